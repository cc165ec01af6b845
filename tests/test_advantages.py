from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.learner.advantages import ADVANTAGES, grpo, raft, rloo

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(rloo([1, 0, 0]), [1, -0.5, -0.5], rtol=1e-15)
    np.testing.assert_allclose(rloo([3, 1, 0, 0]), [3 - 1 / 3, 0, -4 / 3, -4 / 3], atol=1e-15)


def test_grpo_divides_by_the_std_with_bessels_correction() -> None:
    std = math.sqrt(1 / 3)  # of [1, 1, 0, 0], over n - 1
    np.testing.assert_allclose(grpo([1, 1, 0, 0]), np.array([0.5, 0.5, -0.5, -0.5]) / (std + 1e-6), rtol=1e-14)


def test_raft_accepts_from_one_half_on_whatever_the_others_got() -> None:
    assert raft([1, 0, 0.5, 0.49]).tolist() == [1, 0, 1, 0]
    assert raft([1, 1]).tolist() == [1, 1]
    assert raft([0.3, 0.3]).tolist() == [0, 0]


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@pytest.mark.parametrize(
    "equal",
    [[1, 1, 1, 1], [0, 0], [0.1 + 0.2, 0.3, 0.3, 0.3], [1e12 + 1, 1e12, 1e12], [-0.3, -(0.1 + 0.2)], [0.7], []],
)
def test_groups_without_a_difference_get_exactly_zero(name: str, equal: list[float]) -> None:
    assert ADVANTAGES[name](equal).tolist() == [0.0] * len(equal)


def test_small_rewards_that_do_differ_keep_their_signal() -> None:
    np.testing.assert_allclose(rloo([2e-12, 1e-12]), [1e-12, -1e-12])
    assert (rloo([0] + [0.95] * 7) != 0).all()


@given(rewards)
def test_rloo_is_the_reward_minus_the_mean_of_the_others(r: list[float]) -> None:
    others = [(sum(r) - x) / (len(r) - 1) for x in r]
    np.testing.assert_allclose(rloo(r), np.array(r) - others, atol=1e-7)


@given(rewards)
def test_centred_advantages_add_up_to_nothing(r: list[float]) -> None:
    assert abs(rloo(r).sum()) < 1e-9
    assert abs(grpo(r).sum()) < 1e-6


@pytest.mark.parametrize("estimator", ADVANTAGES.values())
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_numbers_are_refused(estimator: object, bad: float) -> None:
    assert callable(estimator)
    with pytest.raises(ValueError, match=r"finite numbers, got \[1\.0, (nan|inf|-inf)\]"):
        estimator([1.0, bad])
