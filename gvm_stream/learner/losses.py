"""Losses: the terms of response tokens, which `objective` adds up with a coefficient for each rollout.

A loss of your own subclasses `Loss` and is named in the configuration by its import path, `module:Class`:

    class Squashed(Loss, frozen=True, kw_only=True):
        scale: float = 1.0                                          # a hyper-parameter

        def terms(self, r: Responses) -> Tensor:
            return -(r.ratio / self.scale).tanh() * r.advantages

The learner makes one step with each batch, so ratios are of the learner's policy to the one that sampled: the ratio of
a loss is the importance weight as well. The KL penalty and the entropy bonus come on top of any loss (`objective`).
torch is not imported: processes without it read configurations, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from gvm_stream.learner.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from gvm_stream.config_learner import KlEstimator

MAX_LOG_RATIO = 20.0  # nats; exp(89) is already infinite in float32
KL_CAP = 2.0  # as the cap of `pg`


@dataclass(frozen=True, eq=False)
class Responses:
    """B responses of at most T tokens; float [B, T] where nothing else is said, in nats."""

    logprobs: Tensor
    """Of the learner, differentiable, 0 in the padding."""
    log_ratio: Tensor
    """Log-probs of the learner minus those at sampling, differentiable within +-MAX_LOG_RATIO, 0 in the padding."""
    mask: Tensor
    """bool, True for response tokens."""
    advantages: Tensor
    """[B, 1], or [B, T] where every token has its own."""
    peers: Tensor
    """[B, 1]: mean over the other rollouts of the prompt of the summed log-ratio; only for losses with `peers`."""

    @classmethod
    def of(cls, logprobs: Tensor, sampled: Tensor, mask: Tensor, advantages: Tensor, peers: Tensor) -> Responses:
        """From both log-probs [B, T], 0 in the padding."""
        return cls(logprobs, clamped_log_ratio(logprobs, sampled), mask, advantages, peers)

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    @property
    def lengths(self) -> Tensor:
        """[B, 1], in tokens."""
        return self.mask.sum(-1, keepdim=True)


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class; fields are hyper-parameters, by default the published ones."""

    every_rollout: ClassVar[bool] = False
    """There is a gradient without advantage, too: such rollouts are not left out."""
    peers: ClassVar[bool] = False
    """`Responses.peers` is needed, which takes a forward pass over the batch beforehand."""

    def terms(self, r: Responses) -> Tensor:
        """[B, T], or [B, 1] for a term that counts once for each token. The padding may hold anything."""
        raise NotImplementedError


LOSSES = Registry(
    "learner.loss",
    Loss,
    {
        "grpo": 'it is learner.advantage = "grpo" with learner.loss = "ppo_clip" and learner.aggregate = "seq_mean"',
        "dapo": 'it is learner.advantage = "grpo" with learner.loss = "ppo_clip" and learner.aggregate = "token_mean"',
        "raft": 'RAFT is learner.advantage = "raft" with learner.loss = "pg"',
        "raft_pp": 'RAFT++ is learner.advantage = "raft" with learner.loss = "ppo_clip"',
    },
)


@LOSSES.register("pg")
class PolicyGradient(Loss, frozen=True):
    """-w A log pi without gradient through the importance weight w.

    `weights` says what w is, with rho the ratio: `token` min(rho, cap), truncated importance sampling (Ionides 2008);
    `sequence` min(product of rho over the response, cap), which is unbiased but for the truncation; `mask` rho within
    [low, high] and 0 outside (the masking of IcePop, arXiv 2510.18855; its usual bounds); `none` 1.
    """

    weights: Literal["token", "sequence", "mask", "none"] = "token"
    cap: Annotated[float, Meta(gt=0)] = 2.0
    low: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    high: Annotated[float, Meta(gt=1)] = 5.0

    def terms(self, r: Responses) -> Tensor:
        loss = -r.advantages * r.logprobs
        return loss if self.weights == "none" else self._weights(r.log_ratio.detach()) * loss

    def _weights(self, log_ratio: Tensor) -> Tensor:
        if self.weights == "sequence":
            return log_ratio.sum(-1, keepdim=True).clamp(max=math.log(self.cap)).exp()
        ratio = log_ratio.exp()
        if self.weights == "token":
            return ratio.clamp(max=self.cap)
        return ratio.where((ratio >= self.low) & (ratio <= self.high), 0.0)


@LOSSES.register("ppo_clip")
class PpoClip(Loss, frozen=True):
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), at most dual |A|.

    Source: PPO, arXiv 1707.06347; uneven clip: DAPO, arXiv 2503.14476; dual clip, which bounds the term of a token that
    is to become less likely and has become more likely: arXiv 1912.09729.
    """

    low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    high: Annotated[float, Meta(gt=0)] = 0.28
    dual: Annotated[float, Meta(gt=1)] = 3.0

    def terms(self, r: Responses) -> Tensor:
        return _clipped(r.ratio, r.advantages, self.low, self.high).minimum(self.dual * r.advantages.abs())


@LOSSES.register("cispo")
class Cispo(Loss, frozen=True):
    """-min(rho, cap) A log pi without gradient through the weight: no token loses its gradient to the clip.

    Source: CISPO, arXiv 2506.13585, which sets no lower bound and names no upper one; that of 5 is of ScaleRL, arXiv
    2510.13786. The same as `pg` with token weights.
    """

    cap: Annotated[float, Meta(gt=0)] = 5.0

    def terms(self, r: Responses) -> Tensor:
        return -r.ratio.detach().clamp(max=self.cap) * r.advantages * r.logprobs


@LOSSES.register("gspo")
class Gspo(Loss, frozen=True):
    """-min(s A, clip(s, 1 - low, 1 + high) A), s the geometric mean of the ratios of a response.

    Source: GSPO, arXiv 2507.18071, which is aggregated by `seq_mean`.
    """

    low: Annotated[float, Meta(gt=0, lt=1)] = 3e-4
    high: Annotated[float, Meta(gt=0)] = 4e-4

    def terms(self, r: Responses) -> Tensor:
        return _clipped(_power_mean(r, 0.0), r.advantages, self.low, self.high)


@LOSSES.register("holder")
class Holder(Loss, frozen=True):
    """`gspo` with the Hoelder mean (mean of rho^power)^(1/power) of the ratios of a response; power 0 is the geometric
    mean. Source: arXiv 2605.12058, form with the clip on the sequence, aggregated by `seq_mean`; the paper lets the
    power fall from 2 to -2 in the course of training, here it is constant."""

    power: Annotated[float, Meta(ge=-4, le=4)] = 1.0
    low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    high: Annotated[float, Meta(gt=0)] = 0.2

    def terms(self, r: Responses) -> Tensor:
        return _clipped(_power_mean(r, self.power), r.advantages, self.low, self.high)


@LOSSES.register("gvpo")
class Gvpo(Loss, frozen=True):
    """(beta (l - mean l of the others) - A)^2 / 2 with l = sum of log rho over a response, gradient through its own l.

    With the advantage `rloo` and aggregated by `seq_sum` its gradient is that of GVPO, arXiv 2504.19599: over a group
    sum_j [beta (l_j - mean l) - (r_j - mean r)]^2 / (2 (n-1)). At the sampling policy it is beta times that of `pg`.
    """

    every_rollout: ClassVar[bool] = True
    peers: ClassVar[bool] = True

    beta: Annotated[float, Meta(gt=0)] = 0.1

    def terms(self, r: Responses) -> Tensor:
        residual = self.beta * (r.log_ratio.sum(-1, keepdim=True) - r.peers) - r.advantages
        return residual**2 / (2 * r.lengths)


@LOSSES.register("delightful")
class Delightful(Loss, frozen=True):
    """-g A log pi without gradient through the gate g = sigmoid(-A log pi / temperature), which passes rare successes
    and damps rare failures. Source: arXiv 2603.14608; there is no importance weight."""

    temperature: Annotated[float, Meta(gt=0)] = 1.0

    def terms(self, r: Responses) -> Tensor:
        loss = -r.advantages * r.logprobs
        return (loss.detach() / self.temperature).sigmoid() * loss


@LOSSES.register("r2vpo")
class R2vpo(Loss, frozen=True):
    """-rho A + penalty (rho - 1)^2: the variance of the ratio is held down instead of its range.

    Source: R2VPO, arXiv 2601.03320, which adapts the penalty by dual ascent to a bound on the variance. Here it is
    constant; by default a token of advantage 1 alone would settle at rho = 1 + 1 / (2 penalty) = 1.2.
    """

    every_rollout: ClassVar[bool] = True

    penalty: Annotated[float, Meta(gt=0)] = 2.5

    def terms(self, r: Responses) -> Tensor:
        ratio = r.ratio
        return self.penalty * (ratio - 1) ** 2 - ratio * r.advantages


def kl_terms(r: Responses, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Terms [B, T] whose gradient, averaged over samples, is that of a KL divergence from the reference model.

    `reference` [B, T] are its log-probs, 0 in the padding. With l = log pi - log pi_ref, clamped to +-MAX_LOG_RATIO:

    `k1` sg(sum of l from the token on) log pi: of KL(pi || pi_ref) over whole responses, what it does to later tokens
    included, with much noise; the same as l taken off the reward, without a baseline. `k2` l^2 / 2: of KL(pi ||
    pi_ref) of each token given those before it. `k3` exp(-l) - 1 + l, GRPO's: of KL(pi_ref || pi) of each token, which
    is near it while both are.

    k1 differentiated as it is would have a gradient of mean 0. Terms are weighted by the ratio to the sampling policy,
    at most KL_CAP, without gradient. Sources: Schulman 2020, Approximating KL Divergence (joschu.net/blog/kl-approx);
    gradients: arXiv 2506.09477, arXiv 2510.01555, arXiv 2512.21852.
    """
    log_ratio = clamped_log_ratio(r.logprobs, reference)
    if estimator == "k1":
        terms = log_ratio.detach().flip(-1).cumsum(-1).flip(-1) * r.logprobs
    elif estimator == "k2":
        terms = log_ratio.square() / 2
    else:
        terms = (-log_ratio).exp() - 1 + log_ratio
    return r.ratio.detach().clamp(max=KL_CAP) * terms


def clamped_log_ratio(logprobs: Tensor, sampled: Tensor) -> Tensor:
    return (logprobs - sampled).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -(ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)


def _power_mean(r: Responses, power: float) -> Tensor:
    """[B, 1]: of the ratios of each response."""
    if power == 0:
        return (r.log_ratio.sum(-1, keepdim=True) / r.lengths).exp()
    powers = (power * r.log_ratio).masked_fill(~r.mask, -math.inf)
    return ((powers.logsumexp(-1, keepdim=True) - r.lengths.log()) / power).exp()
