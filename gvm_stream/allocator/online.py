"""`OnlineAllocator`: which prompt gets the next rollout, and when a group is ready to train on.

Pure and synchronous: no sockets, no clock, no global randomness. Time is counted in *training batches* and *policy
versions*, both given by the caller:

    items = allocator.ask(slots, version)          # work for a sampler that has policy `version`
    told = allocator.tell(item.work, item.attempt, outcome)
    groups = allocator.batch(step)                 # None until every group of that batch has closed
    allocator.settle(step, version, fates)         # the learner is done with it; its policy is now `version`

Batch b may be sampled once b - max_lag batches are settled, and only by versions from that moment on. So no token
can be more than max_lag batches old when it is trained on and nothing has to be dropped for age. A batch is a fixed
set of prompts: a slow (long, hard) group is waited for, never replaced by a fast one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from gvm_stream.allocator.account import TokenAccount
from gvm_stream.allocator.estimates import Estimates
from gvm_stream.allocator.ledger import Ledger, Reception
from gvm_stream.allocator.policies import POLICIES, plan
from gvm_stream.allocator.types import (
    Cancelled,
    ClosedGroup,
    Expired,
    Failed,
    Fate,
    Member,
    Outcome,
    PromptId,
    Scored,
    Unscorable,
    WorkItem,
)

STATE_FORMAT = 1


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """See the keys of the same names in `config.AllocationSection`."""

    policy: str = "neyman"
    prompts_per_step: int = 32
    rollouts_per_step: int = 256
    min_rollouts: int = 2
    max_rollouts: int = 32
    memory_versions: float = 128.0
    prior: tuple[float, float] = (0.5, 0.5)
    max_lag: int = 1
    max_attempts: int = 3
    steps: int | None = None
    """Batches in all; None: no end."""


class Told(msgspec.Struct, frozen=True):
    reception: Reception
    closed: ClosedGroup | None = None
    """The group this outcome completed, if it did."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a prompt gets what it gets."""

    prompt: PromptId
    visits: int
    successes: float
    """Discounted counts of earlier visits."""
    failures: float
    acceptance: float
    """Posterior mean."""
    reward_variance: float
    """Posterior mean of p(1-p)."""
    mean_tokens: float
    quarantined: bool
    planned: dict[int, int]
    """Batch -> rollouts, for batches not settled yet."""


class _Group:
    def __init__(self, prompt: int, step: int, planned: int) -> None:
        self.prompt, self.step, self.planned = prompt, step, planned
        self.left = planned
        self.failed = 0
        self.members: list[Member] = []
        self.closed: ClosedGroup | None = None


class OnlineAllocator:
    """Plans batches of prompts, issues their rollouts, learns from the outcomes. See the module docstring."""

    def __init__(self, settings: Settings, *, seed: int) -> None:
        if settings.policy not in POLICIES:
            raise ValueError(f"policy {settings.policy!r} is unknown; there are {', '.join(sorted(POLICIES))}")
        self.settings = settings
        self.estimates = Estimates(settings.prior, settings.memory_versions)
        self.ledger = Ledger()
        self.account = TokenAccount()
        self.settled_steps = 0
        self._seed = seed
        self._policy = POLICIES[settings.policy]
        self._prompts: list[PromptId] = []
        self._position: dict[PromptId, int] = {}
        self._quarantine: set[int] = set()
        self._epoch = 0
        self._order: deque[int] = deque()
        self._groups: dict[int, _Group] = {}
        self._next_group = 0
        self._steps: dict[int, list[int]] = {}
        """Unsettled batches: step -> groups."""
        self._open: dict[int, int] = {}
        """Unsettled batches: step -> groups that have not closed."""
        self._versions = [0]
        """Policy version after so many settled batches."""
        self._launch: deque[tuple[int, int, int]] = deque()
        """(group, index, min_version) not issued yet, in launch order."""
        self._retry: deque[WorkItem] = deque()
        self._withdrawn = False
        self._tokens: dict[int, int] = {}
        """Tokens of scored work whose fate is pending."""

    # --- prompts ---

    def add(self, prompts: Iterable[PromptId]) -> None:
        """Add prompts; they take part from the next epoch on. Raises ValueError for one that is there already."""
        fresh = list(prompts)
        for i, prompt in enumerate(fresh):
            if prompt in self._position:
                for undone in fresh[:i]:
                    del self._position[undone]
                raise ValueError(f"prompt {prompt!r} is there already")
            self._position[prompt] = len(self._prompts) + i
        self._prompts += fresh
        self.estimates.grow(len(fresh))

    def start(self, version: int) -> None:
        """Set the policy version that sampling starts from."""
        self._versions[-1] = version

    # --- ask / tell ---

    def ask(self, slots: int, version: int) -> list[WorkItem]:
        """Up to `slots` work items for a sampler that has policy `version`; fewer when pacing allows no more."""
        items: list[WorkItem] = []
        while len(items) < slots and not self._withdrawn:
            if self._retry and self._retry[0].min_version <= version:
                items.append(self.ledger.reissue(self._retry.popleft()))
            elif self._launch and self._launch[0][2] <= version:
                number, index, min_version = self._launch.popleft()
                group = self._groups[number]
                items.append(
                    self.ledger.issue(
                        group=number,
                        prompt=self._prompts[group.prompt],
                        index=index,
                        step=group.step,
                        min_version=min_version,
                        reason=f"{self.settings.policy}: {index + 1} of {group.planned} planned",
                    )
                )
            elif self._launch or not self._plan_next():
                break
        return items

    def tell(self, work: int, attempt: int, outcome: Outcome) -> Told:
        """Take the outcome of an attempt. In any order, twice, or late: what does not count is counted and ignored.

        Raises ValueError for a reward that is not finite or a negative number of tokens; nothing has changed then.
        """
        if isinstance(outcome, Scored) and not np.isfinite(outcome.reward):
            raise ValueError(f"work {work}: reward {outcome.reward} is not a finite number")
        if outcome.tokens < 0:
            raise ValueError(f"work {work}: {outcome.tokens} tokens")
        reception, item, tokens = self.ledger.settle(work, attempt, outcome)
        if item is None:
            self.account.extend(Fate.FAILED, tokens)
            return Told(reception)
        self.account.add(FATE_OF[type(outcome)], outcome.tokens)
        if isinstance(outcome, Failed | Expired) and item.attempt + 1 < self.settings.max_attempts:
            self._retry.append(item)
            return Told(reception)
        group = self._groups[item.group]
        group.left -= 1
        group.failed += isinstance(outcome, Failed | Expired)
        if isinstance(outcome, Scored):
            self._tokens[work] = outcome.tokens
            group.members.append(
                Member(
                    work=work,
                    index=item.index,
                    reward=outcome.reward,
                    tokens=outcome.tokens,
                    oldest_version=outcome.oldest_version,
                )
            )
        return Told(reception, self._close(item.group) if group.left == 0 else None)

    # --- batches ---

    def batch(self, step: int) -> tuple[ClosedGroup, ...] | None:
        """The closed groups of a batch, in plan order; None while it is not complete. Groups without a single scored
        rollout are left out."""
        if self._open.get(step, 1) > 0:
            return None
        closed = [self._groups[number].closed for number in self._steps[step]]
        return tuple(group for group in closed if group is not None and group.members)

    def settle(self, step: int, version: int, fates: Mapping[Fate, Iterable[int]]) -> None:
        """The learner is done with batch `step`; its policy is `version` now. `fates` names every rollout of it once.

        Raises ValueError if it is not the next batch or not complete, the version goes backwards, or the fates do not
        match the batch; nothing has changed then.
        """
        if step != self.settled_steps or self.batch(step) is None:
            raise ValueError(f"batch {step} cannot be settled: the next complete one would be {self.settled_steps}")
        if version < self._versions[-1]:
            raise ValueError(f"policy version {version} is older than {self._versions[-1]}")
        members = {m.work for number in self._steps[step] for m in self._groups[number].members}
        named = [(fate, work) for fate, works in fates.items() for work in works]
        works = {work for _, work in named}
        if len(named) != len(members) or works != members:
            raise ValueError(
                f"the fates of batch {step} name {len(named)} rollouts, the batch has {len(members)}; "
                f"{len(members ^ works)} are not in both"
            )
        for fate, work in named:
            self.account.move(Fate.PENDING, fate, self._tokens.pop(work))
        for number in self._steps.pop(step):
            del self._groups[number]
        del self._open[step]
        self.settled_steps += 1
        self._versions.append(version)

    def withdraw(self) -> list[WorkItem]:
        """Nothing more is issued; the items still running come back (the caller cancels them)."""
        self._withdrawn = True
        return self.ledger.running()

    # --- for people ---

    def explain(self, prompt: PromptId) -> Explanation:
        """Raises KeyError for an unknown prompt."""
        i = self._position[prompt]
        where, now = np.array([i]), self._versions[-1]
        a, b = self.estimates.posterior(where, now)
        return Explanation(
            prompt=prompt,
            visits=int(self.estimates.visits[i]),
            successes=float(a[0] - self.settings.prior[0]),
            failures=float(b[0] - self.settings.prior[1]),
            acceptance=float(a[0] / (a[0] + b[0])),
            reward_variance=float(self.estimates.reward_variance(where, now)[0]),
            mean_tokens=float(self.estimates.mean_tokens(where)[0]),
            quarantined=i in self._quarantine,
            planned={g.step: g.planned for g in self._groups.values() if g.prompt == i},
        )

    def quarantine(self, prompt: PromptId) -> None:
        """Do not visit this prompt again; rollouts under way go on. Raises KeyError for an unknown prompt."""
        self._quarantine.add(self._position[prompt])

    @property
    def quarantined(self) -> list[PromptId]:
        """Prompts that are not visited again: `quarantine` said so, or no rollout of a visit could be made."""
        return [self._prompts[i] for i in sorted(self._quarantine)]

    @property
    def exhausted(self) -> bool:
        """True when every prompt is quarantined: there is nothing left to plan."""
        return len(self._quarantine) == len(self._prompts)

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Plain data. Batches not settled are saved as plans: their rollouts are made again, none is skipped."""
        return {
            "format": STATE_FORMAT,
            "estimates": self.estimates.state_dict(),
            "account": self.account.state_dict(),
            "settled_steps": self.settled_steps,
            "version": self._versions[-1],
            "quarantine": sorted(self._quarantine),
            "epoch": self._epoch,
            "order": list(self._order),
            "plans": [
                [(self._groups[number].prompt, self._groups[number].planned) for number in self._steps[step]]
                for step in sorted(self._steps)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; the same prompts must have been added. Raises ValueError if it does not fit."""
        if state["format"] != STATE_FORMAT:
            raise ValueError(f"allocator state of format {state['format']}, expected {STATE_FORMAT}")
        self.estimates.load_state_dict(state["estimates"])
        self.account.load_state_dict(state["account"])
        self.settled_steps = state["settled_steps"]
        self._versions = [state["version"]] * (self.settled_steps + 1)
        self._quarantine = set(state["quarantine"])
        self._epoch, self._order = state["epoch"], deque(state["order"])
        self._groups, self._steps, self._open, self._tokens = {}, {}, {}, {}
        self._launch, self._retry, self.ledger = deque(), deque(), Ledger()
        self._withdrawn = False
        for offset, groups in enumerate(state["plans"]):
            self._add_step(self.settled_steps + offset, [(p, n) for p, n in groups])

    # --- inside ---

    def _plan_next(self) -> bool:
        """Plan the next batch if pacing admits it."""
        step = self.settled_steps + len(self._steps)
        if step > self.settled_steps + self.settings.max_lag:
            return False
        if self.settings.steps is not None and step >= self.settings.steps:
            return False
        prompts = self._next_prompts()
        if not prompts:
            return False
        budget = round(self.settings.rollouts_per_step * len(prompts) / self.settings.prompts_per_step)
        values = self._policy(self.estimates, np.array(prompts), self._versions[-1])
        rollouts = plan(values, budget, self.settings.min_rollouts, self.settings.max_rollouts)
        self._add_step(step, list(zip(prompts, rollouts.tolist(), strict=True)))
        return True

    def _next_prompts(self) -> list[int]:
        """The next prompts in epoch order; one batch never has the same prompt twice."""
        usable = len(self._prompts) - len(self._quarantine)
        prompts: list[int] = []
        while len(prompts) < min(self.settings.prompts_per_step, usable):
            if not self._order:
                order = np.random.default_rng((self._seed, self._epoch)).permutation(len(self._prompts))
                # A batch may straddle two epochs: what it already has comes later in the new one.
                self._order = deque(sorted(order.tolist(), key=lambda i: i in prompts))
                self._epoch += 1
            prompt = self._order.popleft()
            if prompt not in self._quarantine:
                prompts.append(prompt)
        return prompts

    def _add_step(self, step: int, plan: list[tuple[int, int]]) -> None:
        min_version = self._versions[max(0, step - self.settings.max_lag)]
        self._steps[step] = []
        self._open[step] = len(plan)
        for prompt, planned in plan:
            number, self._next_group = self._next_group, self._next_group + 1
            self._groups[number] = _Group(prompt, step, planned)
            self._steps[step].append(number)
            self._launch.extend((number, index, min_version) for index in range(planned))

    def _close(self, number: int) -> ClosedGroup:
        group = self._groups[number]
        self._open[group.step] -= 1
        group.members.sort(key=lambda member: member.index)
        group.closed = ClosedGroup(
            group=number,
            prompt=self._prompts[group.prompt],
            step=group.step,
            planned=group.planned,
            weight=1.0,
            members=tuple(group.members),
        )
        if group.members:
            self.estimates.observe(
                group.prompt,
                np.array([m.reward for m in group.members]),
                sum(m.tokens for m in group.members),
                max(m.oldest_version for m in group.members),
            )
        elif group.failed == group.planned:
            self._quarantine.add(group.prompt)
        return group.closed


FATE_OF: dict[type[Outcome], Fate] = {
    Scored: Fate.PENDING,
    Unscorable: Fate.UNSCORABLE,
    Cancelled: Fate.CANCELLED,
    Failed: Fate.FAILED,
    Expired: Fate.FAILED,
}
