from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gvm_stream.allocator.arrays import Floats
from gvm_stream.config import (
    Config,
    DataSection,
    LearnerSection,
    ModelSection,
    RunSection,
    SamplingSection,
    StreamSection,
)
from gvm_stream.errors import ConfigError, TrainingError
from gvm_stream.learner.advantages import ADVANTAGES, Advantage, Group, Rloo
from gvm_stream.learner.losses import LOSSES, Loss, PpoClip, Responses
from gvm_stream.learner.main import main
from gvm_stream.learner.objective import Objective


def objective(learner: Mapping[str, object], max_tokens: int = 100) -> Objective:
    return Objective.of(
        Config(
            model=ModelSection(path="-"),
            data=DataSection(train="-"),
            sampling=SamplingSection(max_tokens=max_tokens),
            learner=msgspec.convert(learner, LearnerSection),
        )
    )


def coefficients(
    aggregate: str, weights: list[float], lengths: list[list[int]], power: float = 1.0
) -> list[list[float]]:
    o = objective({"aggregate": aggregate, "delta_l_power": power}, max_tokens=10)
    return [c.tolist() for c in o.coefficients(weights, [np.array(row, float) for row in lengths])]


def test_coefficients_of_sequence_aggregates_by_hand() -> None:
    weights, lengths = [1.0, 3.0], [[2, 4], [5]]
    assert coefficients("seq_sum", weights, lengths) == [[1 / 8, 1 / 8], [3 / 4]]
    assert coefficients("seq_mean", weights, lengths) == [[1 / 16, 1 / 32], [pytest.approx(3 / 20)]]
    assert coefficients("seq_const", weights, lengths) == [[1 / 80, 1 / 80], [pytest.approx(3 / 40)]]


def test_token_mean_divides_by_all_tokens_of_the_batch() -> None:
    assert coefficients("token_mean", [1.0, 1.0], [[2, 4], [5]]) == [[1 / 11, 1 / 11], [1 / 11]]
    assert coefficients("token_mean", [1.0, 3.0], [[2, 4], [5]]) == [[1 / 21, 1 / 21], [3 / 21]]


@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
def test_delta_l_weighs_responses_by_a_power_of_their_length_with_mean_one(power: float) -> None:
    lengths = [[1, 2], [50, 4], [9, 9]]
    found = np.array(coefficients("delta_l", [1.0, 1.0, 1.0], lengths, power))
    by_length = np.array(lengths, float) ** -power
    np.testing.assert_allclose(found, by_length / by_length.mean() / 6)


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10), st.lists(st.integers(1, 50), min_size=1, max_size=6)), min_size=1, max_size=6
    )
)
def test_the_weight_of_a_prompt_never_depends_on_its_number_of_rollouts(groups: list[tuple[float, list[int]]]) -> None:
    weights, lengths = [w for w, _ in groups], [row for _, row in groups]
    shares = np.array(weights) / sum(weights)
    by_rollout = [sum(row) for row in coefficients("seq_sum", weights, lengths)]
    np.testing.assert_allclose(by_rollout, shares)
    mean = coefficients("seq_mean", weights, lengths)
    by_token = [sum(c * t for c, t in zip(row, ts, strict=True)) for row, ts in zip(mean, lengths, strict=True)]
    np.testing.assert_allclose(by_token, shares)


def test_allocated_coefficients_come_out_as_the_allocator_made_them() -> None:
    group = Group(np.ones(3), np.ones(3), np.array([0.5, 0.0, -0.25]), size=3, prior=(1.0, 1.0))
    o = objective({})
    (advantages,) = o.advantage.of_batch([group])
    (share, _) = o.coefficients([1.0, 3.0], [group.lengths, np.ones(7)])
    np.testing.assert_allclose(advantages * share, group.coefficients / 4)  # the prompt has a quarter of all weight


def test_rloo_with_uneven_groups_estimates_the_policy_gradient_without_bias() -> None:
    """One-token responses of a 5-action softmax: the gradient of J = sum_a pi_a r_a is pi_a (r_a - J)."""
    rng = np.random.default_rng(20)
    theta = np.array([0.3, -0.5, 1.0, 0.0, -1.0])
    reward = np.array([1.0, 0.0, 0.0, 1.0, 0.3])
    pi = np.exp(theta) / np.exp(theta).sum()
    truth = pi * (reward - pi @ reward)

    sampled = [rng.choice(5, size=2 + i % 5, p=pi) for i in range(6000)]
    groups = [Group(reward[a], np.ones(len(a)), np.zeros(len(a)), len(a), (1.0, 1.0)) for a in sampled]
    advantages = Rloo().of_batch(groups)
    shares = objective({}).coefficients([1.0] * len(groups), [g.lengths for g in groups])

    def column(values: list[Floats]) -> Tensor:
        return torch.from_numpy(np.concatenate(values))[:, None]

    logits = torch.tensor(theta, requires_grad=True)
    logp = torch.log_softmax(logits, 0)[torch.from_numpy(np.concatenate(sampled))][:, None]
    mask = torch.ones_like(logp, dtype=torch.bool)
    a = column(advantages)
    terms = objective({}).loss.terms(Responses.of(logp, logp.detach(), mask, a, torch.zeros_like(a)))
    (gradient,) = torch.autograd.grad((terms * column(shares)).sum(), logits)

    per_group = [a @ (np.eye(5)[s] - pi) / len(s) for a, s in zip(advantages, sampled, strict=True)]
    standard_error = np.std(per_group, axis=0) / math.sqrt(len(groups))
    assert (standard_error < np.abs(truth).max() / 20).all()  # sharp enough to see the 1 - 1/n of a plain mean baseline
    assert (np.abs(-gradient.numpy() - truth) < 5 * standard_error).all()


def test_gvpo_has_the_gradient_of_the_group_variance() -> None:
    rewards, n, beta = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64), 4, 0.1
    log_ratio = torch.tensor([0.3, -0.7, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    r_theta = beta * log_ratio
    written_out = ((r_theta - r_theta.mean() - rewards + rewards.mean()) ** 2).sum() / (2 * (n - 1))
    (expected,) = torch.autograd.grad(written_out, log_ratio)

    own = log_ratio.detach()[:, None]
    peers = (own.sum() - own) / (n - 1)
    group = Group(rewards.numpy(), np.ones(n), np.zeros(n), n, (1.0, 1.0))
    o = objective({"advantage": "rloo", "loss": "gvpo"})
    a = torch.from_numpy(o.advantage.of_batch([group])[0])[:, None]
    leaf = own.clone().requires_grad_()
    r = Responses.of(leaf, torch.zeros_like(own), torch.ones_like(own, dtype=torch.bool), a, peers)
    (share,) = o.coefficients([1.0], [group.lengths])
    (found,) = torch.autograd.grad((o.loss.terms(r) * torch.from_numpy(share)[:, None]).sum(), leaf)
    torch.testing.assert_close(found[:, 0], expected)


class Half(Advantage, frozen=True, kw_only=True):
    share: float = 0.5

    def of_group(self, group: Group) -> Floats:
        return np.asarray(group.rewards - self.share * group.rewards.mean())


class Squashed(Loss, frozen=True):
    def terms(self, r: Responses) -> Tensor:
        return -r.ratio.tanh() * r.advantages


def test_an_advantage_and_a_loss_of_your_own_are_found_by_import_path() -> None:
    o = objective(
        {"advantage": f"{__name__}:Half", "advantage_options": {"share": 0.25}, "loss": f"{__name__}:Squashed"}
    )
    assert o.advantage == Half(share=0.25)
    assert o.loss == Squashed()


class Total(Loss, frozen=True):
    def terms(self, r: Responses) -> Tensor:
        return -(r.logprobs * r.advantages).sum()


def test_a_loss_of_your_own_that_adds_up_what_the_learner_adds_up_is_refused() -> None:
    tokens, column = torch.zeros(2, 3), torch.ones(2, 1)
    r = Responses.of(tokens, tokens, tokens == 0, column, column)
    with pytest.raises(TrainingError, match=r"\(Total\) gave terms of shape \[\] .* of shape \[2, 3\], .* \[2, 1\]$"):
        objective({"loss": f"{__name__}:Total"}).terms(r, None, tokens)


def test_options_left_out_are_the_published_ones() -> None:
    assert objective({"loss": "ppo_clip", "loss_options": {"high": 0.4}}).loss == PpoClip(low=0.2, high=0.4, dual=3.0)


@pytest.mark.parametrize(
    ("learner", "sentence"),
    [
        ({"advantage": "gae"}, 'learner.advantage = "gae" is unknown; there are allocated, bnpo, .*"module:Class"'),
        ({"loss": "ppo"}, 'learner.loss = "ppo" is unknown; there are cispo, .*, ppo_clip, r2vpo, or your own'),
        (
            {"loss": "ppo_clip", "loss_options": {"hihg": 1}},
            'learner.loss_options: Object contains unknown field `hihg`; "ppo_clip" has low, high, dual$',
        ),
        (
            {"loss": "gvpo", "loss_options": {"beta": 0}},
            'learner.loss_options.beta: Expected `float` > 0.0; "gvpo" has beta$',
        ),
        ({"advantage_options": {"k": 4}}, '`k`; "allocated" has no options$'),
        ({"advantage": "raft_pp"}, 'learner.advantage = "raft_pp" is unknown: RAFT.* with learner.loss = "ppo_clip"$'),
        ({"advantage": "stratified"}, 'the path-count estimator is "allocated", with allocation.design'),
        ({"advantage": "reinforce_ada"}, 'it is "allocated", with allocation.policy = "reinforce_ada_balance"'),
        ({"loss": "grpo"}, 'it is learner.advantage = "grpo" with learner.loss = "ppo_clip" and learner.aggregate'),
        ({"loss": "raft"}, 'learner.loss = "raft" is unknown: RAFT is learner.advantage = "raft" with'),
        ({"loss": "raft_pp"}, 'RAFT.* is learner.advantage = "raft" with learner.loss = "ppo_clip"$'),
        (
            {"advantage": "otb", "loss": "gvpo"},
            'learner.loss = "gvpo" compares whole responses, but learner.advantage = "otb" gives each token',
        ),
    ],
)
def test_a_configuration_that_means_nothing_is_refused_when_it_is_read(
    learner: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        objective(learner)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere:Loss", 'learner.loss = "nowhere:Loss" cannot be imported: ModuleNotFoundError'),
        (f"{__name__}:Missing", "cannot be imported: AttributeError"),
        (f"{__name__}:Half", f'learner.loss = "{__name__}:Half" must be a subclass of Loss, got .*Half'),
    ],
)
def test_a_path_without_a_loss_is_refused_by_the_learner(path: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        objective({"loss": path})


def test_the_learner_refuses_it_before_it_waits_for_an_allocator(tmp_path: Path) -> None:
    config = Config(
        run=RunSection(dir=str(tmp_path)),
        model=ModelSection(path="-"),
        data=DataSection(train="-"),
        stream=StreamSection(address="tcp://127.0.0.1:1"),  # nobody is there
        learner=LearnerSection(advantage="nowhere:Half"),
    )
    with pytest.raises(
        ConfigError, match=r'learner.advantage = "nowhere:Half" cannot be imported: ModuleNotFoundError'
    ):
        main(config, resume=False)


def test_names_are_registered_once() -> None:
    with pytest.raises(ValueError, match="'pg' is registered already"):
        LOSSES.register("pg")(Squashed)
    with pytest.raises(ValueError, match="must be a subclass of Advantage"):
        ADVANTAGES.register("squashed")(Squashed)
    assert "squashed" not in ADVANTAGES.classes
