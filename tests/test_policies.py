from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator import OnlineAllocator, Settings
from gvm_stream.allocator.estimates import Estimates, Floats, Ints
from gvm_stream.allocator.policies import neyman, plan, uniform
from gvm_stream.learner.advantages import rloo
from tests.test_online import allocator, scored, train


@st.composite
def problems(draw: st.DrawFn, prompts: int = 30, most: int = 20) -> tuple[Floats, int, int, int]:
    """Values, a budget within reach, and bounds."""
    values = draw(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.25]), min_size=1, max_size=prompts))
    least = draw(st.integers(2, most))
    upper = draw(st.integers(least, most))
    budget = draw(st.integers(len(values) * least, len(values) * upper))
    return np.array(values), budget, least, upper


def variance(values: Floats, rollouts: Ints | tuple[int, ...]) -> float:
    """Of the batch gradient: values are per rollout, leave-one-out loses one."""
    return math.fsum(v / (n - 1) for v, n in zip(values, rollouts, strict=True))


@given(problems())
def test_a_plan_spends_exactly_the_budget_within_the_bounds(problem: tuple[Floats, int, int, int]) -> None:
    values, budget, least, most = problem
    rollouts = plan(values, budget, least, most)
    assert rollouts.sum() == budget
    assert rollouts.min() >= least
    assert rollouts.max() <= most


@given(problems(prompts=4, most=6))
def test_no_other_plan_has_less_variance(problem: tuple[Floats, int, int, int]) -> None:
    values, budget, least, most = problem
    everything = product(range(least, most + 1), repeat=len(values))
    best = min(variance(values, rollouts) for rollouts in everything if sum(rollouts) == budget)
    assert variance(values, plan(values, budget, least, most)) == pytest.approx(best, rel=1e-12, abs=1e-300)


def test_rollouts_grow_with_the_root_of_the_value() -> None:
    # Without bounds or rounding the optimum is n - 1 proportional to sqrt(v).
    assert plan(np.array([1.0, 4.0, 9.0]), 3 + 60, 2, 60).tolist() == [11, 21, 31]
    # The third rollout is worth v/2, the fourth v/6.
    assert plan(np.array([1.0, 2.9]), 6, 2, 60).tolist() == [3, 3]
    assert plan(np.array([1.0, 3.1]), 6, 2, 60).tolist() == [2, 4]


@pytest.mark.parametrize("value", [0.0, 0.25, 1e-30, 7.0])
def test_equal_values_give_a_uniform_plan(value: float) -> None:
    assert plan(np.full(4, value), 32, 2, 32).tolist() == [8, 8, 8, 8]
    assert plan(np.full(4, value), 34, 2, 32).tolist() == [9, 9, 8, 8]
    assert plan(np.full(3, value), 6, 2, 2).tolist() == [2, 2, 2]


def test_worthless_prompts_share_what_the_others_cannot_take() -> None:
    assert plan(np.array([0.0, 1.0, 0.0]), 20, 2, 8).tolist() == [6, 8, 6]


@given(problems(), st.integers(-20, 20))
def test_only_ratios_of_values_matter(problem: tuple[Floats, int, int, int], power: int) -> None:
    values, budget, least, most = problem
    values = np.round(values, 3)
    scaled = values * 2.0**power  # exact, so that ties stay ties
    assert plan(scaled, budget, least, most).tolist() == plan(values, budget, least, most).tolist()


@pytest.mark.parametrize("budget", [5, 17])
def test_a_budget_out_of_reach_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"{budget} rollouts cannot be spread over 2 prompts with 3 to 8 each"):
        plan(np.ones(2), budget, 3, 8)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_values_that_are_no_values_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite number of at least 0"):
        plan(np.array([1.0, bad]), 8, 2, 8)


def test_one_rollout_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 rollouts, not 1"):
        plan(np.ones(2), 8, 1, 8)


def seen(*successes: int, of: int = 16) -> Estimates:
    estimates = Estimates((0.5, 0.5), 128.0)
    estimates.grow(len(successes))
    for prompt, wins in enumerate(successes):
        estimates.observe(prompt, np.array([1.0] * wins + [0.0] * (of - wins)), of, 0)
    return estimates


def test_neyman_prefers_prompts_that_are_neither_solved_nor_hopeless() -> None:
    values = neyman(seen(0, 2, 8, 14, 16), np.arange(5), 0)
    hopeless, hard, even, easy, solved = plan(values, 40, 2, 32).tolist()
    assert even > hard == easy > hopeless == solved >= 2
    assert values[2] == pytest.approx(8.5 * 8.5 / (17 * 18))


def test_neyman_looks_again_at_prompts_that_it_has_not_seen_for_long() -> None:
    estimates = seen(16, 16)
    estimates.observe(1, np.ones(16), 16, 500)
    forgotten, fresh = neyman(estimates, np.arange(2), 500).tolist()
    assert forgotten > fresh


def test_uniform_ignores_what_was_learned() -> None:
    assert uniform(seen(0, 8, 16), np.array([2, 1]), 3).tolist() == [1.0, 1.0]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="policy 'best' is unknown; there are neyman, uniform"):
        OnlineAllocator(Settings(policy="best"), seed=0)


def gradient(rewards: tuple[int, ...], p: float) -> float:
    """Leave-one-out policy gradient of a Bernoulli policy by its success rate p, mean over the rollouts."""
    score = (np.array(rewards) - p) / (p * (1 - p))
    return float(np.mean(rloo(rewards) * score))


def chance_of(rewards: tuple[int, ...], p: float) -> float:
    return math.prod(p if r else 1 - p for r in rewards)


@lru_cache
def expected_gradient(designs: tuple[tuple[int, ...], ...], p: float) -> float:
    return sum(chance_of(rewards, p) * gradient(rewards, p) for rewards in designs)


def test_a_plan_from_earlier_visits_is_unbiased_with_leave_one_out() -> None:
    """c(p) = E[sf / (N(N-1))] / (p(1-p)) = 1 for every prompt, by enumeration of two visits."""
    rates = {"train-0": 0.2, "train-1": 0.7}
    c, sizes = dict.fromkeys(rates, 0.0), set()
    for rewards in product((0, 1), repeat=8):
        a = allocator(2, policy="neyman", max_lag=0, rollouts_per_step=8, max_rollouts=6)
        history = 1.0
        for item, reward in zip(a.ask(8, 0), rewards, strict=True):
            a.tell(item.work, 0, scored(reward))
            history *= chance_of((reward,), rates[item.prompt])
        train(a, 0, 1)
        planned = Counter(item.prompt for item in a.ask(100, 1))
        sizes.add(planned["train-0"])
        for prompt, p in rates.items():
            c[prompt] += history * expected_gradient(tuple(product((0, 1), repeat=planned[prompt])), p)
    assert len(sizes) > 1  # the plan does depend on the first visit
    assert c == pytest.approx(dict.fromkeys(rates, 1.0), rel=1e-12)


def test_a_size_that_depends_on_its_own_rewards_would_be_biased() -> None:
    """What the planned design avoids: two rollouts, and two more if the first two failed."""
    p = 0.2
    stopped = ((1, 1), (1, 0), (0, 1), *((0, 0, *more) for more in product((0, 1), repeat=2)))
    assert expected_gradient(stopped, p) == pytest.approx(1 + 0.8 * (0.8 / 2 + p / 3))
