"""A made-up world: prompts with known acceptance rates, gradients and lengths, and rollouts drawn from them.

Every prompt's gradient lies along a direction of its own, so what matters of a score grad log pi(y) is its mean along
that direction and its variance, both by class (success, failure). With G the root mean squared norm of a score, the
same in both classes, and rho = `signal`:

    rloo   mu+ = (1-p) delta, mu- = -p delta, ||delta||^2 = rho G^2; target grad p = p(1-p) delta
    raft   ||mu+||^2 = rho G^2; target grad log p = mu+; mu- = -min(1, p/(1-p)) mu+

Scores have mean 0, p mu+ + (1-p) mu- = 0; for `raft` that would need more than the energy of a failure where p > 1/2,
hence the minimum. It only matters for wrong responses that get a coefficient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.policies import Coefficient
from gvm_stream.allocator.types import PromptId

BLOCK = 4096
MOST_CERTAIN = 1e-6
"""Acceptance rates stay this far from 0 and 1."""


class WorldSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError for values out of range, naming them."""

    prompts: int = 512
    coefficient: Coefficient = "rloo"
    acceptance: tuple[float, float] = (0.5, 0.8)
    """Beta distribution of the acceptance rates."""
    energy_sd: float = 0.6
    """Of log G between prompts."""
    energy_noise: float = 0.5
    """Log-sd of the energy seen for a rollout around that of its prompt."""
    signal: float = 0.3
    """Share of the energy that is signal, see above."""
    damping: float = 1e-3
    """alpha of GVM's damped bound V = G^2 / (p + alpha/p) (arXiv 2505.02391, Prop. 1 with beta = 2); 0: G^2 / p. It is
    what the bound is reported with, and changes nothing that happens."""
    mean_tokens: float = 200.0
    cost_sd: float = 0.0
    """Log-sd of the mean lengths of prompts."""
    length_sd: float = 0.5
    """Log-sd of the lengths within a prompt."""
    length_bias: float = 0.0
    """Correct responses are shorter by exp(-length_bias)."""
    drift: float = 0.0
    """Standard deviation of the change of logit p with every policy version."""
    verifier_noise: float = 0.0
    """Chance that a verdict is the wrong one."""
    flaky: float = 0.0
    """Share of prompts whose verdicts are a coin's."""
    crashes: float = 0.0
    """Chance that an attempt at a rollout fails or expires half-way."""
    unscorable: float = 0.0

    def __post_init__(self) -> None:
        if not (self.prompts >= 1 and 1 <= self.mean_tokens < np.inf and all(0 < x < np.inf for x in self.acceptance)):
            raise ValueError(
                f"prompts = {self.prompts} and mean_tokens = {self.mean_tokens} must be at least 1, "
                f"acceptance = {self.acceptance} above 0, and all finite"
            )
        if not np.isfinite(self.length_bias):
            raise ValueError(f"length_bias = {self.length_bias} must be a finite number")
        for name in ("energy_sd", "energy_noise", "damping", "cost_sd", "length_sd", "drift"):
            if not 0 <= (value := getattr(self, name)) < np.inf:
                raise ValueError(f"{name} = {value} must be a finite number of at least 0")
        for name in ("signal", "verifier_noise", "flaky", "crashes", "unscorable"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} = {value} must be from 0 to below 1")
        if self.crashes + self.unscorable >= 1:
            raise ValueError(f"crashes = {self.crashes} and unscorable = {self.unscorable} leave no rollout")


class Rollout(NamedTuple):
    """What an attempt turns out to be."""

    correct: bool
    accepted: bool
    """The verdict."""
    tokens: int
    energy: float
    fault: Literal["failed", "expired", "unscorable"] | None
    made: int
    """Tokens it has when it ends; fewer than `tokens` after a crash."""


class Truth(NamedTuple):
    """What is true of the prompts under a policy version. Arrays [P]; gradients along the prompt's own direction."""

    acceptance: Floats
    mean_success: Floats
    """mu+, mu-."""
    mean_failure: Floats
    noise_success: Floats
    """Variance of a score, E - ||mu||^2 by class."""
    noise_failure: Floats
    target: Floats
    """grad p (rloo) or grad log p (raft)."""
    variance: Floats
    """V of the bound V / (n - offset): p(1-p) G^2 (rloo) or G^2 / (p + alpha/p) (raft)."""
    cost: Floats
    """Expected tokens of a rollout."""


class World:
    """Draws rollouts; the same seed gives the same prompts and drift whatever is drawn in which order."""

    def __init__(self, settings: WorldSettings, seed: int) -> None:
        self.settings = settings
        self.offset = 1 if settings.coefficient == "rloo" else 0
        """n rollouts leave V / (n - offset): the leave-one-out baseline costs a degree of freedom."""
        prompts, draws, self._drift = (np.random.default_rng((seed, stream)) for stream in range(3))
        count = settings.prompts
        p = prompts.beta(*settings.acceptance, count).clip(MOST_CERTAIN, 1 - MOST_CERTAIN)
        self._acceptance = [p]
        """By policy version; just one without drift."""
        self._rates = [p.tolist()]
        self.energy = np.exp(2 * settings.energy_sd * prompts.standard_normal(count))
        """G^2."""
        self._length = settings.mean_tokens * _mean_one(settings.cost_sd * prompts.standard_normal(count))
        self._flaky = prompts.random(count) < settings.flaky
        self._energies, self._lengths, self._coins = (a.tolist() for a in (self.energy, self._length, self._flaky))
        self._uniform = _in_blocks(draws.random)
        self._noise = _in_blocks(lambda n: _log_normal(draws, settings.energy_noise, n))
        self._stretch = _in_blocks(lambda n: _log_normal(draws, settings.length_sd, n))
        self._shorter = float(np.exp(-settings.length_bias))
        self.truth = lru_cache(4)(self._truth)
        """`truth(version) -> Truth`."""

    @property
    def ids(self) -> list[PromptId]:
        """Prompt ids: positions in the arrays, as text."""
        return [str(i) for i in range(self.settings.prompts)]

    def rollout(self, prompt: int, version: int) -> Rollout:
        settings, uniform = self.settings, self._uniform
        correct = next(uniform) < self._rates[self._age(version)][prompt]
        verdict, fault = next(uniform), next(uniform)
        accepted = verdict < 0.5 if self._coins[prompt] else correct != (verdict < settings.verifier_noise)
        length = self._lengths[prompt] * next(self._stretch)
        tokens = max(1, round(length * self._shorter if correct else length))
        energy = self._energies[prompt] * next(self._noise)
        if fault < settings.crashes:
            share = 2 * fault / settings.crashes  # below 1: it failed; above: it expired; uniform within either
            return Rollout(
                correct, accepted, tokens, energy, "failed" if share < 1 else "expired", int(tokens * (share % 1))
            )
        unscorable = fault < settings.crashes + settings.unscorable
        return Rollout(correct, accepted, tokens, energy, "unscorable" if unscorable else None, tokens)

    def _age(self, version: int) -> int:
        """Index of a version into what is kept by version."""
        if self.settings.drift == 0:
            return 0
        while len(self._acceptance) <= version:
            p = self._acceptance[-1]
            odds = p / (1 - p) * np.exp(self.settings.drift * self._drift.standard_normal(len(p)))
            p = (odds / (1 + odds)).clip(MOST_CERTAIN, 1 - MOST_CERTAIN)
            self._acceptance.append(p)
            self._rates.append(p.tolist())
        return version

    def _truth(self, version: int) -> Truth:
        p, energy, signal = self._acceptance[self._age(version)], self.energy, self.settings.signal
        size = np.sqrt(signal * energy)
        if self.settings.coefficient == "rloo":
            success, failure, target, variance = (1 - p) * size, -p * size, p * (1 - p) * size, p * (1 - p) * energy
        else:
            success, failure, target = size, -size * np.minimum(1, p / (1 - p)), size
            variance = energy / (p + self.settings.damping / p)
        cost = self._length * (p * self._shorter + 1 - p)
        return Truth(p, success, failure, energy - success**2, energy - failure**2, target, variance, cost)


def _mean_one(logs: Floats) -> Floats:
    """Log-normal numbers scaled to the sample mean 1: unequal costs, the same total."""
    numbers = np.exp(logs)
    return np.asarray(numbers / numbers.mean())


def _log_normal(rng: np.random.Generator, sd: float, count: int) -> Floats:
    """With mean 1."""
    return rng.lognormal(-(sd**2) / 2, sd, count)


def _in_blocks(draw: Callable[[int], Floats]) -> Iterator[float]:
    while True:
        yield from draw(BLOCK).tolist()
