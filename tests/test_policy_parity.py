"""Policies against independent transcriptions of what was published."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.budget import Rollouts
from gvm_stream.allocator.policies import make_policy
from gvm_stream.allocator.policies.planned import GvmTwoStage, ReinforceAdaEst, gvm_sample_sizes
from tests.test_policies import outcomes, view


def published_sample_sizes(accept_rates: list[float], grad_norms: list[float], total: int) -> list[int]:
    """GVM, Proposition 1 with alpha = 1e-3 and beta = 2, and the rounding that was released."""
    weights = [
        norm / math.sqrt(p + 1e-3 / p) if norm > 0 and p > 0 else 0.0
        for p, norm in zip(accept_rates, grad_norms, strict=True)
    ]
    exact = [total * (weight / sum(weights)) for weight in weights]
    sizes = [round(x) for x in exact]  # Python rounds half to even, as numpy does
    while sum(sizes) != total:
        step = 1 if sum(sizes) < total else -1
        furthest = max(range(len(sizes)), key=lambda i: step * (exact[i] - sizes[i]))
        sizes[furthest] += step
    return sizes


def test_gvm_sample_sizes_are_the_published_ones() -> None:
    rng = np.random.default_rng(0)
    left_out = corrected = 0
    for _ in range(1000):
        count, pilot = int(rng.integers(1, 65)), int(rng.choice([4, 8, 16, 32]))
        accept_rates = rng.binomial(pilot, rng.beta(0.5, 0.8, count)) / pilot
        accept_rates[0] = max(accept_rates[0], 1 / pilot)  # the release fails if nothing was accepted
        grad_norms = rng.lognormal(0, 0.6, count)
        sizes = gvm_sample_sizes(accept_rates, grad_norms, 8 * count)
        assert sizes.tolist() == published_sample_sizes(accept_rates.tolist(), grad_norms.tolist(), 8 * count)
        assert sizes.sum() == 8 * count
        left_out += int(np.sum(sizes[accept_rates == 0] == 0))
        corrected += int(np.sum(accept_rates == 0))
    assert left_out == corrected > 0


def test_a_sample_size_is_damped_only_below_the_reach_of_a_pilot_of_eight() -> None:
    undamped = np.array([1 / 8, 1 / 16, 1 / 32]) ** -0.5
    sizes = gvm_sample_sizes(np.array([1 / 8, 1 / 16, 1 / 32]), np.ones(3), 10**6)
    factors = sizes / undamped * (0.970 * undamped[0] / sizes[0])
    assert factors == pytest.approx([0.970, 0.892, 0.703], abs=1e-3)


@pytest.mark.parametrize("rates", [[0.0, 0.0, 0.0], [1.0, 0.5, 0.25]])
def test_where_the_release_divides_by_zero_all_prompts_share_alike(rates: list[float]) -> None:
    norms = np.ones(3) if not any(rates) else np.zeros(3)
    assert gvm_sample_sizes(np.array(rates), norms, 24).tolist() == [8, 8, 8]
    assert sorted(gvm_sample_sizes(np.array(rates), norms, 25).tolist()) == [8, 8, 9]


def test_one_prompt_takes_all() -> None:
    assert gvm_sample_sizes(np.array([0.125]), np.array([2.0]), 8).tolist() == [8]


@pytest.mark.parametrize("bad", [math.nan, -0.1, math.inf])
def test_what_is_no_number_is_refused_where_the_release_makes_garbage_of_it(bad: float) -> None:
    with pytest.raises(ValueError, match="accept rate must be from 0 to 1"):
        gvm_sample_sizes(np.array([0.5, bad]), np.ones(2), 16)
    with pytest.raises(ValueError, match="gradient norm must be a finite number"):
        gvm_sample_sizes(np.array([0.5, 0.5]), np.array([1.0, bad]), 16)


def test_ada_est_gives_more_to_hard_prompts_and_scales_their_advantages_up() -> None:
    policy = ReinforceAdaEst(eps=0.05)
    seen = view([(20.0, 80.0), (95.0, 5.0)], most=100)
    assert policy.plan_rounds(seen, Rollouts(rollouts=30)).rollouts.tolist() == [40, 20]
    advantages = np.array([0.75, -0.25, -0.25, -0.25]) / math.sqrt(0.25 + 0.05)
    assert policy.coefficients(outcomes(1, 0, 0, 0)) == pytest.approx(advantages / 4)
    assert not np.any(policy.coefficients(outcomes(0, 0, 0)))
    assert not np.any(policy.coefficients(outcomes(1, 1)))


def test_the_two_stages_of_gvm_share_the_budget_and_leave_out_what_the_pilot_failed() -> None:
    policy = GvmTwoStage(pilot=4)
    seen = view([(1.0, 1.0)] * 3, success=[1.0, 4.0, 1.0], coefficient="raft")
    budget = Rollouts(rollouts=12)
    assert policy.plan_rounds(seen, budget).rollouts.tolist() == [4, 4, 4]
    pilot = (outcomes(1, 0, 0, 0), outcomes(1, 0, 0, 0), outcomes(0, 0, 0, 0))
    assert policy.second_stage(seen, pilot, budget).tolist() == [8, 16, 0]
    nothing_accepted = (outcomes(0, 0, 0, 0), outcomes(0, 0), outcomes())
    assert policy.second_stage(seen, nothing_accepted, budget).tolist() == [8, 8, 8]
    with pytest.raises(ValueError, match="pilot of 4 leaves nothing of 4 rollouts per prompt"):
        policy.plan_rounds(seen, Rollouts(rollouts=4))


def published_knapsack(rates: Floats, total: int, least: int, most: int) -> float:
    """Greatest total value by dynamic programming over (prompts so far, rollouts spent)."""
    best = {0: 0.0}
    for p in rates.tolist():
        step: dict[int, float] = {}
        for spent, value in best.items():
            for n in range(least, most + 1):
                worth = value + (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2
                if spent + n <= total and worth > step.get(spent + n, -1.0):
                    step[spent + n] = worth
        best = step
    return best[total]


@given(
    st.lists(st.tuples(st.floats(0.1, 30), st.floats(0.1, 30)), min_size=1, max_size=6),
    st.integers(2, 3),
    st.integers(4, 9),
    st.floats(0, 1),
)
def test_the_knapsack_by_marginal_gains_is_as_good_as_the_dynamic_programme(
    betas: list[tuple[float, float]], least: int, most: int, fill: float
) -> None:
    total = round(len(betas) * (least + fill * (most - least)))
    seen = view(betas, least=least, most=most)
    plan = make_policy("knapsack", {}).plan(seen, Rollouts(rollouts=total / len(betas)))
    p, n = seen.posterior.mean(), plan.rollouts
    value = float(np.sum((1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2))
    assert n.sum() == total
    assert value == pytest.approx(published_knapsack(p, total, least, most), rel=1e-9, abs=1e-15)
