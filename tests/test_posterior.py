from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.posterior import Posterior

parameters = st.floats(math.log(0.05), math.log(1e4)).map(math.exp)
betas = st.tuples(parameters, parameters)


@st.composite
def posteriors(draw: st.DrawFn) -> Posterior:
    rows = draw(st.lists(st.tuples(parameters, parameters, parameters, parameters, st.floats(0, 1)), min_size=1))
    return Posterior(*np.array(rows).T)


def one(a: float, b: float) -> Posterior:
    return Posterior.of(np.array([a]), np.array([b]))


def test_moments_are_probabilities_of_rewards() -> None:
    posterior = one(2.0, 3.0)
    assert posterior.mean() == pytest.approx(2 / 5)
    assert posterior.reward_variance() == pytest.approx(2 * 3 / (5 * 6))
    assert posterior.moment(2, 1) == pytest.approx(2 * 3 * 3 / (5 * 6 * 7))
    assert posterior.moment(0, 0) == pytest.approx(1)


def test_a_mixture_lies_between_its_parts() -> None:
    mixed = Posterior(*np.array([[1.0], [3.0], [3.0], [1.0], [0.25]]))
    assert mixed.mean() == pytest.approx(0.25 * 0.25 + 0.75 * 0.75)
    assert mixed.expect(np.sqrt) == pytest.approx(
        0.25 * one(1.0, 3.0).expect(np.sqrt) + 0.75 * one(3.0, 1.0).expect(np.sqrt)
    )


@given(posteriors(), st.integers(0, 100), st.integers(0, 100))
@settings(max_examples=50)
def test_expectations_agree_with_closed_forms(posterior: Posterior, successes: int, failures: int) -> None:
    expected = posterior.expect(lambda p: p**successes * (1 - p) ** failures)
    assert expected == pytest.approx(posterior.moment(successes, failures), abs=1e-7)


@given(betas)
def test_expectations_of_a_root_agree_with_the_closed_form(beta: tuple[float, float]) -> None:
    a, b = beta
    root = math.exp(math.lgamma(a + 0.5) - math.lgamma(a) + math.lgamma(a + b) - math.lgamma(a + b + 0.5))
    assert one(a, b).expect(np.sqrt) == pytest.approx(root, abs=1e-6)


@given(betas)
def test_expectations_are_symmetric_in_success_and_failure(beta: tuple[float, float]) -> None:
    a, b = beta

    def hump(p: Floats) -> Floats:
        return p**3 / (p**2 + 0.01)

    assert one(a, b).expect(hump) == pytest.approx(one(b, a).expect(lambda p: hump(1 - p)), abs=1e-7)


def test_f_may_differ_between_prompts() -> None:
    posterior = Posterior.of(np.ones(3), np.ones(3))
    powers = np.array([1, 2, 3])
    assert posterior.expect(lambda p: p ** powers[:, None]) == pytest.approx(1 / (powers + 1))


@given(posteriors())
def test_the_matched_beta_has_the_same_mean_and_variance(posterior: Posterior) -> None:
    matched = Posterior.of(*posterior.matched())
    assert matched.mean() == pytest.approx(posterior.mean())
    assert matched.reward_variance() == pytest.approx(posterior.reward_variance())


@given(betas)
def test_a_single_beta_is_its_own_match(beta: tuple[float, float]) -> None:
    a, b = one(*beta).matched()
    assert (a[0], b[0]) == pytest.approx(beta, rel=1e-6)


def test_draws_follow_the_mixture() -> None:
    count = 100_000
    posterior = Posterior(*np.outer([0.5, 4.0, 6.0, 2.0, 0.3], np.ones(count)))
    draws = posterior.sample(np.random.default_rng(1))
    for moment, successes in ((draws, 1), (draws**2, 2), (draws**5, 5)):
        expected = posterior.moment(successes, 0)[0]
        spread = math.sqrt((posterior.moment(2 * successes, 0)[0] - expected**2) / count)
        assert abs(moment.mean() - expected) < 5 * spread


def test_some_prompts_can_be_taken_out() -> None:
    posterior = Posterior(*np.arange(1.0, 16.0).reshape(5, 3) / 16)
    assert posterior.take(np.array([2, 0])).mean().tolist() == posterior.mean()[[2, 0]].tolist()
