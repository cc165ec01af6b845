"""The loss: token terms, and the coefficient of every rollout in their sum.

    loss = sum over groups i, rollouts j, tokens t of  coefficient_ij * term_ijt

Coefficients depend on weights, group sizes and lengths alone, so they are known before the first forward pass and
micro-batches simply add up: neither their split nor leaving out rollouts without signal changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gvm_stream.config import LearnerSection

MAX_LOG_RATIO = 20.0  # nats; exp(89) is already infinite in float32


class TokenTerms(NamedTuple):
    """All of the shape of the log-probs given."""

    losses: Tensor
    """Differentiable."""
    ratio: Tensor
    """pi_now / pi_behaviour, without gradient, the log clamped to +-MAX_LOG_RATIO."""
    clamped: Tensor
    """bool: the log-ratio was beyond the clamp."""


def token_terms(settings: LearnerSection, logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> TokenTerms:
    """Terms of response tokens; float32 [..., T] each, `advantages` broadcast against them.

    `logprobs` are the learner's (differentiable), `behaviour` those at sampling: finite, in nats.
    """
    log_ratio = logprobs - behaviour
    clamped = log_ratio.detach().abs() > MAX_LOG_RATIO
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if settings.loss == "pg":
        losses = policy_gradient(logprobs, ratio, advantages, settings.importance_cap)
    else:
        losses = clipped_ratio(ratio, advantages, settings.clip_low, settings.clip_high)
    return TokenTerms(losses, ratio.detach(), clamped)


def policy_gradient(logprobs: Tensor, ratio: Tensor, advantages: Tensor, cap: float) -> Tensor:
    """-min(ratio, cap) A log pi, no gradient through the weight; cap 0: weight 1.

    Token-level truncated importance sampling (Ionides 2008), the cap named `importance_cap`.
    """
    if cap == 0:
        return -advantages * logprobs
    return -ratio.detach().clamp(max=cap) * advantages * logprobs


def clipped_ratio(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A). Source: PPO, arXiv 1707.06347; uneven clip: DAPO, 2503.14476."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def coefficients(
    aggregate: str, weights: Sequence[float], lengths: Sequence[Sequence[int]]
) -> tuple[tuple[float, ...], ...]:
    """Coefficient of each rollout's token terms, given prompt weights w [G] and response lengths T [G][n_i].

    With W = sum w_i:  `seq_sum` w_i / (W n_i);  `seq_mean` w_i / (W n_i T_ij);  `token_mean` w_i / sum_ij w_i T_ij.
    Pass every group and rollout of the batch, those without signal too: they keep the prompts' weights what they are.
    """
    if aggregate == "token_mean":
        tokens = sum(w * sum(row) for w, row in zip(weights, lengths, strict=True))
        return tuple(tuple(w / tokens for _ in row) for w, row in zip(weights, lengths, strict=True))
    total = sum(weights)
    shares = [w / total for w in weights]
    if aggregate == "seq_sum":
        return tuple(tuple(s / len(row) for _ in row) for s, row in zip(shares, lengths, strict=True))
    return tuple(tuple(s / (len(row) * t) for t in row) for s, row in zip(shares, lengths, strict=True))
