"""The error of a policy's gradients, from the coefficients that the library gave out and the truth of the world.

No formula of the library is taken on trust. Given the rewards of a visit, its gradient estimate w sum_j c_j score_j has
the variance `noise` = w^2 sum_j c_j^2 sigma^2(class of j) and a known mean along the prompt's direction; `deviation`
is that mean minus the target. noise + deviation^2 has the exact mean squared error as its mean. The target has weight
1: a policy that reweights prompts is charged for it. A prompt without a visit in a step counts as the estimate 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gvm_stream.allocator.arrays import Floats, Ints
from gvm_stream.allocator.estimates import SUCCESS_REWARD
from gvm_stream.simulate.drive import Step
from gvm_stream.simulate.world import World

Bools = npt.NDArray[np.bool_]
BINS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Edges of the difficulty bins, true acceptance rates."""


@dataclass(frozen=True)
class Measured:
    """Of T steps on the same P prompts; arrays are [T, P]. Errors are means over prompts."""

    noise: Floats
    deviation: Floats
    variance: Floats
    """V / (n - offset) with true values, n rollouts of the visit that are trained on; n - offset below 1 counts as 1,
    which flatters policies that leave prompts out."""
    rollouts: Ints
    resolved: Bools
    """At least one accepted among them."""
    acceptance: Floats
    generated: Floats
    """[T] tokens per prompt up to the end of a step, whatever became of them."""

    @property
    def error(self) -> float:
        """Mean squared error of a step's gradient."""
        return float((self.noise + self.deviation**2).mean())

    @property
    def bias_squared(self) -> float:
        """Its part that averaging over steps does not reduce: unbiased from all pairs of visits to a prompt, so it can
        come out below 0. NaN for a single step."""
        steps = len(self.deviation)
        if steps < 2:
            return float("nan")
        pairs = self.deviation.sum(0) ** 2 - (self.deviation**2).sum(0)
        return float(pairs.mean()) / (steps * (steps - 1))

    @property
    def bound(self) -> float:
        return float(self.variance.mean())

    @property
    def tokens(self) -> float:
        """Per prompt and step."""
        return float(self.generated[-1]) / len(self.generated)

    def error_so_far(self) -> Floats:
        """[T] mean squared error of the mean of all gradients up to each step."""
        steps = np.arange(1, len(self.noise) + 1)
        noise, deviation = self.noise.cumsum(0), self.deviation.cumsum(0)
        return np.asarray(((noise + deviation**2) / steps[:, None] ** 2).mean(1))

    def resolved_by_difficulty(self) -> Floats:
        """[len(BINS) - 1] share of resolved visits; NaN in empty bins."""
        where = np.searchsorted(BINS, self.acceptance, side="right").ravel() - 1
        visits = np.bincount(where, minlength=len(BINS) - 1)
        resolved = np.bincount(where, self.resolved.ravel(), minlength=len(BINS) - 1)
        shares: Floats = np.full(len(visits), np.nan)
        return np.divide(resolved, visits, out=shares, where=visits > 0)


def measure(world: World, steps: Iterable[Step]) -> Measured:
    """Measure the batches of a drive; none has the same prompt twice."""
    rows = [_measure_step(world, step) for step in steps]
    return Measured(*(np.array(column) for column in zip(*rows, strict=True)))


class _Row(NamedTuple):
    """A row of every array of `Measured`."""

    noise: Floats
    deviation: Floats
    variance: Floats
    rollouts: Ints
    resolved: Bools
    acceptance: Floats
    generated: float


def _measure_step(world: World, step: Step) -> _Row:
    count = world.settings.prompts
    members = [(int(group.prompt), group.weight, member) for group in step.groups for member in group.members]
    prompts = np.array([i for i, _, _ in members], np.int64)
    weights = np.array([weight * member.coefficient for _, weight, member in members])
    correct = np.array([step.correct[member.work] for _, _, member in members], np.bool_)
    accepted = np.array([member.reward >= SUCCESS_REWARD for _, _, member in members], np.float64)
    versions = np.array([member.oldest_version for _, _, member in members], np.int64)

    noise, mean = np.zeros(count), np.zeros(count)
    for version in np.unique(versions):
        of = versions == version
        truth, at, right, weight = world.truth(int(version)), prompts[of], correct[of], weights[of]
        variances = np.where(right, truth.noise_success[at], truth.noise_failure[at])
        noise += np.bincount(at, weight**2 * variances, count)
        mean += np.bincount(at, weight * np.where(right, truth.mean_success[at], truth.mean_failure[at]), count)
    rollouts = np.bincount(prompts, minlength=count)
    truth = world.truth(step.version)
    return _Row(
        noise=noise,
        deviation=mean - truth.target,
        variance=truth.variance / np.maximum(rollouts - world.offset, 1),
        rollouts=rollouts,
        resolved=np.bincount(prompts, accepted, count) > 0,
        acceptance=truth.acceptance,
        generated=step.generated / count,
    )


def oracle_over_uniform(world: World, per_prompt: float, least: int, most: int) -> float:
    """Bound of the best allocation over that of the uniform one for the same tokens, all true values known.

    n_i - offset ~ sqrt(V_i / c_i) (Neyman 1934, with costs), fractions allowed, within the same limits.
    """
    truth = world.truth(0)
    shape = np.sqrt(truth.variance / truth.cost)
    budget = per_prompt * truth.cost.sum()
    low, high = 0.0, (most - world.offset) / shape.min()
    for _ in range(100):
        middle = (low + high) / 2
        rollouts = (middle * shape + world.offset).clip(least, most)
        low, high = (middle, high) if (rollouts * truth.cost).sum() < budget else (low, middle)
    oracle = (truth.variance / (rollouts - world.offset)).mean()
    return float(oracle / (truth.variance / (per_prompt - world.offset)).mean())
