"""Policies whose numbers are fixed before the first rollout, and the two-stage rule they descend from.

In the planned design none of them changes the objective: the numbers depend on earlier visits only.
"""

from __future__ import annotations

import math

import numpy as np

from gvm_stream.allocator.arrays import Floats, Ints
from gvm_stream.allocator.budget import AnyBudget, Price, Rollouts, Tokens, Variance
from gvm_stream.allocator.estimates import SUCCESS_REWARD
from gvm_stream.allocator.planning import Plan, allocate, round_to_sum
from gvm_stream.allocator.policies.base import Outcomes, Policy, View, register
from gvm_stream.allocator.stopping import PosteriorRule
from gvm_stream.allocator.values import gvm_value


def _total(view: View, budget: AnyBudget) -> int:
    """Rollouts of the step for rules with numbers of their own."""
    return round(budget.rollouts * len(view.prompts))


def _shares(view: View, budget: AnyBudget, shares: Floats) -> Plan:
    """Numbers in proportion to `shares` within the bounds of a visit, with the exact sum."""
    return Plan(round_to_sum(shares, _total(view, budget), view.least, view.most), math.nan)


def _check_damping(alpha: float, beta: float) -> None:
    if not (math.isfinite(alpha) and alpha > 0 and math.isfinite(beta) and beta > 1):
        raise ValueError(f"alpha = {alpha} must be finite and above 0, beta = {beta} finite and above 1")


@register("uniform")
class Uniform(Policy, frozen=True, kw_only=True):
    """The same number for every prompt: the largest that the budget allows or, where a variance is to be reached, the
    smallest that reaches it. Only a number of rollouts per prompt that is not whole makes some differ by one.

    Raises ValueError if the bounds do not admit that number.
    """

    def plan(self, view: View, budget: AnyBudget) -> Plan:
        count, offset = len(view.prompts), view.offset
        match budget:
            case Rollouts():
                return _shares(view, budget, np.ones(count))
            case Tokens(tokens=tokens):
                n = min(math.floor(tokens * count / view.cost.sum()), view.most)
            case Variance(rollouts=rollouts, relative=relative):
                n = max(math.ceil(offset + (rollouts - offset) / relative), view.least)
            case Price(price=price):
                # The n-th rollout of all lowers the variance by V/(k (k - 1)), with k = n - offset.
                pairs = float(view.variance().sum() / (price * view.cost.sum()))
                n = offset + math.floor((1 + math.sqrt(1 + 4 * pairs)) / 2)
                n = min(max(n, view.least), view.most)
        if not view.least <= n <= view.most:
            raise ValueError(f"the budget means {n} rollouts for every prompt, not within {view.least} to {view.most}")
        return Plan(np.full(count, n, np.int64), math.nan)


@register("gvm")
class Gvm(Policy, frozen=True, kw_only=True):
    """GVM, online (arXiv 2505.02391, Proposition 1): n_i ~ w_i G_i / sqrt(p_i + alpha p_i^(1 - beta)), which minimises
    the bound sum w^2 G^2/(p n) on the variance of RAFT with hopeless prompts damped.

    p_i is the posterior mean of earlier visits, where the paper has a pilot, and G_i^2 the expected energy of an
    accepted rollout. With a number of rollouts as the budget it is the closed form, else the same values with costs.
    """

    alpha: float = 1e-3
    beta: float = 2.0

    def __post_init__(self) -> None:
        _check_damping(self.alpha, self.beta)

    def values(self, view: View) -> Floats:
        return view.weight**2 * gvm_value(view.posterior.mean(), view.energy_success, self.alpha, self.beta)

    def plan(self, view: View, budget: AnyBudget) -> Plan:
        if isinstance(budget, Rollouts):
            return _shares(view, budget, np.sqrt(self.values(view)))
        return super().plan(view, budget)


@register("neyman")
class Neyman(Policy, frozen=True, kw_only=True):
    """Neyman allocation with costs (Neyman 1934) by the posterior mean of the variance: n_i ~ w_i sqrt(E[V_i] / c_i).

    The mean, not a plug-in estimate: the variance of the batch is linear in V_i, and the p_hat of a few rollouts is
    often 0 or 1, where the plug-in is 0.

    With raft V is damped as that of `Gvm`, with beta = 2. The less `alpha`, the more rollouts go to hopeless prompts.

    Sequential: rounds of `round_size` until another round lowers the expected variance by less than the price of the
    planned allocation. Own counts decide when to stop, which the class-conditional coefficients of that design undo.
    """

    designs = ("planned", "sequential")

    round_size: int = 4
    alpha: float = 1e-3

    def __post_init__(self) -> None:
        if self.round_size < 2:
            raise ValueError(f"round_size = {self.round_size} must be at least 2, the fewest rollouts of a visit")
        _check_damping(self.alpha, 2.0)

    def values(self, view: View) -> Floats:
        return view.variance(self.alpha)

    def plan_rounds(self, view: View, budget: AnyBudget) -> Plan:
        """Raises ValueError for the coefficient raft, and for a round that does not fit the bounds of a visit."""
        if view.coefficient != "rloo":
            raise ValueError("neyman stops rloo visits only; with raft use the policy raft_risk")
        if not view.least <= self.round_size <= view.most:
            raise ValueError(f"round_size = {self.round_size} must be from {view.least} to {view.most} rollouts")
        cost = view.charged(budget)
        variance = view.variance()
        planned = allocate(variance, cost, budget, least=view.least, most=view.most, offset=view.offset)
        price = budget.price if isinstance(budget, Price) else planned.price
        # variance = w^2 E E[q] defines the energy E of a rule. A prompt without variance gets one round, and so do all
        # where the budget is used up by the least visits, which leaves no price.
        threshold = np.full(len(cost), math.inf)
        if not math.isnan(price):
            value = price * view.price_factor * cost * view.posterior.reward_variance()
            np.divide(value, variance, out=threshold, where=variance > 0)
        a, b = view.posterior.matched()
        rules = tuple(
            PosteriorRule.near(self.round_size, view.most // self.round_size, *row)
            for row in zip(a.tolist(), b.tolist(), threshold.tolist(), strict=True)
        )
        return Plan(np.full(len(cost), self.round_size, np.int64), price, rules)


@register("rollout_gdro")
class RolloutGdro(Policy, frozen=True, kw_only=True):
    """Rollout-GDRO (arXiv 2601.19280): the square-root rule n_b ~ sqrt(v_b) over bins of the pass rate, at most
    `most_times` the mean number. Bins are by posterior mean, v_b is the mean variance of a bin's prompts.

    The released method learns the numbers by a bandit (EXP3P) per bin and a shadow price; here they are its optimum.
    Its scripts have bins split at .4 and .75, or at tenths.
    """

    edges: tuple[float, ...] = (0.4, 0.75)
    most_times: float = 3.0

    def __post_init__(self) -> None:
        if not all(low < high for low, high in zip((0.0, *self.edges), (*self.edges, 1.0), strict=True)):
            raise ValueError(f"edges = {self.edges} must rise between 0 and 1")
        if not self.most_times >= 1:
            raise ValueError(f"most_times = {self.most_times} must be at least 1")

    def plan(self, view: View, budget: AnyBudget) -> Plan:
        bins = np.digitize(view.posterior.mean(), self.edges)
        prompts = np.bincount(bins)
        variance = np.bincount(bins, view.variance()) / np.maximum(prompts, 1)
        most = min(view.most, math.ceil(self.most_times * budget.rollouts))
        return Plan(round_to_sum(np.sqrt(variance)[bins], _total(view, budget), view.least, most), math.nan)


@register("knapsack")
class Knapsack(Policy, frozen=True, kw_only=True):
    """Knapsack RL (arXiv 2509.25849): numbers of the greatest total (1 - p^n - (1-p)^n) p (1-p)^2, the chance of a
    gradient times what it is worth. p is the posterior mean.

    The value is concave in n, so the greatest marginal gains are the optimum and no dynamic programme is needed. A
    posterior mean is never 0: what others have no use for goes to the hardest prompts by the same rule.
    """

    def plan(self, view: View, budget: AnyBudget) -> Plan:
        count, total = len(view.prompts), _total(view, budget)
        if not count * view.least <= total <= count * view.most:
            raise ValueError(
                f"{total} rollouts cannot be spread over {count} prompts, {view.least} to {view.most} each"
            )
        p, n = view.posterior.mean(), np.arange(view.least, view.most)[:, None]
        gains = (p**n * (1 - p) + (1 - p) ** n * p) * p * (1 - p) ** 2
        # Row by row, so that ties go to fewer rollouts, then to the earlier prompt.
        best = np.argsort(-gains, axis=None, kind="stable")[: total - count * view.least]
        return Plan(view.least + np.bincount(best % count, minlength=count), math.nan)


@register("reinforce_ada_est")
class ReinforceAdaEst(Policy, frozen=True, kw_only=True):
    """Reinforce-Ada-Est (arXiv 2510.04996 v3, Algorithm 1): n ~ 1/sqrt(p + eps), p the posterior mean, and advantages
    (r - mean) / sqrt(mean + eps).

    Meant for the objective E[log p], half of it by numbers and half by advantages, where all rollouts of a batch count
    alike. Here a gradient is a mean over its prompt, so only the advantages re-weight prompts: like 1/sqrt(p), but less
    for hard ones, whose mean is mostly 0 (n = 8: 2.0 instead of 3.2 at p = .1, 2.3 instead of 7.1 at .02). The value of
    `eps` is ours.
    """

    designs = ("reference",)

    eps: float = 0.01

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"eps = {self.eps} must be a finite number above 0")

    def plan_rounds(self, view: View, budget: AnyBudget) -> Plan:
        return _shares(view, budget, 1 / np.sqrt(view.posterior.mean() + self.eps))

    def coefficients(self, outcomes: Outcomes) -> Floats:
        accepted = (outcomes.rewards >= SUCCESS_REWARD).astype(np.float64)
        n = max(len(accepted), 1)
        mean = float(accepted.sum()) / n
        return (accepted - mean) / (math.sqrt(mean + self.eps) * n)


def gvm_sample_sizes(
    accept_rates: Floats, grad_norms: Floats, total: int, alpha: float = 1e-3, beta: float = 2.0
) -> Ints:
    """Sample sizes [B] of GVM's second stage, as released with arXiv 2505.02391: Proposition 1, rounded half to even,
    then by one where the residual is largest until the sum is `total`. 0 where nothing was accepted.

    If nothing was accepted anywhere (the released code divides by zero) all prompts share alike. Raises ValueError for
    rates that are not from 0 to 1 and norms that are not finite and >= 0 (there NaN becomes a huge integer).
    """
    if not np.all((accept_rates >= 0) & (accept_rates <= 1)):
        raise ValueError("an accept rate must be from 0 to 1")
    if not np.all((grad_norms >= 0) & np.isfinite(grad_norms)):
        raise ValueError("a gradient norm must be a finite number of at least 0")
    weights = grad_norms * np.sqrt(gvm_value(accept_rates, np.ones_like(grad_norms), alpha, beta))
    if not weights.any():
        weights = np.ones_like(grad_norms)
    exact = weights / weights.sum() * total
    sizes: Ints = np.round(exact).astype(np.int64)
    error = total - int(sizes.sum())
    one = 1 if error > 0 else -1
    by_residual = np.argsort(one * (sizes - exact), kind="stable")
    sizes[by_residual[: abs(error)]] += one
    return sizes


@register("gvm_two_stage")
class GvmTwoStage(Policy, frozen=True, kw_only=True):
    """GVM as released (arXiv 2505.02391, Algorithm 2): a pilot of every prompt, which is counted and thrown away, then
    Proposition 1 on its accept rates. Both stages together use budget.rollouts per prompt; there are no bounds.

    A prompt without an accepted pilot rollout is left out of the step, which weights prompts by 1 - (1-p)^pilot. G is
    the root of the expected energy of earlier visits, sqrt(E||g||^2), where the release has the pilot's mean norm.
    """

    designs = ("reference",)

    pilot: int = 8
    alpha: float = 1e-3
    beta: float = 2.0

    def __post_init__(self) -> None:
        _check_damping(self.alpha, self.beta)
        if self.pilot < 1:
            raise ValueError(f"pilot = {self.pilot} must be at least 1 rollout")

    def plan_rounds(self, view: View, budget: AnyBudget) -> Plan:
        """Raises ValueError if the budget leaves nothing for the second stage."""
        if budget.rollouts <= self.pilot:
            raise ValueError(f"a pilot of {self.pilot} leaves nothing of {budget.rollouts:g} rollouts per prompt")
        return Plan(np.full(len(view.prompts), self.pilot, np.int64), math.nan)

    def second_stage(self, view: View, pilot: tuple[Outcomes, ...], budget: AnyBudget) -> Ints:
        accepted = np.array([np.count_nonzero(outcomes.rewards >= SUCCESS_REWARD) for outcomes in pilot])
        scored = np.array([len(outcomes.rewards) for outcomes in pilot])
        total = _total(view, budget) - self.pilot * len(pilot)
        return gvm_sample_sizes(
            accepted / np.maximum(scored, 1), np.sqrt(view.energy_success), total, self.alpha, self.beta
        )
