"""Energy (squared gradient norm) of rollouts by class and length, over all prompts."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any, NamedTuple

import numpy as np

from gvm_stream.allocator.arrays import Floats

MAX_RATIO = 30.0
"""Energies count as at most so many times, and at least one part in so many of, what their length predicts."""
MEMORY = 4096
"""Rollouts after which one has lost 1/e of its weight; visits, for the spread."""
BORROWED = 4.0
"""Rollouts that a class borrows from the other one, which is what it goes by before it has any."""
RIDGE = 1.0
"""Weight of slope 1 in squared log lengths: some four rollouts of usual spread."""
LOG_MAX_RATIO = log(MAX_RATIO)
LEAST = 1e-30
LOG_LEAST = log(LEAST)
SHRINKAGE_RANGE = (0.1, 20.0)

Energy = tuple[bool, int, float]
"""A rollout: whether it succeeded, its tokens, its energy."""


class Line(NamedTuple):
    """Typical energy exp(intercept) * tokens^slope, and the mean ratio of energies to it.

    A line through logarithms predicts a median; times the mean ratio it predicts the mean, whatever the distribution
    (the smearing estimate of Duan 1983).
    """

    intercept: float
    slope: float
    mean_ratio: float

    def mean(self, tokens: Floats) -> Floats:
        """Mean energy at these lengths (above 0)."""
        return self.mean_ratio * np.exp(self.intercept + self.slope * np.log(tokens))

    def at(self, tokens: float) -> float:
        """The same for one length."""
        return self.mean_ratio * exp(self.intercept + self.slope * log(tokens))


class EnergyModel:
    """Regression of log energy on log length in each class by discounted sums; O(1) per rollout.

    It leans to slope 1, energy in proportion to length: a gradient is a sum over tokens whose terms are uncorrelated.
    """

    def __init__(self) -> None:
        # A millionth of a rollout with one token and energy 1: before any is observed, energy = tokens.
        nothing = [1e-6, 0.0, 0.0, 0.0, 0.0, 1e-6]
        self._sums = {True: nothing, False: nothing.copy()}
        """Discounted sums of 1, x, y, xx, xy and ratios by class; x = log tokens, y = log energy."""
        self._visits, self._within, self._around = 8.0, 1.0, 1.5
        """Spread of energies relative to their prediction, over so many visits: within a visit, and around 1. Before
        any: coefficients of variation of 1 within a prompt and about 1/2 between prompts of equal length."""

    def line(self, success: bool) -> Line:
        """Of a class; O(1)."""
        n, x, y, xx, xy, _ = self._sums[success]
        other_n, other_x, other_y, other_xx, other_xy, _ = self._sums[not success]
        share = BORROWED / (BORROWED + other_n)
        n += share * other_n
        x, y = (x + share * other_x) / n, (y + share * other_y) / n
        slope = (xy + share * other_xy - n * x * y + RIDGE) / (xx + share * other_xx - n * x * x + RIDGE)
        slope = min(max(slope, 0.0), 2.0)  # 2: all terms of the sum over tokens point the same way
        return Line(y - slope * x, slope, self._mean_ratio(success))

    @property
    def shrinkage(self) -> float:
        """Rollouts of predicted energy that a prompt starts with: the variance of energies within a visit over that
        between prompts, both relative to what the length predicts (empirical Bayes)."""
        low, high = SHRINKAGE_RANGE
        return min(max(self._within / max(self._around - self._within, self._within / high), low), high)

    def observe(self, visit: Sequence[Energy]) -> list[float]:
        """Count the rollouts of a visit; returns their energies, within MAX_RATIO of what their lengths predict."""
        keep = (1 - 1 / MEMORY) ** len(visit)
        least = {}
        for success, sums in self._sums.items():
            # Logarithms are not robust at their lower end, and a memorised response has next to no energy: it counts as
            # at least one part in MAX_RATIO of the typical energy per token.
            least[success] = (sums[2] - sums[1]) / sums[0] - LOG_MAX_RATIO
            sums[:] = [keep * total for total in sums]
        logs = []
        for success, tokens, energy in visit:  # no min and max: this loop is what the allocator's speed depends on
            x = log(tokens) if tokens > 1 else 0.0
            y = log(energy) if energy > LEAST else LOG_LEAST
            logs.append((x, y))
            if y < x + least[success]:
                y = x + least[success]
            sums = self._sums[success]
            sums[0] += 1
            sums[1] += x
            sums[2] += y
            sums[3] += x * x
            sums[4] += x * y
        lines = {True: self.line(True), False: self.line(False)}
        clipped, ratios = [], []
        for (x, y), (success, _, energy) in zip(logs, visit, strict=True):
            line = lines[success]
            typical = line.intercept + line.slope * x
            ratio = y - typical
            if -LOG_MAX_RATIO <= ratio <= LOG_MAX_RATIO:
                ratio = exp(ratio)
                clipped.append(energy)
            else:
                ratio = MAX_RATIO if ratio > 0 else 1 / MAX_RATIO
                clipped.append(ratio * exp(typical))
            self._sums[success][5] += ratio
            ratios.append(ratio)
        mean = {True: self._mean_ratio(True), False: self._mean_ratio(False)}
        self._observe_spread([ratio / mean[success] for ratio, (success, _, _) in zip(ratios, visit, strict=True)])
        return clipped

    def _mean_ratio(self, success: bool) -> float:
        n, *_, total = self._sums[success]
        other_n, *_, other_total = self._sums[not success]
        share = BORROWED / (BORROWED + other_n)
        return (total + share * other_total) / (n + share * other_n)

    def _observe_spread(self, ratios: list[float]) -> None:
        k = len(ratios)
        if k < 2:
            return
        mean = sum(ratios) / k
        keep = 1 - 1 / MEMORY
        within = sum((ratio - mean) ** 2 for ratio in ratios) / (k - 1)
        around = sum((ratio - 1) ** 2 for ratio in ratios) / k
        weight = self._visits = keep * self._visits + 1
        self._within += (within - self._within) / weight
        self._around += (around - self._around) / weight

    def state_dict(self) -> dict[str, Any]:
        return {
            "success": list(self._sums[True]),
            "failure": list(self._sums[False]),
            "spread": [self._visits, self._within, self._around],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = {True: list(state["success"]), False: list(state["failure"])}
        self._visits, self._within, self._around = state["spread"]
