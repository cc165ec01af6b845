from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gvm_stream.config import LearnerSection
from gvm_stream.learner.optimizer import clip_gradient, learning_rate, make_optimizer
from tests.tiny_models import FAMILIES, tiny_model


def rates(learner: LearnerSection, steps: int) -> list[float]:
    return [learning_rate(learner, step, steps) for step in range(steps)]


def test_warm_up_is_linear_and_ends_at_the_full_rate() -> None:
    learner = LearnerSection(lr=1e-4, warmup_steps=4)
    assert rates(learner, 6) == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4, 1e-4])
    assert rates(LearnerSection(lr=1e-4), 2) == [1e-4, 1e-4]


def test_a_cosine_falls_from_the_full_rate_to_nothing_after_the_last_step() -> None:
    learner = LearnerSection(lr=2e-4, warmup_steps=2, schedule="cosine")
    found = rates(learner, 10)
    assert found[:3] == pytest.approx([1e-4, 2e-4, 2e-4])
    assert found[6] == pytest.approx(1e-4)  # half way
    assert found[2:] == sorted(found[2:], reverse=True)
    assert 0 < found[-1] < 1e-5
    assert learning_rate(learner, 10, 10) == learning_rate(learner, 11, 10) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_biases_and_embeddings_do_not_decay(family: str) -> None:
    model = tiny_model(family, seed=0)
    optimizer = make_optimizer(model, LearnerSection(weight_decay=0.1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decaying, others = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decaying | others == set(names.values())
    assert not decaying & others
    for name in names.values():
        layer = any(word in name for word in ("proj.weight", "c_attn.weight", "c_fc.weight"))
        head = name == "lm_head.weight"  # not named where it is the embedding
        assert (name in decaying) == (layer or head), name


def test_weight_decay_does_not_touch_what_does_not_decay() -> None:
    model = nn.ModuleList([nn.Embedding(3, 2), nn.Linear(2, 2), nn.LayerNorm(2)])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, LearnerSection(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (0.95 if name == "1.weight" else 1.0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0)


def test_prepared_moments_are_those_that_torch_makes() -> None:
    """Steps are equal, bit for bit, to those of an optimiser that was left to make its own."""
    parameters = []
    for prepared in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False)
        learner = LearnerSection(lr=0.1)
        optimizer = make_optimizer(model, learner)
        if not prepared:
            optimizer.state.clear()
        for _ in range(3):
            model.weight.grad = model.weight.detach() ** 3
            optimizer.step()
        parameters.append(model.weight)
    assert torch.equal(*parameters)


def test_the_norm_is_that_before_clipping() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])  # the last has none
    assert clip_gradient(parameters, 10.0) == pytest.approx(7.0)
    assert parameters[0].grad.tolist() == [2.0, 3.0]
    assert clip_gradient(iter(parameters), 0.7) == pytest.approx(7.0)
    assert parameters[0].grad.tolist() == pytest.approx([0.2, 0.3], rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_no_number_clips_nothing(bad: float) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, bad])
    assert not math.isfinite(clip_gradient([parameter], 0.5))
    assert parameter.grad[0] == 1.0
