from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gvm_stream.learner import energy
from gvm_stream.learner.energy import cheaper, lm_head_energies, parameter_energies
from tests.tiny_models import FAMILIES, VOCABULARY, tiny_model

Batch = tuple[Tensor, Tensor, Tensor]


def batch(lengths: Sequence[int], vocabulary: int, width: int, seed: int = 0, scale: float = 1.0) -> Batch:
    """Hidden states, weight of the lm_head, and tokens sampled from the policy that they make."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(lengths), width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * scale / math.sqrt(width)
    tokens = torch.multinomial((hidden @ weight.T).softmax(-1), 1, generator=generator)[:, 0]
    return hidden, weight, tokens


def by_autograd(hidden: Tensor, weight: Tensor, tokens: Tensor, lengths: Sequence[int], temperature: float) -> Tensor:
    """float64 [R], one backward pass per rollout."""
    leaf = weight.double().requires_grad_()
    logprobs = (hidden.double() @ leaf.T / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    totals = torch.stack([part.sum() for part in torch.split(logprobs, list(lengths))])
    return torch.stack([torch.autograd.grad(t, leaf, retain_graph=True)[0].square().sum() for t in totals])


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    vocabulary=st.integers(2, 50),
    width=st.integers(1, 24),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    tile=st.sampled_from([16, 300, energy.TILE]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_exact_energies_equal_autograd_on_ragged_rollouts_whatever_the_tiles(
    lengths: list[int], vocabulary: int, width: int, temperature: float, tile: int, seed: int
) -> None:
    hidden, weight, tokens = batch(lengths, vocabulary, width, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy, "TILE", tile)
        found = lm_head_energies(hidden, weight, tokens, lengths, temperature=temperature, method="exact")
    expected = by_autograd(hidden, weight, tokens, lengths, temperature)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_energies_of_a_model_equal_those_of_its_own_lm_head(family: str) -> None:
    """Rollouts as rows of a forward pass; with a tied embedding, autograd is asked for the lm_head's use alone."""
    model = tiny_model(family, seed=1)
    rows = torch.randint(0, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        outputs = model(rows, output_hidden_states=True)
    weight = model.lm_head.weight.detach()
    hidden = outputs.hidden_states[-1][:, 4:-1].flatten(0, 1)
    torch.testing.assert_close(hidden @ weight.T, outputs.logits[:, 4:-1].flatten(0, 1))
    tokens, lengths = rows[:, 5:].flatten(), [15, 15, 15]
    expected = by_autograd(hidden, weight, tokens, lengths, 1.0)
    found = lm_head_energies(hidden, weight, tokens, lengths, method="exact")
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


def test_confident_rollouts_keep_their_small_energies() -> None:
    hidden, weight, _ = batch([30, 30], 64, 32, scale=12.0)
    best, tokens = (hidden @ weight.T).softmax(-1).max(-1)
    confident = best > 0.98
    hidden, tokens, lengths = hidden[confident], tokens[confident], [int(confident.sum())]
    expected = by_autograd(hidden, weight, tokens, lengths, 1.0)
    assert expected < 1e-3 * len(tokens) * 32  # of the energy that unlikely tokens would have
    found = lm_head_energies(hidden, weight, tokens, lengths, method="exact")
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


def test_sketched_energies_are_unbiased_with_the_stated_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "BUCKETS", 8)
    lengths = [3, 25]
    hidden, weight, tokens = batch(lengths, 100, 16)
    exact = lm_head_energies(hidden, weight, tokens, lengths, temperature=0.7, method="exact")
    draws = torch.stack(
        [
            lm_head_energies(hidden, weight, tokens, lengths, temperature=0.7, seed=seed, method="sketch") / exact
            for seed in range(400)
        ]
    )
    spread = draws.std(0)
    assert ((draws.mean(0) - 1).abs() < 5 * spread / math.sqrt(400)).all()
    assert (spread < math.sqrt(2 / 8)).all()
    assert (spread > 0.01).all()


def test_a_sketch_is_drawn_from_its_seed_alone_and_tiles_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [12, 1, 7]
    hidden, weight, tokens = batch(lengths, 700, 16)
    first, second = (lm_head_energies(hidden, weight, tokens, lengths, seed=s, method="sketch") for s in (1, 2))
    assert not torch.equal(first, second)
    monkeypatch.setattr(energy, "TILE", 2000)
    again = lm_head_energies(hidden, weight, tokens, lengths, seed=1, method="sketch")
    torch.testing.assert_close(again, first)


def test_a_vocabulary_within_the_buckets_is_sketched_without_error() -> None:
    hidden, weight, tokens = batch([9, 30], 128, 16)
    exact, sketched = (
        lm_head_energies(hidden, weight, tokens, [9, 30], method=method) for method in ("exact", "sketch")
    )
    torch.testing.assert_close(sketched, exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("method", ["exact", "sketch"])
def test_under_autocast_only_the_logits_are_of_low_precision(method: Literal["exact", "sketch"]) -> None:
    hidden, weight, tokens = batch([20, 20], 60, 16)
    hidden, weight = hidden.bfloat16().float(), weight.bfloat16().float()  # so that rounding them changes nothing
    with torch.autocast("cpu", torch.bfloat16):
        found = lm_head_energies(hidden, weight, tokens, [20, 20], method=method)
    rounded = lm_head_energies(hidden.bfloat16(), weight, tokens, [20, 20], method=method)
    assert torch.equal(found, rounded)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, lm_head_energies(hidden, weight, tokens, [20, 20]), rtol=0.01, atol=0)


@pytest.mark.parametrize(("lengths", "method"), [([30, 2], "exact"), ([200], "sketch")])
def test_the_cheaper_method_is_taken(lengths: list[int], method: Literal["exact", "sketch"]) -> None:
    hidden, weight, tokens = batch(lengths, 3000, 256)
    assert cheaper(lengths, 3000, 256) == method
    named = lm_head_energies(hidden, weight, tokens, lengths, method=method)
    assert torch.equal(lm_head_energies(hidden, weight, tokens, lengths), named)


def test_small_models_are_exact_and_long_responses_of_large_ones_sketched() -> None:
    assert cheaper([30, 80, 12] * 80, vocabulary=128, width=64) == "exact"
    assert cheaper([50], vocabulary=152_000, width=1536) == "exact"
    assert cheaper([50] * 10, vocabulary=152_000, width=1536) == "sketch"  # logits would be computed twice
    assert cheaper([1000], vocabulary=152_000, width=1536) == "sketch"


def test_energies_in_any_parameter_by_backward_passes() -> None:
    model = tiny_model("llama", seed=0)
    rows = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    logprobs = model(rows).logits[:, 4:-1].log_softmax(-1).gather(2, rows[:, 5:, None]).sum((1, 2))
    parameters = [model.model.embed_tokens.weight, model.lm_head.weight]
    both = parameter_energies(logprobs, parameters)
    apart = [parameter_energies(logprobs, [p]) for p in parameters]
    torch.testing.assert_close(both, apart[0] + apart[1])

    with torch.no_grad():
        hidden = model(rows, output_hidden_states=True).hidden_states[-1][:, 4:-1].flatten(0, 1)
    head = lm_head_energies(hidden, parameters[1].detach(), rows[:, 5:].flatten(), [7, 7])
    torch.testing.assert_close(apart[1], head, rtol=1e-4, atol=0)
