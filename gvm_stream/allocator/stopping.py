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
from functools import cached_property
from math import comb

import msgspec

Counts = tuple[int, int]
"""(successes, failures)."""


class Rule(msgspec.Struct, frozen=True, dict=True):
    """Rounds of `round_size` rollouts, at most `max_rounds`; stops early after a round with at least `successes`
    successes and `failures` failures. Raises ValueError for sizes below 1.

    Example: `Rule(8, 4, 2, 2)` is the balanced rule of Reinforce-Ada (arXiv 2510.04996) with its defaults.
    """

    round_size: int
    max_rounds: int = 1
    successes: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        if self.round_size < 1 or self.max_rounds < 1 or min(self.successes, self.failures) < 0:
            raise ValueError(f"{self} needs at least one round of at least one rollout, and no negative counts")

    def stops(self, counts: Counts) -> bool:
        """True if sampling ends with these counts at the end of a round."""
        s, f = counts
        return (s >= self.successes and f >= self.failures) or s + f >= self.round_size * self.max_rounds

    @cached_property
    def ends(self) -> dict[Counts, int]:
        """Where sampling can end -> number of sample paths there."""
        return self._count_paths(())

    def q_hat(self, counts: Counts) -> float:
        """Unbiased estimate of p(1-p) from the counts at the end. Raises KeyError for counts the rule cannot end with,
        ValueError for rules whose first round is a single rollout (two draws are needed)."""
        if self.round_size < 2:
            raise ValueError(f"{self}: the first round must have at least 2 rollouts")
        return self._begin_with_both[counts] / self.ends[counts]

    def p_hat(self, counts: Counts) -> float:
        """Unbiased estimate of p from the counts at the end. Raises KeyError for counts the rule cannot end with."""
        return self._begin_with_success[counts] / self.ends[counts]

    @cached_property
    def _begin_with_success(self) -> dict[Counts, int]:
        return self._count_paths((1,))

    @cached_property
    def _begin_with_both(self) -> dict[Counts, int]:
        return self._count_paths((1, 0))

    def _count_paths(self, forced: tuple[int, ...]) -> dict[Counts, int]:
        """Paths to every end whose first draws are `forced` (1 a success, 0 a failure); ends without one count 0."""
        free = self.round_size - len(forced)
        won = sum(forced)
        states = {(won + j, len(forced) - won + free - j): comb(free, j) for j in range(free + 1)}
        ends: dict[Counts, int] = {}
        for _ in range(self.max_rounds):
            going: dict[Counts, int] = {}
            for counts, paths in states.items():
                (ends if self.stops(counts) else going)[counts] = paths
            states = {}
            for (s, f), paths in going.items():
                for j in range(self.round_size + 1):
                    reached = (s + j, f + self.round_size - j)
                    states[reached] = states.get(reached, 0) + paths * comb(self.round_size, j)
        return ends if not forced else {counts: ends.get(counts, 0) for counts in self.ends}


Weights = Callable[[Rule, Counts], tuple[float, float]]
"""(rule, counts at the end) -> (total weight on successes, total weight on failures, taken as positive)."""


def leave_one_out(rule: Rule, counts: Counts) -> tuple[float, float]:
    """Mean over all rollouts of (reward - mean of the others) times the score: RLOO."""
    s, f = counts
    n = s + f
    weight = s * f / (n * (n - 1)) if n > 1 else 0.0
    return weight, weight


def class_conditional(rule: Rule, counts: Counts) -> tuple[float, float]:
    """q(s, f) on either class, 0 where one is empty: unbiased under every rule, and after down-sampling a class."""
    q = rule.q_hat(counts) if min(counts) > 0 else 0.0
    return q, q


def pool_baseline(keep: int) -> Weights:
    """The released estimator of Reinforce-Ada: keep `keep` rollouts, half of each class where there are so many, with
    advantage reward - mean of the whole pool."""

    def weights(rule: Rule, counts: Counts) -> tuple[float, float]:
        s, f = counts
        kept_s = min(keep // 2, s)
        kept_f = min(keep - kept_s, f)
        kept_s = min(keep - kept_f, s)
        mean = s / (s + f)
        return kept_s * (1 - mean) / keep, kept_f * mean / keep

    return weights


def implied_objective(rule: Rule, p: float, weights: Weights = leave_one_out) -> float:
    """c(p): the factor by which the estimator `weights` under `rule` scales the gradient of a prompt with success
    probability `p`, exactly. Raises ValueError unless 0 < p < 1."""
    if not 0 < p < 1:
        raise ValueError(f"p = {p} must lie between 0 and 1")
    total = 0.0
    for (s, f), paths in rule.ends.items():
        on_successes, on_failures = weights(rule, (s, f))
        total += paths * p**s * (1 - p) ** f * (on_successes / p + on_failures / (1 - p))
    return total


def expected_rollouts(rule: Rule, p: float) -> float:
    """Mean number of rollouts that the rule draws at success probability `p`."""
    return sum(paths * p**s * (1 - p) ** f * (s + f) for (s, f), paths in rule.ends.items())
