"""Advantages of one group: what each rollout is worth, given the rewards of all rollouts of its prompt.

Pure numpy, float64, groups of any size. A group whose raw rewards do not differ carries no comparison: `grpo` and
`rloo` answer exactly 0, decided by the range of the rewards, because a float std of equal numbers need not be 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Estimator = Callable[[npt.ArrayLike], Float64]

ACCEPTED = 0.5  # verdicts are 0 or 1; a graded reward counts as right from one half on
SAME_REWARD = 1e-9  # rewards closer than this share of their magnitude are equal


def raft(rewards: npt.ArrayLike) -> Float64:
    """1 for an accepted rollout (reward >= 0.5), else 0; [n] -> [n]. Source: RAFT, arXiv 2304.06767.

    There is no baseline, so a group in which everything was accepted keeps its 1s: leaving such groups out would scale
    the gradient of a prompt by 1 - p^(n-1), its weight in the objective by its difficulty.
    """
    return (_finite(rewards) >= ACCEPTED).astype(np.float64)


def grpo(rewards: npt.ArrayLike) -> Float64:
    """(r - mean) / (std + 1e-6) with Bessel's correction; [n] -> [n]. Source: GRPO, arXiv 2402.03300."""
    r = _finite(rewards)
    return np.zeros_like(r) if _same(r) else (r - r.mean()) / (r.std(ddof=1) + 1e-6)


def rloo(rewards: npt.ArrayLike) -> Float64:
    """r - mean of the others = n/(n-1) (r - mean); [n] -> [n]. Unbiased for n known beforehand.

    Source: RLOO, arXiv 2402.14740.
    """
    r = _finite(rewards)
    return np.zeros_like(r) if _same(r) else (r - r.mean()) * (r.size / (r.size - 1))


ADVANTAGES: dict[str, Estimator] = {"raft": raft, "grpo": grpo, "rloo": rloo}
"""By the name used in `learner.advantage`."""


def _finite(rewards: npt.ArrayLike) -> Float64:
    r = np.asarray(rewards, dtype=np.float64)
    if r.ndim != 1 or not np.isfinite(r).all():
        raise ValueError(f"rewards of a group must be a list of finite numbers, got {r.tolist()}")
    return r


def _same(r: Float64) -> bool:
    """True for groups without a difference: empty, of one rollout, or equal up to rounding."""
    return r.size < 2 or bool(np.ptp(r) <= SAME_REWARD * np.abs(r).max())
