"""What a step minimises: advantages, token terms, and the coefficient of every rollout in their sum.

    loss = sum over groups i, rollouts j, tokens t of  coefficient_ij * term_ijt

Coefficients depend on weights, group sizes and lengths alone, so they are known before the first forward pass and
micro-batches simply add up: neither their split nor leaving out rollouts without signal changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.config import Aggregate, Config
from gvm_stream.errors import ConfigError
from gvm_stream.learner.advantages import ADVANTAGES, Advantage
from gvm_stream.learner.losses import LOSSES, Loss


@dataclass(frozen=True)
class Objective:
    advantage: Advantage
    loss: Loss
    aggregate: Aggregate
    delta_l_power: float
    """Of the aggregate `delta_l`."""
    max_tokens: int
    """Length cap of responses, the constant of `seq_const`."""

    @classmethod
    def of(cls, config: Config) -> Objective:
        """Raises ConfigError for names and options that mean nothing."""
        learner = config.learner
        try:
            advantage = ADVANTAGES.make(learner.advantage, learner.advantage_options)
            loss = LOSSES.make(learner.loss, learner.loss_options)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return cls(advantage, loss, learner.aggregate, learner.delta_l_power, config.sampling.max_tokens)

    def coefficients(self, weights: Sequence[float], lengths: Sequence[Floats]) -> list[Floats]:
        """Coefficients [n] of each group's rollouts, given the prompts' weights w and response lengths T [n].

        With share = w / (n sum of all w): `seq_sum` share; `seq_const` share / max_tokens (Dr. GRPO, arXiv 2503.20783);
        `seq_mean` share / T (GRPO, arXiv 2402.03300). In these the number of rollouts never changes a prompt's part.
        `token_mean` w / sum of all w T (DAPO, arXiv 2503.14476). `delta_l` share T^-power / sum of all share T^-power,
        of least variance with power 1 if that of a gradient grows in proportion to T (arXiv 2509.07558).
        Pass every group and rollout of the batch, those without signal too.
        """
        if self.aggregate == "token_mean":
            tokens = sum(w * t.sum() for w, t in zip(weights, lengths, strict=True))
            return [np.full(len(t), w / tokens) for w, t in zip(weights, lengths, strict=True)]
        total = sum(weights)
        shares = [np.full(len(t), w / total / len(t)) for w, t in zip(weights, lengths, strict=True)]
        if self.aggregate == "seq_sum":
            return shares
        if self.aggregate == "seq_const":
            return [s / self.max_tokens for s in shares]
        power = 1.0 if self.aggregate == "seq_mean" else self.delta_l_power
        shares = [s * t**-power for s, t in zip(shares, lengths, strict=True)]
        if self.aggregate == "seq_mean":
            return shares
        norm = sum(s.sum() for s in shares)
        return [s / norm for s in shares]
