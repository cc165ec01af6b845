"""From what is known of the prompts of a step to the visits to make of it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from gvm_stream.allocator.arrays import Ints
from gvm_stream.allocator.budget import Price, Rollouts, Tokens
from gvm_stream.allocator.estimates import Estimates
from gvm_stream.allocator.objectives import weights
from gvm_stream.allocator.planning import SLACK
from gvm_stream.allocator.policies import Outcomes, Plan, Policy, View
from gvm_stream.allocator.settings import Settings
from gvm_stream.allocator.stopping import StoppingRule

PRICE_RATE = 0.3
"""Sequential design: the price moves by exp(PRICE_RATE (spent / budget - 1)) a step."""
PRICE_FACTOR_RANGE = (1e-3, 1e3)


class PlannedVisit(NamedTuple):
    prompt: int
    rollouts: int
    weight: float
    prior: tuple[float, float]
    shadow: bool
    rule: StoppingRule | None


class Planner:
    """Applies the policy. Everything it uses comes from earlier visits, or from (seed, step)."""

    def __init__(self, settings: Settings, estimates: Estimates, seed: int, policy: Policy | None = None) -> None:
        """`policy`: one that is made already, instead of that of the settings."""
        self.settings = settings
        self.policy: Policy = policy or settings.make_policy()
        self.design = settings.design or self.policy.designs[0]
        self.two_stage = type(self.policy).second_stage is not Policy.second_stage
        self.refills = type(self.policy).refill is not Policy.refill
        self.selects = type(self.policy).select is not Policy.select
        self.price = math.nan
        """Decrease of variance per token of the last rollout granted in the newest step."""
        self.price_factor = 1.0
        self.estimates = estimates
        self._seed = seed
        self._shadow_share = 0.0 if settings.policy == "uniform" else settings.shadow_uniform

    def select(self, usable: Ints, step: int, version: int) -> list[int] | None:
        """The prompts of a step, if the policy chooses them."""
        count = min(self.settings.prompts_per_step, len(usable))
        chosen = self.policy.select(self.view(usable, version, self._rng(step, 1)), count)
        return None if chosen is None else chosen.tolist()

    def plan(self, prompts: list[int], step: int, version: int) -> list[PlannedVisit]:
        """Visits to the prompts of a step, in the same order."""
        rng = self._rng(step, 0)
        view = self.view(np.array(prompts), version, rng)
        shadow = rng.random(len(prompts)) < self._shadow_share
        mean = self.settings.budget.rollouts
        rollouts = (math.floor(mean) + (rng.random(len(prompts)) < mean % 1)).astype(np.int64)
        rules: list[StoppingRule | None] = [None] * len(prompts)
        rest = np.flatnonzero(~shadow)
        if len(rest):
            plan = self._apply(view.take(rest))
            if plan.rollouts.min() < 0:
                raise ValueError(f"policy {self.settings.policy!r} plans {plan.rollouts.min()} rollouts for a prompt")
            rollouts[rest] = plan.rollouts
            self.price = plan.price
            if plan.rules is not None:
                for i, rule in zip(rest.tolist(), plan.rules, strict=True):
                    rules[i] = rule
        priors = _priors(view)
        return [
            PlannedVisit(*row)
            for row in zip(
                prompts, rollouts.tolist(), view.weight.tolist(), priors, shadow.tolist(), rules, strict=True
            )
        ]

    def stand_in(self, prompt: int, rollouts: int, version: int) -> PlannedVisit:
        """A visit to another prompt in the place of one that is left out."""
        view = self.view(np.array([prompt]), version)
        return PlannedVisit(prompt, rollouts, float(view.weight[0]), _priors(view)[0], shadow=False, rule=None)

    def second_stage(self, prompts: list[int], pilot: tuple[Outcomes, ...], step: int, version: int) -> list[int]:
        """Further rollouts once the pilot of the whole step has ended."""
        view = self.view(np.array(prompts), version, self._rng(step, 2))
        rollouts = self.policy.second_stage(view, pilot, self.settings.budget)
        assert rollouts is not None, "two_stage says that the policy has one"
        return [int(n) for n in rollouts]

    def spent(self, visits: int, rollouts: int, tokens: int) -> None:
        """Sequential design: so much went into the visits of a step under rules; the price follows the budget."""
        match self.settings.budget:
            case Rollouts(rollouts=per_prompt):
                ratio = rollouts / (per_prompt * visits)
            case Tokens(tokens=per_prompt):
                ratio = tokens / (per_prompt * visits)
            case _:
                return
        low, high = PRICE_FACTOR_RANGE
        # A first step that is far off must not throw the price out of the world.
        factor = self.price_factor * math.exp(PRICE_RATE * max(-1.0, min(ratio - 1, 2.0)))
        self.price_factor = max(low, min(factor, high))

    def view(self, prompts: Ints, version: int, rng: np.random.Generator | None = None) -> View:
        s, e = self.settings, self.estimates
        posterior = e.posterior(prompts, version)
        success, failure = e.energies(prompts)
        return View(
            prompts=prompts,
            posterior=posterior,
            energy_success=success,
            energy_failure=failure,
            cost=e.costs(prompts),
            weight=weights(s.objective, posterior.mean(), s.coefficient),
            visits=e.visits(prompts),
            version=version,
            coefficient=s.coefficient,
            least=s.min_rollouts,
            most=s.max_rollouts,
            price_factor=self.price_factor,
            rng=rng or self._rng(0, 3),
        )

    def _apply(self, view: View) -> Plan:
        plan = self.policy.plan if self.design == "planned" else self.policy.plan_rounds
        budget = self.settings.budget
        if isinstance(budget, Tokens | Price) and not self.estimates.knows_costs:
            budget = Rollouts(rollouts=budget.rollouts)  # nothing can be bought in tokens before any length is known
        if isinstance(budget, Tokens):
            # Responses grow: what the fewest rollouts cost is spent in any case. The factor is for rounding.
            floor = view.least * float(view.cost.mean()) * (1 + SLACK)
            budget = Tokens(rollouts=budget.rollouts, tokens=max(budget.tokens, floor))
        return plan(view, budget)

    def _rng(self, step: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, step, purpose))

    def state_dict(self) -> dict[str, Any]:
        return {"price": self.price, "price_factor": self.price_factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.price, self.price_factor = state["price"], state["price_factor"]


def _priors(view: View) -> list[tuple[float, float]]:
    a, b = view.posterior.matched()
    return list(zip(a.tolist(), b.tolist(), strict=True))
