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
