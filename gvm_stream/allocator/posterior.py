"""What earlier visits say about acceptance rates: for every prompt a mixture of two Beta distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from gvm_stream.allocator.arrays import Floats, Ints

NODES = 121
REACH = 30.0
"""Largest logit of a node: beyond it p is within 1e-13 of 0 or 1, where the integrand is as good as constant."""
DEPTH = 25.0
"""Nodes go out to where the density in the logit is exp(-DEPTH) of its peak."""
BLOCK = 512
"""Prompts that `expect` computes with at a time."""


@dataclass(frozen=True)
class Posterior:
    """Acceptance rates p of B prompts. Arrays are [B]; Beta parameters (a, b) are above 0."""

    fast_a: Floats
    fast_b: Floats
    slow_a: Floats
    slow_b: Floats
    fast_weight: Floats
    """Probability of the fast one."""

    @classmethod
    def of(cls, a: Floats, b: Floats) -> Posterior:
        """Of a single Beta distribution per prompt."""
        return cls(a, b, a, b, np.ones(len(a)))

    def take(self, indices: Ints) -> Posterior:
        """Of the prompts at `indices`."""
        return Posterior(*(getattr(self, field.name)[indices] for field in fields(self)))

    def moment(self, successes: int, failures: int) -> Floats:
        """E[p^successes (1-p)^failures], [B], in closed form: the probability of that sequence of rewards."""
        return self._mix(lambda a, b: _beta_moment(a, b, successes, failures))

    def mean(self) -> Floats:
        """E[p], [B]."""
        return self.moment(1, 0)

    def reward_variance(self) -> Floats:
        """E[p(1-p)], [B]: what is left of the variance of a reward once the uncertainty about p is taken out."""
        return self.moment(1, 1)

    def matched(self) -> tuple[Floats, Floats]:
        """(a, b), [B] each, of the single Beta distribution with the same mean and variance of p."""
        success, failure, both = self.moment(1, 0), self.moment(0, 1), self.moment(1, 1)
        strength = both / (success * failure - both)
        return strength * success, strength * failure

    def expect(self, f: Callable[[Floats], Floats]) -> Floats:
        """E[f(p)], [B], of a function of p, elementwise on arrays of any shape.

        By the trapezoidal rule in the logit of p: exact to some 1e-8 of the range of f, for a and b from .05 to 1e4
        and any f that is smooth on the scale of the logit, such as (1-p)^n for any n. Goes through the prompts by
        blocks, so that a million of them need no more memory than 512.
        """
        return self._mix(
            lambda a, b: np.concatenate(
                [_beta_expect(a[i : i + BLOCK], b[i : i + BLOCK], f) for i in range(0, len(a), BLOCK)] or [a]
            )
        )

    def sample(self, rng: np.random.Generator) -> Floats:
        """One draw of p for every prompt, [B]."""
        fast = rng.random(len(self.fast_weight)) < self.fast_weight
        return rng.beta(np.where(fast, self.fast_a, self.slow_a), np.where(fast, self.fast_b, self.slow_b))

    def _mix(self, of_beta: Callable[[Floats, Floats], Floats]) -> Floats:
        fast = self.fast_weight * of_beta(self.fast_a, self.fast_b)
        return fast + (1 - self.fast_weight) * of_beta(self.slow_a, self.slow_b)


def _beta_moment(a: Floats, b: Floats, successes: int, failures: int) -> Floats:
    moment = np.ones(len(a))
    for k in range(successes):
        moment *= (a + k) / (a + b + k)
    for k in range(failures):
        moment *= (b + k) / (a + b + successes + k)
    return moment


def _beta_expect(a: Floats, b: Floats, f: Callable[[Floats], Floats]) -> Floats:
    # The density in the logit x is exp(l), l = a log p + b log(1-p), with its peak at log(a/b) and a curvature there of
    # k = 1/(1/a + 1/b), which falls no faster than exp(-d) with the distance d. So l has dropped by at least
    # k (d - 1 + exp(-d)) >= k d^2/(2 + d) at d.
    peak = np.log(a / b)
    drop = DEPTH * (1 / a + 1 / b)
    distance = drop / 2 + np.sqrt(drop**2 / 4 + 2 * drop)
    low = np.maximum(peak - distance, -REACH)
    spacing = (np.minimum(peak + distance, REACH) - low) / (NODES - 1)
    x = low[:, None] + spacing[:, None] * np.arange(NODES)
    p = 1 / (1 + np.exp(-x))
    log_p = np.log(p)
    density = a[:, None] * log_p + b[:, None] * (log_p - x)
    weight = np.exp(density - density.max(axis=1, keepdims=True))
    # Beyond the ends the density is exp(a x) and exp(-b x): the rest of the trapezoidal sum is a geometric series.
    weight[:, 0] /= -np.expm1(-a * spacing)
    weight[:, -1] /= -np.expm1(-b * spacing)
    return np.asarray((weight * f(p)).sum(axis=1) / weight.sum(axis=1))
