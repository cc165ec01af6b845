from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator.confidence import excludes, interval, log_ratio

counts = st.integers(0, 300)
levels = st.sampled_from([0.2, 0.05, 1e-3])


@pytest.mark.parametrize(("n", "high"), [(8, 0.439), (16, 0.267), (32, 0.153), (64, 0.0845), (128, 0.046)])
def test_a_prompt_without_successes_may_still_be_worth_visiting_after_100_failures(n: int, high: float) -> None:
    assert interval(0, n, 0.05) == pytest.approx((0, high), abs=5e-4)
    assert interval(n, 0, 0.05) == pytest.approx((1 - high, 1), abs=5e-4)


@pytest.mark.parametrize(("n", "half_width"), [(8, 0.41), (16, 0.33), (32, 0.26), (64, 0.195), (128, 0.145)])
def test_widths_at_equal_counts(n: int, half_width: float) -> None:
    low, high = interval(n // 2, n // 2, 0.05)
    assert (0.5 - low, high - 0.5) == pytest.approx((half_width, half_width), abs=5e-3)


@pytest.mark.parametrize("p", [0.02, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("alpha", [0.2, 0.05])
def test_however_often_one_looks_the_true_rate_is_seldom_ever_excluded(p: float, alpha: float) -> None:
    chance = np.ones(1)  # of every number of successes, the true rate not having been excluded so far
    for n in range(1, 257):
        chance = np.append(chance * (1 - p), 0) + np.append(0, chance * p)
        chance[[excludes(s, n - s, p, alpha) for s in range(n + 1)]] = 0
    missed = 1 - chance.sum()
    assert alpha / 10 < missed <= alpha


@given(counts, counts, levels)
def test_the_interval_ends_where_rates_begin_to_be_excluded(s: int, f: int, alpha: float) -> None:
    low, high = interval(s, f, alpha)
    assert 0 <= low < high <= 1
    if s + f:
        assert low <= s / (s + f) <= high
    if s:
        assert log_ratio(s, f, low) == pytest.approx(-math.log(alpha), rel=1e-6)
        assert excludes(s, f, low * 0.999, alpha)
    else:
        assert low == 0
    if f:
        assert log_ratio(s, f, high) == pytest.approx(-math.log(alpha), rel=1e-6)
        assert excludes(s, f, 1 - (1 - high) * 0.999, alpha)
    else:
        assert high == 1


def test_rates_of_0_and_1_are_excluded_by_one_outcome_and_only_by_it() -> None:
    assert excludes(1, 10**6, 0.0, 1e-9)
    assert not excludes(0, 10**6, 0.0, 0.5)
    assert excludes(10**6, 1, 1.0, 1e-9)
    assert not excludes(10**6, 0, 1.0, 0.5)


def test_without_outcomes_nothing_is_excluded() -> None:
    assert interval(0, 0, 0.05) == (0, 1)
    assert log_ratio(0, 0, 0.3) == 0
