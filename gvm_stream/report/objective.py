"""The objective that a run's estimator follows: c(p), the factor by which it scales the gradient of a prompt with
acceptance rate p, made by enumeration (`allocator.stopping.implied_objective`). 1 everywhere is the mean reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.from_config import allocator_settings
from gvm_stream.allocator.objectives import weights
from gvm_stream.allocator.policies import make_policy
from gvm_stream.allocator.policies.adaptive import ReinforceAda
from gvm_stream.allocator.policies.planned import GvmTwoStage, ReinforceAdaEst
from gvm_stream.allocator.stopping import Counts, Rule, StoppingRule, Weights, implied_objective, pool_baseline
from gvm_stream.config import Config

POINTS = np.linspace(0.02, 0.98, 49)
UNBIASED = ("rloo", "opo", "opob", "otb", "shrunken", "raft", "dr_grpo")
"""Advantages of which the mean is the gradient of p, but for a constant, with a number of rollouts fixed beforehand."""


class Implied(NamedTuple):
    values: Sequence[float]
    """c at `POINTS`; empty where it is not known."""
    text: str


def implied(config: Config, design: str) -> Implied:
    """What the estimator of this configuration follows; `design` is the one that was in use."""
    allocation, advantage = config.allocation, config.learner.advantage
    n = max(2, round(allocation.rollouts_per_prompt))
    if advantage == "grpo":
        curve = _under(Rule(n), _standardised)
        text = (
            f"Dividing by the standard deviation (GRPO, {n} rollouts) gives more weight to very easy and hard prompts."
        )
    elif advantage in UNBIASED:
        curve, text = np.ones(len(POINTS)), "Every prompt's gradient counts the same, whatever its difficulty."
    elif advantage == "allocated":
        curve, text = _of_allocator(config, design, n)
    else:
        return Implied(
            (), f'What the advantage "{advantage}" does to the weights of prompts is not known in closed form.'
        )
    settings = allocator_settings(allocation, max_tokens=config.sampling.max_tokens, steps=config.run.steps)
    if allocation.objective != "own":
        curve = curve * weights(settings.objective, POINTS, allocation.coefficient)
        text += f" The objective {allocation.objective} weights them by their expected acceptance rate on top."
    return Implied(curve.tolist(), text)


def _of_allocator(config: Config, design: str, n: int) -> tuple[Floats, str]:
    """With the coefficients that come with every group."""
    allocation = config.allocation
    if design == "reference":
        policy = make_policy(allocation.policy, allocation.options)
        if isinstance(policy, ReinforceAda):
            rule = Rule(policy.round_size, policy.max_rounds, *policy.exit())
            text = (
                "Stopping on the counts and keeping a balanced subset re-weight the prompts: this method, as published,"
            )
            return _under(rule, pool_baseline(policy.keep)), f"{text} does not follow the mean reward."
        if isinstance(policy, ReinforceAdaEst):
            eps = policy.eps
            return _under(Rule(n), lambda rule, counts: _by_root_mean(counts, eps)), (
                f"Dividing by the root of the mean reward (here with {n} rollouts) makes it roughly the root of p."
            )
        if isinstance(policy, GvmTwoStage):
            base, text = _of_estimator(allocation.coefficient, n)
            kept = 1 - (1 - POINTS) ** policy.pilot
            return base * kept, f"{text} Prompts without a success in the pilot of {policy.pilot} are left out."
    return _of_estimator(allocation.coefficient, n)


def _of_estimator(coefficient: str, n: int) -> tuple[Floats, str]:
    if coefficient == "raft":
        return (1 - (1 - POINTS) ** n) / POINTS, (
            f"The gradient of log p, hard prompts first, as far as {n} rollouts find a success."
        )
    return np.ones(len(POINTS)), (
        "Every prompt's gradient counts the same, whatever its difficulty and however many rollouts it got: allocation "
        "changes the noise, not the objective."
    )


def _under(rule: StoppingRule, estimator: Weights) -> Floats:
    return np.array([implied_objective(rule, p, estimator) for p in POINTS.tolist()])


def _standardised(rule: StoppingRule, counts: Counts) -> tuple[float, float]:
    """GRPO, arXiv 2402.03300: the mean of (reward - mean) / standard deviation times the score."""
    s, f = counts
    n = s + f
    weight = s * f / n**2 / math.sqrt(s * f / (n * (n - 1))) if s and f else 0.0
    return weight, weight


def _by_root_mean(counts: Counts, eps: float) -> tuple[float, float]:
    """Reinforce-Ada-Est, arXiv 2510.04996 v3: the mean of (reward - mean) / sqrt(mean + eps) times the score."""
    s, f = counts
    n = s + f
    weight = s * f / n**2 / math.sqrt(s / n + eps)
    return weight, weight
