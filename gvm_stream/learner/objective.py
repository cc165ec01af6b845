"""What a step minimises: advantages, token terms, and the coefficient of every rollout in their sum.

    loss = sum over groups i, rollouts j, tokens t of  coefficient_ij * (term_ijt + KL penalty_ijt - entropy bonus_ijt)

The KL penalty is in the loss and not in the reward: advantages, and which groups have any, stay what the allocator
planned for.

Coefficients depend on weights, group sizes and lengths alone, so they are known before the first forward pass and
micro-batches simply add up: neither their split nor leaving out rollouts without signal changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.config import Aggregate, Config, LearnerSection
from gvm_stream.errors import ConfigError, TrainingError
from gvm_stream.learner.advantages import ADVANTAGES, Advantage
from gvm_stream.learner.losses import LOSSES, Loss, Responses, kl_terms

if TYPE_CHECKING:
    from torch import Tensor

    from gvm_stream.config_learner import KlEstimator


@dataclass(frozen=True)
class Objective:
    advantage: Advantage
    loss: Loss
    aggregate: Aggregate
    delta_l_power: float
    """Of the aggregate `delta_l`."""
    max_tokens: int
    """Length cap of responses, the constant of `seq_const`."""
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k2"
    entropy_bonus: float = 0.0

    @classmethod
    def of(cls, config: Config) -> Objective:
        """Raises ConfigError for names and options that mean nothing."""
        learner = config.learner
        try:
            advantage, loss = make_estimators(learner)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return cls(
            advantage,
            loss,
            learner.aggregate,
            learner.delta_l_power,
            config.sampling.max_tokens,
            learner.kl_coefficient,
            learner.kl_estimator,
            learner.entropy_bonus,
        )

    @property
    def every_rollout(self) -> bool:
        """Rollouts without advantage have a gradient, too."""
        return self.loss.every_rollout or self.kl_coefficient > 0 or self.entropy_bonus > 0

    @property
    def surveys(self) -> bool:
        """A forward pass over the batch beforehand is needed."""
        return self.loss.peers or bool(self.advantage.measured)

    def terms(self, r: Responses, reference: Tensor | None, entropies: Tensor) -> Tensor:
        """Terms of the tokens [B, T], 0 in the padding. `reference` are the log-probs of the reference model, None
        without a KL penalty; `entropies` those of the policy, both [B, T] and in nats. Raises TrainingError
        for a loss whose terms have another shape."""
        terms = self.loss.terms(r)
        if terms.shape not in (r.mask.shape, (len(r.mask), 1)):
            raise TrainingError(
                f"learner.loss ({type(self.loss).__name__}) gave terms of shape {list(terms.shape)} for responses of "
                f"shape {list(r.mask.shape)}, expected that or one for each response, {[len(r.mask), 1]}"
            )
        if reference is not None:
            terms = terms + self.kl_coefficient * kl_terms(r, reference, self.kl_estimator)
        if self.entropy_bonus:
            terms = terms - self.entropy_bonus * entropies
        return terms.expand(r.mask.shape).where(r.mask, 0.0)

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


def make_estimators(learner: LearnerSection) -> tuple[Advantage, Loss]:
    """Raises ValueError for names and options that mean nothing, and for a pair that does not go together."""
    advantage = ADVANTAGES.make(learner.advantage, learner.advantage_options)
    loss = LOSSES.make(learner.loss, learner.loss_options)
    if advantage.measured == "token" and loss.peers:
        raise ValueError(
            f'learner.loss = "{learner.loss}" compares whole responses, but learner.advantage = "{learner.advantage}" '
            "gives each token an advantage of its own"
        )
    return advantage, loss
