from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator import coefficients
from gvm_stream.allocator.arrays import Floats
from gvm_stream.config import LearnerSection
from gvm_stream.errors import TrainingError
from gvm_stream.learner.advantages import (
    ADVANTAGES,
    Advantage,
    Bnpo,
    DrGrpo,
    Group,
    Opo,
    OrderStat,
    Raft,
    Rloo,
    Shrunken,
)

NAMES = sorted(ADVANTAGES.classes)
COMPARING = [name for name in NAMES if ADVANTAGES.classes[name].compares]


def group(
    rewards: Sequence[float],
    lengths: Sequence[int] | None = None,
    c: Sequence[float] | None = None,
    prior: tuple[float, float] = (1.0, 1.0),
) -> Group:
    n = len(rewards)
    return Group(
        rewards=np.array(rewards, float),
        lengths=np.array(lengths or [1] * n, float),
        coefficients=np.array(c or [0.0] * n, float),
        size=n,
        prior=prior,
    )


def advantages(name: str, *groups: Group, **options: int) -> list[list[float]]:
    return [a.tolist() for a in ADVANTAGES.make(name, options).of_batch(groups)]


quarters = st.integers(0, 4).map(lambda k: k / 4)
rollouts = st.lists(st.tuples(quarters, st.integers(1, 50), st.floats(-2, 2)), min_size=1, max_size=7)
priors = st.tuples(st.floats(0.1, 5), st.floats(0.1, 5))


@st.composite
def ragged_groups(draw: st.DrawFn) -> Group:
    rewards, lengths, c = zip(*draw(rollouts), strict=True)
    return group(rewards, lengths, c, draw(priors))


batches = st.lists(ragged_groups(), min_size=1, max_size=5)


# What each estimator says, as slowly and obviously as possible: the advantage of rollout j of group g of a batch.
Reference = Callable[[Sequence[Group], Group, int], float]


def others(values: Floats, j: int) -> list[float]:
    return [v for k, v in enumerate(values.tolist()) if k != j]


def grpo(batch: Sequence[Group], g: Group, j: int) -> float:
    return (float(g.rewards[j]) - statistics.fmean(g.rewards)) / (statistics.stdev(map(float, g.rewards)) + 1e-6)


def opo(batch: Sequence[Group], g: Group, j: int) -> float:
    r, tokens = others(g.rewards, j), others(g.lengths, j)
    return float(g.rewards[j]) - sum(t * x for t, x in zip(tokens, r, strict=True)) / sum(tokens)


def shrunken(batch: Sequence[Group], g: Group, j: int) -> float:
    strength = sum(g.prior)
    mean = g.prior[0] / strength
    r = others(g.rewards, j)
    return float(g.rewards[j]) - (strength * mean + sum(r)) / (strength + len(r))


def order_stat(size: int, top: int) -> Reference:
    """size * (mean of the objective over subsets with j - mean over those without)."""

    def reference(batch: Sequence[Group], g: Group, j: int) -> float:
        k = min(size, len(g.rewards) - 1)
        with_j: list[float] = []
        without: list[float] = []
        for subset in itertools.combinations(range(len(g.rewards)), k):
            best = sorted((g.rewards[i] for i in subset), reverse=True)[: min(top, k)]
            (with_j if j in subset else without).append(statistics.fmean(best))
        return k * (statistics.fmean(with_j) - statistics.fmean(without))

    return reference


def bnpo(batch: Sequence[Group], g: Group, j: int) -> float:
    means = [statistics.fmean(x.rewards) for x in batch]
    a = b = 0.0
    if len(set(means)) > 1:
        m = statistics.fmean(means)
        strength = m * (1 - m) / statistics.variance(means) - 1
        a, b = strength * m, strength * (1 - m)
    alpha, beta = max(1 + a / 3, 1), max(1 + b / 3, 1)
    p = statistics.fmean(g.rewards)
    density = p ** (alpha - 1) * (1 - p) ** (beta - 1)
    density *= math.exp(math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta))
    return (float(g.rewards[j]) - p) * (min(1 / density, 1e6) if density else 1e6)


def reinforce_pp(batch: Sequence[Group], g: Group, j: int) -> float:
    tokens = [
        r for x in batch for r, t in zip(x.rewards.tolist(), x.lengths.tolist(), strict=True) for _ in range(int(t))
    ]
    return (float(g.rewards[j]) - statistics.fmean(tokens)) / math.sqrt(statistics.variance(tokens) + 1e-8)


REFERENCES: dict[str, Reference] = {
    "allocated": lambda batch, g, j: g.size * g.coefficients[j],
    "raft": lambda batch, g, j: float(g.rewards[j] >= 0.5),
    "grpo": grpo,
    "dr_grpo": lambda batch, g, j: float(g.rewards[j]) - statistics.fmean(g.rewards),
    "rloo": lambda batch, g, j: float(g.rewards[j]) - statistics.fmean(others(g.rewards, j)),
    "opo": opo,
    "shrunken": shrunken,
    "order_stat": order_stat(4, 1),
    "bnpo": bnpo,
    "reinforce_pp": reinforce_pp,
}


def test_every_estimator_has_a_reference_and_is_named_in_the_configuration() -> None:
    assert sorted(REFERENCES) == NAMES
    description = str(LearnerSection.__annotations__["advantage"])
    assert [name for name in NAMES if f"{name}," not in description and f"{name} (" not in description] == []


@pytest.mark.parametrize("name", NAMES)
@given(batch=batches)
def test_estimators_equal_their_slow_reference_on_ragged_groups(name: str, batch: list[Group]) -> None:
    whole = np.concatenate([g.rewards for g in batch])
    for g, found in zip(batch, advantages(name, *batch), strict=True):
        silent = np.ptp(whole if name == "reinforce_pp" else g.rewards) == 0 and name in COMPARING
        expected = [0.0 if silent else REFERENCES[name](batch, g, j) for j in range(len(g.rewards))]
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@given(batch=batches, size=st.integers(1, 5), top=st.integers(1, 3))
def test_order_statistics_of_any_size_equal_their_reference(batch: list[Group], size: int, top: int) -> None:
    for g, found in zip(batch, advantages("order_stat", *batch, size=size, top=top), strict=True):
        if np.ptp(g.rewards):
            expected = [order_stat(size, top)(batch, g, j) for j in range(len(g.rewards))]
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize(
    "equal",
    [[1, 1, 1, 1], [0, 0], [0.1 + 0.2, 0.3, 0.3, 0.3], [1 - 1e-12, 1, 1], [0.7]],
)
def test_groups_without_a_difference_get_exactly_zero(name: str, equal: list[float]) -> None:
    assert advantages(name, group(equal)) == [[0.0] * len(equal)]


def test_small_rewards_that_do_differ_keep_their_signal() -> None:
    np.testing.assert_allclose(advantages("rloo", group([2e-12, 1e-12])), [[1e-12, -1e-12]])


def test_raft_accepts_from_one_half_on_whatever_the_others_got() -> None:
    assert advantages("raft", group([1, 0, 0.5, 0.49]), group([1, 1]), group([0.3])) == [[1, 0, 1, 0], [1, 1], [0]]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=12))
def test_allocated_is_rloo_for_a_planned_visit(rewards: list[float]) -> None:
    c = coefficients.rloo(np.array(rewards)).tolist()
    np.testing.assert_allclose(advantages("allocated", group(rewards, c=c)), advantages("rloo", group(rewards)))


def test_shrunken_learns_from_a_single_rollout_and_from_a_surprise() -> None:
    assert advantages("shrunken", group([1], prior=(1, 3))) == [[0.75]]
    assert advantages("shrunken", group([1, 1], prior=(1, 3))) == [[0.6, 0.6]]


def test_bnpo_weighs_by_the_density_of_the_fitted_beta() -> None:
    # Means 1/4 and 3/4: variance 1/8, so a + b = 1 and both parameters are 1 + 1/6.
    density = (3 / 16) ** (1 / 6) * math.gamma(7 / 3) / math.gamma(7 / 6) ** 2
    found = advantages("bnpo", group([1, 0, 0, 0]), group([1, 1, 1, 0]))
    np.testing.assert_allclose(found[0], np.array([0.75, -0.25, -0.25, -0.25]) / density)
    assert advantages("bnpo", group([1, 0])) == [[0.5, -0.5]]


def test_bnpo_refuses_rewards_it_has_no_distribution_for() -> None:
    with pytest.raises(TrainingError, match=r'"bnpo" takes rewards from 0 to 1, got \[1\.0, -1\.0\]'):
        Bnpo().of_batch([group([1, -1])])


def test_reinforce_pp_knows_no_prompts_only_the_batch() -> None:
    (easy, hard) = advantages("reinforce_pp", group([1, 1]), group([0, 0]))
    assert easy == pytest.approx([math.sqrt(3) / 2] * 2)
    assert hard == pytest.approx([-math.sqrt(3) / 2] * 2)


# A softmax policy over four responses of different rewards and lengths. All samples of n of them are enumerated, so
# that the mean of an estimator is exact.
THETA = np.array([0.4, -0.8, 0.1, -0.2])
PI = np.exp(THETA) / np.exp(THETA).sum()
REWARD = np.array([1.0, 0.0, 0.0, 1.0])
LENGTH = np.array([3, 10, 1, 25])
SCORES = np.eye(4) - PI


def samples(n: int) -> Iterator[tuple[list[int], float]]:
    for actions in itertools.product(range(4), repeat=n):
        yield list(actions), float(np.prod(PI[list(actions)]))


def mean_gradient(estimator: Advantage, n: int) -> Floats:
    total = np.zeros(4)
    for actions, probability in samples(n):
        (a,) = estimator.of_batch([group(REWARD[actions].tolist(), LENGTH[actions].tolist(), prior=(0.3, 2.0))])
        total += probability * a @ SCORES[actions] / n
    return total


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("estimator", [Rloo(), Opo(), Shrunken(), Raft(), OrderStat(size=1)])
def test_the_mean_gradient_is_that_of_the_expected_reward(estimator: Advantage, n: int) -> None:
    np.testing.assert_allclose(mean_gradient(estimator, n), PI * (REWARD - PI @ REWARD), atol=1e-12)


def test_a_shrunken_baseline_needs_no_second_rollout() -> None:
    np.testing.assert_allclose(mean_gradient(Shrunken(), 1), PI * (REWARD - PI @ REWARD), atol=1e-12)


@pytest.mark.parametrize(("n", "size"), [(3, 2), (5, 2), (5, 4), (4, 7)])
def test_the_mean_gradient_of_order_statistics_is_that_of_pass_at_k(n: int, size: int) -> None:
    k = min(size, n - 1)
    p = PI @ REWARD
    expected = k * (1 - p) ** (k - 1) * PI * (REWARD - p)  # of 1 - (1 - p)^k
    np.testing.assert_allclose(mean_gradient(OrderStat(size=size), n), expected, atol=1e-12)


def test_a_mean_that_includes_the_rollout_shrinks_the_gradient() -> None:
    found = mean_gradient(DrGrpo(), 4)
    np.testing.assert_allclose(found, 3 / 4 * PI * (REWARD - PI @ REWARD), atol=1e-12)
