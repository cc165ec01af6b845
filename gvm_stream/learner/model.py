"""The causal LM in the learner: loading it, and the log-probs of responses under it."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from gvm_stream.errors import ModelError
from gvm_stream.learner.batch import MicroBatch
from gvm_stream.learner.energy import lm_head_energies
from gvm_stream.learner.logprobs import token_energies, token_logprobs


def load_model(path: str, dtype: str, device: str, *, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Load a causal LM (folder or hub name) with weights of `dtype` (a torch name), without dropout.

    Masters of the weights belong in float32: a step of AdamW with lr 1e-6 is below the resolution of bfloat16.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), output_loading_info=True)
        model, loading = loaded
        model.to(device)
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError, SafetensorError) as error:
        # AssertionError: of a torch without CUDA that is asked for it.
        raise ModelError(
            f"model {path!r} cannot be loaded as a causal LM in {dtype} on {device}: {_first_line(error)}"
        ) from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ModelError(f"model {path!r} lacks {len(missing)} of its weights, the first of them {missing[0]!r}")
    if not isinstance(model, PreTrainedModel) or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"model {path!r} ({type(model).__name__}) takes no `logits_to_keep`, which the learner needs to compute "
            "the logits of responses only"
        )
    model.train(False)
    if not _has_plain_head(model):
        raise ModelError(
            f"model {path!r} ({type(model).__name__}) changes its logits after the lm_head (bias, scale or soft cap), "
            "which the learner does not support"
        )
    if gradient_checkpointing:
        checkpoint_layers(model)
    return model


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Have backward passes compute every layer of `model` again instead of keeping its activations.

    What transformers' `activation_checkpointing_enable` does, but it takes effect in training mode only; here what is
    inside the layers stays without dropout. Raises ModelError for models that know no such layers.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"learner.gradient_checkpointing is of no use to {type(model).__name__}: it has no such layers"
        )
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.training = True


def response_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Last hidden states, [N, d], from which the response tokens of `batch` are predicted, in the order of its index.

    The forward pass is the whole model's, without positions for its lm_head: FSDP gathers parameters in it.
    """
    row, _, position = batch.index
    states: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
    try:
        model(input_ids=batch.tokens, use_cache=False, logits_to_keep=position[:0])
    finally:
        hook.remove()
    return states[0].flatten(0, 1).index_select(0, row * batch.tokens.shape[1] + position - 1)


def response_logprobs(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> Tensor:
    """Log-probs of the response tokens under softmax(logits / temperature); float32 [B, T], 0 in the padding, in nats.

    Logits are computed for response tokens only, and never all at once (`logprobs`).
    """
    return logprobs_and_entropies(model, batch, response_states(model, batch), temperature)[0]


def logprobs_and_entropies(
    model: PreTrainedModel, batch: MicroBatch, states: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Of the response tokens and of the distributions that they were drawn from; float32 [B, T] each, 0 in the padding,
    in nats. `states`: `response_states`, which come first: under FSDP they gather the weight of the lm_head."""
    logprobs, entropies = token_logprobs(states, lm_head_weight(model), _targets(batch), temperature)
    return _padded(logprobs, batch), _padded(entropies, batch)


def response_token_energies(model: PreTrainedModel, batch: MicroBatch, states: Tensor, temperature: float) -> Tensor:
    """`logprobs.token_energies` of the response tokens; float32 [B, T], 0 in the padding."""
    return _padded(token_energies(states, lm_head_weight(model), _targets(batch), temperature), batch)


def response_energies(
    model: PreTrainedModel, batch: MicroBatch, states: Tensor, temperature: float, seed: int
) -> Tensor:
    """Squared norm of the gradient of every response's log-prob in the lm_head; float32 [B]. `states`:
    `response_states`."""
    return lm_head_energies(
        states.detach(),
        lm_head_weight(model),
        _targets(batch),
        batch.mask.sum(1).tolist(),
        temperature=temperature,
        seed=seed,
    )


def lm_head_weight(model: PreTrainedModel) -> Tensor:
    """[V, d]; logits are the last hidden states times it, which `load_model` has checked."""
    weight: Tensor = model.get_output_embeddings().weight
    return weight


def _targets(batch: MicroBatch) -> Tensor:
    row, _, position = batch.index
    return batch.tokens[row, position]


def _padded(values: Tensor, batch: MicroBatch) -> Tensor:
    """[B, T], 0 in the padding, from one value per response token."""
    row, place, _ = batch.index
    return values.new_zeros(batch.mask.shape).index_put((row, place), values)


@torch.no_grad()
def _has_plain_head(model: PreTrainedModel) -> bool:
    """Logits are hidden states times the lm_head's weight: no bias, no scale, no soft cap."""
    head: Any = model.get_output_embeddings()
    tokens = torch.arange(2, device=model.device)[None]
    states = model.base_model(input_ids=tokens, use_cache=False)[0]
    found, plain = model(input_ids=tokens, use_cache=False).logits, states @ head.weight.T
    return head.bias is None and torch.allclose(
        found, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()), equal_nan=True
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
