"""Stopping rules that look at reward counts: what they do to the objective, and the coefficients that undo it.

A rule draws rollouts of a prompt in rounds and stops on the counts (successes s, failures f) at the end of a round. Any
estimator whose weights depend on counts alone has mean c(p) times the gradient of p, with c(p) = E[a]/p + E[b]/(1-p), a
and b the total weights on successes and failures: it never tilts a prompt's direction, it only re-weights prompts.
`implied_objective` computes c exactly by enumeration. c = 1 everywhere means the estimator is unbiased.

With a fixed number of rollouts the leave-one-out estimator has c = 1. Stopped adaptively it has not; the
class-conditional estimator q(s, f) (mean score of the successes - mean score of the failures) has, where q is the share
of sample paths to (s, f) that begin with a success and a failure (Rao-Blackwell with path counts, after Girshick,
Mosteller and Savage 1946).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from math import comb, exp, inf, log

import msgspec

Counts = tuple[int, int]
"""(successes, failures)."""


class StoppingRule(msgspec.Struct, frozen=True, dict=True):
    """Rounds of `round_size` rollouts, at most `max_rounds`; between rounds it stops on the counts. Subclasses say when
    in `enough`, and have a tag of their own: `msgspec.convert(data, Rule | PosteriorRule)` tells them apart.

    Raises ValueError for sizes below 1.
    """

    round_size: int
    max_rounds: int

    def __post_init__(self) -> None:
        if self.round_size < 1 or self.max_rounds < 1:
            raise ValueError(f"{self} needs at least one round of at least one rollout")

    def enough(self, counts: Counts) -> bool:
        """True if no further round is wanted after these counts. Depends on nothing but them and the rule's fields,
        which are fixed before the first rollout: this is what the estimates below rest on."""
        raise NotImplementedError

    def stops(self, counts: Counts) -> bool:
        """True if sampling ends with these counts at the end of a round."""
        return sum(counts) >= self.round_size * self.max_rounds or self.enough(counts)

    @cached_property
    def ends(self) -> dict[Counts, int]:
        """Where sampling can end -> number of sample paths there."""
        return self._count_paths(())

    def q_hat(self, counts: Counts) -> float:
        """Unbiased estimate of p(1-p) from the counts at the end. Raises KeyError for counts the rule cannot end with,
        ValueError for rules that can end with a single rollout (two draws are needed)."""
        return self._begin_with_both.get(counts, 0) / self.ends[counts]

    def p_hat(self, counts: Counts) -> float:
        """Unbiased estimate of p from the counts at the end. Raises KeyError for counts the rule cannot end with."""
        return self._begin_with_success.get(counts, 0) / self.ends[counts]

    @cached_property
    def _begin_with_success(self) -> dict[Counts, int]:
        return self._count_paths((1,))

    @cached_property
    def _begin_with_both(self) -> dict[Counts, int]:
        if any(s + f < 2 for s, f in self.ends):
            raise ValueError(f"{self} can end with a single rollout; an estimate of p(1-p) takes at least 2 rollouts")
        return self._count_paths((1, 0))

    def _count_paths(self, forced: tuple[int, ...]) -> dict[Counts, int]:
        """End -> paths there whose first draws are `forced` (1 a success, 0 a failure). Exact: Python integers."""
        going: dict[Counts, int] = {(0, 0): 1}
        ends: dict[Counts, int] = {}
        for _ in range(self.max_rounds):
            fixed, forced = forced[: self.round_size], forced[self.round_size :]
            won, free = sum(fixed), self.round_size - len(fixed)
            ways = [comb(free, j) for j in range(free + 1)]
            reached: dict[Counts, int] = {}
            for (s, f), paths in going.items():
                for j, way in enumerate(ways, start=won):
                    counts = (s + j, f + self.round_size - j)
                    reached[counts] = reached.get(counts, 0) + paths * way
            going = {}
            for counts, paths in reached.items():
                (ends if self.stops(counts) else going)[counts] = paths
        return ends


class Rule(StoppingRule, frozen=True, tag="counts"):
    """Stops after a round with at least `successes` successes and `failures` failures.

    Example: `Rule(8, 4, 2, 2)` is the balanced rule of Reinforce-Ada (arXiv 2510.04996) with its defaults.
    """

    max_rounds: int = 1
    successes: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.successes, self.failures) < 0:
            raise ValueError(f"{self} must not ask for a negative number of successes or failures")

    def enough(self, counts: Counts) -> bool:
        return counts[0] >= self.successes and counts[1] >= self.failures


class PosteriorRule(StoppingRule, frozen=True, tag="posterior"):
    """Sequential Neyman: stops once another round is not worth its price.

    With a Beta(a, b) posterior from earlier visits and n = s + f rollouts in this one, the leave-one-out gradient has
    variance w^2 E q / (n-1), E the squared norm of a score, and a round of M lowers it by w^2 E q / ((n-1)(n+M-1)) per
    rollout. q = p(1-p) is taken at its posterior mean AB / ((A+B)(A+B+1)), A = a+s, B = b+f. Sampling stops when that
    is at most `threshold` (n-1)(n+M-1); `threshold` = price per token x tokens per rollout / (w^2 E), fixed before
    the visit. Raises ValueError unless a, b and threshold are finite and above 0.
    """

    a: float
    b: float
    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 < value < inf for value in (self.a, self.b, self.threshold)):
            raise ValueError(f"{self}: a, b and threshold must be finite numbers above 0")

    @staticmethod
    def near(round_size: int, max_rounds: int, a: float, b: float, threshold: float) -> PosteriorRule:
        """The rule with a, b and threshold rounded to a grid of 10 % steps; the threshold may be 0 or infinite.
        Instances are shared, so that most visits find their paths counted already."""
        threshold = min(max(threshold, 1e-12), 1.0)  # below it no visit stops early, above it every one does
        grid = [_nearest_step(value) for value in (a, b, threshold)]
        return _posterior_rule(round_size, max_rounds, *grid)

    def enough(self, counts: Counts) -> bool:
        n = sum(counts)
        a, b = self.a + counts[0], self.b + counts[1]
        return a * b <= self.threshold * (n - 1) * (n + self.round_size - 1) * (a + b) * (a + b + 1)


_STEP = log(1.1)


def _nearest_step(value: float) -> int:
    return round(log(value) / _STEP)


@lru_cache(maxsize=1024)
def _posterior_rule(round_size: int, max_rounds: int, a: int, b: int, threshold: int) -> PosteriorRule:
    return PosteriorRule(round_size, max_rounds, exp(a * _STEP), exp(b * _STEP), exp(threshold * _STEP))


Weights = Callable[[StoppingRule, Counts], tuple[float, float]]
"""(rule, counts at the end) -> (total weight on successes, total weight on failures, taken as positive)."""


def leave_one_out(rule: StoppingRule, counts: Counts) -> tuple[float, float]:
    """Mean over all rollouts of (reward - mean of the others) times the score: RLOO."""
    s, f = counts
    n = s + f
    weight = s * f / (n * (n - 1)) if n > 1 else 0.0
    return weight, weight


def class_conditional(rule: StoppingRule, counts: Counts) -> tuple[float, float]:
    """q(s, f) on either class, 0 where one is empty: unbiased under every rule, and after down-sampling a class."""
    q = rule.q_hat(counts)
    return q, q


def balanced(keep: int, counts: Counts) -> Counts:
    """How many of each class are kept of a pool: half of each where there are so many, the rest from the other class.
    Source: Reinforce-Ada, arXiv 2510.04996."""
    s, f = counts
    kept_f = min(keep - min(keep // 2, s), f)
    return min(keep - kept_f, s), kept_f


def pool_baseline(keep: int) -> Weights:
    """The released estimator of Reinforce-Ada: of the pool `balanced(keep, ...)` rollouts are kept, with advantage
    reward - mean of the whole pool."""

    def weights(rule: StoppingRule, counts: Counts) -> tuple[float, float]:
        s, f = counts
        kept_s, kept_f = balanced(keep, counts)
        mean = s / (s + f)
        return kept_s * (1 - mean) / keep, kept_f * mean / keep

    return weights


def implied_objective(rule: StoppingRule, p: float, weights: Weights = leave_one_out) -> float:
    """c(p): the factor by which the estimator `weights` under `rule` scales the gradient of a prompt with success
    probability `p`, exactly. Raises ValueError unless 0 < p < 1."""
    if not 0 < p < 1:
        raise ValueError(f"p = {p} must lie between 0 and 1")
    total = 0.0
    for (s, f), paths in rule.ends.items():
        on_successes, on_failures = weights(rule, (s, f))
        total += paths * p**s * (1 - p) ** f * (on_successes / p + on_failures / (1 - p))
    return total


def expected_rollouts(rule: StoppingRule, p: float) -> float:
    """Mean number of rollouts that the rule draws at success probability `p`."""
    return sum(paths * p**s * (1 - p) ** f * (s + f) for (s, f), paths in rule.ends.items())
