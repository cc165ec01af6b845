"""Confidence sequence of an acceptance rate: intervals that hold at all times at once, whatever the stopping rule.

Robbins' mixture (1970): under rate p, the likelihood of the outcomes averaged over Beta(1/2, 1/2), divided by that of
p, is a martingale with mean 1, so by Ville's inequality it ever reaches 1/alpha with probability at most alpha. The
rates not excluded at some time are an interval, because the logarithm of the ratio is convex in p.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log, log1p

from gvm_stream.allocator.prior import log_marginal


def log_ratio(successes: int, failures: int, p: float) -> float:
    """log of (mixture likelihood / likelihood of rate `p`), 0 <= p <= 1; infinite if the counts are impossible."""
    if (p == 0 and successes > 0) or (p == 1 and failures > 0):
        return inf
    likelihood = (successes * log(p) if successes else 0.0) + (failures * log1p(-p) if failures else 0.0)
    return log_marginal(0.5, 0.5, successes, failures) - likelihood


def excludes(successes: int, failures: int, p: float, alpha: float) -> bool:
    """True if rate `p` is outside the sequence of level 1 - `alpha` at these counts."""
    return log_ratio(successes, failures, p) >= -log(alpha)


def interval(successes: int, failures: int, alpha: float) -> tuple[float, float]:
    """Ends of the sequence of level 1 - `alpha` at these counts; exactly 0 without successes, 1 without failures."""
    if successes + failures == 0:
        return 0.0, 1.0
    peak = successes / (successes + failures)

    def outside(p: float) -> bool:
        return excludes(successes, failures, p, alpha)

    low = 0.0 if successes == 0 else _boundary(outside, 0.0, peak)
    high = 1.0 if failures == 0 else _boundary(outside, 1.0, peak)
    return low, high


def _boundary(outside: Callable[[float], bool], beyond: float, within: float) -> float:
    """Bisection down to neighbouring floats, or nearly."""
    for _ in range(60):
        middle = (beyond + within) / 2
        if outside(middle):
            beyond = middle
        else:
            within = middle
    return within
