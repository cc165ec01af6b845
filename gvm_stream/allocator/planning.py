"""From values to numbers of rollouts: integers that minimise the variance of a step's gradient within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gvm_stream.allocator.arrays import Floats, Ints
from gvm_stream.allocator.budget import AnyBudget, Price, Rollouts, Tokens, Variance
from gvm_stream.allocator.stopping import StoppingRule

SLACK = 1e-9
"""Relative: sums of floats are compared with a budget up to their rounding."""


class Plan(NamedTuple):
    rollouts: Ints
    """[B] to launch; with rules: in the first round."""
    price: float
    """Decrease of variance per token of the last rollout granted; NaN where no price is involved."""
    rules: tuple[StoppingRule, ...] | None = None
    """Sequential and reference designs: the rule of every visit. None: the visit ends after `rollouts`."""


def allocate(values: Floats, cost: Floats, budget: AnyBudget, *, least: int, most: int, offset: int) -> Plan:
    """Rollouts n per prompt [B], least <= n <= most, that minimise sum_i values_i / (n_i - offset) within the budget.

    `values` [B] are variances per rollout, `cost` [B] expected tokens per rollout, above 0. Beyond the least, rollouts
    are granted in order of what they lower the variance by, values / ((n - offset)(n - offset + 1)), for a budget in
    rollouts each, otherwise per token, up to the first that the budget does not cover. For rollouts this is exact
    (Fox 1966); for tokens no plan that takes as few as this one has less variance. Ties go to the prompt with fewer
    rollouts, then to the earlier one. Prompts of value 0 come last, evenly, so that all of value 0 get a uniform plan.

    The price is the least decrease of variance per token of any prompt's last rollout, NaN if all have only the least.
    Raises ValueError for a budget out of reach, a `least` not above `offset`, and values negative or not finite.
    """
    if least <= offset:
        raise ValueError(f"a prompt needs at least {offset + 1} rollouts, not {least}")
    if not np.all(np.isfinite(values)) or np.any(values < 0):
        raise ValueError("the value of a prompt must be a finite number of at least 0")
    count, low, high = len(values), least - offset, most - offset  # n - offset is called m from here on
    per_token = values / cost
    match budget:
        case Rollouts(rollouts=mean):
            total = round(mean * count)
            _check_total(total, count, least, most)
            m = _grant(values, lambda i, m: m.astype(np.float64), total - count * least, low, high)
        case Tokens(tokens=mean):
            spare = count * mean * (1 + SLACK) - least * float(cost.sum())
            if spare < 0:
                needed = least * cost.mean()
                raise ValueError(f"{mean:g} tokens per prompt do not pay for {least} rollouts each: {needed:g} would")
            m = _grant(per_token, lambda i, m: cost[i] * m, spare, low, high)
        case Variance(rollouts=mean, relative=relative):
            variance = float(values.sum())
            target = relative * variance / min(max(mean - offset, low), high) * (1 + SLACK)
            if variance / high > target:
                raise ValueError(
                    f"{relative:g} times the variance of {mean:g} rollouts each is out of reach with at most {most}"
                )
            # The first grant that uses up `excess` is still needed.
            excess = variance / low - target
            m = _grant(per_token, lambda i, m: -values[i] / m, np.nextafter(excess, -np.inf), low, high, one_more=True)
        case Price(price=price):
            m = _worth_more(per_token, np.nextafter(price, 0), low, high)
    return Plan(m + offset, _price(per_token, m, low))


def round_to_sum(shares: Floats, total: int, least: int, most: int) -> Ints:
    """Integers [B] from `least` to `most` with this sum, as proportional to `shares` [B] as the bounds allow; largest
    remainders are rounded up, of equal ones the first. Shares of 0 take, evenly, what the others cannot.

    Raises ValueError for a sum out of reach, and shares negative or not finite.
    """
    if not np.all(np.isfinite(shares)) or np.any(shares < 0):
        raise ValueError("a share must be a finite number of at least 0")
    _check_total(total, len(shares), least, most)
    shares = _zeros_last(shares, 1e-9 / most)
    # The sum grows with the scale: bisection to the last bit.
    low, high = 0.0, most / shares.min()
    while low < (scale := (low + high) / 2) < high:
        if np.clip(scale * shares, least, most).sum() <= total:
            low = scale
        else:
            high = scale
    exact = np.clip(low * shares, least, most)
    integers = exact.astype(np.int64)
    remainders = (exact - integers).round(9)  # so that those that differ by rounding only are equal
    up = np.argsort(-remainders, kind="stable")[: total - integers.sum()]
    integers[up] += 1
    return integers


def _check_total(total: int, count: int, least: int, most: int) -> None:
    if not count * least <= total <= count * most:
        raise ValueError(f"{total} rollouts cannot be spread over {count} prompts with {least} to {most} each")


def _zeros_last(values: Floats, factor: float) -> Floats:
    """Values scaled to below 1 (by a power of two, so that ties stay ties), those of 0 or too small to compute with
    replaced by the least other one times `factor`; all 1 if there is no other."""
    if not values.any():
        return np.ones(len(values))
    scaled = np.ldexp(values, -np.frexp(values.max())[1])
    positive = scaled > 1e-150
    return np.asarray(np.where(positive, scaled, scaled[positive].min() * factor))


def _grant(
    per: Floats,
    use: Callable[[Ints, Ints], Floats],
    amount: float,
    low: int,
    high: int,
    *,
    one_more: bool = False,
) -> Ints:
    """m [B] after granting rollouts in order of per / (m (m + 1)) for as long as they use at most `amount`, and one
    more if asked for. The first m rollouts of prompts i use `use(i, m)`, up to a constant.

    The plan is all rollouts worth more than some price and a few at that price. Bisection on the price narrows down
    which to about one per prompt, and only those are sorted.
    """
    prompts = np.arange(len(per))
    inner, outer = np.full(len(per), low), np.full(len(per), high)

    def used(m: Ints) -> float:
        return float((use(prompts, m) - use(prompts, np.full_like(m, low))).sum())

    if amount < 0:
        return inner
    if used(outer) <= amount:
        return outer
    per = _zeros_last(per, 1 / (high + 1) ** 2)
    cheap, dear = per.min() / (high + 1) ** 2, per.max()
    while (outer - inner).sum() > len(per):
        price = math.sqrt(cheap * dear)
        m = _worth_more(per, price, low, high)
        if used(m) <= amount:
            inner, dear = m, price
        else:
            outer, cheap = m, price
    between = outer - inner
    i = np.repeat(prompts, between)
    m = np.arange(len(i)) + np.repeat(outer - np.cumsum(between), between)
    order = np.lexsort((m, -per[i] / (m * (m + 1))))
    i, m = i[order], m[order]
    running = used(inner) + np.cumsum(use(i, m + 1) - use(i, m))
    granted = np.searchsorted(running, amount, side="right") + one_more
    return inner + np.bincount(i[:granted], minlength=len(per))


def _worth_more(per: Floats, price: float, low: int, high: int) -> Ints:
    """m [B] once every rollout with per / (m (m + 1)) > price has been granted."""
    root = np.sqrt(per / price + 0.25) - 0.5
    m: Ints = np.clip(np.ceil(root) - 1, low, high).astype(np.int64)
    for _ in range(2):  # from at most 2 below, whatever the rounding of the root
        m += (m < high) & (per / (m * (m + 1)) > price)
    return m


def _price(per_token: Floats, m: Ints, low: int) -> float:
    granted = m > low
    if not granted.any():
        return math.nan
    m = m[granted]
    return float((per_token[granted] / (m * (m - 1))).min())
