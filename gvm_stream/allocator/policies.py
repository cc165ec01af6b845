"""Policies: how many rollouts each prompt of a step gets, from what earlier visits taught.

A policy is a value per prompt; one rule turns values into numbers. Its plan is made before the step's first rollout, so
with a leave-one-out baseline the gradient of every prompt is unbiased whatever the policy (design "planned").
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from gvm_stream.allocator.estimates import Estimates, Floats, Ints

Policy = Callable[[Estimates, Ints, int], Floats]
"""(estimates, prompts [B], policy version) -> variance per rollout over its cost [B], up to a common factor."""


def uniform(estimates: Estimates, prompts: Ints, version: int) -> Floats:
    """Every prompt is worth the same."""
    return np.ones(len(prompts))


def neyman(estimates: Estimates, prompts: Ints, version: int) -> Floats:
    """Posterior-mean variance per token, w^2 E[V] / c (Neyman allocation with costs).

    V = p(1-p) E, where the gradient energy E of a rollout is a sum over its tokens and so is its cost c;
    with energy taken as proportional to length the two cancel and E[p(1-p)] is left.
    """
    return estimates.reward_variance(prompts, version)


POLICIES: dict[str, Policy] = {"uniform": uniform, "neyman": neyman}


def plan(values: Floats, budget: int, least: int, most: int) -> Ints:
    """Rollouts per prompt [B] that minimise sum_i values_i / (n_i - 1) with sum n_i = budget, least <= n_i <= most.

    Greedy by marginal gain v / (n (n - 1)), which is exact for a separable convex sum (Fox 1966). Ties go to the
    prompt with fewer rollouts, then to the earlier one, so equal values (also all zero) give a uniform plan.
    Raises ValueError for `least` under 2 (one rollout has no others to compare with), a budget out of reach, or values
    that are negative or not finite.
    """
    count = len(values)
    if least < 2:
        raise ValueError(f"a prompt needs at least 2 rollouts, not {least}")
    if not count * least <= budget <= count * most:
        raise ValueError(f"{budget} rollouts cannot be spread over {count} prompts with {least} to {most} each")
    if not np.all(np.isfinite(values)) or np.any(values < 0):
        raise ValueError("the value of a prompt must be a finite number of at least 0")
    rollouts = np.full(count, least, np.int64)

    def entry(i: int) -> tuple[float, int, int]:
        n = int(rollouts[i])
        return (-float(values[i]) / (n * (n - 1)), n, i)

    heap = [entry(i) for i in range(count) if least < most]
    heapq.heapify(heap)
    for _ in range(budget - count * least):
        i = heap[0][2]
        rollouts[i] += 1
        if rollouts[i] < most:
            heapq.heapreplace(heap, entry(i))
        else:
            heapq.heappop(heap)
    return rollouts
