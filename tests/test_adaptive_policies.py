from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator import stopping
from gvm_stream.allocator.arrays import Floats, Ints
from gvm_stream.allocator.budget import AnyBudget, Price, Rollouts, Tokens, Variance
from gvm_stream.allocator.coefficients import pool_baseline
from gvm_stream.allocator.policies import Coefficient, Outcomes, Plan, View, make_policy
from gvm_stream.allocator.posterior import Posterior
from gvm_stream.allocator.risk import none_accepted, raft_risk
from gvm_stream.allocator.stopping import Rule, class_conditional, implied_objective


def view(
    a: Floats,
    b: Floats,
    *,
    energy: Floats | None = None,
    cost: Floats | None = None,
    coefficient: Coefficient = "raft",
    least: int = 1,
    most: int = 32,
    price_factor: float = 1.0,
) -> View:
    count = len(a)
    energy = np.ones(count) if energy is None else energy
    return View(
        prompts=np.arange(count),
        posterior=Posterior.of(a, b),
        energy_success=energy,
        energy_failure=energy,
        cost=np.full(count, 100.0) if cost is None else cost,
        weight=np.ones(count),
        visits=np.ones(count, np.int64),
        version=0,
        coefficient=coefficient,
        least=least,
        most=most,
        price_factor=price_factor,
        rng=np.random.default_rng(0),
    )


# reinforce_ada

NAMES = ("reinforce_ada_pos", "reinforce_ada_balance")


@pytest.mark.parametrize(("name", "rule"), [(NAMES[0], Rule(8, 4, 1, 0)), (NAMES[1], Rule(8, 4, 2, 2))])
def test_every_prompt_is_sampled_in_rounds_under_the_published_rule(name: str, rule: Rule) -> None:
    plan = make_policy(name, {}).plan_rounds(view(np.ones(3), np.ones(3)), Rollouts(rollouts=8))
    assert plan.rollouts.tolist() == [8, 8, 8]
    assert math.isnan(plan.price)
    assert plan.rules == (rule,) * 3


def test_an_odd_number_to_keep_asks_for_one_failure_more() -> None:
    plan = make_policy("reinforce_ada_balance", {"keep": 5}).plan_rounds(
        view(np.ones(1), np.ones(1)), Rollouts(rollouts=8)
    )
    assert plan.rules == (Rule(8, 4, 2, 3),)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_design_trains_on_a_balanced_few_against_the_mean_of_the_pool(name: str) -> None:
    rewards = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    coefficients = make_policy(name, {}).coefficients(Outcomes(rewards, np.full(8, 10), None))
    assert coefficients is not None
    np.testing.assert_allclose(coefficients, pool_baseline(rewards, 4))
    np.testing.assert_allclose(coefficients * 4, [-3 / 8, 5 / 8, -3 / 8, 0, 0, 5 / 8, 0, 0])


@pytest.mark.parametrize(("name", "hard", "easy"), [(NAMES[0], 5.88, 1.58), (NAMES[1], 7.17, 3.95)])
def test_as_released_it_reweights_prompts_and_in_the_sequential_design_it_does_not(
    name: str, hard: float, easy: float
) -> None:
    policy = make_policy(name, {})
    assert policy.designs == ("reference", "sequential")
    (rule,) = policy.plan_rounds(view(np.ones(1), np.ones(1)), Rollouts(rollouts=8)).rules or ()
    for p, factor in ((0.02, hard), (0.9, easy)):
        assert implied_objective(rule, p, stopping.pool_baseline(4)) == pytest.approx(factor, abs=0.005)
        assert implied_objective(rule, p, class_conditional) == pytest.approx(1)


def test_rounds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="keep = 9 must be from 2 to round_size = 8"):
        make_policy("reinforce_ada_pos", {"keep": 9})
    with pytest.raises(ValueError, match="at least one round"):
        make_policy("reinforce_ada_pos", {"max_rounds": 0})
    with pytest.raises(ValueError, match="max_rounds = 4 of round_size = 8 exceed 16 rollouts"):
        make_policy("reinforce_ada_pos", {}).plan_rounds(view(np.ones(3), np.ones(3), most=16), Rollouts(rollouts=8))


# raft_risk


def planned(seen: View, budget: AnyBudget, **options: float) -> Plan:
    return make_policy("raft_risk", options).plan(seen, budget)


def after(rng: np.random.Generator, p: Floats, rollouts: int) -> tuple[Floats, Floats]:
    """Posteriors of these acceptance rates, Beta(.5, .8) before so many rollouts each."""
    s = rng.binomial(rollouts, p).astype(np.float64)
    return 0.5 + s, 0.8 + rollouts - s


def learned(seed: int, count: int = 64) -> View:
    """A view on prompts that have had 16 rollouts each."""
    rng = np.random.default_rng(seed)
    p = rng.beta(0.5, 0.8, count)
    energy, cost = np.exp(1.2 * rng.normal(size=count)), rng.uniform(50, 500, count)
    return view(*after(rng, p, 16), energy=energy, cost=cost)


def risk_of(seen: View, rollouts: Ints) -> float:
    risk = raft_risk(none_accepted(seen.posterior, seen.most), 0.3).total()
    return float((seen.energy_success * risk[np.arange(len(rollouts)), rollouts]).sum())


@given(st.integers(0, 100), st.floats(1, 32))
@settings(max_examples=25)
def test_a_number_of_rollouts_is_spent_exactly(seed: int, mean: float) -> None:
    seen = learned(seed)
    rollouts = planned(seen, Rollouts(rollouts=mean)).rollouts
    assert rollouts.sum() == round(mean * 64)
    assert rollouts.min() >= 1
    assert rollouts.max() <= 32


def test_small_plans_are_the_best_there_are_wherever_no_block_is_cut() -> None:
    p = np.array([0.05, 0.3, 0.8])
    seen = view(p * 1e9, (1 - p) * 1e9, energy=np.array([2.0, 1.0, 1.0]), most=7)
    totals = 0
    for total in range(3, 22):
        plan = planned(seen, Rollouts(rollouts=total / 3), min_resolved=0.0)
        following = planned(seen, Rollouts(rollouts=min(total + 1, 21) / 3), min_resolved=0.0)
        if following.price == plan.price:
            continue
        totals += 1
        best = min(risk_of(seen, np.array(n)) for n in product(range(1, 8), repeat=3) if sum(n) == total)
        assert risk_of(seen, plan.rollouts) == pytest.approx(best, rel=1e-6)
    assert totals > 5


def test_equal_prompts_get_the_same_also_when_they_are_worth_nothing() -> None:
    for energy in (1.0, 0.0):
        seen = view(np.full(5, 0.5), np.full(5, 0.8), energy=np.full(5, energy))
        assert planned(seen, Rollouts(rollouts=8)).rollouts.tolist() == [8] * 5


def test_tokens_are_kept_to_and_a_longer_prompt_gets_fewer_rollouts() -> None:
    seen = view(np.full(2, 3.0), np.full(2, 3.0), cost=np.array([100.0, 300.0]))
    short, long = planned(seen, Tokens(rollouts=8, tokens=1600)).rollouts
    assert 2 * 1600 - 300 < 100 * short + 300 * long <= 2 * 1600
    assert short > long


def test_a_variance_is_reached_with_fewer_tokens_than_uniform_visits_take() -> None:
    seen = learned(1)
    rollouts = planned(seen, Variance(rollouts=8, relative=0.9)).rollouts
    assert risk_of(seen, rollouts) <= 0.9 * risk_of(seen, np.full(64, 8))
    assert seen.cost @ rollouts < 8 * seen.cost.sum()


def test_a_variance_that_hopeless_prompts_put_out_of_reach_ends_a_run_in_no_error() -> None:
    hopeless = view(np.full(2, 0.5), np.full(2, 500.0))
    plan = planned(hopeless, Variance(rollouts=8, relative=0.7))
    assert plan.rollouts.tolist() == [hopeless.most] * 2


def test_at_the_price_of_a_plan_by_tokens_the_plan_is_the_same() -> None:
    seen = learned(2)
    plan = planned(seen, Tokens(rollouts=8, tokens=3000))
    again = planned(seen, Price(rollouts=8, price=plan.price))
    assert again.price == plan.price
    assert np.all(again.rollouts >= plan.rollouts)
    assert (again.rollouts - plan.rollouts).sum() < 32


def test_a_larger_signal_share_sends_more_rollouts_to_hard_prompts() -> None:
    p = np.array([0.03, 0.5])
    seen = view(p * 100, (1 - p) * 100)
    hard = [
        planned(seen, Rollouts(rollouts=16), signal_share=share, min_resolved=0.0).rollouts[0]
        for share in (0.3, 0.6, 0.8)
    ]
    assert hard[0] < hard[1] < hard[2]


def test_planned_numbers_keep_to_the_budget_of_bias() -> None:
    seen = learned(3)
    found = 1 - none_accepted(seen.posterior, 32)
    for share in (0.5, 0.9):
        rollouts = planned(seen, Rollouts(rollouts=8), min_resolved=share).rollouts
        assert np.all(found[np.arange(64), rollouts] >= share * found[:, 8])


@pytest.mark.parametrize(("mean", "price_factor", "gain"), [(8, 1.12, 1.4), (16, 1.0, 1.4)])
def test_stopping_by_the_accepted_rollouts_beats_uniform_visits_at_no_more_rollouts(
    mean: int, price_factor: float, gain: float
) -> None:
    rng = np.random.default_rng(0)
    count = 256
    p, energy = rng.beta(0.5, 0.8, count), np.exp(1.2 * rng.normal(size=count))
    seen = view(*after(rng, p, 2 * mean), energy=energy, most=4 * mean, price_factor=price_factor)
    visit_rules = make_policy("raft_risk", {}).plan_rounds(seen, Rollouts(rollouts=mean)).rules
    assert visit_rules is not None
    rollouts, risk, unresolved = np.array(
        [
            np.sum(
                [
                    paths * q**s * (1 - q) ** f * np.array([s + f, 0.7 / s if s else 0.3, s == 0])
                    for (s, f), paths in rule.ends.items()
                ],
                axis=0,
            )
            for rule, q in zip(visit_rules, p.tolist(), strict=True)
        ]
    ).T
    none = (1 - p)[:, None] ** np.arange(mean + 1)
    assert rollouts.mean() <= mean
    assert (energy * raft_risk(none, 0.3).total()[:, mean]).sum() / (energy * risk).sum() > gain
    assert np.all(1 - unresolved >= 0.7 * (1 - none[:, mean]) - 1e-12)


def test_a_budget_of_bare_minima_leaves_no_price_and_visits_end_as_soon_as_they_may() -> None:
    seen = view(np.full(3, 2.0), np.full(3, 2.0), least=2)
    plan = make_policy("raft_risk", {}).plan_rounds(seen, Rollouts(rollouts=2))
    assert math.isnan(plan.price)
    assert plan.rollouts.tolist() == [1, 1, 1]
    assert plan.rules is not None
    assert all(set(rule.ends) == {(0, 2), (1, 1), (2, 0)} for rule in plan.rules)


def test_what_cannot_be_done_is_refused() -> None:
    seen = view(np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="coefficient raft, not for rloo"):
        make_policy("raft_risk", {}).plan_rounds(view(np.ones(2), np.ones(2), coefficient="rloo"), Rollouts(rollouts=8))
    with pytest.raises(ValueError, match="round_size = 64 must be at most the 32"):
        make_policy("raft_risk", {"round_size": 64}).plan_rounds(seen, Rollouts(rollouts=8))
    for budget in (Rollouts(rollouts=33), Tokens(rollouts=8, tokens=50)):
        with pytest.raises(ValueError, match="out of reach"):
            planned(seen, budget)
    for options in ({"signal_share": 1.0}, {"min_resolved": 1.5}, {"round_size": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} = "):
            make_policy("raft_risk", options)
