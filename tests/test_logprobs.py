from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gvm_stream.errors import ModelError
from gvm_stream.learner import logprobs as module
from gvm_stream.learner.batch import Row, pack
from gvm_stream.learner.logprobs import token_energies, token_logprobs
from gvm_stream.learner.model import checkpoint_layers, load_model, response_logprobs
from tests.tiny_models import FAMILIES, VOCABULARY, random_prompts, save_tiny_model, tiny_model


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def by_softmax(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return logprobs.gather(1, tokens[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@settings(deadline=None)
@given(
    count=st.integers(1, 12),
    vocabulary=st.integers(2, 20),
    per_chunk=st.integers(1, 13),
    temperature=st.floats(0.3, 3),
    use=st.sampled_from(["log-probs", "entropies", "both"]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_a_softmax_whatever_the_chunks(
    count: int, vocabulary: int, per_chunk: int, temperature: float, use: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 5, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 5, generator=generator).requires_grad_()
    tokens = torch.randint(vocabulary, (count,), generator=generator)
    of_logprobs, of_entropies = torch.randn(2, count, generator=generator)
    of_logprobs *= use != "entropies"
    of_entropies *= use != "log-probs"

    def gradients(logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, ...]:
        used = [p for p in ((logprobs, of_logprobs), (entropies, of_entropies)) if p[1].any()]
        return torch.autograd.grad(sum((values * by).sum() for values, by in used), (hidden, weight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", per_chunk * vocabulary)
        found = token_logprobs(hidden, weight, tokens, temperature)
    exact = by_softmax(hidden.double(), weight.double(), tokens, temperature)
    for values, expected in zip((*found, *gradients(*found)), (*exact, *gradients(*exact)), strict=True):
        torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-4, check_dtype=False)


@pytest.mark.parametrize("per_chunk", [1, 4, 100])
def test_energies_of_tokens_are_those_of_the_gradient_in_the_logits(
    per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    hidden, weight, tokens = torch.randn(11, 4), torch.randn(9, 4), torch.arange(11) % 9
    monkeypatch.setattr(module, "CHUNK", per_chunk * 9)
    found = token_energies(hidden, weight, tokens, 0.7)
    logits = (hidden @ weight.T).double().requires_grad_()
    logprobs = torch.log_softmax(logits / 0.7, -1).gather(1, tokens[:, None]).sum()
    (gradient,) = torch.autograd.grad(logprobs, logits)
    torch.testing.assert_close(found, gradient.square().sum(1).float())


def test_no_tensor_that_is_made_or_kept_holds_more_logits_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 3 * 50)
    hidden, weight = torch.randn(11, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        token_logprobs(hidden, weight, torch.arange(11), 1.0)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert largest.numel == weight.numel() == 200


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of the largest result of any operation while it is entered."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_under_autocast_products_are_in_bfloat16_and_sums_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    tokens = torch.arange(40)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = token_logprobs(hidden, weight, tokens, 1.0)
    exact, _ = by_softmax(hidden, weight, tokens, 1.0)
    assert found.dtype == torch.float32
    assert 1e-5 < (found - exact).abs().max() < 0.1
    found_gradients = torch.autograd.grad(found.sum(), (hidden, weight))
    for gradient, expected in zip(found_gradients, torch.autograd.grad(exact.sum(), (hidden, weight)), strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - expected).norm() < 0.02 * expected.norm()


def make_rows() -> list[Row]:
    """Prompts and responses of 1 to 20 tokens; log-probs at sampling do not matter here."""
    prompts, responses = random_prompts(8, seed=1), random_prompts(8, seed=2)
    return [
        Row(0, i, prompt.size, np.concatenate([prompt, response]), np.zeros(response.size, np.float32), 1.0, 1.0)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]


def gradient_and_logprobs(model: PreTrainedModel, rows: list[Row], most: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Of the sum of squared log-probs; log-probs by row."""
    found: list[Tensor] = []
    for batch in pack(rows, most):
        logprobs = response_logprobs(model, batch, 0.7)
        logprobs.square().sum().backward()  # type: ignore[no-untyped-call]
        found += logprobs.detach()
    by_length = sorted(rows, key=lambda row: row.tokens.size, reverse=True)
    each = {row.work: values[: row.logprobs.size] for row, values in zip(by_length, found, strict=True)}
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return gradient, each


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_each_response_alone(family: str) -> None:
    model = tiny_model(family, seed=0)
    model.train(False)
    rows = make_rows()
    alone, each = gradient_and_logprobs(model, rows, 1)
    together, packed = gradient_and_logprobs(model, rows, 200)
    for row in rows:
        ids = torch.from_numpy(row.tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, row.prompt_length - 1 : -1]
        expected = torch.log_softmax(logits / 0.7, -1).gather(1, ids[row.prompt_length :, None])[:, 0]
        torch.testing.assert_close(each[row.work], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(packed[row.work], expected, atol=1e-5, rtol=0)
    assert (together - alone).norm() < 1e-5 * alone.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_layers_give_the_same_gradient_from_fewer_activations(family: str) -> None:
    results = []
    for checkpointed in (False, True):
        model = tiny_model(family, seed=0)
        model.train(False)
        if checkpointed:
            checkpoint_layers(model)
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            gradient, _ = gradient_and_logprobs(model, make_rows(), 10_000)
        results.append((gradient, sum(tensor.numel() for tensor in kept.values())))
    (plain, plain_kept), (checkpointed_gradient, checkpointed_kept) = results
    torch.testing.assert_close(checkpointed_gradient, plain, atol=1e-5, rtol=1e-5)
    assert checkpointed_kept < plain_kept / 2


def test_dropout_stays_off_in_checkpointed_layers(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path, "gpt2")), "float32", "cpu", gradient_checkpointing=True)
    assert model.config.resid_pdrop == 0.1
    first, second = (gradient_and_logprobs(model, make_rows(), 200)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_checkpointing_a_model_without_layers_for_it_is_an_error() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=0))
    with pytest.raises(ModelError, match=r"learner\.gradient_checkpointing is of no use to LlamaForCausalLM"):
        checkpoint_layers(model)


def test_a_model_that_changes_its_logits_is_refused(tmp_path: Path) -> None:
    GraniteForCausalLM(
        GraniteConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            logits_scaling=8.0,
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"GraniteForCausalLM.* changes its logits after the lm_head"):
        load_model(str(tmp_path), "float32", "cpu")
