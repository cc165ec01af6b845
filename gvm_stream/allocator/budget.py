"""What limits the rollouts of a step: a number of them, of tokens, a variance to reach, or a price."""

from __future__ import annotations

import math

import msgspec


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """One of the following. `rollouts` is also the size of a step that the policies with numbers of their own, and
    shadow-uniform visits, take as the mean."""

    rollouts: float
    """Rollouts per prompt, on average."""


class Rollouts(Budget, frozen=True, kw_only=True, tag="rollouts"):
    """`rollouts` per prompt on average: exactly in every step, but for what shadow-uniform visits round."""


class Tokens(Budget, frozen=True, kw_only=True, tag="tokens"):
    """The expected cost of a step is at most `tokens` per prompt on average, or what `min_rollouts` cost, where that is
    more. Before any length is known: `rollouts`."""

    tokens: float


class Variance(Budget, frozen=True, kw_only=True, tag="variance"):
    """As few tokens as reach `relative` times the variance that `rollouts` for every prompt would have."""

    relative: float = 1.0


class Price(Budget, frozen=True, kw_only=True, tag="price"):
    """Every rollout that lowers the variance by at least `price` per token. Before any length is known: `rollouts`."""

    price: float


AnyBudget = Rollouts | Tokens | Variance | Price


def check(budget: AnyBudget) -> None:
    """Raises ValueError for numbers that are not finite or not above 0."""
    for name, value in msgspec.structs.asdict(budget).items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"{type(budget).__name__.lower()} budget: {name} = {value} must be a finite number above 0"
            )
