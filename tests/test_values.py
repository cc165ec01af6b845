from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator.posterior import Posterior
from gvm_stream.allocator.values import gvm_value, raft_variance, rloo_variance

rates = st.floats(0.02, 0.98)
ALPHA = 1e-3


def known(p: float) -> Posterior:
    """As good as."""
    return Posterior.of(np.array([p * 1e9]), np.array([(1 - p) * 1e9]))


def exact_rloo(p: float, n: int, success: float, failure: float, signal: float) -> float:
    """Variance of the leave-one-out gradient of n rollouts, summed over the number of accepted ones.

    Energies are of the scores about their class means; those are (1-p) delta and -p delta (they average to 0), with
    signal = ||delta||^2.
    """
    total = 0.0
    for s in range(n + 1):
        f = n - s
        on_success, on_failure = f / (n * (n - 1)), s / (n * (n - 1))
        noise = s * on_success**2 * success + f * on_failure**2 * failure
        mean = s * on_success * (1 - p) + f * on_failure * p  # in units of delta
        total += math.comb(n, s) * p**s * (1 - p) ** f * (noise + (mean - p * (1 - p)) ** 2 * signal)
    return total


def value(p: float, success: float, failure: float, signal: float = 0.0) -> float:
    """Of second moments, which is what energies measure."""
    first = success + (1 - p) ** 2 * signal
    second = failure + p**2 * signal
    return float(rloo_variance(known(p), np.array([first]), np.array([second]))[0])


@given(rates, st.integers(2, 20))
def test_rloo_variance_is_exact_for_equal_energies_and_scores_of_mean_zero(p: float, n: int) -> None:
    assert value(p, 3.0, 3.0) / (n - 1) == pytest.approx(exact_rloo(p, n, 3.0, 3.0, 0.0), rel=1e-6)


@given(rates, st.floats(0.2, 5))
def test_rloo_variance_is_right_to_leading_order_for_unequal_energies(p: float, failure: float) -> None:
    n = 400
    exact = exact_rloo(p, n, 1.0, failure, 0.0)
    second_order = p * (1 - p) * (p + (1 - p) * failure) / n**2
    assert value(p, 1.0, failure) / (n - 1) == pytest.approx(exact, abs=2 * second_order + 0.01 * exact)


@given(rates, st.floats(0, 1))
def test_what_rloo_variance_leaves_out_is_the_squared_gradient(p: float, signal: float) -> None:
    n = 400
    gradient = (p * (1 - p)) ** 2 * signal
    assert (value(p, 1.0, 1.0, signal) - gradient) / n == pytest.approx(exact_rloo(p, n, 1.0, 1.0, signal), rel=0.02)


def test_rloo_variance_is_averaged_over_what_is_known() -> None:
    posterior = Posterior.of(np.array([0.5, 8.0]), np.array([0.5, 8.0]))
    fresh, seen = rloo_variance(posterior, np.ones(2), np.ones(2))
    assert fresh == pytest.approx(0.5 * 0.5 / (1 * 2))
    assert fresh < seen < 0.25


def test_gvm_value_is_the_square_of_the_published_weight() -> None:
    p, norm = np.array([0.01, 0.125, 0.5, 1.0]), np.array([1.0, 2.0, 3.0, 4.0])
    weight = norm / np.sqrt(p + ALPHA * p ** (1 - 3.0))
    assert np.sqrt(gvm_value(p, norm**2, ALPHA, 3.0)) == pytest.approx(weight)


def test_gvm_gives_up_on_the_hopeless() -> None:
    assert gvm_value(np.array([0.0, 1.0]), np.array([5.0, 5.0])).tolist() == [0.0, 5 / (1 + ALPHA)]


@pytest.mark.parametrize(("alpha", "beta"), [(1e-3, 2.0), (1e-2, 3.0)])
def test_gvm_values_peak_at_a_known_rate(alpha: float, beta: float) -> None:
    p = np.linspace(0, 1, 100_001)
    peak = p[np.argmax(gvm_value(p, np.ones(len(p)), alpha, beta))]
    assert peak == pytest.approx((alpha * (beta - 1)) ** (1 / beta), abs=2e-5)


@given(rates)
def test_raft_variance_at_a_known_rate_is_the_gvm_value(p: float) -> None:
    energy = np.array([2.0])
    assert raft_variance(known(p), energy) == pytest.approx(gvm_value(np.array([p]), energy), rel=1e-6)


def test_raft_variance_is_averaged_over_what_is_known() -> None:
    raft = partial(raft_variance, energy_success=np.array([3.0]), alpha=ALPHA)
    root = math.sqrt(ALPHA)
    # Integrals of p / (p^2 + alpha) and of 2 p^2 / (p^2 + alpha).
    assert raft(Posterior.of(np.ones(1), np.ones(1))) == pytest.approx(1.5 * math.log((1 + ALPHA) / ALPHA), rel=1e-6)
    assert raft(Posterior.of(np.array([2.0]), np.ones(1))) == pytest.approx(
        6 * (1 - root * math.atan(1 / root)), rel=1e-6
    )


@given(rates, st.integers(1, 12))
def test_gvms_bound_is_the_variance_of_its_estimator_but_for_the_squared_mean(p: float, n: int) -> None:
    """The sum of the accepted scores over n p, with scores of mean mu and energy G^2: Lemma 1 of GVM."""
    mean, energy = 0.7, 2.0
    variance = 0.0
    for k in range(n + 1):
        chance = math.comb(n, k) * p**k * (1 - p) ** (n - k)
        variance += chance * (k * (energy - mean**2) / (n * p) ** 2 + (k / (n * p) - 1) ** 2 * mean**2)
    undamped = gvm_value(np.array([p]), np.array([energy]), 1e-12)
    assert undamped / n == pytest.approx(variance + mean**2 / n)
