from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator.estimates import Estimates


def estimates(prompts: int = 2, prior: tuple[float, float] = (0.5, 0.5), memory: float = 10.0) -> Estimates:
    made = Estimates(prior, memory)
    made.grow(prompts)
    return made


def only(values: np.ndarray) -> float:
    (value,) = values.tolist()
    return float(value)


FIRST = np.array([0])


def test_an_unseen_prompt_has_the_prior() -> None:
    e = estimates(prior=(2.0, 3.0))
    a, b = e.posterior(np.array([0, 1]), 7)
    assert (a.tolist(), b.tolist()) == ([2.0, 2.0], [3.0, 3.0])
    assert only(e.reward_variance(FIRST, 7)) == pytest.approx(2 * 3 / (5 * 6))


def test_rewards_of_at_least_one_half_are_successes() -> None:
    e = estimates()
    e.observe(0, np.array([1.0, 0.5, 0.49, 0.0, -1.0]), 100, 0)
    assert [only(counts) for counts in e.posterior(FIRST, 0)] == [2.5, 3.5]
    assert [only(counts) for counts in e.posterior(np.array([1]), 0)] == [0.5, 0.5]


def test_counts_age_by_policy_versions() -> None:
    e = estimates(memory=10.0)
    e.observe(0, np.array([1.0, 1.0, 0.0]), 30, 3)
    a, b = e.posterior(FIRST, 8)
    keep = math.exp(-5 / 10)
    assert (only(a), only(b)) == pytest.approx((0.5 + 2 * keep, 0.5 + keep))
    e.observe(0, np.array([0.0, 1.0]), 10, 8)
    a, b = e.posterior(FIRST, 28)
    later = math.exp(-20 / 10)
    assert (only(a), only(b)) == pytest.approx((0.5 + later * (2 * keep + 1), 0.5 + later * (keep + 1)))
    assert e.visits.tolist() == [2, 0]


def test_a_late_visit_by_an_older_policy_ages_nothing() -> None:
    e = estimates()
    e.observe(0, np.array([1.0]), 1, 9)
    e.observe(0, np.array([0.0]), 1, 4)
    assert [only(counts) for counts in e.posterior(FIRST, 9)] == [1.5, 1.5]
    assert e.version.tolist() == [9, -1]


def test_variance_is_the_posterior_mean_of_p_times_1_minus_p() -> None:
    e = estimates(prior=(1.0, 1.0))
    e.observe(0, np.array([1.0, 0.0, 0.0]), 3, 0)  # Beta(2, 3)
    grid = (np.arange(200_000) + 0.5) / 200_000
    density = 12 * grid * (1 - grid) ** 2
    assert only(e.reward_variance(FIRST, 0)) == pytest.approx(float(np.mean(density * grid * (1 - grid))), rel=1e-6)
    assert only(e.reward_variance(FIRST, 0)) == pytest.approx(2 * 3 / (5 * 6))


@given(st.integers(1, 500), st.sampled_from([0.0, 1.0]), st.floats(0.1, 5))
def test_one_sided_counts_never_end_a_prompt(n: int, reward: float, prior: float) -> None:
    e = estimates(1, (prior, prior))
    e.observe(0, np.full(n, reward), n, 0)
    variance = only(e.reward_variance(FIRST, 0))
    assert variance == pytest.approx(prior * (n + prior) / ((n + 2 * prior) * (n + 2 * prior + 1)))
    assert 0 < variance < 0.25


def test_what_was_learned_long_ago_drifts_back_to_the_prior() -> None:
    e = estimates(1, memory=10.0)
    prior = only(e.reward_variance(FIRST, 0))
    e.observe(0, np.zeros(8), 8, 0)
    acceptances = []
    for version in range(0, 200, 10):
        a, b = e.posterior(FIRST, version)
        acceptances.append(only(a / (a + b)))
    assert acceptances == sorted(acceptances)
    assert (acceptances[0], acceptances[-1]) == pytest.approx((0.5 / 9, 0.5), rel=1e-6)
    assert only(e.reward_variance(FIRST, 0)) < 0.5 * prior
    assert only(e.reward_variance(FIRST, 190)) == pytest.approx(prior, rel=1e-6)


def test_mean_tokens_is_per_rollout_and_defaults_to_the_mean_over_seen_ones() -> None:
    e = estimates(3)
    everyone = np.array([0, 1, 2])
    assert e.mean_tokens(everyone).tolist() == [1.0, 1.0, 1.0]
    e.observe(0, np.array([1.0, 0.0]), 60, 0)
    e.observe(1, np.array([1.0, 0.0, 0.0, 0.0]), 600, 0)
    assert e.mean_tokens(everyone).tolist() == [30.0, 150.0, 110.0]
    e.observe(0, np.array([1.0]), 100, 10)  # one memory later, the first visit counts for 1/e
    keep = math.exp(-1)
    assert only(e.mean_tokens(FIRST)) == pytest.approx((60 * keep + 100) / (2 * keep + 1))


def test_new_prompts_leave_the_old_ones_as_they_were() -> None:
    e = estimates(1)
    e.observe(0, np.array([1.0]), 5, 2)
    e.grow(2)
    a, b = e.posterior(np.array([0, 1, 2]), 2)
    assert (a.tolist(), b.tolist()) == ([1.5, 0.5, 0.5], [0.5, 0.5, 0.5])


def test_saved_and_loaded_estimates_are_the_same() -> None:
    e = estimates(3)
    e.observe(1, np.array([1.0, 0.0, 1.0]), 33, 4)
    e.observe(1, np.array([0.0]), 7, 9)
    loaded = estimates(3)
    loaded.load_state_dict(e.state_dict())
    assert loaded.state_dict() == e.state_dict()
    for version in (9, 50):
        prompts = np.array([0, 1, 2])
        np.testing.assert_array_equal(loaded.reward_variance(prompts, version), e.reward_variance(prompts, version))
        np.testing.assert_array_equal(loaded.mean_tokens(prompts), e.mean_tokens(prompts))


def test_the_state_of_other_prompts_is_refused() -> None:
    e = estimates(2)
    before = e.state_dict()
    with pytest.raises(ValueError, match="the state holds 3 prompts, this allocator 2"):
        e.load_state_dict(estimates(3).state_dict())
    assert e.state_dict() == before
