"""Log-probs of chosen tokens straight from hidden states: the logits of a long batch never exist all at once.

Forward, the logits of a chunk of tokens at a time are reduced to what each token needs. Backward, they are computed
again, chunk by chunk, for one more product with the lm_head (as in cut cross-entropy, arXiv 2411.09009, but in plain
torch). A batch of a single chunk keeps its logits instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1 << 27
"""Most logits at a time: 512 MiB of float32. A chunk reads the weight and adds to its gradient once; below about a
thousand tokens that takes longer than the products."""


def token_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of `tokens` and entropies under softmax(hidden @ weight.T / temperature); float32 [N] each, in nats.

    `hidden` [N, d] are the states that predict `tokens`, int64 [N]; `weight` [V, d] is that of the lm_head. Products
    are in the type of autocast where it is on, else in that of `hidden`; everything after them is in float32. Both
    results are differentiable, once.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    chunk = max(1, CHUNK // len(weight))
    logprobs, entropies = _TokenLogprobs.apply(hidden.to(dtype), weight, tokens, temperature, chunk)  # type: ignore[no-untyped-call]
    return logprobs, entropies


@torch.no_grad()
def token_energies(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Squared norm of the gradient of each token's log-prob in the logits, ||e(y) - pi||^2 / temperature^2; float32
    [N]. Arguments as in `token_logprobs`. Source: the logit-gradient proxy of arXiv 2602.07078."""
    energies = hidden.new_empty(len(tokens), dtype=torch.float32)
    low = weight.to(hidden.dtype)
    chunk = max(1, CHUNK // len(weight))
    for first in range(0, len(tokens), chunk):
        part = slice(first, first + chunk)
        slopes = _logits(hidden[part], low, temperature).softmax(-1)
        slopes.scatter_add_(1, tokens[part, None], slopes.new_full((len(slopes), 1), -1.0))
        energies[part] = torch.linalg.vecdot(slopes, slopes)
    return energies / temperature**2


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        low = weight.to(hidden.dtype)
        log_sums, logprobs, entropies = hidden.new_empty((3, len(tokens)), dtype=torch.float32)
        scores = None
        for first in range(0, len(tokens), chunk):
            part = slice(first, first + chunk)
            scores = _logits(hidden[part], low, temperature)
            log_sums[part] = scores.logsumexp(-1)
            scores -= log_sums[part, None]
            logprobs[part] = scores.gather(1, tokens[part, None])[:, 0]
            entropies[part] = -torch.linalg.vecdot(scores.exp(), scores)
        ctx.save_for_backward(hidden, weight, tokens, log_sums, entropies, scores if len(tokens) <= chunk else None)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        *gradients: Tensor | None,
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, tokens, log_sums, entropies, kept = ctx.saved_tensors
        of_logprobs, of_entropies = gradients
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(log_sums)
        low = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        for first in range(0, len(tokens), ctx.chunk):
            part = slice(first, first + ctx.chunk)
            scores = _logits(hidden[part], low, ctx.temperature).sub_(log_sums[part, None]) if kept is None else kept
            # d log p_y = 1[v = y] - p_v and, of the entropy H, dH = -p_v (log p_v + H) for the logit of v.
            factor = of_logprobs[part, None]
            if of_entropies is not None:
                factor = factor + of_entropies[part, None] * (scores + entropies[part, None])
            slope = scores.exp().mul_(-factor)
            slope.scatter_add_(1, tokens[part, None], of_logprobs[part, None])
            slope = slope.div_(ctx.temperature).to(hidden.dtype)
            hidden_gradient[part] = slope @ low
            weight_gradient += slope.T @ hidden[part]
        return hidden_gradient, weight_gradient.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.T).float().div_(temperature)
