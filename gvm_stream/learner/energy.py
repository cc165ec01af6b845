"""Gradient energy of rollouts: the squared norm of grad log pi(y), summed over the tokens of a response, not averaged.

For the weight W of the lm_head the gradient is a sum of outer products, sum_t delta_t h_t^T, with h_t the hidden state
that predicts token y_t and delta_t = (e(y_t) - pi_t) / temperature. Hence a forward pass is enough, and in Gram form

    energy = sum over t, s of (delta_t . delta_s) (h_t . h_s)

(ghost norms: Goodfellow, arXiv 1510.01799; Li et al., arXiv 2110.05679) the gradient itself is never built. Where the
embedding is tied to the lm_head, this is the lm_head's part alone. pi is softmax(W h / temperature), without bias or
cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

TILE = 1 << 24
"""Most logits at a time: 64 MiB of float32, and as much again while they become probabilities."""
BUCKETS = 512
"""Of the sketch. The relative standard deviation of an energy is at most sqrt(2 / BUCKETS) = 6 %, for gradients of full
rank far less; energies of the rollouts of one prompt differ by several times that."""
FOLDING = 100
"""Multiply-adds of a matrix product in the time it takes to add one probability to its bucket; 60 to 110 on CPUs."""


@torch.no_grad()
def lm_head_energies(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    temperature: float = 1.0,
    seed: int = 0,
    method: Literal["exact", "sketch"] | None = None,
) -> Tensor:
    """Energies in the weight of the lm_head of R rollouts; float32 [R].

    `hidden` [N, d] are the states from which the N response tokens were predicted (what the lm_head is fed), `tokens`
    int64 [N] those tokens, rollout after rollout with `lengths` [R] that add up to N; `weight` [V, d]. Logits are
    computed in the type of autocast where it is on, else in that of `hidden`; everything after them in float32.

    `exact` goes over the vocabulary in tiles, twice if there are several. `sketch` adds the vocabulary up in BUCKETS
    with random signs drawn from `seed` (CountSketch, Charikar, Chen and Farach-Colton 2002): an unbiased estimate, by
    logits computed once. By default the one with fewer multiply-adds is taken (`cheaper`).
    """
    if method is None:
        method = cheaper(lengths, *weight.shape)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        if method == "exact":
            return _exact(hidden, weight, tokens, lengths, temperature)
        return _sketched(hidden, weight, tokens, lengths, temperature, seed)


def cheaper(lengths: Sequence[int], vocabulary: int, width: int) -> Literal["exact", "sketch"]:
    """Compare multiply-adds beyond one computation of the logits, for V = `vocabulary` and d = `width`.

    A response of T tokens takes T min(T (V + d), V d) exactly, and T V d more when its logits have to be computed
    twice; T (FOLDING V + min(T (B + d), B d)) by a sketch of B buckets.
    """
    total = sum(lengths)
    exact = sum(_products(t, vocabulary, width) for t in lengths)
    if total * vocabulary > TILE:
        exact += total * vocabulary * width
    sketch = FOLDING * total * vocabulary + sum(_products(t, BUCKETS, width) for t in lengths)
    return "exact" if exact <= sketch else "sketch"


def parameter_energies(logprobs: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Energies in any parameters, such as the `embed_tokens` of GVM (arXiv 2505.02391); float32 [R].

    `logprobs` [R] are differentiable sums over responses. Slow: every rollout takes a backward pass over the graph of
    all of them, so give few at a time. The graph is kept.
    """
    energies = []
    for total in logprobs:
        gradients = torch.autograd.grad(total, parameters, retain_graph=True)
        energies.append(torch.stack([g.float().square().sum() for g in gradients]).sum())
    return torch.stack(energies)


def _exact(hidden: Tensor, weight: Tensor, tokens: Tensor, lengths: Sequence[int], temperature: float) -> Tensor:
    n, vocabulary = len(tokens), len(weight)
    width = max(1, TILE // n)
    tiles = torch.split(weight, width)
    states = torch.split(hidden.float(), list(lengths))

    def logits(tile: Tensor) -> Tensor:
        return (hidden @ tile.T).float().div_(temperature)

    log_sum = hidden.new_full((n,), -torch.inf, dtype=torch.float32)
    for tile in tiles:
        values = logits(tile)
        log_sum = torch.logaddexp(log_sum, values.logsumexp(-1))
    energies = hidden.new_zeros(len(lengths), dtype=torch.float32)
    places = torch.arange(n, device=hidden.device)
    for first, tile in zip(range(0, vocabulary, width), tiles, strict=True):
        if len(tiles) > 1:
            values = logits(tile)
        scores = values.sub_(log_sum[:, None]).exp_().neg_()
        column = tokens - first
        scores[places, column.clamp(0, len(tile) - 1)] += (column >= 0) & (column < len(tile))
        energies += _squared_norms(torch.split(scores, list(lengths)), states)
    return energies / temperature**2


def _sketched(
    hidden: Tensor, weight: Tensor, tokens: Tensor, lengths: Sequence[int], temperature: float, seed: int
) -> Tensor:
    n, vocabulary = len(tokens), len(weight)
    # Drawn on the CPU: the same everywhere.
    generator = torch.Generator().manual_seed(seed)
    bucket = (torch.randperm(vocabulary, generator=generator) % BUCKETS).to(hidden.device)
    sign = (torch.randint(0, 2, (vocabulary,), generator=generator) * 2.0 - 1).to(hidden.device)
    scores = hidden.new_zeros((n, BUCKETS), dtype=torch.float32)
    scores[torch.arange(n, device=hidden.device), bucket[tokens]] = sign[tokens]
    rows = max(1, TILE // vocabulary)
    for states, part in zip(torch.split(hidden, rows), torch.split(scores, rows), strict=True):
        probabilities = (states @ weight.T).float().div_(temperature).softmax(-1)
        part.index_add_(1, bucket, probabilities.mul_(sign), alpha=-1)
    norms = _squared_norms(torch.split(scores, list(lengths)), torch.split(hidden.float(), list(lengths)))
    return norms / temperature**2


def _squared_norms(scores: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
    """||s^T h||^2 of every pair s [T, w] and h [T, d], in Gram form where that takes fewer multiply-adds; [R]."""
    norms = []
    for s, h in zip(scores, states, strict=True):
        (t, w), d = s.shape, h.shape[1]
        norms.append(((s @ s.T) * (h @ h.T)).sum() if t * (w + d) < w * d else (s.T @ h).square().sum())
    return torch.stack(norms)


def _products(tokens: int, width: int, other: int) -> int:
    return tokens * min(tokens * (width + other), width * other)
