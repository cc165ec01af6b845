from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gvm_stream.config import LearnerSection
from gvm_stream.learner.losses import LOSSES, MAX_LOG_RATIO, Loss, PolicyGradient, PpoClip, Responses

NAMES = sorted(LOSSES.classes)


def responses(
    logprobs: list[list[float]],
    sampled: list[list[float]],
    advantages: list[float],
    peers: list[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Responses, Tensor]:
    """Responses of unequal lengths, padded; and the leaf that their log-probs are."""
    mask = torch.tensor([[t < len(row) for t in range(max(map(len, logprobs)))] for row in logprobs])

    def pad(rows: list[list[float]]) -> Tensor:
        return torch.tensor([row + [0.0] * (mask.shape[1] - len(row)) for row in rows], dtype=dtype)

    leaf = pad(logprobs).requires_grad_()
    column = torch.tensor([advantages, peers or [0.0] * len(advantages)], dtype=dtype)[:, :, None]
    return Responses.of(leaf, pad(sampled), mask, column[0], column[1]), leaf


def evaluate(loss: Loss, logprobs: list[float], sampled: list[float], advantages: list[float]) -> tuple[Tensor, Tensor]:
    """(term, its derivative by the token's own log-prob) of one-token responses."""
    r, leaf = responses([[x] for x in logprobs], [[x] for x in sampled], advantages)
    terms = loss.terms(r)
    (gradient,) = torch.autograd.grad(terms.sum(), leaf)
    return terms.detach()[:, 0], gradient[:, 0]


# What each loss says, written out for one response: log-probs [T] now and at sampling, its advantage, the mean
# log-ratio of its peers -> the sum of its token terms.
Reference = Callable[[Tensor, Tensor, float, float], Tensor]


def sequence(form: Callable[[Tensor], Tensor], low: float, high: float) -> Reference:
    def reference(now: Tensor, old: Tensor, a: float, peers: float) -> Tensor:
        s = form((now - old).exp())
        return -len(now) * torch.min(s * a, torch.clip(s, 1 - low, 1 + high) * a)

    return reference


def by_token(term: Callable[[Tensor, Tensor, float], Tensor]) -> Reference:
    """From the log-prob and the ratio of one token."""

    def reference(now: Tensor, old: Tensor, a: float, peers: float) -> Tensor:
        return torch.stack([term(x, (x - y).exp(), a) for x, y in zip(now, old, strict=True)]).sum()

    return reference


def ppo(x: Tensor, ratio: Tensor, a: float) -> Tensor:
    clipped = torch.min(ratio * a, torch.clip(ratio, 0.8, 1.28) * a)
    return -torch.max(clipped, torch.tensor(3.0 * a, dtype=x.dtype)) if a < 0 else -clipped


def sequence_weight(now: Tensor, old: Tensor, a: float, peers: float) -> Tensor:
    weight = min(math.exp((now - old).sum().item()), 1.5)
    return -weight * a * now.sum()


def gvpo(now: Tensor, old: Tensor, a: float, peers: float) -> Tensor:
    return (0.1 * ((now - old).sum() - peers) - a) ** 2 / 2


REFERENCES: list[tuple[str, dict[str, Any], Reference]] = [
    ("pg", {}, by_token(lambda x, ratio, a: -min(ratio.item(), 2.0) * a * x)),
    ("pg", {"weights": "none"}, by_token(lambda x, ratio, a: -a * x)),
    ("pg", {"weights": "sequence", "cap": 1.5}, sequence_weight),
    ("pg", {"weights": "mask"}, by_token(lambda x, ratio, a: -(ratio.item() if 0.5 <= ratio <= 5 else 0.0) * a * x)),
    ("ppo_clip", {}, by_token(ppo)),
    ("cispo", {}, by_token(lambda x, ratio, a: -min(ratio.item(), 5.0) * a * x)),
    ("gspo", {}, sequence(lambda ratio: ratio.prod() ** (1 / len(ratio)), 3e-4, 4e-4)),
    ("gspo", {"low": 0.5, "high": 0.9}, sequence(lambda ratio: ratio.prod() ** (1 / len(ratio)), 0.5, 0.9)),
    ("holder", {}, sequence(lambda ratio: ratio.mean(), 0.2, 0.2)),
    ("holder", {"power": 2}, sequence(lambda ratio: (ratio**2).mean() ** 0.5, 0.2, 0.2)),
    ("holder", {"power": -1, "low": 0.9, "high": 9}, sequence(lambda ratio: 1 / (1 / ratio).mean(), 0.9, 9.0)),
    ("gvpo", {}, gvpo),
    ("delightful", {}, by_token(lambda x, ratio, a: -a * x / (1 + math.exp(a * x.item())))),
    ("r2vpo", {"penalty": 0.7}, by_token(lambda x, ratio, a: -ratio * a + 0.7 * (ratio - 1) ** 2)),
]

tokens = st.tuples(st.floats(-4, -0.01), st.floats(-1.5, 1.5))
batches = st.lists(
    st.tuples(st.lists(tokens, min_size=1, max_size=6), st.floats(-2, 2), st.floats(-1, 1)), min_size=1, max_size=4
)


def test_every_loss_has_a_reference_and_is_named_in_the_configuration() -> None:
    assert sorted({name for name, _, _ in REFERENCES}) == NAMES
    description = str(LearnerSection.__annotations__["loss"])
    assert [name for name in NAMES if f"{name}," not in description and f"{name} (" not in description] == []


@pytest.mark.parametrize(("name", "options", "reference"), REFERENCES)
@given(batch=batches)
@settings(max_examples=50, deadline=None)  # the first call warms torch up
def test_losses_and_gradients_equal_the_written_out_formula_on_ragged_responses(
    name: str,
    options: dict[str, Any],
    reference: Reference,
    batch: list[tuple[list[tuple[float, float]], float, float]],
) -> None:
    now = [[x for x, _ in row] for row, _, _ in batch]
    old = [[x - ratio for x, ratio in row] for row, _, _ in batch]
    r, leaf = responses(now, old, [a for _, a, _ in batch], [peers for _, _, peers in batch])
    terms = LOSSES.make(name, options).terms(r).expand(r.mask.shape)
    (gradient,) = torch.autograd.grad(terms[r.mask].sum(), leaf)

    for i, (row, a, peers) in enumerate(batch):
        alone = torch.tensor(now[i], dtype=torch.float64, requires_grad=True)
        expected = reference(alone, torch.tensor(old[i], dtype=torch.float64), a, peers)
        (by_token,) = torch.autograd.grad(expected, alone)
        torch.testing.assert_close(terms[i, : len(row)].sum(), expected)
        torch.testing.assert_close(gradient[i, : len(row)], by_token)


@pytest.mark.parametrize("name", NAMES)
def test_at_the_sampling_policy_losses_have_the_policy_gradient(name: str) -> None:
    """Summed over the tokens of a response; sequence ratios are means over T tokens, whose gradient is a T-th each."""
    logprobs = [[-1.0, -2.0, -0.5], [-3.0]]
    r, leaf = responses(logprobs, logprobs, [0.5, -1.0])
    terms = LOSSES.make(name, {}).terms(r).expand(r.mask.shape)
    (gradient,) = torch.autograd.grad(terms[r.mask].sum(), leaf)
    expected = -r.advantages.expand(r.mask.shape)
    if name == "gvpo":
        expected = 0.1 * expected
    if name == "delightful":
        expected = expected * (expected * leaf.detach()).sigmoid()
    torch.testing.assert_close(gradient[r.mask], expected[r.mask])


def test_policy_gradient_weighs_tokens_by_the_truncated_ratio() -> None:
    losses, gradient = evaluate(PolicyGradient(cap=1.2), [-1, -2, -3], [-1.5, -2, -2], [2, 2, -1])
    weights = [1.2, 1.0, math.exp(-1)]  # the first ratio, exp(0.5), is over the cap
    np.testing.assert_allclose(losses, [-weights[0] * 2 * -1, -weights[1] * 2 * -2, -weights[2] * -1 * -3])
    np.testing.assert_allclose(gradient, [-weights[0] * 2, -weights[1] * 2, weights[2]])


def test_masked_weights_leave_out_tokens_far_from_the_sampling_policy() -> None:
    ratios = [0.4, 0.6, 4.0, 6.0]
    _, gradient = evaluate(PolicyGradient(weights="mask"), np.log(ratios).tolist(), [0.0] * 4, [-1.0] * 4)
    np.testing.assert_allclose(gradient, [0, 0.6, 4.0, 0])


def test_sequence_weights_are_those_of_whole_responses() -> None:
    r, leaf = responses([[-1.0, -1.0], [-1.0, -1.0]], [[-1.5, -1.2], [-0.8, -0.5]], [1.0, 1.0])
    (gradient,) = torch.autograd.grad(PolicyGradient(weights="sequence").terms(r).sum(), leaf)
    np.testing.assert_allclose(gradient, [[-2.0] * 2, [-math.exp(-0.7)] * 2])  # exp(0.7) > 2


def test_clipped_ratio_stops_rewarding_beyond_the_clip_and_only_there() -> None:
    ratios = np.array([1.1, 1.5, 0.5, 1.1, 1.5, 0.5, 3.5])
    advantages = [2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0]
    losses, gradient = evaluate(PpoClip(low=0.2, high=0.28, dual=3), np.log(ratios).tolist(), [0.0] * 7, advantages)
    np.testing.assert_allclose(losses, [-2.2, -2.56, -1.0, 2.2, 3.0, 1.6, 6.0])
    np.testing.assert_allclose(gradient, [-2.2, 0, -1.0, 2.2, 3.0, 0, 0], atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    for advantage in (-1.0, 0.0, 1.0):
        # float32, in which exp(90) is infinite
        r, leaf = responses([[-0.1, -95.0], [-1.0]], [[-90.1, -0.1], [-1.0]], [advantage] * 2, dtype=torch.float32)
        terms = LOSSES.make(name, {}).terms(r)
        (gradient,) = torch.autograd.grad(terms.expand(r.mask.shape)[r.mask].sum(), leaf)
        assert torch.isfinite(terms).all()
        assert torch.isfinite(gradient).all()
        assert r.ratio.max() <= math.exp(MAX_LOG_RATIO) * 1.0001


@pytest.mark.parametrize(("name", "options", "reference"), REFERENCES)
def test_a_log_prob_that_is_not_a_number_is_not_clamped_away(
    name: str, options: dict[str, Any], reference: Reference
) -> None:
    losses, _ = evaluate(LOSSES.make(name, options), [math.nan], [-1.0], [1.0])
    assert losses.isnan().all()
