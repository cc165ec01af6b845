from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator.stopping import (
    Rule,
    class_conditional,
    expected_rollouts,
    implied_objective,
    leave_one_out,
    pool_baseline,
)

BALANCED = Rule(8, 4, 2, 2)
POSITIVE = Rule(8, 4, 1, 0)

rules = st.builds(
    Rule,
    st.integers(2, 6),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 4),
)
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
def test_the_class_conditional_estimator_is_unbiased_under_every_rule(rule: Rule, p: float) -> None:
    assert implied_objective(rule, p, class_conditional) == pytest.approx(1, rel=1e-9)


@given(st.integers(2, 20), probabilities)
def test_leave_one_out_is_unbiased_for_a_fixed_number_of_rollouts(n: int, p: float) -> None:
    assert implied_objective(Rule(n), p) == pytest.approx(1, rel=1e-9)


def test_leave_one_out_is_biased_when_sampling_stops_on_the_counts() -> None:
    assert implied_objective(BALANCED, 0.1, leave_one_out) == pytest.approx(1.286, abs=5e-4)
    assert implied_objective(POSITIVE, 0.02, leave_one_out) == pytest.approx(1.831, abs=5e-4)


@given(rules, probabilities)
@settings(max_examples=50)
def test_the_ends_of_a_rule_are_all_that_can_happen(rule: Rule, p: float) -> None:
    total = sum(paths * p**s * (1 - p) ** f for (s, f), paths in rule.ends.items())
    assert total == pytest.approx(1, rel=1e-9)
    assert all(rule.stops(counts) and paths > 0 for counts, paths in rule.ends.items())


@given(rules, probabilities)
@settings(max_examples=50)
def test_p_hat_and_q_hat_are_unbiased(rule: Rule, p: float) -> None:
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


def test_stopping_at_the_third_success_gives_haldanes_inverse_binomial_estimate() -> None:
    rule = Rule(1, 40, 3)
    for s, f in rule.ends:
        if s == 3:
            assert rule.p_hat((s, f)) == pytest.approx(2 / (s + f - 1))


def test_the_cost_of_a_rule() -> None:
    assert expected_rollouts(BALANCED, 0.1) == pytest.approx(21.0, abs=0.05)
    p = 0.05
    assert expected_rollouts(POSITIVE, p) == pytest.approx(8 * (1 - (1 - p) ** 32) / (1 - (1 - p) ** 8))


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        Rule(0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        implied_objective(BALANCED, 1.0)
    with pytest.raises(ValueError, match="at least 2 rollouts"):
        Rule(1, 9, 1).q_hat((1, 0))
    with pytest.raises(KeyError):
        BALANCED.p_hat((1, 2))
