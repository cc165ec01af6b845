"""Drawing one token per row from softmax(logits / temperature), with its log-prob under that same distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_tokens(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample from every row of `logits` [n, V] at its own `temperature` (float32 [n]).

    Returns tokens int64 [n] and log-probs float32 [n]; a row whose distribution is undefined has log-prob nan.

    Exponential race: of independent arrivals E_v / p_v with E_v ~ Exp(1), v arrives first with probability p_v. In
    logs the winner maximises log p_v - log E_v, with E = -log U for U uniform on [0, 1).
    """
    logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    uniform = torch.rand(logprobs.shape, generator=generator, device=logprobs.device)
    tokens = (logprobs - uniform.log_().neg_().log_()).argmax(dim=-1, keepdim=True)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
