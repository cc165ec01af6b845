"""What a training step saw, rollout by rollout, and whether it is fit to be learned from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from gvm_stream.allocator.arrays import Floats

COLUMNS = 11

SkipCause = Literal["no_signal", "not_finite", "mismatch", "zero_gradient"]


class Skip(NamedTuple):
    """Why a batch is not trained on."""

    cause: SkipCause
    reason: str
    """For people."""


@dataclass(frozen=True, eq=False)
class Figures:
    """What a step saw of its R rows, those of all ranks: group ids [R], and a column [R] for each figure."""

    groups: Floats
    loss: Floats
    tokens: Floats
    distance: Floats
    """Sum over the tokens of |log-ratio|, in nats."""
    log_ratio: Floats
    """Of the whole response, from clamped ones of its tokens."""
    ratio: Floats
    ratio_squared: Floats
    clamped: Floats
    entropies: Floats
    """Sum over the tokens of the policy's entropy, in nats."""
    divergences: Floats
    """Sum over the tokens of exp(-l) - 1 + l, l the log-ratio to the reference model; 0 without one."""
    energy: Floats
    """Gradient energy in the lm_head; NaN if `learner.energies` is off."""
    work: Floats

    @classmethod
    def of(cls, parts: Sequence[tuple[Sequence[int], Floats]]) -> Figures:
        """From the groups and the table [B, COLUMNS] of every part."""
        groups = np.array([group for part, _ in parts for group in part], np.float64)
        return cls(groups, *np.concatenate([np.zeros((0, COLUMNS)), *(table for _, table in parts)]).T)

    @property
    def total_loss(self) -> float:
        losses: list[float] = self.loss.tolist()
        return sum(losses)  # numpy warns of inf - inf

    @property
    def mismatch(self) -> float:
        return self._by_token(self.distance)

    @property
    def entropy(self) -> float:
        """Nats per token."""
        return self._by_token(self.entropies)

    @property
    def kl(self) -> float:
        """KL(policy || reference) per token, in nats, for rollouts of this policy (k3 of Schulman 2020)."""
        return self._by_token(self.divergences)

    @property
    def effective_sample_size(self) -> float:
        """Of the tokens' weights."""
        squares = self.ratio_squared.sum() * self.tokens.sum()
        return float(self.ratio.sum() ** 2 / squares) if squares else 1.0

    @property
    def effective_rollouts(self) -> float:
        """(sum w)^2 / sum w^2 / R, w the importance weights of whole responses."""
        weights = np.exp(self.log_ratio - self.log_ratio.max())
        return float(weights.sum() ** 2 / (weights**2).sum() / weights.size)

    def _by_token(self, sums: Floats) -> float:
        return float(sums.sum() / self.tokens.sum()) if self.tokens.size else 0.0

    def problem(self, max_mismatch: float) -> Skip | None:
        """Why they are not fit to be learned from, if they are not."""
        if not math.isfinite(self.total_loss):
            groups = named(self.groups[~np.isfinite(self.loss)])
            return Skip("not_finite", f"the loss is {self.total_loss} because of {groups}")
        if self.mismatch > max_mismatch:
            beyond = self.groups[self.distance > max_mismatch * self.tokens]
            return Skip(
                "mismatch",
                f"the log-probs are {self.mismatch:.3g} nats from those at sampling, more than "
                f"learner.max_logprob_mismatch = {max_mismatch:g}, because of {named(beyond)}",
            )
        return None


def named(groups: Iterable[float], most: int = 20) -> str:
    """Group ids, for people."""
    numbers = sorted({int(group) for group in groups})
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"group{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:most]))}{more}"
