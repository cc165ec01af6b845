from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gvm_stream.learner import variance
from gvm_stream.learner.variance import PARTS, GradientNoise, random_parts
from gvm_stream.wire.messages import NoiseStats

Floats = npt.NDArray[np.float64]


@pytest.fixture(autouse=True, scope="module")
def small_sketch() -> Iterator[None]:
    """Still more buckets than parameters, and thus exact, where a test says nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variance, "BUCKETS", 64)
        yield


def measure(
    gradients: Sequence[Sequence[float]] | Floats,
    shares: Sequence[float] | Floats,
    shadow: Sequence[bool] | None = None,
    tokens: int = 10,
    seed: int = 0,
) -> NoiseStats:
    """Of parts with these gradients [K, P], added up in the `.grad` of two parameters."""
    rows = torch.tensor(np.asarray(gradients), dtype=torch.float32)
    size = rows.shape[1] // 2
    first, second = torch.zeros(size, requires_grad=True), torch.zeros(rows.shape[1] - size, requires_grad=True)
    noise = GradientNoise([first, second], seed)
    for row, share, kind in zip(rows, shares, shadow or [False] * len(rows), strict=True):
        torch.autograd.backward(first @ row[:size] + second @ row[size:])
        noise.part(float(share), tokens, kind)
    return noise.result()


@given(
    gradients=st.lists(st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4), min_size=3, max_size=8),
    seed=st.integers(0, 100),
)
@settings(max_examples=50, deadline=None)
def test_for_parts_of_one_size_the_variance_is_that_between_parts(gradients: list[list[float]], seed: int) -> None:
    g = np.array(gradients)
    count = len(g)
    found = measure(g, np.full(count, 1 / count), seed=seed)
    between = count / (count - 1) * ((g - g.mean(0)) ** 2).sum()
    assert found.variance == pytest.approx(between, abs=1e-4)
    assert found.signal == pytest.approx((g.sum(0) ** 2).sum() - between, abs=1e-4)
    assert found.tokens == 10 * count
    assert found.allocated == pytest.approx(found.variance_tokens, abs=1e-2)
    assert found.shadow is None


def test_parts_that_agree_have_no_noise_whatever_their_sizes() -> None:
    shares = np.array([0.5, 0.125, 0.25, 0.125])
    found = measure(shares[:, None] * np.array([[3.0, -4.0]]), shares)
    assert found.variance == pytest.approx(0, abs=1e-6)
    assert found.standard_error == pytest.approx(0, abs=1e-6)
    assert found.signal == pytest.approx(25)


def test_ratios_of_signal_and_noise() -> None:
    noise = NoiseStats(variance=2.0, standard_error=0.5, signal=4.0, tokens=100, allocated=200.0, shadow=None)
    assert noise.variance_tokens == 200
    assert noise.snr == 2
    assert noise.noise_scale == 50  # half the tokens, twice the variance: as large as the signal
    assert (
        NoiseStats(variance=0.0, standard_error=0.0, signal=4.0, tokens=1, allocated=0.0, shadow=None).snr == math.inf
    )
    unseen = NoiseStats(variance=2.0, standard_error=1.0, signal=-1.0, tokens=1, allocated=2.0, shadow=None)
    assert unseen.noise_scale == math.inf
    assert unseen.snr == -0.5


def test_estimates_are_unbiased_for_parts_of_unequal_sizes_and_the_standard_error_is_safe() -> None:
    """Groups of one weight with normal gradients, dealt into parts of 1 to 4 groups."""
    rng = np.random.default_rng(0)
    mean, sd = np.array([0.5, -0.2, 0.1, 0.0]), np.array([1.0, 0.5, 2.0, 1.0])
    sizes = np.array([1, 4, 2, 3, 3, 2, 4, 1])
    groups = sizes.sum()
    steps = []
    for _ in range(1500):
        parts = [rng.normal(mean, sd, (size, 4)).sum(0) / groups for size in sizes]
        steps.append(measure(np.array(parts), sizes / groups))
    estimates = np.array([step.variance for step in steps])
    signals = np.array([step.signal for step in steps])
    within = 5 / math.sqrt(len(steps))
    assert abs(estimates.mean() - (sd**2).sum() / groups) < within * estimates.std()
    assert abs(signals.mean() - (mean**2).sum()) < within * signals.std()
    stated = math.sqrt(np.mean([step.standard_error**2 for step in steps]))
    assert 1.05 < stated / estimates.std() < 1.2  # the jackknife errs on the safe side, by about 10 % for 8 parts


def test_shadow_groups_are_measured_apart_and_however_few() -> None:
    """Five groups allocated, one shadow-uniform with 4 times the variance on a third of the tokens."""
    rng = np.random.default_rng(1)
    shadow = [False] * 5 + [True]
    sd = np.array([1.0] * 5 + [2.0])[:, None]
    steps = [measure(rng.normal(0.3, sd, (6, 3)) / 6, np.full(6, 1 / 6), shadow, tokens=10) for _ in range(500)]
    within = 5 / math.sqrt(len(steps))
    for name, variance_of_mean, tokens in (("allocated", 3 * 1 / 5, 50), ("shadow", 3 * 4 / 1, 10)):
        found = np.array([getattr(step, name) for step in steps])
        assert abs(found.mean() - variance_of_mean * tokens) < within * found.std()
    total = np.array([step.variance for step in steps])
    assert abs(total.mean() - 3 * (5 * 1 + 4) / 36) < within * total.std()


class Bandit:
    """A softmax policy per prompt over a shared linear model; reward 1 for one of its actions."""

    def __init__(self, prompts: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(prompts, 4, generator=generator)
        self.weight = (0.5 * torch.randn(4, 5, generator=generator)).requires_grad_()
        self.right = torch.arange(prompts) % 5

    def loss(self, prompt: int, coefficient: float, rollouts: int, generator: torch.Generator) -> Tensor:
        """Of a group with the leave-one-out baseline."""
        logprobs = (self.features[prompt] @ self.weight).log_softmax(-1)
        actions = torch.multinomial(logprobs.detach().exp(), rollouts, replacement=True, generator=generator)
        rewards = (actions == self.right[prompt]).float()
        advantages = (rewards - rewards.mean()) * rollouts / (rollouts - 1)
        return -(advantages * logprobs[actions]).sum() * coefficient / rollouts

    def step(self, prompts: Sequence[int], generator: torch.Generator, seed: int) -> tuple[NoiseStats, Floats]:
        """What is measured on a step, and its gradient."""
        self.weight.grad = torch.zeros_like(self.weight)
        noise = GradientNoise([self.weight], seed)
        for part in random_parts([False] * len(prompts), seed):
            for group in part:
                torch.autograd.backward(self.loss(prompts[group], 1 / len(prompts), 4, generator))
            noise.part(len(part) / len(prompts), 4 * len(part))
        return noise.result(), self.weight.grad.flatten().double().numpy()


@pytest.mark.parametrize("redrawn", [True, False])
def test_the_variance_is_that_of_resampled_steps(redrawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With new prompts in every step without bias; with the same ones it is too high by the spread of their means."""
    monkeypatch.setattr(variance, "PARTS", 5)
    bandit = Bandit(prompts=8)
    generator = torch.Generator().manual_seed(1)
    rng = np.random.default_rng(2)
    batch = 8
    measured, gradients = [], []
    for seed in range(600):
        prompts = rng.integers(0, 8, batch).tolist() if redrawn else list(range(batch))
        noise, gradient = bandit.step(prompts, generator, seed)
        measured.append(noise.variance)
        gradients.append(gradient)
    distances = ((np.array(gradients) - np.mean(gradients, axis=0)) ** 2).sum(1)
    excess = 0.0 if redrawn else spread_of_means(bandit)
    expected = distances.mean() * len(gradients) / (len(gradients) - 1) + excess
    error = math.sqrt((np.var(measured) + np.var(distances)) / len(gradients))
    assert error < 0.04 * expected
    assert abs(np.mean(measured) - expected) < 5 * error
    assert redrawn or excess > 10 * error


def spread_of_means(bandit: Bandit) -> float:
    """B/(B-1) times the sum of squared distances of the prompts' expected gradients from their mean."""
    means = []
    for prompt, right in enumerate(bandit.right):
        probability = (bandit.features[prompt] @ bandit.weight).softmax(-1)[right]
        (gradient,) = torch.autograd.grad(probability, bandit.weight)
        means.append(gradient.flatten().double().numpy() / len(bandit.right))
    count = len(means)
    return float(count / (count - 1) * ((np.array(means) - np.mean(means, axis=0)) ** 2).sum())


def test_sketches_are_unbiased_with_the_stated_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variance, "BUCKETS", 32)
    monkeypatch.setattr(variance, "CHUNK", 64)
    gradients = np.random.default_rng(3).normal(0.2, 1, (4, 500))
    exact = 4 / 3 * ((gradients - gradients.mean(0)) ** 2).sum()
    found = np.array([measure(gradients, np.full(4, 0.25), seed=seed).variance / exact for seed in range(400)])
    assert abs(found.mean() - 1) < 5 * found.std() / math.sqrt(400)
    assert 0.02 < found.std() < math.sqrt(2 / 32)


def test_a_part_without_gradient_counts_as_an_estimate_of_zero() -> None:
    parameter, unused, frozen = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True), torch.zeros(4)
    noise = GradientNoise([frozen, unused, parameter], seed=0)
    noise.part(0.25, 5)  # nothing to train on: no gradient at all yet
    for _ in range(3):
        torch.autograd.backward(parameter @ torch.tensor([1.0, 2.0]))
        noise.part(0.25, 5)
    rows = [[0.0, 0.0], *[[1.0, 2.0]] * 3]
    assert noise.result() == measure(rows, [0.25] * 4, tokens=5)


def test_two_parts_are_too_few() -> None:
    with pytest.raises(ValueError, match="2 parts say nothing"):
        measure([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.5])


@given(shadow=st.lists(st.booleans(), min_size=1, max_size=60), seed=st.integers(0, 100))
def test_groups_are_dealt_evenly_into_parts_of_one_kind(shadow: list[bool], seed: int) -> None:
    parts = random_parts(shadow, seed)
    assert sorted(i for part in parts for i in part) == list(range(len(shadow)))
    assert len(parts) <= PARTS + 1
    for kind in (False, True):
        sizes = [len(part) for part in parts if shadow[part[0]] == kind]
        assert not sizes or (min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)
    assert all(len({shadow[i] for i in part}) == 1 for part in parts)
    assert parts == random_parts(shadow, seed)


def test_groups_are_dealt_at_random() -> None:
    assert random_parts([False] * 30, seed=0) != random_parts([False] * 30, seed=1)


def test_norms_of_sharded_gradients_are_summed_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another_rank_like_this_one(tensor: Tensor) -> None:
        tensor *= 2

    monkeypatch.setattr(distributed, "all_reduce", with_another_rank_like_this_one)
    distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        found = []
        sharded = distribute_tensor(torch.zeros(6), init_device_mesh("cpu", (1,)), [Shard(0)])
        for parameter in (torch.zeros(6, requires_grad=True), sharded.requires_grad_()):
            noise = GradientNoise([parameter], seed=0)
            for k in range(3):
                torch.autograd.backward((parameter * (k + 1)).sum())
                noise.part(1 / 3, 1)
            found.append(noise.result())
    finally:
        distributed.destroy_process_group()
    whole, shards = found
    assert shards.variance == pytest.approx(2 * whole.variance)
    assert shards.signal == pytest.approx(2 * whole.signal)
    assert whole.variance > 0
