"""A host of the allocator in simulated time: samplers that ask, produce and tell, and a learner that settles."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gvm_stream.allocator.online import OnlineAllocator
from gvm_stream.allocator.types import (
    Cancelled,
    ClosedGroup,
    Expired,
    Failed,
    Fate,
    Outcome,
    Scored,
    Unscorable,
    WorkItem,
)
from gvm_stream.simulate.world import Rollout, World

Key = tuple[int, int]
"""(work, attempt)."""


@dataclass(frozen=True)
class Step:
    """A batch at the moment it is complete and the learner takes it."""

    number: int
    version: int
    """Policy version that it updates."""
    groups: tuple[ClosedGroup, ...]
    correct: dict[int, bool]
    """Work -> whether the response is right, whatever the verifier said; of all that was scored for this batch."""
    generated: int
    """Tokens for this batch and those before it, whatever became of them."""


class _Attempt(NamedTuple):
    item: WorkItem
    rollout: Rollout
    started: float
    version: int

    @property
    def key(self) -> Key:
        return self.item.work, self.item.attempt


def drive(allocator: OnlineAllocator, world: World, *, steps: int, slots: int = 256) -> Iterator[Step]:
    """Run until `steps` batches are settled, `slots` rollouts at a time; yields each batch before it is settled.

    The allocator has the prompts `world.ids` and has been started. A token takes one unit of time, so short responses
    come back first. The learner takes no time and makes one policy version of every batch. Cancellations take effect
    at once and report the tokens so far. The owner of an expired attempt goes on and reports later. What still runs at
    the end is cancelled. Raises RuntimeError if the allocator has no work and its batch is not complete.
    """
    host = _Host(allocator, world)
    while allocator.settled_steps < steps:
        groups = allocator.batch(allocator.settled_steps)
        if groups is None:
            host.advance(slots)
        else:
            yield host.take(groups)
            host.settle(groups)
    host.cancel_all()


class _Host:
    def __init__(self, allocator: OnlineAllocator, world: World) -> None:
        self._allocator, self._world = allocator, world
        self._now = 0.0
        self._running: dict[Key, _Attempt] = {}
        self._reports: list[tuple[float, int, _Attempt, Outcome]] = []
        """Heap of what is going to be reported; by time, then in launch order."""
        self._scheduled = 0
        self._cancelled: set[Key] = set()
        self._correct: defaultdict[int, dict[int, bool]] = defaultdict(dict)
        """By batch."""
        self._tokens: Counter[int] = Counter()
        """By batch."""

    @property
    def _version(self) -> int:
        return self._allocator.settled_steps

    def advance(self, slots: int) -> None:
        """Fill the free slots, then go on to the next report."""
        for item in self._allocator.ask(slots - len(self._running), self._version):
            self._launch(item)
        if not self._reports:
            raise RuntimeError(
                f"the allocator has no work though batch {self._allocator.settled_steps} is not complete"
            )
        self._now, _, attempt, outcome = heapq.heappop(self._reports)
        if attempt.key in self._cancelled:
            self._cancelled.remove(attempt.key)
            return
        self._running.pop(attempt.key, None)
        self._report(attempt, outcome)
        if isinstance(outcome, Expired):
            self._schedule(self._now + attempt.rollout.tokens - outcome.tokens, attempt, _scored(attempt))

    def take(self, groups: tuple[ClosedGroup, ...]) -> Step:
        number = self._allocator.settled_steps
        generated = sum(tokens for batch, tokens in self._tokens.items() if batch <= number)
        return Step(number, self._version, groups, self._correct.pop(number, {}), generated)

    def settle(self, groups: tuple[ClosedGroup, ...]) -> None:
        fates: dict[Fate, list[int]] = {Fate.TRAINED: [], Fate.ZERO_SIGNAL: []}
        for group in groups:
            signal = any(member.coefficient for member in group.members)
            fates[Fate.TRAINED if signal else Fate.ZERO_SIGNAL] += [member.work for member in group.members]
        self._allocator.settle(self._allocator.settled_steps, self._version + 1, fates)

    def cancel_all(self) -> None:
        while self._running:
            self._cancel(next(iter(self._running)))

    def _launch(self, item: WorkItem) -> None:
        rollout = self._world.rollout(int(item.prompt), self._version)
        attempt = _Attempt(item, rollout, self._now, self._version)
        self._running[attempt.key] = attempt
        self._correct[item.step][item.work] = rollout.correct
        self._schedule(self._now + rollout.made, attempt, _outcome(attempt))

    def _schedule(self, time: float, attempt: _Attempt, outcome: Outcome) -> None:
        self._scheduled += 1
        heapq.heappush(self._reports, (time, self._scheduled, attempt, outcome))

    def _report(self, attempt: _Attempt, outcome: Outcome) -> None:
        before = self._allocator.account.generated
        told = self._allocator.tell(*attempt.key, outcome)
        self._tokens[attempt.item.step] += self._allocator.account.generated - before
        for key in told.cancel:
            self._cancel(key)

    def _cancel(self, key: Key) -> None:
        attempt = self._running.pop(key)
        self._cancelled.add(key)
        self._report(attempt, Cancelled(reason="no longer needed", tokens=int(self._now - attempt.started)))


def _outcome(attempt: _Attempt) -> Outcome:
    rollout = attempt.rollout
    match rollout.fault:
        case "failed":
            return Failed(reason="simulated crash", tokens=rollout.made)
        case "expired":
            return Expired(reason="simulated silence", tokens=rollout.made)
        case "unscorable":
            return Unscorable(reason="simulated verifier crash", tokens=rollout.tokens, seconds=0.0)
        case None:
            return _scored(attempt)


def _scored(attempt: _Attempt) -> Scored:
    rollout = attempt.rollout
    return Scored(
        reward=float(rollout.accepted),
        tokens=rollout.tokens,
        seconds=float(rollout.tokens),
        oldest_version=attempt.version,
        energy=rollout.energy,
    )
