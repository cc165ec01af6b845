"""Canaries tell right weights from wrong ones, whoever computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gvm_stream.canary import LENGTH, canary_logprobs, canary_tokens
from gvm_stream.learner.batch import Row, pack
from gvm_stream.learner.canary import canary_of
from gvm_stream.learner.distributed import Ranks, gather_weights, weights_of
from gvm_stream.learner.model import checkpoint_layers, response_logprobs
from gvm_stream.learner.publish import publish
from gvm_stream.producers.causal_lm import copy_weights, load_causal_lm
from gvm_stream.wire.messages import Canary
from tests.tiny_models import FAMILIES, VOCABULARY, save_tiny_model, tiny_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def logprobs_of(canary: Canary) -> Tensor:
    return torch.from_numpy(np.frombuffer(canary.logprobs, "<f4").copy())


@given(st.integers(1, 300_000))
def test_tokens_are_always_the_same_and_far_from_the_ends_of_the_vocabulary(vocab_size: int) -> None:
    tokens = canary_tokens(vocab_size)
    assert tokens.shape == (LENGTH,)
    assert torch.equal(tokens, canary_tokens(vocab_size))
    assert vocab_size // 4 <= tokens.min()
    assert tokens.max() < vocab_size - vocab_size // 4


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_the_log_probs_that_the_learner_trains_on(family: str) -> None:
    model = tiny_model(family, seed=1).train(False)
    tokens = canary_tokens(VOCABULARY)
    row = Row(0, 0, 1, tokens.numpy().astype(np.int32), np.zeros(LENGTH - 1, np.float32), 1.0, 1.0)
    (batch,) = pack([row], LENGTH)
    trained_on = response_logprobs(model, batch, temperature=1.0)[0]
    torch.testing.assert_close(canary_logprobs(model, tokens), trained_on, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_that_loads_the_published_weights_finds_them(tmp_path: Path, family: str, dtype: str) -> None:
    """The masters are float32 either way; what counts is what was written."""
    learner = tiny_model(family, seed=1).train(False)
    weights = weights_of(learner, dtype)
    canary = canary_of(learner, weights)
    info = publish(gather_weights(weights, Ranks()), tmp_path, 1, "", canary, keep=1)
    base = save_tiny_model(tmp_path / "base", family, seed=2)
    engine = load_causal_lm(str(base), dtype=DTYPES[dtype], device=torch.device("cpu"), max_length=LENGTH)
    tokens = torch.from_numpy(np.frombuffer(canary.tokens, "<i4").astype(np.int64))
    assert (canary_logprobs(engine, tokens) - logprobs_of(canary)).abs().max() > 0.5
    copy_weights(engine, Path(info.path))
    torch.testing.assert_close(canary_logprobs(engine, tokens), logprobs_of(canary), atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_wrong_weight_shows(family: str) -> None:
    model = tiny_model(family, seed=1).train(False)
    weights = weights_of(model)
    right = logprobs_of(canary_of(model, weights))
    for name, weight in weights.items():
        wrong = {**weights, name: weight + 0.1 * torch.randn_like(weight)}
        assert (logprobs_of(canary_of(model, wrong)) - right).abs().max() > 1e-3, name


def test_computing_them_leaves_the_training_as_it_was() -> None:
    """Without gradients or random numbers, also where layers are computed again in the backward pass."""
    model = tiny_model("qwen2", seed=1).train(False)
    plain = canary_of(model, weights_of(model, "bfloat16"))
    checkpoint_layers(model)
    before, random = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    assert canary_of(model, weights_of(model, "bfloat16")) == plain
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
