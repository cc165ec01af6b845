"""Reinforce-Ada (arXiv 2510.04996): sample a prompt in rounds until its group has something to learn from.

Two designs. `reference` is the method as released: of the pool, `keep` rollouts are trained on, half of each class
where there are so many, with advantage reward - mean of the pool. Stopping on the counts and keeping a balanced subset
both re-weight prompts, by c(p) of `stopping.implied_objective`: it then maximises F(p) with F' = c instead of p.
`sequential` spends the same rollouts with coefficients that are exact under the rule, c = 1.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.budget import AnyBudget
from gvm_stream.allocator.coefficients import pool_baseline
from gvm_stream.allocator.planning import Plan
from gvm_stream.allocator.policies.base import Design, Outcomes, Policy, View, register
from gvm_stream.allocator.stopping import Rule


class ReinforceAda(Policy, frozen=True, kw_only=True):
    """What both exits share: rounds of `round_size` rollouts, at most `max_rounds`, whatever the budget is. Subclasses
    say in `exit` how many successes and failures end a visit. Raises ValueError for rounds smaller than `keep`, or
    `keep` under 2."""

    designs: ClassVar[tuple[Design, ...]] = ("reference", "sequential")

    round_size: int = 8
    max_rounds: int = 4
    keep: int = 4
    """Rollouts of a prompt to train on, in the reference design."""

    def __post_init__(self) -> None:
        if not 2 <= self.keep <= self.round_size:
            raise ValueError(f"keep = {self.keep} must be from 2 to round_size = {self.round_size}")
        self._rule()

    def exit(self) -> tuple[int, int]:
        """(successes, failures) that end a visit."""
        raise NotImplementedError

    def plan_rounds(self, view: View, budget: AnyBudget) -> Plan:
        """Raises ValueError if all rounds together can exceed `view.most`."""
        if self.round_size * self.max_rounds > view.most:
            raise ValueError(
                f"max_rounds = {self.max_rounds} of round_size = {self.round_size} exceed {view.most} rollouts a visit"
            )
        prompts = len(view.prompts)
        return Plan(np.full(prompts, self.round_size), np.nan, (self._rule(),) * prompts)

    def coefficients(self, outcomes: Outcomes) -> Floats:
        return pool_baseline(outcomes.rewards, self.keep)

    def _rule(self) -> Rule:
        return Rule(self.round_size, self.max_rounds, *self.exit())


@register("reinforce_ada_pos")
class ReinforceAdaPos(ReinforceAda, frozen=True, kw_only=True):
    """Ends a visit after a round with a success. As released it favours hard prompts: c(p) = 5.9 at p = .02, 2.8 at .1,
    1.0 at .5, 1.6 at .9."""

    def exit(self) -> tuple[int, int]:
        return 1, 0


@register("reinforce_ada_balance")
class ReinforceAdaBalance(ReinforceAda, frozen=True, kw_only=True):
    """Ends a visit after a round with half of `keep` successes and half failures. As released it favours both ends:
    c(p) = 7.2 at p = .02 and .98, 4.0 at .1 and .9, 1.0 at .5."""

    def exit(self) -> tuple[int, int]:
        return self.keep // 2, self.keep - self.keep // 2
