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
    Measured,
    Opo,
    Opob,
    OrderStat,
    Otb,
    Raft,
    Rloo,
    Shrunken,
)

NAMES = sorted(ADVANTAGES.classes)
MEASURED = [name for name in NAMES if ADVANTAGES.classes[name].measured]
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
    "opob": lambda batch, g, j: float(g.rewards[j]) - statistics.fmean(others(g.rewards, j)),  # until measured
    "otb": lambda batch, g, j: float(g.rewards[j]) - statistics.fmean(others(g.rewards, j)),
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


# Advantages that look at the rollouts through the learner's policy.
tokens_seen = st.lists(st.tuples(st.floats(-2, 2), st.floats(1e-3, 10)), min_size=1, max_size=5)


@st.composite
def measured_groups(draw: st.DrawFn, by: str) -> tuple[Group, Measured]:
    rewards = draw(st.lists(quarters, min_size=2, max_size=6))
    seen = [draw(tokens_seen) for _ in rewards]
    ratios, energies = ([np.array([pair[k] for pair in row]) for row in seen] for k in (0, 1))
    measured = Measured(ratios, energies if by == "token" else [each[:1] for each in energies])
    return group(rewards, [len(row) for row in seen]), measured


def opob(g: Group, m: Measured, cap: float, j: int, t: int) -> float:
    weights = [min(math.exp(sum(ratios)), cap) ** 2 * e for ratios, (e,) in zip(m.log_ratios, m.energies, strict=True)]
    rest = [k for k in range(len(weights)) if k != j]
    return float(g.rewards[j] - sum(weights[k] * g.rewards[k] for k in rest) / sum(weights[k] for k in rest))


def otb(g: Group, m: Measured, cap: float, j: int, t: int) -> float:
    t = min(t, max(len(m.log_ratios[k]) for k in range(len(g.rewards)) if k != j) - 1)
    total = baseline = 0.0
    for k in range(len(g.rewards)):
        if k != j and t < len(m.log_ratios[k]):
            pairs = zip(m.log_ratios[k][: t + 1], m.energies[k], strict=False)
            so_far = sum(min(math.exp(ratio), cap) ** 2 * e for ratio, e in pairs)
            total += so_far
            baseline += so_far * g.rewards[k]
    return float(g.rewards[j]) - baseline / total


MEASURED_REFERENCES = {"opob": opob, "otb": otb}


@pytest.mark.parametrize("name", MEASURED)
@given(data=st.data(), cap=st.sampled_from([0.5, 2.0, math.inf]))
def test_measured_estimators_equal_their_slow_reference(name: str, data: st.DataObject, cap: float) -> None:
    estimator = ADVANTAGES.make(name, {"cap": cap})
    g, measured = data.draw(measured_groups(estimator.measured))
    for j, found in enumerate(estimator.of_measured(g, measured)):
        assert len(found) == len(measured.energies[j])
        expected = [MEASURED_REFERENCES[name](g, measured, cap, j, t) for t in range(len(found))]
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def even(by: str, lengths: list[int], energies: list[float]) -> Measured:
    """On policy; the energy of a response spread over its tokens."""
    by_token = [np.full(length, energy / length) for length, energy in zip(lengths, energies, strict=True)]
    whole = [np.array([energy]) for energy in energies]
    return Measured([np.zeros(length) for length in lengths], by_token if by == "token" else whole)


@pytest.mark.parametrize("estimator", [Opob(), Otb()])
def test_rollouts_of_equal_energy_have_the_baseline_of_rloo(estimator: Advantage) -> None:
    g = group([1, 0, 0, 0.5], [3] * 4)
    found = estimator.of_measured(g, even(estimator.measured, [3] * 4, [0.7] * 4))
    for of_rollout, expected in zip(found, advantages("rloo", g)[0], strict=True):
        np.testing.assert_allclose(of_rollout, expected)


def test_energies_in_proportion_to_length_make_opob_opo() -> None:
    g = group([1, 0, 0, 0.5], [3, 9, 1, 20])
    found = Opob().of_measured(g, even("response", [3, 9, 1, 20], [0.3, 0.9, 0.1, 2.0]))
    np.testing.assert_allclose(np.concatenate(found), advantages("opo", g)[0])


def test_past_the_last_token_of_the_others_their_last_baseline_stays() -> None:
    long, short, middle = Otb().of_measured(group([1, 1, 0], [4, 1, 2]), even("token", [4, 1, 2], [4.0, 1.0, 2.0]))
    assert long.tolist() == [0.5, 1, 1, 1]
    assert short.tolist() == [0.5]
    assert middle.tolist() == [-1, -1]


@pytest.mark.parametrize("estimator", [Opob(), Otb()])
@pytest.mark.parametrize("energies", [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
def test_responses_that_the_policy_is_certain_of_have_a_baseline(estimator: Advantage, energies: list[float]) -> None:
    found = estimator.of_measured(group([1, 1, 0], [2, 2, 2]), even(estimator.measured, [2, 2, 2], energies))
    np.testing.assert_allclose(found[0], 0.5)


def test_ratios_of_long_responses_do_not_underflow() -> None:
    ratios = [np.full(500, -2.0), np.full(500, -2.1), np.full(500, -3.0)]
    measured = Measured(ratios, [np.ones(1)] * 3)
    found = Opob().of_measured(group([1, 0, 0.5], [500] * 3), measured)
    np.testing.assert_allclose(np.concatenate(found), [1, -1, -0.5])


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


def test_opob_is_unbiased_off_policy() -> None:
    """Samples of an older policy, with exact importance weights."""
    old = np.exp(1.5 * THETA[::-1])
    old /= old.sum()
    ratio = PI / old
    total = np.zeros(4)
    for actions in itertools.product(range(4), repeat=3):
        picked = list(actions)
        measured = Measured(list(np.log(ratio[picked])[:, None]), list((SCORES[picked] ** 2).sum(1, keepdims=True)))
        a = np.concatenate(Opob(cap=math.inf).of_measured(group(REWARD[picked].tolist()), measured))
        total += np.prod(old[picked]) * (ratio[picked] * a) @ SCORES[picked] / 3
    np.testing.assert_allclose(total, PI * (REWARD - PI @ REWARD), atol=1e-12)


def test_otb_is_unbiased_for_responses_of_unequal_lengths() -> None:
    """The first token is 0, the end, or 1 or 2; after these a second one follows, from another softmax for each."""
    logits = np.array([[0.2, -0.4, 0.7], [1.0, 0.0, -0.6], [-0.3, 0.5, 0.1]])
    pi = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)

    def scores(state: int, token: int) -> Floats:
        gradient = np.zeros((3, 3))
        gradient[state] = np.eye(3)[token] - pi[state]
        return gradient

    responses = [[0]] + [[first, second] for first in (1, 2) for second in range(3)]
    steps = [[(0, y[0])] + [(y[0], token) for token in y[1:]] for y in responses]
    chances = np.array([math.prod(pi[state, token] for state, token in path) for path in steps])
    gradients = [[scores(state, token) for state, token in path] for path in steps]
    rewards = np.array([1.0, 0.0, 1.0, 0.25, 0.0, 0.0, 1.0])
    energies = [np.array([float((s**2).sum()) for s in path]) for path in gradients]

    truth = sum(c * r * sum(path) for c, r, path in zip(chances, rewards, gradients, strict=True))
    total = np.zeros((3, 3))
    for sample in itertools.product(range(7), repeat=3):
        picked = list(sample)
        g = group(rewards[picked].tolist(), [len(responses[i]) for i in picked])
        measured = Measured([np.zeros(len(responses[i])) for i in picked], [energies[i] for i in picked])
        for i, by_token in zip(picked, Otb().of_measured(g, measured), strict=True):
            step = sum(a * s for a, s in zip(by_token, gradients[i], strict=True))
            total += np.prod(chances[picked]) * step / 3
    np.testing.assert_allclose(total, truth, atol=1e-12)


def test_the_baseline_of_opob_goes_to_that_of_least_variance() -> None:
    """In a group with 1,000 rollouts of an older policy, just as often as expected, energies four times as large where
    the reward is 1; least is sum of p w^2 E (r - b)^2."""
    old, ratio, energies, rewards = [0.5, 0.3, 0.2], [0.6, 0.8, 2.3], [1.0, 4.0, 1.0], [0.0, 1.0, 0.3]
    actions = np.repeat(np.arange(3), (1000 * np.array(old)).astype(int))
    measured = Measured([np.log([ratio[a]]) for a in actions], [np.array([energies[a]]) for a in actions])
    found = rewards[0] - Opob(cap=math.inf).of_measured(group(np.take(rewards, actions).tolist()), measured)[0][0]

    def moment(b: float) -> float:
        return sum(p * w**2 * e * (r - b) ** 2 for p, w, e, r in zip(old, ratio, energies, rewards, strict=True))

    assert moment(found) < min(moment(found - 0.01), moment(found + 0.01))
    assert moment(found) < 0.9 * moment(float(np.dot(old, rewards)))
