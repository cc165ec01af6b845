"""Allocation by the exact risk of RAFT at the number of rollouts at hand, where GVM takes its limit for many."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.budget import AnyBudget, Price, Rollouts, Tokens, Variance
from gvm_stream.allocator.planning import SLACK, Plan
from gvm_stream.allocator.policies.base import Design, Policy, View, register
from gvm_stream.allocator.risk import RiskRule, decreases, none_accepted, raft_risk, rollouts_to_resolve


@register("raft_risk")
class RaftRisk(Policy, frozen=True, kw_only=True):
    """Minimises the sum over prompts of w^2 E ||estimate - grad log p||^2, bias included (`allocator.risk`).

    Sequential: rollouts in rounds of `round_size` until the accepted ones leave too little to gain for the price of the
    planned allocation. Planned: greedy by the best average decrease over any number of further rollouts.

    The least risk leaves hopeless prompts alone, though these are where there is most to learn, so bias has a budget of
    its own, `min_resolved`. At the default the risk of a sequential step is 1.4 to 1.6 times lower than that of the
    same number of rollouts for every prompt (mean 8 to 32, signal_share .3, p ~ Beta(.5, .8)); without, 1.7 times.

    Raises ValueError for hyper-parameters out of range.
    """

    designs: ClassVar[tuple[Design, ...]] = ("sequential", "planned")

    signal_share: float = 0.3
    """||E score||^2 / E ||score||^2 of accepted rollouts: how much is lost by none compared to the noise of one. Norms
    alone do not tell it, so it is an assumption. The lower, the fewer rollouts go to hard prompts."""
    min_resolved: float = 0.7
    """Least probability of an accepted rollout, relative to that of a uniform visit. Sequential: at every p. Planned:
    on the average of the posterior. 0: no bound."""
    round_size: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.signal_share < 1:
            raise ValueError(f"signal_share = {self.signal_share} must be between 0 and 1")
        if not 0 <= self.min_resolved <= 1:
            raise ValueError(f"min_resolved = {self.min_resolved} must be from 0 to 1")
        if self.round_size < 1:
            raise ValueError(f"round_size = {self.round_size} must be at least 1")

    def plan(self, view: View, budget: AnyBudget) -> Plan:
        """Raises ValueError for another coefficient than raft, and a budget out of reach. Where a variance is, every
        prompt gets the most."""
        if view.coefficient != "raft":
            raise ValueError(f"raft_risk allocates rollouts for the coefficient raft, not for {view.coefficient}")
        count = len(view.prompts)
        none = none_accepted(view.posterior, view.most)
        risk = _scale(view)[:, None] * raft_risk(none, self.signal_share).total()
        floor = np.maximum(view.least, rollouts_to_resolve(none, math.floor(budget.rollouts), self.min_resolved))
        cost = view.charged(budget)
        # By number of rollouts first, so that equal prompts take turns.
        per_token = (decreases(risk, floor) / cost[:, None]).T.ravel()
        order = np.argsort(-per_token, kind="stable")
        per_token, prompt = per_token[order], order % count
        match budget:
            case Rollouts(rollouts=rollouts):
                granted = round(rollouts * count)
            case Tokens(tokens=tokens):
                affordable = np.cumsum(cost[prompt]) <= tokens * count * (1 + SLACK)
                granted = int(np.sum(affordable & (per_token > 0)))
            case Variance(rollouts=rollouts, relative=relative):
                saved = np.cumsum(np.where(np.isfinite(per_token), per_token, 0) * cost[prompt])
                excess = risk[np.arange(count), floor].sum() - relative * risk[:, round(rollouts)].sum()
                enough = 1 + int(np.sum(np.maximum.accumulate(saved) < excess * (1 - SLACK)))
                # No number of rollouts lowers the risk of hopeless prompts. A variance may so get out of reach in the
                # middle of a run, which then goes on with all that a visit may have.
                granted = min(max(enough, int(floor.sum())), count * view.most)
            case Price(price=price):
                granted = int(np.sum(per_token >= price))
        if not count * view.least <= granted <= count * view.most:
            raise ValueError(
                f"{budget} is out of reach of {count} prompts with {view.least} to {view.most} rollouts each"
            )
        last = float(per_token[granted - 1])
        return Plan(np.bincount(prompt[:granted], minlength=count), last if math.isfinite(last) else math.nan)

    def plan_rounds(self, view: View, budget: AnyBudget) -> Plan:
        """Raises ValueError like `plan`, and for a round that is more than the rollouts of a visit."""
        if self.round_size > view.most:
            raise ValueError(f"round_size = {self.round_size} must be at most the {view.most} rollouts of a visit")
        price = self.plan(view, budget).price
        # The largest decrease there can be is 1: a visit then ends as soon as it may, as it must if the budget has no
        # more than the floors (no price), and for a prompt worth nothing.
        scale = _scale(view)
        threshold = np.ones(len(scale))
        if math.isfinite(price):
            np.divide(price * view.price_factor * view.charged(budget), scale, out=threshold, where=scale > 0)
        patience = math.ceil(self.min_resolved * budget.rollouts)
        rounds = view.most // self.round_size
        a, b = view.posterior.matched()
        rules = tuple(
            RiskRule(
                self.round_size,
                rounds,
                a=of_a,
                b=of_b,
                threshold=of_price,
                signal_share=self.signal_share,
                least=view.least,
                patience=patience,
            ).near()
            for of_a, of_b, of_price in zip(a.tolist(), b.tolist(), threshold.clip(1e-12, 1).tolist(), strict=True)
        )
        return Plan(np.full(len(rules), self.round_size), price, rules)


def _scale(view: View) -> Floats:
    return view.weight**2 * view.energy_success
