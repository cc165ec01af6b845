"""The risk of the RAFT estimator with finitely many rollouts, and the rule that stops where it is not worth lowering.

RAFT estimates grad log p = mu, the mean score of accepted rollouts, by the mean over the k accepted of n, and by 0 when
there is none. With E = E ||score||^2 of an accepted rollout and rho = ||mu||^2 / E its signal share,

    E ||estimate - mu||^2 / E = (1 - rho) E[1/k; k >= 1] + rho (1 - p)^n,

a variance and a squared bias. E/(n p), the value GVM allocates by (arXiv 2505.02391), is its limit for n p >> 1. Where
n p is below about one the risk is not convex in n: the first accepted rollout brings more noise than it removes bias,
so rollouts there pay in blocks or not at all.

Both parts follow from m_n = P(nothing accepted in n rollouts) alone, which the posterior gives in closed form.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gvm_stream.allocator.arrays import Floats, Ints
from gvm_stream.allocator.posterior import Posterior
from gvm_stream.allocator.stopping import Counts, StoppingRule


class Risk(NamedTuple):
    """Parts of the risk with 0..L rollouts, in units of E. Arrays are [B, L + 1]."""

    variance: Floats
    bias: Floats
    """Squared."""

    def total(self) -> Floats:
        return self.variance + self.bias


def none_accepted(posterior: Posterior, most: int) -> Floats:
    """m [B, most + 1]: probability that none of 0..most rollouts is accepted, E(1-p)^n."""
    return np.stack([posterior.moment(0, n) for n in range(most + 1)], axis=1)


def raft_risk(none: Floats, signal_share: float) -> Risk:
    """Risk of the RAFT estimator of each prompt with 0..L rollouts, given `none_accepted` m [B, L + 1].

    E[1/k; k >= 1] = sum over j = 1..n of (m_{n-j} - m_n) / j: by induction at known p, where m_n = (1-p)^n and the
    left side is (1-p) times its value at n-1 plus (1 - m_n) / n; and on the average over p, as it is linear in m.
    """
    n = np.arange(none.shape[1])
    lag = np.maximum(n - n[:, None], 0)
    inverse = np.divide(1.0, lag, out=np.zeros(lag.shape), where=lag > 0)
    mean_inverse = none @ inverse - none * inverse.sum(axis=0)
    return Risk((1 - signal_share) * mean_inverse, signal_share * none)


def decreases(risk: Floats, floor: Ints) -> Floats:
    """What each further rollout takes off `risk` [B, L + 1], as [B, L]; where rollouts pay in blocks, the average of
    the best block; infinite for the first `floor` [B], which are not to be weighed.

    From there on these are the slopes of the lower convex envelope: they fall along n, so taking the largest ones of
    all prompts is a greedy plan that looks ahead.
    """
    most = risk.shape[1] - 1
    best = np.full((len(risk), most), -np.inf)
    for block in range(1, most + 1):
        rest = best[:, : most + 1 - block]
        np.maximum(rest, (risk[:, :-block] - risk[:, block:]) / block, out=rest)
    best[np.arange(most) < floor[:, None]] = np.inf
    return np.asarray(np.minimum.accumulate(best, axis=1))


def rollouts_to_resolve(none: Floats, rollouts: int, share: float) -> Ints:
    """Fewest rollouts [B] that find something accepted with at least `share` of the probability of `rollouts` ones."""
    resolved = 1 - none[:, : rollouts + 1]
    return np.asarray(np.argmax(resolved >= share * resolved[:, -1:], axis=1))


@lru_cache(maxsize=1024)
def stopping_table(
    a: float, b: float, threshold: float, signal_share: float, round_size: int, max_rounds: int
) -> npt.NDArray[np.bool_]:
    """Where to stop: [max_rounds, most], by rounds drawn and by accepted rollouts, the last round left out.

    Minimises the expected risk + `threshold` x rollouts of a Beta(a, b) prompt by backward induction over rollouts.
    This is the exact optimum, so there is no look-ahead to choose for k = 0, where one rollout alone may not pay.
    """
    most = round_size * max_rounds
    k = np.arange(most + 1)
    stop = (1 - signal_share) / np.maximum(k, 1)
    stop[0] = signal_share
    table = np.ones((max_rounds, most), np.bool_)
    best = stop
    for n in range(most - 1, 0, -1):
        p = (a + k[: n + 1]) / (a + b + n)
        best = threshold + (1 - p) * best[:-1] + p * best[1:]
        if n % round_size == 0:
            table[n // round_size, : n + 1] = stop[: n + 1] <= best
            best = np.minimum(stop[: n + 1], best)
    return table


class RiskRule(StoppingRule, frozen=True, kw_only=True, tag="risk"):
    """Stops once more rollouts are not worth their price, by what the accepted ones so far leave to gain.

    With k accepted the risk is (1 - signal_share)/k, or signal_share at k = 0. Of all rules it minimises, under a
    Beta(a, b) posterior from earlier visits, the expected risk + `threshold` x rollouts (`stopping_table`), where
    `threshold` = price per token x tokens of a rollout / (w^2 E) is fixed before the visit. No visit has fewer than
    `least` rollouts, and none is given up with nothing accepted before `patience` rollouts.

    Given that k >= 1, the mean over the accepted is unbiased, under this as under every rule on counts; all bias is in
    visits that end at k = 0. `patience` bounds it: as 1 - (1-p)^n is concave in n, a visit is resolved with at least
    patience/n times the probability that n rollouts have, at every p.

    Raises ValueError unless a, b and threshold are finite and above 0 and signal_share is between 0 and 1.
    """

    a: float
    b: float
    threshold: float
    signal_share: float
    least: int = 1
    patience: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 < value < inf for value in (self.a, self.b, self.threshold)):
            raise ValueError(f"{self}: a, b and threshold must be finite numbers above 0")
        if not 0 < self.signal_share < 1:
            raise ValueError(f"{self}: signal_share must be between 0 and 1")

    def near(self) -> RiskRule:
        """This rule with a, b and threshold to two digits, so that most visits find their table made."""
        a, b, threshold = (float(f"{value:.1e}") for value in (self.a, self.b, self.threshold))
        return msgspec.structs.replace(self, a=a, b=b, threshold=threshold)

    def enough(self, counts: Counts) -> bool:
        s, f = counts
        if s + f < (self.least if s else max(self.least, self.patience)):
            return False
        table = stopping_table(self.a, self.b, self.threshold, self.signal_share, self.round_size, self.max_rounds)
        return bool(table[(s + f) // self.round_size, s])
