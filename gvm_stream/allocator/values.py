"""Variance of a prompt's gradient estimate per rollout, from acceptance rates and energies. Arrays are [B].

Energies are expected squared norms of the score grad log pi(y): E+ of accepted rollouts, E- of the others.
"""

from __future__ import annotations

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.posterior import Posterior


def rloo_variance(posterior: Posterior, energy_success: Floats, energy_failure: Floats) -> Floats:
    """V = E[p(1-p)^2] E+ + E[p^2(1-p)] E-: the leave-one-out gradient of n rollouts has variance V / (n-1).

    To leading order in 1/n, and exactly where E+ = E- and the mean scores vanish. The term -||grad p||^2 of the full V
    (CurES, arXiv 2510.01037) is left out: it takes the difference of the mean scores of accepted and other rollouts,
    which norms do not tell. So V is too large by the squared signal of one rollout, small next to its noise.
    """
    return posterior.moment(1, 2) * energy_success + posterior.moment(2, 1) * energy_failure


def raft_variance(posterior: Posterior, energy_success: Floats, alpha: float = 1e-3, beta: float = 2.0) -> Floats:
    """V = E+ E[1/(p + alpha p^(1-beta))]: the mean score of the accepted of n rollouts has variance V / n.

    GVM's bound E+ / p with its damping (arXiv 2505.02391, Proposition 1), good where many are accepted, averaged over
    what is known of p: E[1/p] itself is infinite for a <= 1, that is for as long as nothing was accepted.
    """
    return energy_success * posterior.expect(lambda p: _damped_inverse(p, alpha, beta))


def gvm_value(p: Floats, energy: Floats, alpha: float = 1e-3, beta: float = 2.0) -> Floats:
    """G^2 / (p + alpha p^(1-beta)) at known rates p, with energy = G^2 (arXiv 2505.02391, Proposition 1, whose numbers
    of rollouts go with the square root of this). 0 at p = 0, where the damping wins. Needs alpha > 0 and beta > 1."""
    return energy * _damped_inverse(p, alpha, beta)


def _damped_inverse(p: Floats, alpha: float, beta: float) -> Floats:
    return p ** (beta - 1) / (p**beta + alpha)
