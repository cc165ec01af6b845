"""Canaries: a few log-probs that tell whether an engine computes with the weights that were announced.

A wrong weight anywhere, tensors swapped, or weights that were never loaded change them; a checksum of the file cannot
see that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from transformers import PreTrainedModel

from gvm_stream.wire.messages import Canary

LENGTH = 64


def canary_tokens(vocab_size: int) -> Tensor:
    """Int64 [64], always the same: from the middle half of the vocabulary, as special tokens are at its ends."""
    first = vocab_size // 4
    random = np.random.default_rng(0)
    return torch.from_numpy(first + random.integers(0, vocab_size - 2 * first, LENGTH))


@torch.no_grad()
def canary_logprobs(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Log-probs of tokens 1 .. T - 1 of `tokens`, int64 [T], each after those before it, at temperature 1; float32
    [T - 1] in nats. `model` is a causal LM of transformers, or is called like one."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(1, tokens[1:, None])[:, 0]


def canary_of(model: PreTrainedModel, weights: dict[str, Tensor]) -> Canary:
    """The canary of `weights`, which are those of `model` as they are published (`distributed.weights_of`).

    A model in parts computes with its own, in the type of its mixed precision, the same; all ranks take part.
    """
    tokens = canary_tokens(model.config.get_text_config().vocab_size)
    on_device = tokens.to(next(iter(weights.values())).device)
    if isinstance(model, FSDPModule):
        logprobs = canary_logprobs(model, on_device)
        model.reshard()  # as no backward pass follows
    else:
        logprobs = canary_logprobs(lambda **inputs: functional_call(model, weights, (), inputs), on_device)
    return Canary(tokens=tokens.numpy().astype("<i4").tobytes(), logprobs=logprobs.cpu().numpy().tobytes())
