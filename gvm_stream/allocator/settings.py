"""What an `OnlineAllocator` can be told."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np

from gvm_stream.allocator import budget as budgets
from gvm_stream.allocator.budget import AnyBudget, Rollouts, Tokens
from gvm_stream.allocator.objectives import Objective, Own
from gvm_stream.allocator.policies import Coefficient, Design, Policy, View, make_policy
from gvm_stream.allocator.posterior import Posterior


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError on construction for values that do not fit together, naming them."""

    policy: str = "neyman"
    options: dict[str, Any] = {}
    """Hyper-parameters of the policy; what is left out has the published default."""
    design: Design | None = None
    """None: the policy's own."""
    coefficient: Coefficient = "rloo"
    """Gradient estimator of a prompt: decides what its variance is and the coefficients that come out."""
    objective: Objective = Own()
    budget: AnyBudget = Rollouts(rollouts=8.0)
    prompts_per_step: int = 32
    """Prompts visited in a training batch."""
    min_rollouts: int = 2
    max_rollouts: int = 32
    keep: int | None = None
    """Train on at most so many rollouts of a visit, half of each class where there are so many, without bias."""
    shadow_uniform: float = 0.05
    """Share of visits that get the same number of rollouts whatever the policy says, to measure its gain."""
    memory_versions: tuple[float, float] = (16.0, 128.0)
    """Fast and slow memory: counts of earlier visits decay by 1/e over so many policy versions."""
    prior: tuple[float, float] = (0.5, 0.5)
    """Beta prior (successes, failures) of acceptance rates; the start of the learned one."""
    learn_prior: bool = True
    """Fit the prior to the prompts seen (empirical Bayes)."""
    change_point: float = 3.0
    """A visit whose log Bayes factor against what was known is below minus this resets its prompt; 0: never."""
    max_tokens: int | None = None
    """Length cap of responses."""
    reward_range: tuple[float, float] | None = None
    """Rewards outside it are refused; None: any finite number is taken."""
    retire_alpha: float = 0.0
    """A prompt is retired once a confidence sequence of this level shows it dead or solved; 0: never."""
    dead_below: float = 0.02
    solved_above: float = 0.98
    readmit_versions: int = 200
    """A retired prompt comes back after so many policy versions."""
    on_close: Literal["cancel", "drain"] = "cancel"
    """Rollouts still running when a visit ends early: cancelled, or waited for and used for the estimates only."""
    rounds_ahead: int = 0
    """Sequential: rounds launched before it is known that they are needed. Fills idle samplers, wastes tokens."""
    max_lag: int = 1
    """Most training batches that a rollout's oldest token may be behind."""
    max_attempts: int = 3
    """Attempts at a rollout before it counts as failed."""
    steps: int | None = None
    """Training batches in all; None: no end."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        budgets.check(self.budget)
        policy = self.make_policy()
        design = self.design or policy.designs[0]
        if design not in policy.designs:
            raise ValueError(f"policy {self.policy!r} has no design {design!r}, only {', '.join(policy.designs)}")
        least = 2 if self.coefficient == "rloo" else 1
        if not least <= self.min_rollouts <= self.budget.rollouts <= self.max_rollouts:
            raise ValueError(
                f"min_rollouts = {self.min_rollouts} (at least {least} with {self.coefficient}), budget.rollouts = "
                f"{self.budget.rollouts:g} and max_rollouts = {self.max_rollouts} must be in this order"
            )
        for name, value, low in (
            ("prompts_per_step", self.prompts_per_step, 1),
            ("max_attempts", self.max_attempts, 1),
            ("max_lag", self.max_lag, 0),
            ("rounds_ahead", self.rounds_ahead, 0),
            ("readmit_versions", self.readmit_versions, 1),
            ("change_point", self.change_point, 0),
            ("keep", self.keep, 2),
            ("max_tokens", self.max_tokens, 1),
            ("steps", self.steps, 1),
        ):
            if value is not None and not value >= low:
                raise ValueError(f"{name} = {value} must be at least {low}")
        for name, share in (("shadow_uniform", self.shadow_uniform), ("retire_alpha", self.retire_alpha)):
            if not 0 <= share < 1:
                raise ValueError(f"{name} = {share} must be from 0 to below 1")
        if not 0 <= self.dead_below < self.solved_above <= 1:
            raise ValueError(f"dead_below = {self.dead_below} and solved_above = {self.solved_above}: 0 to 1, in order")
        if not 0 < self.memory_versions[0] <= self.memory_versions[1]:
            raise ValueError(f"memory_versions = {self.memory_versions} must rise from above 0")
        if not all(0 < count < math.inf for count in self.prior):
            raise ValueError(f"prior = {self.prior} must be finite numbers above 0")
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range = {self.reward_range} must rise")
        self._try(policy, design)

    def _try(self, policy: Policy, design: Design) -> None:
        """A plan for a prompt that nothing is known of finds what the policy has to say against the settings."""
        one, zero = np.ones(1), np.zeros(1, np.int64)
        a, b = self.prior
        view = View(
            prompts=zero,
            posterior=Posterior.of(a * one, b * one),
            energy_success=one,
            energy_failure=one,
            # A budget in tokens is one for the length that responses turn out to have.
            cost=self.budget.tokens / self.budget.rollouts * one if isinstance(self.budget, Tokens) else one,
            weight=one,
            visits=zero,
            version=0,
            coefficient=self.coefficient,
            least=self.min_rollouts,
            most=self.max_rollouts,
            price_factor=1.0,
            rng=np.random.default_rng(0),
        )
        (policy.plan if design == "planned" else policy.plan_rounds)(view, self.budget)

    def make_policy(self) -> Policy:
        return make_policy(self.policy, self.options)
