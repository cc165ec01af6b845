from __future__ import annotations

import math
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.posterior import Posterior
from gvm_stream.allocator.risk import RiskRule, decreases, none_accepted, raft_risk, rollouts_to_resolve
from gvm_stream.allocator.stopping import Rule, StoppingRule

probabilities = st.floats(0.001, 0.999)
shares = st.floats(0.01, 0.99)
shapes = st.floats(0.1, 50)


def known(p: Floats, most: int) -> Floats:
    """`none_accepted` at known acceptance rates."""
    return np.asarray((1 - p)[:, None] ** np.arange(most + 1))


def beta_log(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def risk_after(k: int, signal_share: float) -> float:
    return (1 - signal_share) / k if k else signal_share


# The risk of n rollouts


@given(probabilities, shares, st.integers(0, 40))
def test_the_risk_is_that_of_the_binomial_number_of_accepted_rollouts(p: float, share: float, n: int) -> None:
    chances = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    risk = raft_risk(known(np.array([p]), 40), share)
    assert risk.variance[0, n] == pytest.approx(sum(chances[k] * (1 - share) / k for k in range(1, n + 1)), abs=1e-13)
    assert risk.bias[0, n] == pytest.approx(chances[0] * share)


@given(shapes, shapes, st.integers(0, 40))
def test_under_a_posterior_it_is_that_of_the_beta_binomial_number(a: float, b: float, n: int) -> None:
    def chance(k: int) -> float:
        return math.comb(n, k) * math.exp(beta_log(a + k, b + n - k) - beta_log(a, b))

    risk = raft_risk(none_accepted(Posterior.of(np.array([a]), np.array([b])), 40), 0.3).total()
    assert risk[0, n] == pytest.approx(sum(chance(k) * risk_after(k, 0.3) for k in range(n + 1)), rel=1e-9)


def test_the_risk_is_the_squared_error_of_the_mean_over_accepted_rollouts() -> None:
    rng = np.random.default_rng(0)
    p, n, visits = 0.2, 6, 40_000
    mean = np.array([0.6, 0.0, 0.8])
    scores = mean + rng.normal(size=(visits, n, 3)) * np.sqrt([1.0, 2.0, 0.5])
    accepted = rng.random((visits, n)) < p
    k = accepted.sum(axis=1)
    estimates = (accepted[:, :, None] * scores).sum(axis=1) / np.maximum(k, 1)[:, None]
    errors = ((estimates - mean) ** 2).sum(axis=1)
    energy = 3.5 + 1.0
    expected = energy * raft_risk(known(np.array([p]), n), 1 / energy).total()[0, n]
    assert errors.mean() == pytest.approx(expected, abs=5 * errors.std() / math.sqrt(visits))


def test_many_accepted_rollouts_leave_the_risk_that_gvm_allocates_by() -> None:
    p, n = np.array([0.5, 0.9]), 400
    np.testing.assert_allclose(raft_risk(known(p, n), 1e-9).total()[:, n] * n * p, 1, rtol=0.01)


def test_the_first_accepted_rollout_of_a_hard_prompt_adds_more_noise_than_it_removes_bias() -> None:
    risk = raft_risk(known(np.array([0.02]), 4), 0.1).total()[0]
    assert np.all(np.diff(risk) > 0)


# What further rollouts take off it


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.data())
def test_decreases_are_the_slopes_of_the_lower_convex_envelope(risk: list[float], data: st.DataObject) -> None:
    most = len(risk) - 1
    floor = data.draw(st.integers(0, most))
    slopes = decreases(np.array([risk]), np.array([floor]))[0]
    assert np.all(np.isinf(slopes[:floor]))
    envelope = [
        min(
            risk[i] + (risk[j] - risk[i]) * (n - i) / max(j - i, 1)
            for i, j in product(range(floor, n + 1), range(n, most + 1))
        )
        for n in range(floor, most + 1)
    ]
    np.testing.assert_allclose(slopes[floor:], -np.diff(envelope), atol=1e-12)


@given(shapes, shapes, st.integers(1, 30), st.floats(0, 1))
def test_the_floor_is_the_fewest_rollouts_that_resolve_a_prompt_often_enough(
    a: float, b: float, rollouts: int, share: float
) -> None:
    none = none_accepted(Posterior.of(np.array([a]), np.array([b])), 30)
    (n,) = rollouts_to_resolve(none, rollouts, share)
    needed = share * (1 - none[0, rollouts])
    assert n <= rollouts
    assert 1 - none[0, n] >= needed
    assert n == 0 or 1 - none[0, n - 1] < needed


# The rule


def risk_rule(
    a: float = 0.5,
    b: float = 0.8,
    threshold: float = 0.01,
    signal_share: float = 0.3,
    *,
    round_size: int = 1,
    max_rounds: int = 16,
    least: int = 1,
    patience: int = 1,
) -> RiskRule:
    return RiskRule(
        round_size,
        max_rounds,
        a=a,
        b=b,
        threshold=threshold,
        signal_share=signal_share,
        least=least,
        patience=patience,
    )


rules = st.builds(
    risk_rule,
    shapes,
    shapes,
    st.floats(1e-4, 0.2),
    shares,
    round_size=st.integers(1, 3),
    max_rounds=st.integers(1, 6),
    patience=st.integers(1, 18),
)


@given(st.floats(0.05, 0.95), st.floats(1e-3, 0.1), shares)
def test_at_a_known_rate_it_stops_once_an_accepted_rollout_more_is_not_worth_the_wait(
    p: float, threshold: float, share: float
) -> None:
    rule = risk_rule(p * 1e9, (1 - p) * 1e9, threshold, share)
    for k in range(1, 16):
        gain = p * (1 - share) / (k * (k + 1))
        assume(abs(gain / threshold - 1) > 1e-4)
        assert all(rule.stops((k, n - k)) == (gain < threshold) for n in range(k, 16))


def cost_under(rule: StoppingRule, a: float, b: float, threshold: float, share: float) -> float:
    """Expected risk + threshold x rollouts of a Beta(a, b) prompt."""
    return sum(
        paths * math.exp(beta_log(a + s, b + f) - beta_log(a, b)) * (risk_after(s, share) + threshold * (s + f))
        for (s, f), paths in rule.ends.items()
    )


@given(st.floats(0.1, 5), st.floats(0.1, 5), st.floats(1e-3, 0.1), shares)
@settings(max_examples=25)
def test_no_other_rule_has_less_risk_for_its_price(a: float, b: float, threshold: float, share: float) -> None:
    best = cost_under(risk_rule(a, b, threshold, share, max_rounds=10), a, b, threshold, share)
    others = [Rule(1, n) for n in range(1, 11)] + [Rule(1, n, k) for n in range(2, 11) for k in range(1, 5)]
    assert all(best <= cost_under(rule, a, b, threshold, share) + 1e-12 for rule in others)


def test_with_nothing_accepted_it_goes_on_where_one_rollout_does_not_pay_but_several_do() -> None:
    p, threshold, share = 0.3, 0.01, 0.45
    one_more = (1 - p) * share + p * (1 - share)
    assert one_more > share
    assert not risk_rule(p * 1e9, (1 - p) * 1e9, threshold, share).stops((0, 1))


def resolved(rule: StoppingRule, p: float) -> float:
    return 1 - sum(paths * (1 - p) ** f for (s, f), paths in rule.ends.items() if s == 0)


@given(rules, probabilities, st.integers(1, 18))
@settings(max_examples=50)
def test_patience_bounds_the_bias_at_every_rate(rule: RiskRule, p: float, rollouts: int) -> None:
    patience = min(rule.patience, rule.round_size * rule.max_rounds)
    assume(patience <= rollouts)
    assert resolved(rule, p) >= patience / rollouts * (1 - (1 - p) ** rollouts) - 1e-12


@given(rules)
def test_rules_are_plain_data(rule: RiskRule) -> None:
    assert msgspec.convert(msgspec.to_builtins(rule), RiskRule) == rule


@given(rules)
def test_a_rule_near_another_differs_by_at_most_five_percent(rule: RiskRule) -> None:
    near = rule.near()
    for name in ("a", "b", "threshold"):
        assert getattr(near, name) == pytest.approx(getattr(rule, name), rel=0.051)
    assert near.near() == near


def test_no_visit_ends_before_its_least_number_of_rollouts() -> None:
    assert min(s + f for s, f in risk_rule(threshold=0.9, least=3).ends) == 3


@pytest.mark.parametrize(("a", "threshold", "share"), [(0.0, 0.1, 0.3), (1.0, math.inf, 0.3), (1.0, 0.1, 1.0)])
def test_bad_numbers_are_refused(a: float, threshold: float, share: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        risk_rule(a, 1.0, threshold, share)
