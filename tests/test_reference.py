"""KL penalty and entropy bonus: exact gradients, and the frozen model behind them. Run by torchrun, this file is a
rank."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from gvm_stream.config import Config, LearnerSection, ModelSection
from gvm_stream.learner import logprobs as logprobs_module
from gvm_stream.learner.advantages import Rloo
from gvm_stream.learner.distributed import Ranks, join_ranks, shard
from gvm_stream.learner.losses import PolicyGradient, Responses, kl_terms
from gvm_stream.learner.model import checkpoint_layers
from gvm_stream.learner.objective import Objective
from gvm_stream.learner.trainer import Trainer
from gvm_stream.wire.messages import TrainGroup
from tests.test_trainer import first_gradient, good_and_bad, group, make_config, make_model, rollout, score, train

ROOT = Path(__file__).parents[1]
Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")

# Responses of two tokens out of three; the second one is drawn from a softmax of its own after each first one.
generator = torch.Generator().manual_seed(0)
LOGITS, OTHER = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
RESPONSES = list(itertools.product(range(3), repeat=2))


def by_token(logits: Tensor) -> Tensor:
    """Log-probs [9, 2] of the tokens of all responses."""
    logp = logits.log_softmax(-1)
    return torch.stack([torch.stack([logp[0, first], logp[1 + first, second]]) for first, second in RESPONSES])


def responses(logp: Tensor, sampled: Tensor) -> Responses:
    column = torch.zeros(len(logp), 1, dtype=logp.dtype)
    return Responses.of(logp, sampled, torch.ones_like(logp, dtype=torch.bool), column, column)


def divergence(estimator: Estimator, logits: Tensor) -> Tensor:
    """What the gradient of each estimator is said to be of, written out."""
    policy, reference = logits.log_softmax(-1), OTHER.log_softmax(-1)
    if estimator == "k1":
        logp = by_token(logits).sum(1)
        return (logp.exp() * (logp - by_token(OTHER).sum(1))).sum()
    if estimator == "k2":
        each = (policy.exp() * (policy - reference)).sum(-1)
    else:
        each = (reference.exp() * (reference - policy)).sum(-1)
    visits = torch.cat([torch.ones(1, dtype=torch.float64), policy[0].exp().detach()])
    total: Tensor = (visits * each).sum()
    return total


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_mean_gradient_of_an_estimator_is_that_of_its_divergence(estimator: Estimator) -> None:
    leaf = LOGITS.clone().requires_grad_()
    logp = by_token(leaf)
    terms = kl_terms(responses(logp, logp.detach()), by_token(OTHER), estimator)
    chances = logp.detach().sum(1).exp()
    (found,) = torch.autograd.grad((chances[:, None] * terms).sum(), leaf)
    again = LOGITS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(divergence(estimator, again), again)
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_older_sampling_policy_is_corrected_for(estimator: Estimator) -> None:
    """One token, with weights below their cap."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    old = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64).log()
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()[:, None]
    gradients = []
    for sampled in (old, policy):
        leaf = policy.clone().requires_grad_()
        logp = leaf.log_softmax(-1)[:, None]
        terms = kl_terms(responses(logp, sampled[:, None]), reference, estimator)
        gradients.append(torch.autograd.grad((sampled.exp()[:, None] * terms).sum(), leaf)[0])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_log_ratios_that_are_far_off_stay_finite(estimator: Estimator) -> None:
    logp = torch.tensor([[-95.0, -0.1]], requires_grad=True)  # float32, in which exp(95) is infinite
    terms = kl_terms(responses(logp, torch.tensor([[-0.1, -95.0]])), torch.tensor([[-0.1, -95.0]]), estimator)
    (gradient,) = torch.autograd.grad(terms.sum(), logp)
    assert torch.isfinite(terms).all()
    assert torch.isfinite(gradient).all()


def test_penalty_and_bonus_add_to_the_terms_of_any_loss_and_leave_the_padding_alone() -> None:
    torch.manual_seed(1)
    logp, sampled, reference, entropies = torch.randn(4, 2, 3, dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    column = torch.ones(2, 1, dtype=torch.float64)
    r = Responses.of(logp.where(mask, 0), sampled.where(mask, 0), mask, column, column)
    plain = Objective(Rloo(), PolicyGradient(), "seq_sum", 1.0, 10)
    both = Objective(Rloo(), PolicyGradient(), "seq_sum", 1.0, 10, 0.3, "k3", 0.2)
    expected = plain.terms(r, None, entropies) + 0.3 * kl_terms(r, reference, "k3").where(mask, 0)
    torch.testing.assert_close(both.terms(r, reference, entropies), expected - 0.2 * entropies.where(mask, 0))
    assert not both.terms(r, reference, entropies)[~mask].any()
    assert both.every_rollout
    assert not plain.every_rollout


def with_reference(folder: Path, **learner: object) -> Config:
    """The reference is the model of `make_model`."""
    make_model().save_pretrained(folder)
    config = make_config(msgspec.convert({"max_grad_norm": 1e9, **learner}, LearnerSection))
    return msgspec.structs.replace(config, model=ModelSection(path=str(folder)))


def moved_model() -> LlamaForCausalLM:
    model = make_model()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return model


def ragged(model: LlamaForCausalLM) -> list[TrainGroup]:
    long = [4 + i % 8 for i in range(30)]
    return [
        group(1, rollout(model, 1, [4], 1.0), rollout(model, 2, long, 0.0), rollout(model, 3, [7, 5], 0.0)),
        group(2, rollout(model, 4, [9, 10, 11], 1.0), rollout(model, 5, [6], 1.0)),  # no advantage
    ]


def written_out(model: LlamaForCausalLM, groups: list[TrainGroup], estimator: Estimator) -> Tensor:
    """The gradient of loss + 0.5 KL - 0.1 entropy, response by response with all logits in float64; aggregated by
    `seq_sum`."""
    policy, start = model.double(), make_model().double()
    names = sorted(name for name, _ in policy.named_parameters())
    total = torch.zeros((), dtype=torch.float64)
    for g in groups:
        mean = np.mean([r.reward for r in g.rollouts])
        for r in g.rollouts:
            prompt, tokens = np.frombuffer(g.prompt_tokens, "<i4"), np.frombuffer(r.tokens, "<i4")
            ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
            at = torch.arange(len(tokens)), ids[len(prompt) :]
            full, frozen = (
                m(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (policy, start)
            )
            logp, entropy = full[at], -(full.exp() * full).sum(-1)
            advantage = (r.reward - mean) * len(g.rollouts) / (len(g.rollouts) - 1)
            ratio = logp - frozen[at].detach()
            if estimator == "k1":
                kl = torch.stack([ratio[t:].sum().detach() * logp[t] for t in range(len(tokens))])
            else:
                kl = ratio**2 / 2 if estimator == "k2" else (-ratio).exp() - 1 + ratio
            terms = -advantage * logp + 0.5 * kl - 0.1 * entropy
            total = total + terms.sum() / len(g.rollouts) / len(groups)
    total.backward()  # type: ignore[no-untyped-call]
    parameters = dict(policy.named_parameters())
    gradients = [parameters[name].grad for name in names]
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("how", ["row by row", "together", "in chunks", "checkpointed"])
def test_a_step_has_the_gradient_written_out_with_all_logits(
    estimator: Estimator, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "in chunks":
        monkeypatch.setattr(logprobs_module, "CHUNK", 3 * 12)
    config = with_reference(
        tmp_path,
        kl_coefficient=0.5,
        kl_estimator=estimator,
        entropy_bonus=0.1,
        micro_batch_tokens=1 if how == "row by row" else 10_000,
    )
    model = moved_model()
    if how == "checkpointed":
        checkpoint_layers(model)
    groups = ragged(model)
    trainer = Trainer(config, model)
    result = train(trainer, *groups)
    assert result.fates["trained"] == (1, 2, 3, 4, 5)
    expected = written_out(moved_model(), groups, estimator).float()
    assert (first_gradient(trainer) - expected).norm() < 2e-5 * expected.norm()


def test_in_bfloat16_the_start_model_is_no_distance_from_itself(tmp_path: Path) -> None:
    config = with_reference(tmp_path, kl_coefficient=0.1)
    config = msgspec.structs.replace(config, model=ModelSection(path=str(tmp_path), dtype="bfloat16"))
    model = make_model()
    result = train(Trainer(config, model), good_and_bad(model))
    assert result.trained
    assert result.stats.kl == 0


def test_the_reference_is_the_start_model_whatever_the_policy_becomes(tmp_path: Path) -> None:
    model = make_model()
    start = make_model()
    trainer = Trainer(with_reference(tmp_path, kl_coefficient=1e-9, lr=1e-2), model)
    found = []
    for _ in range(3):
        batch = good_and_bad(model)
        ratios = torch.cat([score(model, tokens) - score(start, tokens) for tokens in ([4, 5], [6, 7, 8])])
        found.append((train(trainer, batch).stats.kl, float(((-ratios).exp() - 1 + ratios).mean())))
    assert found[0] == (0.0, 0.0)  # bit for bit
    for kl, expected in found[1:]:
        assert kl == pytest.approx(expected, rel=1e-2)
        assert kl > 1e-4


def test_a_strong_penalty_keeps_the_policy_near_the_start(tmp_path: Path) -> None:
    moved = []
    for coefficient in (0.0, 30.0):
        model = make_model()
        trainer = Trainer(with_reference(tmp_path, kl_coefficient=coefficient, lr=3e-3), model)
        for _ in range(15):
            train(trainer, good_and_bad(model))
        moved.append(float(score(model, [4, 5]).sum() - score(make_model(), [4, 5]).sum()))
    assert moved[0] > 1
    assert abs(moved[1]) < moved[0] / 5


def test_the_entropy_of_the_policy_is_reported(tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    groups = [good_and_bad(model)]
    assert train(Trainer(make_config(LearnerSection()), model), *groups).stats.entropy == pytest.approx(
        np.log(12), rel=1e-6
    )


def test_without_a_penalty_no_reference_is_loaded() -> None:
    assert Trainer(make_config(LearnerSection()), make_model())._reference is None  # its model.path is no model


def steps_on(ranks: Ranks, start: Path, estimator: str) -> dict[str, Tensor]:
    """Weights after two steps of the moved model, whose `reference` is divided like itself."""
    learner = msgspec.convert(
        {
            "kl_coefficient": 0.5,
            "kl_estimator": estimator,
            "entropy_bonus": 0.1,
            "advantage": "otb" if estimator == "k2" else "opob",
            "micro_batch_tokens": 20,
            "lr": 1e-2,
        },
        LearnerSection,
    )
    config = msgspec.structs.replace(make_config(learner), model=ModelSection(path=str(start)))
    groups = ragged(moved_model())
    model = shard(moved_model(), ranks, "cpu", "float32")
    trainer = Trainer(config, model, ranks)
    for step in range(2):
        assert trainer.train(step, groups, lambda: None).trained
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return {name: weight.full_tensor() if isinstance(weight, DTensor) else weight for name, weight in weights.items()}


@pytest.mark.stream
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    """With a divided reference, and advantages that compare rollouts on different ranks."""
    make_model().save_pretrained(tmp_path / "start")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.test_reference", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for estimator in ESTIMATORS:
        one, two = steps_on(Ranks(), tmp_path / "start", estimator), torch.load(tmp_path / f"{estimator}.pt")
        for name, weight in one.items():
            torch.testing.assert_close(two[name], weight, atol=1e-5, rtol=0)


def as_a_rank(folder: Path) -> None:
    torch.set_num_threads(1)
    with join_ranks("cpu") as ranks:
        for estimator in ESTIMATORS:
            weights = steps_on(ranks, folder / "start", estimator)
            if ranks.first:
                torch.save(weights, folder / f"{estimator}.pt")


if __name__ == "__main__":
    as_a_rank(Path(sys.argv[1]))
