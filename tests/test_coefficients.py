from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator import coefficients, stopping
from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.stopping import Rule

verdicts = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=20).map(np.array)
"""Binary rewards [n] in launch order."""


def on_classes(c: Floats, rewards: Floats) -> tuple[float, float]:
    """Total weight on successes, total weight on failures (taken as positive)."""
    return float(c[rewards == 1].sum()), -float(c[rewards == 0].sum())


def test_rloo_compares_each_rollout_with_the_others() -> None:
    rewards = np.array([1.0, 0.25, 0.0, -2.0])
    expected = [(r - (rewards.sum() - r) / 3) / 4 for r in rewards]
    assert coefficients.rloo(rewards) == pytest.approx(expected)


@pytest.mark.parametrize("rewards", [[], [1.0], [0.0, 0.0], [0.1] * 7])
def test_rloo_is_exactly_zero_where_there_is_nothing_to_compare(rewards: list[float]) -> None:
    assert coefficients.rloo(np.array(rewards)).tolist() == [0.0] * len(rewards)


def test_raft_is_the_mean_over_successes() -> None:
    assert coefficients.raft(np.array([0.5, 0.4, 1.0])).tolist() == [0.5, 0.0, 0.5]
    assert coefficients.raft(np.array([0.0, 0.0])).tolist() == [0.0, 0.0]


@given(verdicts)
def test_of_a_planned_visit_class_conditional_and_rloo_coefficients_are_the_same(rewards: Floats) -> None:
    rule = Rule(len(rewards))
    assert coefficients.class_conditional(rewards, rule) == pytest.approx(coefficients.rloo(rewards), abs=1e-15)


def test_class_conditional_coefficients_refuse_counts_the_rule_cannot_end_with() -> None:
    with pytest.raises(KeyError):
        coefficients.class_conditional(np.array([1.0, 0.0, 0.0]), Rule(8, 4, 2, 2))


@given(verdicts, st.integers(2, 8))
def test_coefficients_have_the_class_weights_whose_objective_is_enumerated(rewards: Floats, keep: int) -> None:
    rule = Rule(len(rewards))
    counts = (int(rewards.sum()), int((1 - rewards).sum()))
    for c, weights in [
        (coefficients.rloo(rewards), stopping.leave_one_out),
        (coefficients.class_conditional(rewards, rule), stopping.class_conditional),
        (coefficients.pool_baseline(rewards, keep), stopping.pool_baseline(keep)),
    ]:
        assert on_classes(c, rewards) == pytest.approx(weights(rule, counts), abs=1e-12)


def test_a_pool_baseline_keeps_the_first_of_each_class() -> None:
    rewards = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    assert coefficients.pool_baseline(rewards, keep=4) * 4 == pytest.approx([-0.5, -0.5, 0, 0.5, 0.5, 0, 0, 0])
    assert coefficients.pool_baseline(rewards[:4], keep=4) * 4 == pytest.approx([-0.25, -0.25, -0.25, 0.75])


@given(verdicts, st.integers(2, 20))
def test_down_sampling_keeps_few_rollouts_and_the_weight_of_their_class(rewards: Floats, keep: int) -> None:
    c = coefficients.rloo(rewards)
    kept = coefficients.down_sample(c, rewards, keep)
    assert on_classes(kept, rewards) == pytest.approx(on_classes(c, rewards))
    assert np.count_nonzero(kept) <= keep
    if keep >= len(rewards):
        assert kept.tolist() == c.tolist()


def test_down_sampling_to_less_than_one_rollout_of_each_class_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2, one rollout of each class"):
        coefficients.down_sample(np.array([0.5, -0.5]), np.array([1.0, 0.0]), keep=1)
