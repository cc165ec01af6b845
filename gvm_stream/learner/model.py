"""The causal LM in the learner: loading it, and the log-probs of responses under it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gvm_stream.errors import ModelError
from gvm_stream.learner.batch import MicroBatch


def load_model(path: str, dtype: str, device: str) -> PreTrainedModel:
    """Load a causal LM (folder or hub name) with weights of `dtype` (a torch name), without dropout.

    Masters of the weights belong in float32: a step of AdamW with lr 1e-6 is below the resolution of bfloat16.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), output_loading_info=True)
        model, loading = loaded
        model.to(device)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
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
    return model


def response_logprobs(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> Tensor:
    """Log-probs of the response tokens under softmax(logits / temperature); float32 [B, T], 0 in the padding, in nats.

    Logits are computed from the last token of the shortest prompt on, and float32 rows of the vocabulary only for
    response tokens.
    """
    row, place, position = batch.index
    needed = torch.arange(batch.first, batch.tokens.shape[1] - 1, device=batch.tokens.device)
    logits: Tensor = model(input_ids=batch.tokens, use_cache=False, logits_to_keep=needed).logits
    logits = logits[row, position - 1 - batch.first].float() / temperature
    targets = batch.tokens[row, position]
    logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return logprobs.new_zeros(batch.mask.shape).index_put((row, place), logprobs)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
