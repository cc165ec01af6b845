from __future__ import annotations

from fractions import Fraction
from math import inf

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gvm_stream.allocator.stopping import (
    PosteriorRule,
    Rule,
    StoppingRule,
    class_conditional,
    expected_rollouts,
    implied_objective,
    leave_one_out,
    pool_baseline,
)

BALANCED = Rule(8, 4, 2, 2)
POSITIVE = Rule(8, 4, 1, 0)

count_rules = st.builds(
    Rule,
    st.integers(2, 6),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 4),
)
posterior_rules = st.builds(
    PosteriorRule,
    st.integers(2, 8),
    st.integers(1, 6),
    st.floats(0.1, 20),
    st.floats(0.1, 20),
    st.floats(-5, -1).map(lambda exponent: 10**exponent),
)
rules = count_rules | posterior_rules
probabilities = st.floats(0.01, 0.99)


@pytest.mark.parametrize(
    ("p", "balanced", "positive"),
    [
        (0.02, 7.17, 5.88),
        (0.05, 5.86, 4.27),
        (0.1, 3.95, 2.80),
        (0.2, 2.04, 1.66),
        (0.3, 1.35, 1.23),
        (0.5, 1.00, 0.97),
        (0.7, 1.35, 1.15),
        (0.9, 3.95, 1.58),
        (0.98, 7.17, 1.73),
    ],
)
def test_the_released_reinforce_ada_estimator_reweights_prompts_by_a_known_factor(
    p: float, balanced: float, positive: float
) -> None:
    assert implied_objective(BALANCED, p, pool_baseline(4)) == pytest.approx(balanced, abs=0.005)
    assert implied_objective(POSITIVE, p, pool_baseline(4)) == pytest.approx(positive, abs=0.005)


@given(rules, probabilities)
def test_the_class_conditional_estimator_is_unbiased_under_every_rule(rule: StoppingRule, p: float) -> None:
    assert implied_objective(rule, p, class_conditional) == pytest.approx(1, rel=1e-9)


@given(st.integers(2, 20), probabilities)
def test_leave_one_out_is_unbiased_for_a_fixed_number_of_rollouts(n: int, p: float) -> None:
    assert implied_objective(Rule(n), p) == pytest.approx(1, rel=1e-9)


def test_leave_one_out_is_biased_when_sampling_stops_on_the_counts() -> None:
    assert implied_objective(BALANCED, 0.1, leave_one_out) == pytest.approx(1.286, abs=5e-4)
    assert implied_objective(POSITIVE, 0.02, leave_one_out) == pytest.approx(1.831, abs=5e-4)


@given(rules, probabilities)
@settings(max_examples=50)
def test_the_ends_of_a_rule_are_all_that_can_happen(rule: StoppingRule, p: float) -> None:
    total = sum(paths * p**s * (1 - p) ** f for (s, f), paths in rule.ends.items())
    assert total == pytest.approx(1, rel=1e-9)
    assert all(rule.stops(counts) and paths > 0 for counts, paths in rule.ends.items())


@given(rules, probabilities)
@settings(max_examples=50)
def test_p_hat_and_q_hat_are_unbiased(rule: StoppingRule, p: float) -> None:
    chances = {(s, f): paths * p**s * (1 - p) ** f for (s, f), paths in rule.ends.items()}
    assert sum(rule.p_hat(counts) * chance for counts, chance in chances.items()) == pytest.approx(p, rel=1e-9)
    assert sum(rule.q_hat(counts) * chance for counts, chance in chances.items()) == pytest.approx(
        p * (1 - p), rel=1e-9
    )


def test_with_a_fixed_number_of_rollouts_they_are_the_usual_estimates() -> None:
    rule = Rule(7)
    for s, f in rule.ends:
        assert rule.p_hat((s, f)) == pytest.approx(s / 7)
        assert rule.q_hat((s, f)) == pytest.approx(s * f / (7 * 6))


@pytest.mark.parametrize("k", [2, 3, 4])
def test_stopping_at_the_kth_success_gives_haldanes_inverse_binomial_estimates(k: int) -> None:
    rule = Rule(1, 40, k)
    for s, f in rule.ends:
        if s == k and f > 0:
            n = s + f
            assert rule.p_hat((s, f)) == pytest.approx((k - 1) / (n - 1), rel=1e-14)
            assert rule.q_hat((s, f)) == pytest.approx((k - 1) * (n - k) / ((n - 1) * (n - 2)), rel=1e-14)


@given(st.integers(2, 12), st.integers(0, 3), st.integers(0, 3), probabilities)
def test_rollouts_one_at_a_time_are_unbiased_too(rounds: int, successes: int, failures: int, p: float) -> None:
    assume(successes + failures > 1)
    assert implied_objective(Rule(1, rounds, successes, failures), p, class_conditional) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("rule", [Rule(8, 16, 8, 8), PosteriorRule(8, 16, 0.3, 2.0, 1e-5)])
def test_estimates_are_accurate_for_a_hundred_rollouts_and_more(rule: StoppingRule) -> None:
    p = Fraction(1, 7)
    chances = {(s, f): paths * p**s * (1 - p) ** f for (s, f), paths in rule.ends.items()}
    assert sum(chances.values()) == 1
    for estimate, expected in ((rule.p_hat, p), (rule.q_hat, p * (1 - p))):
        mean = sum(Fraction(estimate(counts)) * chance for counts, chance in chances.items())
        assert abs(mean / expected - 1) < 1e-16


@given(posterior_rules, st.integers(1, 20), st.integers(1, 20))
def test_a_posterior_rule_stops_when_a_rollout_of_another_round_lowers_the_variance_too_little(
    rule: PosteriorRule, s: int, f: int
) -> None:
    n, draws = s + f, rule.a + rule.b + s + f
    p = (rule.a + s) / draws
    q = p * (1 - p) * draws / (draws + 1)
    gain = (q / (n - 1) - q / (n + rule.round_size - 1)) / rule.round_size
    assume(gain != pytest.approx(rule.threshold))
    assert rule.enough((s, f)) == (gain < rule.threshold)


def test_a_posterior_rule_spends_more_where_the_outcome_is_less_certain() -> None:
    rule = PosteriorRule(4, 8, 1.0, 1.0, 3e-4)
    costs = [expected_rollouts(rule, p) for p in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)]
    assert costs[:4] == sorted(costs[:4])
    assert costs == pytest.approx(costs[::-1])
    assert costs[0] < 0.7 * costs[3]


def test_a_single_rollout_never_ends_a_visit_by_the_posterior() -> None:
    assert PosteriorRule(1, 8, 1.0, 1.0, 1.0).ends == {(2, 0): 1, (1, 1): 2, (0, 2): 1}


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(1e-11, 1))
def test_near_gives_one_shared_rule_within_5_percent(a: float, b: float, threshold: float) -> None:
    rule = PosteriorRule.near(8, 4, a, b, threshold)
    assert rule is PosteriorRule.near(8, 4, rule.a, rule.b, rule.threshold)
    assert (rule.a, rule.b, rule.threshold) == pytest.approx((a, b, threshold), rel=0.05)


def test_near_takes_a_price_of_nothing_and_any_other() -> None:
    assert PosteriorRule.near(8, 4, 1.0, 1.0, 0.0).ends == Rule(32).ends
    assert PosteriorRule.near(8, 4, 1.0, 1.0, inf).ends == Rule(8).ends


@given(rules)
def test_rules_are_plain_data(rule: StoppingRule) -> None:
    assert msgspec.convert(msgspec.to_builtins(rule), Rule | PosteriorRule) == rule
    assert msgspec.json.decode(msgspec.json.encode(rule), type=Rule | PosteriorRule) == rule


def test_the_cost_of_a_rule() -> None:
    assert expected_rollouts(BALANCED, 0.1) == pytest.approx(21.0, abs=0.05)
    p = 0.05
    assert expected_rollouts(POSITIVE, p) == pytest.approx(8 * (1 - (1 - p) ** 32) / (1 - (1 - p) ** 8))


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        Rule(0)
    with pytest.raises(ValueError, match="negative number"):
        Rule(8, 4, 2, -1)
    with pytest.raises(ValueError, match="above 0"):
        PosteriorRule(8, 4, 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="above 0"):
        PosteriorRule(8, 4, inf, 1.0, 0.1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        implied_objective(BALANCED, 1.0)
    with pytest.raises(ValueError, match="at least 2 rollouts"):
        Rule(1, 9, 1).q_hat((1, 0))
    with pytest.raises(KeyError):
        BALANCED.p_hat((1, 2))
