from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gvm_stream.allocator.coefficients import rloo
from gvm_stream.config import AllocationSection, Config, DataSection, LearnerSection, ModelSection, SamplingSection
from gvm_stream.learner.advantages import ADVANTAGES, Group, Measured
from gvm_stream.learner.batch import Row, pack
from gvm_stream.learner.model import response_logprobs
from gvm_stream.learner.trainer import StepResult, Trainer
from gvm_stream.wire.messages import TrainGroup, TrainRollout

PROMPT = [1, 2, 3]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = LlamaConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(shape)
    model.train(False)
    return model


def make_config(learner: LearnerSection, max_lag: int = 1, temperature: float = 1.0, dtype: str = "float32") -> Config:
    return Config(
        model=ModelSection(path="-", dtype="bfloat16" if dtype == "bfloat16" else "float32"),
        data=DataSection(train="-"),
        allocation=AllocationSection(max_lag=max_lag),
        sampling=SamplingSection(temperature=temperature),
        learner=learner,
    )


def score(model: LlamaForCausalLM, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probs of a response after PROMPT: one row, no padding, all logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def rollout(
    model: LlamaForCausalLM, work: int, tokens: list[int], reward: float, lag: int = 0, off_by: float = 0.0
) -> TrainRollout:
    logprobs = score(model, tokens).numpy() + np.float32(off_by)
    return TrainRollout(
        work=work,
        reward=reward,
        tokens=np.array(tokens, "<i4").tobytes(),
        logprobs=logprobs.astype("<f4").tobytes(),
        spans=((0, 0, len(tokens)),),
        truncated=False,
        lag=lag,
        coefficient=0.0,
    )


def group(number: int, *rollouts: TrainRollout) -> TrainGroup:
    """As the allocator makes them of a planned visit."""
    coefficients = rloo(np.array([r.reward for r in rollouts])).tolist()
    return TrainGroup(
        group=number,
        prompt=f"train-{number}",
        prompt_tokens=np.array(PROMPT, "<i4").tobytes(),
        weight=1.0,
        prior=(1.0, 1.0),
        rollouts=tuple(msgspec.structs.replace(r, coefficient=c) for r, c in zip(rollouts, coefficients, strict=True)),
    )


def good_and_bad(model: LlamaForCausalLM, number: int = 0) -> TrainGroup:
    return group(number, rollout(model, 2 * number, [4, 5], 1.0), rollout(model, 2 * number + 1, [6, 7, 8], 0.0))


def train(trainer: Trainer, *groups: TrainGroup) -> StepResult:
    return trainer.train(0, groups, lambda: None)


def bits(trainer: Trainer, model: LlamaForCausalLM) -> list[bytes]:
    state = trainer.state_dict()["optimizer"]
    moments = [value for _, entry in sorted(state.items()) for _, value in sorted(entry.items())]
    return [tensor.detach().numpy().tobytes() for tensor in [*model.parameters(), *moments]]


def first_gradient(trainer: Trainer) -> Tensor:
    """After one step the first moment is (1 - beta1) times the gradient."""
    state = trainer.state_dict()["optimizer"]
    return torch.cat([state[name]["exp_avg"].flatten() for name in sorted(state)]) / (1 - LearnerSection().betas[0])


def test_training_raises_the_probability_of_the_rewarded_response() -> None:
    model = make_model()
    good, bad = score(model, [4, 5]).sum(), score(model, [6, 7, 8]).sum()
    trainer = Trainer(make_config(LearnerSection(lr=3e-3)), model)
    for _ in range(20):
        assert train(trainer, good_and_bad(model)).trained
    assert score(model, [4, 5]).sum() > good + 1
    assert score(model, [6, 7, 8]).sum() < bad - 1


def test_padded_log_probs_equal_those_of_each_row_alone() -> None:
    model = make_model()
    responses = [[4, 5, 6, 7, 8, 9], [10], [11, 4, 11]]
    rows = [
        Row(0, w, len(PROMPT), np.array(PROMPT + r, np.int32), np.zeros(len(r), np.float32), 1.0, 1.0)
        for w, r in enumerate(responses)
    ]
    longer_prompt = replace(rows[0], prompt_length=len(PROMPT) + 2, logprobs=rows[0].logprobs[2:])
    (batch,) = pack([*rows, longer_prompt], 1000)
    found = response_logprobs(model, batch, temperature=0.7)
    expected = [score(model, r, 0.7) for r in (responses[0], responses[0], responses[2], responses[1])]
    expected[1] = expected[1][2:]
    assert found.dtype == torch.float32
    for logp, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(logp[: len(alone)], alone, atol=1e-5, rtol=0)
        assert not logp[len(alone) :].any()


@pytest.mark.parametrize(
    ("aggregate", "loss"),
    [
        ("seq_sum", "pg"),
        ("seq_mean", "ppo_clip"),
        ("token_mean", "pg"),
        ("delta_l", "cispo"),
        ("seq_mean", "gspo"),
        ("seq_sum", "gvpo"),
    ],
)
def test_the_gradient_does_not_depend_on_the_micro_batch_split(aggregate: str, loss: str) -> None:
    gradients = []
    for micro_batch_tokens in (1, 2 * 4, 4 * 4, 10_000):
        model = make_model()
        long = [4 + i % 8 for i in range(97)]
        groups = [
            group(1, rollout(model, 1, [4], 1.0, off_by=0.2), rollout(model, 2, long, 0.0)),
            group(2, rollout(model, 3, [5], 1.0), rollout(model, 4, [6], 0.0)),
            group(3, rollout(model, 5, [7, 8], 1.0), rollout(model, 6, [9], 1.0)),
        ]
        settings = msgspec.convert(
            {"aggregate": aggregate, "loss": loss, "micro_batch_tokens": micro_batch_tokens, "max_grad_norm": 1e9},
            LearnerSection,
        )
        trainer = Trainer(make_config(settings), model)
        assert train(trainer, *groups).trained
        gradients.append(first_gradient(trainer))
    assert gradients[0].abs().max() > 1e-3
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("loss", ["gvpo", "r2vpo"])
def test_losses_that_hold_the_policy_pull_on_groups_without_signal(loss: str) -> None:
    gradients = []
    for off_by in (0.0, -0.5):
        model = make_model()
        silent = group(2, rollout(model, 3, [9], 1.0, off_by=off_by), rollout(model, 4, [10, 11], 1.0))
        trainer = Trainer(make_config(LearnerSection(loss=loss)), model)
        assert train(trainer, good_and_bad(model), silent).fates["trained"] == (0, 1, 3, 4)
        gradients.append(first_gradient(trainer))
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


def test_gvpo_compares_each_rollout_with_the_others_of_its_prompt() -> None:
    """A shift of all log-ratios of a group moves nothing, as the partition function of its objective cancels."""
    gradients = []
    for shift in (0.0, 0.7):
        model = make_model()
        even = [rollout(model, 1, [4, 5], 1.0, off_by=shift / 2), rollout(model, 2, [6], 0.0, off_by=shift)]
        trainer = Trainer(make_config(LearnerSection(loss="gvpo", micro_batch_tokens=1, max_grad_norm=1e9)), model)
        assert train(trainer, group(1, *even)).trained
        gradients.append(first_gradient(trainer))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("advantage", ["opob", "otb"])
def test_baselines_weighted_by_energy_are_those_of_the_policy_as_it_is(advantage: str) -> None:
    """Advantages from the logits of each response alone, then the gradient of `pg`, written out."""
    responses = {1: ([4, 5], 1.0, -0.3), 2: ([6, 7, 8, 9], 0.0, 0.2), 3: ([10], 0.5, 0.1), 4: ([11, 5, 4], 0.0, 0.0)}
    model = make_model()
    members, logprobs = [], []
    for work, (tokens, reward, off_by) in responses.items():
        members.append(rollout(model, work, tokens, reward, off_by=off_by))
        logits = model(input_ids=torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        full = torch.log_softmax(logits, -1)
        chosen = full.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        (slope,) = torch.autograd.grad(chosen.sum(), model.lm_head.weight, retain_graph=True)
        by_token = (torch.eye(12)[tokens] - full.exp()).square().sum(-1)
        logprobs.append((chosen, slope.square().sum().item(), by_token.tolist()))
    measured = Measured(
        log_ratios=[np.full(len(tokens), -off_by) for tokens, _, off_by in responses.values()],
        energies=[np.array(by_token if advantage == "otb" else [whole]) for _, whole, by_token in logprobs],
    )
    n, rewards = 4, np.array([reward for _, reward, _ in responses.values()])
    lengths = np.array([len(tokens) for tokens, _, _ in responses.values()], float)
    compared = Group(rewards, lengths, np.zeros(n), n, (1.0, 1.0))
    loss = torch.zeros(())
    found = ADVANTAGES.make(advantage, {}).of_measured(compared, measured)
    for (chosen, _, _), (_, _, off_by), a in zip(logprobs, responses.values(), found, strict=True):
        loss = loss - (math.exp(-off_by) * torch.from_numpy(a).float() * chosen).sum() / n / 2
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, [named[name] for name in sorted(named)])
    expected = torch.cat([gradient.flatten() for gradient in gradients])

    silent = group(2, rollout(model, 5, [4, 4, 4, 4, 4, 4], 1.0), rollout(model, 6, [5], 1.0))
    for settings in ({"micro_batch_tokens": 1}, {"micro_batch_tokens": 10_000}, {"measure_every": 1}):
        learner = msgspec.convert({"advantage": advantage, "max_grad_norm": 1e9, **settings}, LearnerSection)
        trainer = Trainer(make_config(learner), make_model())
        result = train(trainer, group(1, *members), silent)
        assert result.fates == {"trained": (1, 2, 3, 4), "zero_signal": (5, 6), "stale": ()}
        assert (first_gradient(trainer) - expected).norm() < 1e-4 * expected.norm()


def test_token_advantages_go_with_rows_that_have_none(tmp_path: Path) -> None:
    """The longest response of the batch is of a group without signal, trained on for a KL penalty of nothing."""
    norms = []
    for kl_coefficient in (0.0, 1e-12):
        model = make_model()
        model.save_pretrained(tmp_path)
        silent = group(2, rollout(model, 5, [4] * 9, 1.0), rollout(model, 6, [5], 1.0))
        config = make_config(LearnerSection(advantage="otb", kl_coefficient=kl_coefficient))
        config = msgspec.structs.replace(config, model=ModelSection(path=str(tmp_path)))
        norms.append(train(Trainer(config, model), good_and_bad(model), silent).stats.grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_groups_without_signal_keep_the_other_prompts_weight() -> None:
    norms = []
    for silent in (0, 3):
        model = make_model()
        groups = [group(9, rollout(model, 90, [4], 0.0), rollout(model, 91, [5], 0.0))] * silent
        norms.append(train(Trainer(make_config(LearnerSection()), model), good_and_bad(model), *groups).stats.grad_norm)
    assert norms[1] == pytest.approx(norms[0] / 4, rel=1e-5)


def test_a_batch_without_signal_leaves_everything_as_it_was() -> None:
    model = make_model()
    trainer = Trainer(make_config(LearnerSection(lr=0.1, weight_decay=0.1, warmup_steps=5)), model)
    assert train(trainer, good_and_bad(model)).trained
    before = bits(trainer, model)
    result = train(trainer, group(1, rollout(model, 1, [4], 1.0), rollout(model, 2, [5], 1.0)))
    assert not result.trained
    assert result.reason == "no usable token: of 2 rollouts 0 are stale and 2 give no signal (group 1)"
    assert result.cause == "no_signal"
    assert result.fates == {"trained": (), "zero_signal": (1, 2), "stale": ()}
    assert result.stats.zero_signal_groups == 1
    assert bits(trainer, model) == before
    assert (trainer.trained_steps, trainer.skipped_in_a_row) == (1, 1)
    assert not train(trainer).trained
    assert trainer.skipped_in_a_row == 2
    assert train(trainer, good_and_bad(model)).trained
    assert trainer.skipped_in_a_row == 0


def test_stale_rollouts_are_left_out_and_reported() -> None:
    model = make_model()
    fresh = good_and_bad(model)
    stale = rollout(model, 7, [9], 1.0, lag=3)
    config = make_config(LearnerSection(advantage="rloo"), max_lag=2)
    result = train(Trainer(config, model), group(0, *fresh.rollouts, stale))
    assert result.fates == {"trained": (0, 1), "zero_signal": (), "stale": (7,)}
    assert (result.stats.max_lag, result.stats.mean_lag) == (3, 1.0)
    assert result.stats.reward_mean == pytest.approx(2 / 3)
    alone = train(Trainer(config, make_model()), fresh)
    assert result.stats.grad_norm == alone.stats.grad_norm


def test_a_loss_that_is_not_a_number_skips_the_step_and_names_the_group() -> None:
    model = make_model()
    healthy = good_and_bad(model, 0)
    poisoned = msgspec.structs.replace(good_and_bad(model, 31), prompt_tokens=np.array([1, 11], "<i4").tobytes())
    with torch.no_grad():
        model.model.embed_tokens.weight[11] = math.nan
    trainer = Trainer(make_config(LearnerSection(micro_batch_tokens=1)), model)
    before = bits(trainer, model)
    result = train(trainer, healthy, poisoned)
    assert not result.trained
    assert result.reason == "the loss is nan because of group 31"
    assert result.cause == "not_finite"
    assert result.fates == {"trained": (), "zero_signal": (0, 1, 62, 63), "stale": ()}
    assert bits(trainer, model) == before
    assert train(trainer, healthy).trained  # nothing of the bad step is left in the gradients


def test_a_gradient_norm_that_is_not_finite_skips_the_step() -> None:
    model = make_model()
    batch = good_and_bad(model, 4)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e24)
    trainer = Trainer(make_config(LearnerSection(loss_options={"weights": "none"}, max_logprob_mismatch=1e30)), model)
    before = bits(trainer, model)
    result = train(trainer, batch)
    assert math.isfinite(result.stats.loss)
    assert result.reason == "the gradient norm is inf over group 4"
    assert result.cause == "not_finite"
    assert bits(trainer, model) == before


def test_the_gradient_norm_is_reported_as_it_was_before_clipping() -> None:
    results = []
    for limit in (1e9, 1e-3):
        model = make_model()
        trainer = Trainer(make_config(LearnerSection(max_grad_norm=limit)), model)
        results.append((train(trainer, good_and_bad(model)).stats.grad_norm, float(first_gradient(trainer).norm())))
    (norm, applied), (norm_clipped, applied_clipped) = results
    assert norm == norm_clipped == pytest.approx(applied, rel=1e-5)
    assert applied_clipped == pytest.approx(1e-3, rel=1e-3)


def test_warm_up_counts_trained_steps_only() -> None:
    model = make_model()
    trainer = Trainer(make_config(LearnerSection(lr=1.0e-4, warmup_steps=4)), model)
    silent = group(1, rollout(model, 1, [4], 1.0), rollout(model, 2, [5], 1.0))
    sizes = []
    for batch in (good_and_bad(model), silent, *[good_and_bad(model)] * 3):
        before = model.lm_head.weight.detach().clone()
        train(trainer, batch)
        sizes.append(float((model.lm_head.weight.detach() - before).abs().max()))
    # Steps of AdamW with one gradient over and over are as large as the learning rate.
    assert sizes == pytest.approx([0.25e-4, 0.0, 0.5e-4, 0.75e-4, 1e-4], rel=0.02)


def test_accumulated_steps_are_those_of_the_whole_batch() -> None:
    """Ragged groups, several updates: parameters after them do not depend on how the batch was cut."""
    weights = []
    for micro_batch_tokens in (1, 30, 10_000):
        model = make_model()
        settings = LearnerSection(lr=1e-3, aggregate="seq_mean", micro_batch_tokens=micro_batch_tokens)
        trainer = Trainer(make_config(settings), model)
        for step in range(4):
            long = [4 + (i + step) % 8 for i in range(21)]
            ragged = group(
                1, rollout(model, 1, long, 1.0), rollout(model, 2, [5], 0.0), rollout(model, 3, [6, 7, 4], 0.0)
            )
            assert train(trainer, ragged, good_and_bad(model, 2)).trained
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], atol=2e-6, rtol=0)


def test_a_step_is_scaled_by_the_effective_number_of_rollouts() -> None:
    """Importance weights 3 and 1: E = (3 + 1)^2 / (9 + 1) / 2 = 0.8."""
    sizes = []
    for ess_scaling in (0.0, 1.0, 0.5):
        model = make_model()
        lagging = group(1, rollout(model, 1, [4, 5], 1.0, off_by=-math.log(3) / 2), rollout(model, 2, [6], 0.0))
        before = model.lm_head.weight.detach().clone()
        assert train(Trainer(make_config(LearnerSection(lr=1e-4, ess_scaling=ess_scaling)), model), lagging).trained
        sizes.append(float((model.lm_head.weight.detach() - before).abs().max()))
    assert sizes == pytest.approx([1e-4, 1e-4 * math.sqrt(0.8), 1e-4], rel=1e-3)


def test_log_probs_far_from_those_at_sampling_skip_the_step_and_name_the_groups() -> None:
    model = make_model()
    trainer = Trainer(make_config(LearnerSection(max_logprob_mismatch=0.5)), model)
    before = bits(trainer, model)
    off = group(7, rollout(model, 1, [4, 5], 1.0, off_by=2.8), rollout(model, 2, [6], 0.0, off_by=-2.8))
    result = train(trainer, good_and_bad(model, 2), off)
    assert not result.trained
    assert result.reason == (
        "the log-probs are 1.05 nats from those at sampling, more than learner.max_logprob_mismatch = 0.5, because of "
        "group 7"
    )
    assert result.cause == "mismatch"
    assert result.stats.mismatch == pytest.approx(8.4 / 8, rel=1e-5)
    assert bits(trainer, model) == before
    assert train(trainer, *[good_and_bad(model, n) for n in (2, 3, 4, 5)], off).trained  # 8.4 nats over 23 tokens


def test_a_batch_whose_gradient_is_nothing_moves_nothing() -> None:
    """All tokens are clipped: momentum and weight decay alone would still move the weights."""
    model = make_model()
    trainer = Trainer(make_config(LearnerSection(lr=0.1, weight_decay=0.1, loss="ppo_clip")), model)
    assert train(trainer, good_and_bad(model)).trained
    before = bits(trainer, model)
    clipped = group(3, rollout(model, 1, [4], 1.0, off_by=-0.5), rollout(model, 2, [5], 0.0, off_by=0.5))
    result = train(trainer, clipped)
    assert result.reason == "the gradient norm is 0.0 over group 3"
    assert result.cause == "zero_gradient"
    assert bits(trainer, model) == before


def test_progress_is_reported_after_every_micro_batch() -> None:
    model = make_model()
    beats: list[None] = []
    trainer = Trainer(make_config(LearnerSection(micro_batch_tokens=1)), model)
    trainer.train(0, [good_and_bad(model, 0), good_and_bad(model, 1)], lambda: beats.append(None))
    assert len(beats) == 4


def test_mismatch_and_effective_sample_size_by_hand() -> None:
    model = make_model()
    shifted = group(1, rollout(model, 1, [4], 1.0, off_by=-math.log(3)), rollout(model, 2, [6], 0.0, off_by=0.0))
    stats = train(Trainer(make_config(LearnerSection()), model), shifted).stats
    assert stats.mismatch == pytest.approx(math.log(3) / 2, rel=1e-5)
    assert stats.effective_sample_size == pytest.approx((3 + 1) ** 2 / (9 + 1) / 2, rel=1e-5)
    extreme = group(1, rollout(model, 1, [4], 1.0, off_by=-90), rollout(model, 2, [6, 7], 0.0))
    trainer = Trainer(make_config(LearnerSection(max_logprob_mismatch=100.0)), make_model())
    assert train(trainer, extreme).clamped_tokens == 1


def test_bfloat16_passes_keep_float32_masters() -> None:
    model = make_model()
    config = make_config(LearnerSection(lr=1e-6), dtype="bfloat16")
    before = model.lm_head.weight.detach().clone()
    assert train(Trainer(config, model), good_and_bad(model)).trained
    change = (model.lm_head.weight - before).abs().max()
    assert model.lm_head.weight.dtype == torch.float32
    assert 0 < change < 1e-5  # below what bfloat16 weights could take up


def test_measuring_the_noise_of_the_gradient_leaves_the_gradient_alone() -> None:
    """Parts of whole groups, one of them shadow-uniform, one without signal."""
    groups = []
    gradients = []
    for measure_every in (0, 1):
        model = make_model()
        groups = [good_and_bad(model, n) for n in range(5)]
        groups[2] = msgspec.structs.replace(groups[2], shadow=True)
        groups.append(group(9, rollout(model, 30, [4], 1.0), rollout(model, 31, [5, 6], 1.0)))
        trainer = Trainer(make_config(LearnerSection(measure_every=measure_every)), model)
        result = train(trainer, *groups)
        assert result.trained
        gradients.append(first_gradient(trainer))
        if measure_every == 0:
            assert result.stats.noise is None
    noise = result.stats.noise
    assert noise is not None
    assert noise.variance > 0
    assert noise.tokens == 5 * 5 + 3
    assert noise.allocated is not None
    assert noise.shadow is not None
    torch.testing.assert_close(*gradients)


def test_the_noise_is_measured_on_every_so_many_steps_only() -> None:
    model = make_model()
    trainer = Trainer(make_config(LearnerSection(measure_every=3)), model)
    groups = [good_and_bad(model, n) for n in range(4)]
    measured = [trainer.train(step, groups, lambda: None).stats.noise is not None for step in range(5)]
    assert measured == [True, False, False, True, False]


def test_energies_are_those_of_the_gradient_in_the_lm_head() -> None:
    model = make_model()
    groups = [good_and_bad(model, n) for n in range(2)]
    expected: dict[int, float] = {}
    for response in [([4, 5], 0), ([6, 7, 8], 1)]:
        tokens, first = response
        logits = model(input_ids=torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        total = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None]).sum()
        (gradient,) = torch.autograd.grad(total, [model.lm_head.weight])
        expected |= {work: float(gradient.square().sum()) for work in (first, first + 2)}
    trainer = Trainer(make_config(LearnerSection(energies="lm_head")), model)
    assert train(trainer, *groups).energies == pytest.approx(expected, rel=1e-4)
    assert train(Trainer(make_config(LearnerSection()), model), *groups).energies == {}
