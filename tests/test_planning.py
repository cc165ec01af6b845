from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.budget import AnyBudget, Price, Rollouts, Tokens, Variance
from gvm_stream.allocator.planning import SLACK, Plan, allocate, round_to_sum


class Problem(NamedTuple):
    values: Floats
    cost: Floats
    budget: AnyBudget
    least: int
    most: int
    offset: int

    def plan(self) -> Plan:
        values, cost, budget, least, most, offset = self
        return allocate(values, cost, budget, least=least, most=most, offset=offset)

    def variance(self, rollouts: Iterable[int]) -> float:
        return math.fsum(v / (n - self.offset) for v, n in zip(self.values, rollouts, strict=True))

    def tokens(self, rollouts: Iterable[int]) -> float:
        return math.fsum(c * n for c, n in zip(self.cost, rollouts, strict=True))


@st.composite
def problems(draw: st.DrawFn, prompts: int = 30, most: int = 20) -> Problem:
    """A budget within reach; values are often such that rollouts are worth exactly the same."""
    value = st.sampled_from([0.0, 0.25, 0.75, 1.5]) | st.floats(1e-6, 1)
    values = np.array(draw(st.lists(value, min_size=1, max_size=prompts)))
    count = len(values)
    cost = np.array(draw(st.lists(st.sampled_from([1.0, 2.0, 300.0]), min_size=count, max_size=count)))
    offset = draw(st.integers(0, 1))
    least = draw(st.integers(offset + 1, most))
    upper = draw(st.integers(least, most))
    total = draw(st.integers(count * least, count * upper))
    budgets: list[AnyBudget] = [
        Rollouts(rollouts=total / count),
        Tokens(rollouts=8, tokens=total / count * cost.mean()),
        Variance(rollouts=total / count),
        Price(rollouts=8, price=draw(st.floats(1e-9, 1))),
    ]
    return Problem(values, cost, draw(st.sampled_from(budgets)), least, upper, offset)


def one_by_one(problem: Problem) -> list[int]:
    """The plan as it is defined: rollout after rollout, the one that lowers the variance most first."""
    values, cost, budget, least, most, offset = problem
    per = values if isinstance(budget, Rollouts) else values / cost
    rollouts = [least] * len(values)
    spent, left = problem.tokens(rollouts), problem.variance(rollouts)

    def entry(i: int) -> tuple[float, int, int]:
        m = rollouts[i] - offset
        return (-float(per[i]) / (m * (m + 1)), rollouts[i], i)

    heap = [entry(i) for i in range(len(values)) if least < most]
    heapq.heapify(heap)
    while heap:
        gain, n, i = heapq.heappop(heap)
        match budget:
            case Rollouts():
                go = sum(rollouts) < round(budget.rollouts * len(values))
            case Tokens():
                go = spent + cost[i] <= budget.tokens * len(values) * (1 + SLACK)
            case Variance():
                uniform = min(max(budget.rollouts, least), most) - offset
                go = left > budget.relative * values.sum() / uniform * (1 + SLACK)
            case Price():
                go = -gain >= budget.price
        if not go:
            break
        rollouts[i] = n + 1
        spent += cost[i]
        left -= values[i] / ((n - offset) * (n + 1 - offset))
        if n + 1 < most:
            heapq.heappush(heap, entry(i))
    return rollouts


@given(problems())
@settings(max_examples=400)
def test_a_plan_is_what_one_rollout_after_the_other_would_give(problem: Problem) -> None:
    assert problem.plan().rollouts.tolist() == one_by_one(problem)


def test_so_it_is_for_many_prompts() -> None:
    rng = np.random.default_rng(0)
    values, cost = rng.gamma(0.3, size=2000), rng.uniform(100, 1000, 2000)
    for budget in (Rollouts(rollouts=9.3), Tokens(rollouts=8, tokens=3000), Variance(rollouts=8, relative=0.7)):
        problem = Problem(values, cost, budget, 2, 32, 1)
        assert problem.plan().rollouts.tolist() == one_by_one(problem)


@given(problems(prompts=4, most=6))
@settings(max_examples=200)
def test_no_other_plan_is_better(problem: Problem) -> None:
    """None with as many rollouts (of a budget in rollouts), or as few tokens, has less variance."""
    rollouts = problem.plan().rollouts
    everything = product(range(problem.least, problem.most + 1), repeat=len(rollouts))
    if isinstance(problem.budget, Rollouts):
        others = [other for other in everything if sum(other) == rollouts.sum()]
    else:
        others = [other for other in everything if problem.tokens(other) <= problem.tokens(rollouts)]
    best = min(problem.variance(other) for other in others)
    assert problem.variance(rollouts) == pytest.approx(best, rel=1e-12, abs=1e-300)


@given(problems())
def test_a_plan_keeps_to_its_bounds_and_its_budget(problem: Problem) -> None:
    rollouts = problem.plan().rollouts
    assert problem.least <= rollouts.min() <= rollouts.max() <= problem.most
    match problem.budget:
        case Rollouts(rollouts=mean):
            assert rollouts.sum() == round(mean * len(rollouts))
        case Tokens(tokens=mean):
            spare = mean * len(rollouts) - problem.tokens(rollouts)
            assert spare >= -1e-6
            assert spare < problem.cost.max() or rollouts.min() == problem.most
        case Variance(rollouts=mean):
            assert problem.variance(rollouts) <= problem.values.sum() / (mean - problem.offset) * (1 + 2 * SLACK)


@given(problems(), st.integers(-20, 20))
def test_only_ratios_of_values_matter(problem: Problem, power: int) -> None:
    scaled = problem._replace(values=problem.values * 2.0**power)
    if isinstance(problem.budget, Price):
        scaled = scaled._replace(budget=Price(rollouts=8, price=problem.budget.price * 2.0**power))
    assert scaled.plan().rollouts.tolist() == problem.plan().rollouts.tolist()


def plan(values: list[float], total: int, least: int, most: int) -> list[int]:
    """Of rollouts that cost the same, with a leave-one-out baseline."""
    budget = Rollouts(rollouts=total / len(values))
    ones = np.ones(len(values))
    return list(allocate(np.array(values), ones, budget, least=least, most=most, offset=1).rollouts)


def test_rollouts_grow_with_the_root_of_the_value() -> None:
    # Without bounds or rounding the optimum is n - 1 proportional to sqrt(v).
    assert plan([1.0, 4.0, 9.0], 3 + 60, 2, 60) == [11, 21, 31]
    # The third rollout is worth v/2, the fourth v/6.
    assert plan([1.0, 2.9], 6, 2, 60) == [3, 3]
    assert plan([1.0, 3.1], 6, 2, 60) == [2, 4]


@pytest.mark.parametrize("value", [0.0, 0.25, 1e-30, 7.0, 5e-324, 1e308])
def test_equal_values_give_a_uniform_plan(value: float) -> None:
    assert plan([value] * 4, 32, 2, 32) == [8, 8, 8, 8]
    assert plan([value] * 4, 34, 2, 32) == [9, 9, 8, 8]
    assert plan([value] * 3, 6, 2, 2) == [2, 2, 2]


def test_worthless_prompts_share_what_the_others_cannot_take() -> None:
    assert plan([0.0, 1.0, 0.0], 20, 2, 8) == [6, 8, 6]
    assert plan([0.0, 1e-9, 1.0], 18, 2, 8) == [2, 8, 8]


def test_of_rollouts_worth_the_same_the_prompt_with_fewer_goes_first() -> None:
    # The fourth rollout of the first is worth 3/4 / (2 * 3), as much as the third of the second, 1/4 / (1 * 2).
    assert plan([0.75, 0.25], 6, 2, 8) == [3, 3]
    assert plan([0.75, 0.25], 7, 2, 8) == [4, 3]


def test_tokens_go_where_they_lower_the_variance_most() -> None:
    # The optimum is n proportional to sqrt(v / c), whatever the budget: v = 1, 1, 4 and c = 1, 4, 1.
    values, cost = np.array([1.0, 1.0, 4.0]), np.array([100.0, 400.0, 100.0])
    budget = Tokens(rollouts=8, tokens=(20 * 100 + 10 * 400 + 40 * 100) / 3)
    assert allocate(values, cost, budget, least=1, most=64, offset=0).rollouts.tolist() == [20, 10, 40]


def test_a_variance_is_reached_with_fewer_tokens_than_uniform_takes() -> None:
    values, cost = np.array([0.01, 1.0, 1.0]), np.array([500.0, 500.0, 100.0])
    problem = Problem(values, cost, Variance(rollouts=8), 2, 32, 1)
    rollouts = problem.plan().rollouts
    assert problem.variance(rollouts) <= values.sum() / 7
    assert problem.tokens(rollouts) < 0.8 * problem.tokens((8, 8, 8))
    equal = Problem(np.ones(3), np.ones(3), Variance(rollouts=8), 2, 32, 1)
    assert equal.plan().rollouts.tolist() == [8, 8, 8]


def test_the_price_of_a_plan_buys_the_same_plan() -> None:
    values, cost = np.array([0.3, 0.7, 1.9]), np.array([10.0, 20.0, 30.0])
    planned = allocate(values, cost, Tokens(rollouts=8, tokens=200), least=2, most=32, offset=1)
    again = allocate(values, cost, Price(rollouts=8, price=planned.price), least=2, most=32, offset=1)
    assert again.rollouts.tolist() == planned.rollouts.tolist()
    assert again.price == planned.price


def test_the_price_is_that_of_the_least_useful_rollout() -> None:
    allocated = partial(allocate, np.array([1.0, 4.0]), np.array([2.0, 100.0]), least=2, offset=1)
    planned = allocated(Rollouts(rollouts=3.5), most=9)
    assert planned.rollouts.tolist() == [3, 4]
    assert planned.price == pytest.approx(4 / (2 * 3) / 100)  # the other's last is worth 1 / (1 * 2) / 2
    assert math.isnan(allocated(Rollouts(rollouts=2), most=9).price)
    assert math.isnan(allocated(Price(rollouts=8, price=1.0), most=9).price)


def test_a_price_buys_what_is_worth_it_to_the_last_bit() -> None:
    def bought(value: float, price: float) -> list[int]:
        budget = Price(rollouts=8, price=price)
        return list(allocate(np.array([0.0, value]), np.ones(2), budget, least=1, most=32, offset=0).rollouts)

    for value in np.random.default_rng(0).random(20).tolist():
        for n in range(1, 32):
            worth = value / (n * (n + 1))
            assert bought(value, worth) == [1, n + 1]
            assert bought(value, math.nextafter(worth, math.inf)) == [1, n]


@pytest.mark.parametrize("total", [5, 17])
def test_rollouts_out_of_reach_are_refused(total: int) -> None:
    with pytest.raises(ValueError, match=f"{total} rollouts cannot be spread over 2 prompts with 3 to 8 each"):
        plan([1.0, 1.0], total, 3, 8)


def test_other_budgets_out_of_reach_are_refused() -> None:
    allocated = partial(allocate, np.ones(2), np.array([10.0, 30.0]), least=2, most=8, offset=1)
    with pytest.raises(ValueError, match="39 tokens per prompt do not pay for 2 rollouts each: 40 would"):
        allocated(Tokens(rollouts=8, tokens=39))
    with pytest.raises(ValueError, match=r"0\.9 times the variance of 8 rollouts each is out of reach"):
        allocated(Variance(rollouts=8, relative=0.9))


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_values_that_are_no_values_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite number of at least 0"):
        plan([1.0, bad], 8, 2, 8)


def test_one_rollout_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 rollouts, not 1"):
        plan([1.0, 1.0], 8, 1, 8)


@given(st.data(), st.lists(st.integers(0, 1000), min_size=1, max_size=30, unique=True), st.integers(0, 10))
def test_rounding_keeps_the_sum_the_bounds_and_the_order(data: st.DataObject, shares: list[int], least: int) -> None:
    most = data.draw(st.integers(max(least, 1), 40))
    total = data.draw(st.integers(least * len(shares), most * len(shares)))
    integers = round_to_sum(np.array(sorted(shares), float), total, least, most)
    assert integers.sum() == total
    assert least <= integers.min() <= integers.max() <= most
    zeros = shares.count(0)
    assert (np.diff(integers[zeros:]) >= 0).all()
    if zeros and integers[0] > least + 1:
        assert (integers[zeros:] == most).all()


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30), st.integers(1, 1000))
def test_rounding_moves_no_share_by_one(shares: list[float], total: int) -> None:
    exact = total * np.array(shares) / sum(shares)
    assert np.abs(round_to_sum(np.array(shares), total, 0, total) - exact).max() < 1


@pytest.mark.parametrize(
    ("shares", "total", "least", "most", "expected"),
    [
        ([1, 1, 2], 8, 0, 8, [2, 2, 4]),
        ([1, 4, 1], 14, 0, 14, [3, 9, 2]),  # 7/3, 28/3, 7/3: of equal remainders the first
        ([1, 3, 6], 16, 0, 16, [2, 5, 9]),  # 1.6, 4.8, 9.6
        ([1, 1, 98], 20, 2, 12, [4, 4, 12]),  # the third can take no more
        ([1, 1, 98], 20, 2, 16, [2, 2, 16]),
        ([0, 0, 0], 8, 0, 8, [3, 3, 2]),
        ([0, 0, 5], 9, 1, 4, [3, 2, 4]),  # worth nothing, but where else
        ([0, 0, 5], 9, 1, 8, [1, 1, 7]),
    ],
)
def test_shares_are_proportional_within_the_bounds(
    shares: list[float], total: int, least: int, most: int, expected: list[int]
) -> None:
    assert round_to_sum(np.array(shares, float), total, least, most).tolist() == expected


def test_impossible_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="a share must be a finite number of at least 0"):
        round_to_sum(np.array([1.0, math.nan]), 4, 0, 4)
    with pytest.raises(ValueError, match="9 rollouts cannot be spread over 2 prompts with 0 to 4 each"):
        round_to_sum(np.ones(2), 9, 0, 4)
