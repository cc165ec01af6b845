from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from gvm_stream.allocator.objectives import Log, Mean, Objective, Own, Power, weights

RATES = np.array([0.001, 0.1, 0.5, 1.0])


def test_the_own_objective_weighs_all_prompts_alike() -> None:
    assert weights(Own(), RATES, "rloo").tolist() == weights(Own(), RATES, "raft").tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("objective", "f"),
    [
        (Mean(), lambda p: p),
        (Log(cap=1e4), math.log),
        (Power(a=0.3, cap=1e4), lambda p: p**0.3),
    ],
)
def test_a_weight_is_the_slope_of_the_objective(objective: Objective, f: Callable[[float], float]) -> None:
    step = 1e-6
    slopes = [(f(p * (1 + step)) - f(p * (1 - step))) / (2 * step * p) for p in RATES.tolist()]
    assert weights(objective, RATES, "rloo") == pytest.approx(slopes, rel=1e-6)
    # raft estimates grad log p = grad p / p.
    assert weights(objective, RATES, "raft") == pytest.approx(slopes * RATES, rel=1e-6)


def test_the_own_objectives_are_the_mean_of_rloo_and_the_log_of_raft() -> None:
    assert weights(Mean(), RATES, "rloo").tolist() == weights(Own(), RATES, "rloo").tolist()
    assert weights(Log(cap=1e4), RATES, "raft") == pytest.approx(weights(Own(), RATES, "raft"))


def test_slopes_are_capped_where_rates_are_too_small_to_be_told_apart() -> None:
    assert weights(Log(), np.array([1e-9, 1 / 32, 1 / 16, 1 / 8]), "rloo").tolist() == [16, 16, 16, 8]
    assert weights(Power(), np.array([1e-9, 1 / 64, 1 / 16, 1 / 4]), "rloo").tolist() == [2, 2, 2, 1]
    assert weights(Log(cap=10), np.array([0.01, 0.5]), "raft").tolist() == [0.1, 1]


@pytest.mark.parametrize("objective", [Own(), Mean(), Log(cap=5), Power(a=0.25, cap=3)])
def test_an_objective_is_plain_data(objective: Objective) -> None:
    assert msgspec.convert(msgspec.to_builtins(objective), Objective) == objective


def test_impossible_objectives_are_refused() -> None:
    with pytest.raises(ValueError, match="cap = 0 must be above 0"):
        Log(cap=0)
    with pytest.raises(ValueError, match="cap = nan must be above 0"):
        Power(cap=math.nan)
    with pytest.raises(ValueError, match="a = 1 must lie between 0 and 1"):
        Power(a=1)
