"""What a policy is: an index of value per prompt, a plan made from it, and, in the adaptive designs, a rule to stop by.

A policy of your own subclasses `Policy`, usually with only `values`, and is registered by `register`:

    @register("mine")
    class Mine(Policy, frozen=True, kw_only=True):
        exponent: float = 0.5                                  # a hyper-parameter, checked on construction

        def values(self, view: View) -> Floats:
            return view.variance() ** self.exponent

Everything a policy sees (`View`) comes from earlier visits, so whatever it plans leaves the leave-one-out gradient of
every prompt unbiased.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np

from gvm_stream.allocator.arrays import Floats, Ints
from gvm_stream.allocator.budget import AnyBudget, Rollouts
from gvm_stream.allocator.planning import Plan, allocate
from gvm_stream.allocator.posterior import Posterior
from gvm_stream.allocator.stopping import StoppingRule
from gvm_stream.allocator.values import raft_variance, rloo_variance

Design = Literal["planned", "sequential", "reference"]
"""`planned`: numbers fixed before the first rollout. `sequential`: rounds under a rule on the counts, with coefficients
that are exact under it. `reference`: a published method to the letter, whatever it does to the objective."""

Coefficient = Literal["rloo", "raft"]
"""The gradient estimator of a prompt. `rloo`: of p, leave-one-out baseline. `raft`: of log p, the mean over accepted
rollouts (0 when there is none)."""


@dataclass(frozen=True)
class View:
    """What is known of the B prompts of a step. Arrays are [B]."""

    prompts: Ints
    """Positions."""
    posterior: Posterior
    """Of the acceptance rates."""
    energy_success: Floats
    """Expected squared gradient norm of an accepted rollout, ||grad log pi||^2."""
    energy_failure: Floats
    cost: Floats
    """Expected tokens of a rollout."""
    weight: Floats
    """Of the prompt in the objective, from past state only."""
    visits: Ints
    version: int
    coefficient: Coefficient
    least: int
    most: int
    """Bounds on the rollouts of a visit."""
    price_factor: float
    """Sequential design: what the planned price has to be multiplied with to meet the budget, learned from steps."""
    rng: np.random.Generator

    def variance(self, alpha: float = 1e-3) -> Floats:
        """w^2 E[V]: posterior mean variance per rollout of the estimator in use; `alpha` damps that of raft."""
        if self.coefficient == "raft":
            v = raft_variance(self.posterior, self.energy_success, alpha)
        else:
            v = rloo_variance(self.posterior, self.energy_success, self.energy_failure)
        return self.weight**2 * v

    def take(self, indices: Ints) -> View:
        """The view of some of the prompts."""
        rows = ("prompts", "energy_success", "energy_failure", "cost", "weight", "visits")
        taken = {name: getattr(self, name)[indices] for name in rows}
        return replace(self, posterior=self.posterior.take(indices), **taken)

    def charged(self, budget: AnyBudget) -> Floats:
        """Tokens that a rollout counts for. A budget in rollouts is one in which each costs the same."""
        return np.full_like(self.cost, self.cost.mean()) if isinstance(budget, Rollouts) else self.cost

    @property
    def offset(self) -> int:
        """The variance of a prompt with n rollouts is V / (n - offset): the baseline costs a degree of freedom."""
        return 1 if self.coefficient == "rloo" else 0


@dataclass(frozen=True)
class Outcomes:
    """The scored rollouts of a visit in launch order. Arrays are [n]."""

    rewards: Floats
    tokens: Ints
    rule: StoppingRule | None
    """The rule that ended the visit, if one did."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class; fields are hyper-parameters. Override what differs."""

    designs: ClassVar[tuple[Design, ...]] = ("planned",)
    """Designs it can be used in, the default first."""

    def values(self, view: View) -> Floats:
        """Value index [B], >= 0 and finite: n rollouts of a prompt leave the variance values / (n - offset)."""
        raise NotImplementedError

    def plan(self, view: View, budget: AnyBudget) -> Plan:
        """Rollouts of every prompt, before the first one is launched."""
        return allocate(self.values(view), view.cost, budget, least=view.least, most=view.most, offset=view.offset)

    def plan_rounds(self, view: View, budget: AnyBudget) -> Plan:
        """The same for the sequential and reference designs: a first round, and a rule for each prompt."""
        raise NotImplementedError

    def second_stage(self, view: View, pilot: tuple[Outcomes, ...], budget: AnyBudget) -> Ints | None:
        """Further rollouts [B] once the planned ones of *all* prompts of the step have ended; None: there is no second
        stage. The first stage then is a pilot, which is not trained on."""
        return None

    def select(self, view: View, count: int) -> Ints | None:
        """Positions of the `count` prompts to visit, of a view on all of them; None: in epoch order."""
        return None

    def refill(self, outcomes: Outcomes, tried: int) -> bool:
        """True if this visit is to be left out and another prompt visited in its place; `tried` have been so far."""
        return False

    def coefficients(self, outcomes: Outcomes) -> Floats | None:
        """Coefficients [n] of the scores in a prompt's gradient; None: those of the design. Reference designs only."""
        return None


POLICIES: dict[str, type[Policy]] = {}
"""By name; `register` adds to it."""

P = TypeVar("P", bound=type[Policy])


def register(name: str) -> Callable[[P], P]:
    """Class decorator: make a policy known by `name`. Raises ValueError if the name is taken."""

    def add(policy: P) -> P:
        if name in POLICIES:
            raise ValueError(f"there is a policy {name!r} already")
        POLICIES[name] = policy
        return policy

    return add


def make_policy(name: str, options: dict[str, Any]) -> Policy:
    """The policy `name` with these hyper-parameters. Raises ValueError for an unknown name, key or a bad value."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; there are {', '.join(sorted(POLICIES))}")
    try:
        return msgspec.convert(options, POLICIES[name])
    except msgspec.ValidationError as error:
        raise ValueError(f"options of policy {name!r}: {error}") from error
