from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.budget import AnyBudget, Price, Rollouts, Tokens, Variance
from gvm_stream.allocator.policies import POLICIES, Coefficient, Outcomes, Plan, Policy, View, make_policy, register
from gvm_stream.allocator.policies.selection import Vade
from gvm_stream.allocator.posterior import Posterior
from gvm_stream.allocator.stopping import StoppingRule, expected_rollouts

PLANNED = ("uniform", "gvm", "neyman", "rollout_gdro", "knapsack", "dapo", "vade", "reinforce_ada_est")
Beta = tuple[float, float]


def view(
    betas: list[Beta],
    *,
    success: list[float] | None = None,
    failure: list[float] | None = None,
    cost: list[float] | None = None,
    weight: list[float] | None = None,
    coefficient: Coefficient = "rloo",
    least: int = 2,
    most: int = 32,
    price_factor: float = 1.0,
    seed: int = 0,
) -> View:
    """Of prompts with these posteriors, alike in what is not given. Positions start at 100."""
    count = len(betas)
    a, b = np.array(betas).T

    def ones(given: list[float] | None) -> Floats:
        return np.ones(count) if given is None else np.array(given)

    return View(
        prompts=np.arange(100, 100 + count),
        posterior=Posterior.of(a, b),
        energy_success=ones(success),
        energy_failure=ones(failure),
        cost=ones(cost),
        weight=ones(weight),
        visits=np.ones(count, np.int64),
        version=0,
        coefficient=coefficient,
        least=least,
        most=most,
        price_factor=price_factor,
        rng=np.random.default_rng(seed),
    )


def rollouts(policy: str, seen: View, budget: AnyBudget) -> list[int]:
    made = make_policy(policy, {})
    plan = made.plan if "planned" in made.designs else made.plan_rounds
    return [int(n) for n in plan(seen, budget).rollouts]


def outcomes(*rewards: float) -> Outcomes:
    return Outcomes(np.array(rewards, np.float64), np.ones(len(rewards), np.int64), None)


@st.composite
def views(draw: st.DrawFn, *, coefficient: Coefficient = "rloo") -> View:
    betas = draw(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.1, 50)), min_size=1, max_size=12))
    count = len(betas)

    def positive(low: float, high: float) -> list[float]:
        return draw(st.lists(st.floats(low, high), min_size=count, max_size=count))

    return view(
        betas,
        success=positive(0.01, 100),
        failure=positive(0.01, 100),
        cost=positive(1, 1000),
        weight=draw(st.lists(st.just(0.0) | st.floats(0.01, 10), min_size=count, max_size=count)),
        coefficient=coefficient,
    )


@pytest.mark.parametrize("policy", PLANNED)
@given(seen=views() | views(coefficient="raft"), mean=st.floats(2, 32))
@settings(max_examples=30)
def test_a_plan_has_exactly_the_rollouts_of_its_budget_within_the_bounds(policy: str, seen: View, mean: float) -> None:
    planned = rollouts(policy, seen, Rollouts(rollouts=mean))
    assert sum(planned) == round(mean * len(planned))
    assert min(planned) >= seen.least
    assert max(planned) <= seen.most
    assert planned == rollouts(policy, seen, Rollouts(rollouts=mean))


@pytest.mark.parametrize("policy", PLANNED)
def test_prompts_that_are_alike_get_the_same(policy: str) -> None:
    alike = view([(1.5, 3.0)] * 5)
    assert rollouts(policy, alike, Rollouts(rollouts=8)) == [8] * 5
    assert sorted(rollouts(policy, alike, Rollouts(rollouts=8.4))) == [8, 8, 8, 9, 9]


@pytest.mark.parametrize("policy", PLANNED)
def test_a_budget_out_of_bounds_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match=r"\b66\b"):
        rollouts(policy, view([(1.0, 1.0)] * 2), Rollouts(rollouts=33))


UNLIKE: list[Beta] = [(1.0, 1.0), (2.0, 30.0), (9.0, 1.0)]


def test_uniform_is_uniform_whatever_the_budget() -> None:
    seen = view(UNLIKE, cost=[100.0, 300.0, 200.0], success=[1.0, 5.0, 9.0])

    def uniform(budget: AnyBudget) -> list[int]:
        return rollouts("uniform", seen, budget)

    assert uniform(Tokens(rollouts=8, tokens=2099)) == [10, 10, 10]
    assert uniform(Tokens(rollouts=8, tokens=10**6)) == [32, 32, 32]
    assert uniform(Variance(rollouts=9, relative=1)) == [9, 9, 9]
    assert uniform(Variance(rollouts=9, relative=0.5)) == [17, 17, 17]
    assert uniform(Variance(rollouts=9, relative=0.51)) == [17, 17, 17]
    assert uniform(Variance(rollouts=9, relative=100)) == [2, 2, 2]
    total = seen.variance().sum()
    assert uniform(Price(rollouts=8, price=total / (4 * 5) / 600)) == [6, 6, 6]
    assert uniform(Price(rollouts=8, price=total / (4 * 5) / 600 * 1.001)) == [5, 5, 5]
    assert uniform(Price(rollouts=8, price=10**6)) == [2, 2, 2]
    assert uniform(Price(rollouts=8, price=1e-9)) == [32, 32, 32]


def test_uniform_refuses_a_budget_that_no_number_meets() -> None:
    with pytest.raises(ValueError, match="1 rollouts for every prompt, not within 2 to 32"):
        rollouts("uniform", view(UNLIKE), Tokens(rollouts=8, tokens=1.5))
    with pytest.raises(ValueError, match="71 rollouts for every prompt, not within 2 to 32"):
        rollouts("uniform", view(UNLIKE), Variance(rollouts=8, relative=0.1))


def test_neyman_prefers_prompts_that_are_neither_solved_nor_hopeless() -> None:
    seen = view([(0.5, 16.5), (2.5, 14.5), (8.5, 8.5), (14.5, 2.5), (16.5, 0.5)])
    hopeless, hard, even, easy, solved = rollouts("neyman", seen, Rollouts(rollouts=8))
    assert even > hard == easy > hopeless == solved >= 2


@pytest.mark.parametrize("policy", ["neyman", "gvm"])
def test_with_less_damping_hopeless_prompts_get_more_rollouts(policy: str) -> None:
    seen = view([(0.5, 200.0), (20.0, 20.0)], coefficient="raft")
    hopeless = [
        make_policy(policy, {"alpha": alpha}).plan(seen, Rollouts(rollouts=8)).rollouts[0] for alpha in (1e-3, 1e-6)
    ]
    assert hopeless[1] > hopeless[0]


def test_neyman_spends_more_on_what_is_uncertain_than_on_what_is_known() -> None:
    doubtful, known = rollouts("neyman", view([(0.5, 2.5), (0.5, 60.5)]), Rollouts(rollouts=8))
    assert doubtful > known


@pytest.mark.parametrize("policy", ["neyman", "gvm"])
def test_rollouts_go_with_the_root_of_energy_and_with_weight(policy: str) -> None:
    betas: list[Beta] = [(3.0, 3.0)] * 2
    by_energy = view(betas, success=[1.0, 9.0], failure=[1.0, 9.0], most=100)
    by_weight = view(betas, weight=[1.0, 3.0], most=100)
    expected = [11, 31] if policy == "neyman" else [10, 30]  # leave-one-out loses a rollout
    assert rollouts(policy, by_energy, Rollouts(rollouts=sum(expected) / 2)) == expected
    assert rollouts(policy, by_weight, Rollouts(rollouts=sum(expected) / 2)) == expected


@pytest.mark.parametrize("policy", ["neyman", "gvm"])
def test_costs_count_where_tokens_are_limited(policy: str) -> None:
    seen = view([(3.0, 3.0)] * 2, cost=[100.0, 400.0], most=100)
    cheap, dear = rollouts(policy, seen, Tokens(rollouts=8, tokens=4000))
    assert 100 * cheap + 400 * dear <= 2 * 4000
    assert cheap == pytest.approx(2 * dear, abs=2)
    assert rollouts(policy, seen, Rollouts(rollouts=8)) == [8, 8]


def expected_of(plan: Plan, p: Floats) -> Floats:
    assert plan.rules is not None
    return np.array([expected_rollouts(rule, rate) for rule, rate in zip(plan.rules, p.tolist(), strict=True)])


def test_sequential_visits_go_on_where_rewards_vary_until_the_price_stops_them() -> None:
    seen = view([(1.0, 1.0)] * 3)
    plan = make_policy("neyman", {"round_size": 4}).plan_rounds(seen, Rollouts(rollouts=16))
    assert plan.rollouts.tolist() == [4, 4, 4]
    assert plan.rules is not None
    assert {(rule.round_size, rule.max_rounds) for rule in plan.rules} == {(4, 8)}
    sure, even, unsure = expected_of(plan, np.array([0.01, 0.5, 0.8]))
    assert 4 <= sure < unsure < even < 32


def test_sequential_visits_meet_the_budget_about_and_the_price_factor_corrects_it() -> None:
    rates = np.random.default_rng(0).beta(0.5, 0.8, 40)
    prior = [(0.5, 0.8)] * 40

    def mean(price_factor: float) -> float:
        plan = make_policy("neyman", {}).plan_rounds(view(prior, price_factor=price_factor), Rollouts(rollouts=8))
        return float(expected_of(plan, rates).mean())

    assert mean(1.0) == pytest.approx(8, rel=0.3)
    assert mean(4.0) < mean(1.0) < mean(0.25)


def variance_of(rule: StoppingRule, p: float) -> float:
    """Of the class-conditional estimate with scores of norm 1, exactly; one with a class empty is 0."""
    ends = {(s, f): paths * p**s * (1 - p) ** f for (s, f), paths in rule.ends.items() if min(s, f) > 0}
    return sum(chance * rule.q_hat((s, f)) ** 2 * (1 / s + 1 / f) for (s, f), chance in ends.items())


def test_of_prompts_never_seen_only_the_sequential_design_learns_where_rollouts_pay() -> None:
    p = np.clip(np.random.default_rng(0).beta(0.2, 0.2, 40), 1e-4, 1 - 1e-4)
    plan = make_policy("neyman", {}).plan_rounds(view([(0.2, 0.2)] * 40), Rollouts(rollouts=16))
    assert plan.rules is not None
    sequential = sum(variance_of(rule, rate) for rule, rate in zip(plan.rules, p.tolist(), strict=True))
    planned = float(np.sum(p * (1 - p))) / (16 - 1)  # alike, so 16 each
    cost = expected_of(plan, p).mean() / 16
    assert sequential * cost < 0.8 * planned


def test_a_prompt_of_no_variance_and_a_budget_of_bare_minima_get_one_round() -> None:
    neyman = make_policy("neyman", {})
    worthless = neyman.plan_rounds(view([(1.0, 1.0)] * 2, weight=[0.0, 1.0]), Rollouts(rollouts=8))
    assert expected_of(worthless, np.full(2, 0.5)).tolist() == [4, pytest.approx(32, abs=20)]
    assert expected_of(worthless, np.full(2, 0.5))[1] > 4
    minima = neyman.plan_rounds(view([(1.0, 1.0)] * 2), Rollouts(rollouts=2))
    assert expected_of(minima, np.full(2, 0.5)).tolist() == [4, 4]


def test_sequential_visits_mind_costs_only_where_tokens_are_limited_and_take_a_given_price_as_it_is() -> None:
    seen = view([(1.0, 1.0)] * 2, cost=[1.0, 9.0])
    even = np.full(2, 0.5)

    def expected(budget: AnyBudget) -> list[float]:
        return [float(n) for n in expected_of(make_policy("neyman", {}).plan_rounds(seen, budget), even)]

    cheap, dear = expected(Rollouts(rollouts=16))
    assert cheap == dear
    cheap, dear = expected(Tokens(rollouts=16, tokens=5 * 16))
    assert cheap > dear
    assert make_policy("neyman", {}).plan_rounds(seen, Price(rollouts=16, price=0.001)).price == 0.001


def test_neyman_stops_only_what_it_has_a_rule_for() -> None:
    with pytest.raises(ValueError, match="with raft use the policy raft_risk"):
        make_policy("neyman", {}).plan_rounds(view(UNLIKE, coefficient="raft"), Rollouts(rollouts=8))
    with pytest.raises(ValueError, match="round_size = 4 must be from 6 to 32"):
        make_policy("neyman", {}).plan_rounds(view(UNLIKE, least=6), Rollouts(rollouts=8))


def test_gvm_is_the_closed_form_on_posterior_means() -> None:
    p = np.array([0.02, 0.1, 0.5, 0.9])
    energy = np.array([4.0, 1.0, 2.0, 1.0])
    seen = view([(100 * x, 100 * (1 - x)) for x in p.tolist()], success=energy.tolist(), coefficient="raft", most=10**6)
    share = np.sqrt(energy / (p + 1e-3 / p))
    planned = rollouts("gvm", seen, Rollouts(rollouts=10**5))
    assert planned == pytest.approx(4 * 10**5 * share / share.sum(), abs=1)


def test_gvm_gives_most_to_hard_prompts_and_gives_up_on_hopeless_ones() -> None:
    p = [0.001, 0.01, 0.0316, 0.1, 0.9]
    seen = view([(1000 * x, 1000 * (1 - x)) for x in p], coefficient="raft", most=1000)
    planned = rollouts("gvm", seen, Rollouts(rollouts=100))
    assert max(planned) == planned[2]
    assert planned[0] < planned[1] < planned[2] > planned[3] > planned[4]


def test_rollout_gdro_has_one_number_for_a_bin_by_the_square_root_rule() -> None:
    seen = view([(1.0, 9.0), (2.0, 8.0), (5.0, 5.0), (6.0, 4.0), (9.0, 1.0)], most=200)
    hard, hard_too, middle, middle_too, easy = rollouts("rollout_gdro", seen, Rollouts(rollouts=100))
    assert abs(hard - hard_too) <= 1
    assert abs(middle - middle_too) <= 1
    variance = seen.variance()
    ratio = math.sqrt(variance[2:4].mean() / variance[4])
    assert middle / easy == pytest.approx(ratio, rel=0.02)


def test_rollout_gdro_gives_no_prompt_more_than_three_times_the_mean() -> None:
    seen = view([(5.0, 5.0)] + [(0.01, 999.0)] * 9)
    planned = rollouts("rollout_gdro", seen, Rollouts(rollouts=4))
    assert planned[0] == 12
    assert sum(planned) == 40


def test_the_knapsack_leaves_hopeless_prompts_what_the_others_cannot_use() -> None:
    seen = view([(0.01, 99.0), (1.5, 8.5), (99.0, 0.01)])
    hopeless, hard, solved = rollouts("knapsack", seen, Rollouts(rollouts=8))
    assert (hopeless, hard, solved) == (2, 20, 2)
    hopeless, hard, solved = rollouts("knapsack", seen, Rollouts(rollouts=20))
    assert (hard, solved) == (32, 2)
    assert hopeless == 26


def test_dapo_refills_groups_without_a_gradient_a_limited_number_of_times() -> None:
    dapo = make_policy("dapo", {"max_tries": 3})
    assert dapo.refill(outcomes(1, 1, 1), 1)
    assert dapo.refill(outcomes(0, 0), 2)
    assert not dapo.refill(outcomes(0, 0), 3)
    assert not dapo.refill(outcomes(0, 1, 0), 1)
    assert not make_policy("uniform", {}).refill(outcomes(0, 0), 1)


def test_vade_visits_what_tells_most_and_explores_what_is_unknown() -> None:
    vade = Vade()
    betas: list[Beta] = [(1e4, 2e4)] + [(1.0, 1.0)] * 8 + [(9e3, 1e3), (1.0, 1e4)]

    def pick(seed: int) -> list[int]:
        return [int(prompt) for prompt in vade.select(view(betas, seed=seed), 4)]

    picks = [pick(seed) for seed in range(50)]
    assert all(picked[0] == 100 and len(set(picked)) == 4 for picked in picks)  # p = 1/3, known, tells most of all
    assert {prompt for picked in picks for prompt in picked} == set(range(100, 109))
    assert pick(0) == picks[0]


def test_a_policy_of_ones_own_takes_a_few_lines() -> None:
    try:

        @register("hardest_first")
        class HardestFirst(Policy, frozen=True, kw_only=True):
            exponent: float = 1.0

            def values(self, seen: View) -> Floats:
                return (1 - seen.posterior.mean()) ** self.exponent

        policy = make_policy("hardest_first", {"exponent": 2})
        hard, easy = policy.plan(view([(1.0, 9.0), (9.0, 1.0)]), Rollouts(rollouts=8)).rollouts
        assert hard > easy
        with pytest.raises(ValueError, match="there is a policy 'hardest_first' already"):
            register("hardest_first")(HardestFirst)
    finally:
        del POLICIES["hardest_first"]


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("best", {}, "policy 'best' is unknown; there are .*dapo, gvm, gvm_two_stage.* uniform"),
        ("uniform", {"size": 8}, "options of policy 'uniform': .*unknown field `size`"),
        ("gvm", {"alpha": "much"}, "options of policy 'gvm': Expected `float`, got `str`"),
        ("gvm", {"alpha": 0}, "alpha = 0.0 must be finite and above 0"),
        ("gvm_two_stage", {"beta": 1}, "beta = 1.0 finite and above 1"),
        ("gvm_two_stage", {"pilot": 0}, "pilot = 0 must be at least 1"),
        ("neyman", {"round_size": 1}, "round_size = 1 must be at least 2"),
        ("rollout_gdro", {"edges": [0.5, 0.5]}, r"edges = \(0.5, 0.5\) must rise between 0 and 1"),
        ("rollout_gdro", {"most_times": 0.5}, "most_times = 0.5 must be at least 1"),
        ("reinforce_ada_est", {"eps": math.inf}, "eps = inf must be a finite number above 0"),
        ("dapo", {"max_tries": 0}, "max_tries = 0 must be at least 1"),
    ],
)
def test_bad_options_are_refused_by_name(policy: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(policy, options)
