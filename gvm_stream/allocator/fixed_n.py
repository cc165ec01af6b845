"""Allocation for trainers that insist on groups of equal size.

A trainer that samples B groups of exactly n rollouts in every step can still spend them unequally: a prompt that is to
have k n rollouts is put into the step k times. Numbers are planned as ever, from earlier visits, and rounded to
multiples of n with the same sum.

A mean over groups would count that prompt k times. So its groups weigh 1/k of it each, and then the number of groups
never re-weights a prompt: every group's gradient has the mean that any other group of the prompt has, and k is fixed
before the first rollout.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gvm_stream.allocator.arrays import Floats, Ints
from gvm_stream.allocator.budget import AnyBudget, Rollouts
from gvm_stream.allocator.online import OnlineAllocator
from gvm_stream.allocator.planning import Plan, round_to_sum
from gvm_stream.allocator.policies import Policy, View
from gvm_stream.allocator.settings import Settings
from gvm_stream.allocator.types import Fate, PromptId, Scored, Unscorable, WorkItem


class Finished(NamedTuple):
    """What a step is worth to the trainer, in the order of its groups: one of the two, never both."""

    advantages: Floats
    """[B, n], for a trainer that takes advantages from outside: the mean over all B n rollouts of advantage x grad log
    pi is the mean over prompts of the weighted gradient estimates. The baseline is over all rollouts of a prompt, in
    whichever group. 0 for a rollout without a verdict."""
    weights: Floats
    """[B], for a trainer that makes its own estimate of each group's gradient: multiply the loss of the group with it.
    The mean over prompts of the weight in the objective is also their mean. 0 for a prompt without any verdict."""


class FixedGroups:
    """An `OnlineAllocator` for a trainer that samples groups of `n` rollouts, as many in every step:

        prompts = groups.step()                        # B ids, some of them repeated
        finished = groups.finish(rewards, tokens)      # [B, n] each; the oldest step that is not finished

    B is `prompts_per_step` x `budget.rollouts` / n. With `max_lag` = 0 the two take turns; a trainer that samples ahead
    may call `step` up to `max_lag` more times. Its policy version is the number of finished steps. The state to save is
    that of `allocator`; after loading it call `allocator.redo_unsettled()`, and `step` begins with the oldest one.

    Raises ValueError for settings that do not make equal groups, fewer prompts than a step has, and equal ones.
    """

    def __init__(self, settings: Settings, n: int, prompts: Sequence[PromptId], *, seed: int) -> None:
        if n < 1:
            raise ValueError(f"a group of {n} rollouts was asked for, expected at least 1")
        if not isinstance(settings.budget, Rollouts):
            raise ValueError("groups of a fixed size need a budget in rollouts, which is the same in every step")
        sizes = {
            "min_rollouts": settings.min_rollouts,
            "budget.rollouts": settings.budget.rollouts,
            "max_rollouts": settings.max_rollouts,
        }
        for name, size in sizes.items():
            if size % n:
                raise ValueError(f"{name} = {size:g} must be a multiple of the group size {n}")
        if len(prompts) < settings.prompts_per_step:
            raise ValueError(f"{len(prompts)} prompts are fewer than prompts_per_step = {settings.prompts_per_step}")
        policy = settings.make_policy()
        if (settings.design or policy.designs[0]) != "planned" or type(policy).refill is not Policy.refill:
            raise ValueError(f"policy {settings.policy!r} changes its plan within a step, which fixed groups cannot")
        self.allocator = OnlineAllocator(settings, seed=seed, policy=Multiples(of=policy, n=n))
        self.allocator.add(prompts)
        self.n = n
        self.groups_per_step = round(settings.prompts_per_step * settings.budget.rollouts) // n
        self._sampling: deque[tuple[int, list[WorkItem]]] = deque()
        """(policy version, work) of the steps that are not finished, group by group."""

    def step(self) -> list[PromptId]:
        """The prompts of the next step's groups, those of a prompt side by side; none after `settings.steps` steps.

        Raises ValueError if too many steps are unfinished, or retired and quarantined prompts leave too few to visit.
        """
        allocator = self.allocator
        if len(self._sampling) > allocator.settings.max_lag:
            raise ValueError(f"{len(self._sampling)} steps are unfinished, max_lag = {allocator.settings.max_lag}")
        version = allocator.settled_steps
        items = allocator.ask(self.groups_per_step * self.n, version)
        if not items:
            return []
        least, found = allocator.settings.prompts_per_step, len({item.prompt for item in items})
        if found < least:
            raise ValueError(f"only {found} of {least} prompts can be visited: the others are retired or quarantined")
        self._sampling.append((version, items))
        return [item.prompt for item in items[:: self.n]]

    def finish(self, rewards: Floats, tokens: Ints) -> Finished:
        """Rewards [B, n], NaN where there is no verdict, and response tokens [B, n] of the oldest unfinished step.

        Raises ValueError, and has not changed anything, without such a step, for another shape, and for rewards or
        tokens that `OnlineAllocator.tell` does not take.
        """
        if not self._sampling:
            raise ValueError("there is no step to finish")
        shape = (self.groups_per_step, self.n)
        if rewards.shape != shape or tokens.shape != shape:
            raise ValueError(f"rewards are {rewards.shape} and tokens {tokens.shape}, expected {shape}")
        allocator = self.allocator
        low, high = allocator.settings.reward_range or (-np.inf, np.inf)
        if not np.all(np.isnan(rewards) | (np.isfinite(rewards) & (low <= rewards) & (rewards <= high))):
            raise ValueError(f"a reward must be a finite number from {low:g} to {high:g}, or NaN for no verdict")
        if tokens.dtype.kind not in "iu" or np.any(tokens < 0):
            raise ValueError("a number of tokens must be an integer of at least 0")
        version, items = self._sampling.popleft()
        for item, reward, length in zip(
            items, rewards.astype(np.float64).ravel().tolist(), tokens.ravel().tolist(), strict=True
        ):
            allocator.tell(
                item.work,
                item.attempt,
                Unscorable(reason="no reward", tokens=length, seconds=0.0)
                if np.isnan(reward)
                else Scored(reward=reward, tokens=length, seconds=0.0, oldest_version=version),
            )
        step = items[0].step
        closed = allocator.batch(step)
        assert closed is not None, "all rollouts of a planned step have been told"
        mean_groups = self.groups_per_step / allocator.settings.prompts_per_step
        groups_of = Counter(item.group for item in items[:: self.n])
        weight_of = {group.group: mean_groups * group.weight / groups_of[group.group] for group in closed}
        scale = mean_groups * self.n
        advantage_of = {m.work: scale * group.weight * m.coefficient for group in closed for m in group.members}
        allocator.settle(step, allocator.settled_steps + 1, {Fate.TRAINED: advantage_of})
        return Finished(
            np.array([advantage_of.get(item.work, 0.0) for item in items]).reshape(shape),
            np.array([weight_of.get(item.group, 0.0) for item in items[:: self.n]]),
        )


class Multiples(Policy, frozen=True, kw_only=True):
    """The numbers of another policy, rounded to multiples of `n` with the same sum."""

    of: Policy
    n: int

    def plan(self, view: View, budget: AnyBudget) -> Plan:
        rollouts, price, _ = self.of.plan(view, budget)
        total = round(budget.rollouts * len(view.prompts))
        groups = round_to_sum(rollouts.astype(np.float64), total // self.n, view.least // self.n, view.most // self.n)
        return Plan(groups * self.n, price)

    def select(self, view: View, count: int) -> Ints | None:
        return self.of.select(view, count)
