"""What the sum over prompts of f(p) is that training goes up: the weight of a prompt's gradient is f'(p).

Any f comes with any gradient estimator. The estimate of p that enters a weight is from earlier visits: one from the
same rollouts would bias the gradient.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.policies.base import Coefficient


class Own(msgspec.Struct, frozen=True, tag="own"):
    """The estimator's own: f(p) = p with `rloo`, log p with `raft`. Every weight is 1."""


class Mean(msgspec.Struct, frozen=True, tag="mean"):
    """f(p) = p, the mean reward."""


class Log(msgspec.Struct, frozen=True, tag="log", kw_only=True):
    """f(p) = log p, the likelihood of an accepted answer: hard prompts count more. Raises ValueError for a bad cap."""

    cap: float = 16.0
    """Largest f'(p) = 1/p: rates below 1/cap cannot be told from each other, nor from 0, by a usual visit."""

    def __post_init__(self) -> None:
        _check_cap(self.cap)


class Power(msgspec.Struct, frozen=True, tag="power", kw_only=True):
    """f(p) = p^a, between the two. Raises ValueError unless 0 < a < 1 and for a bad cap."""

    a: float = 0.5
    cap: float = 2.0
    """Largest f'(p) = a p^(a-1); with a = .5 it is reached at p = 1/16, as that of `Log`."""

    def __post_init__(self) -> None:
        if not 0 < self.a < 1:
            raise ValueError(f"power objective: a = {self.a} must lie between 0 and 1")
        _check_cap(self.cap)


Objective: TypeAlias = Own | Mean | Log | Power


def weights(objective: Objective, mean: Floats, coefficient: Coefficient) -> Floats:
    """Weights [B] of the prompts' gradient estimates at acceptance rates `mean` [B] above 0, known before the visit.

    f'(p) for `rloo`, which estimates the gradient of p; f'(p) p for `raft`, which estimates that of log p.
    """
    match objective:
        case Own():
            return np.ones(len(mean))
        case Mean():
            slope = np.ones(len(mean))
        case Log(cap=cap):
            slope = np.minimum(1 / mean, cap)
        case Power(a=a, cap=cap):
            slope = np.minimum(a * mean ** (a - 1), cap)
    return slope * mean if coefficient == "raft" else slope


def _check_cap(cap: float) -> None:
    if not cap > 0:
        raise ValueError(f"objective: cap = {cap} must be above 0")
