"""A host of an allocator for tests that does everything in any order."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from gvm_stream.allocator import (
    Cancelled,
    ClosedGroup,
    Expired,
    Failed,
    Fate,
    Log,
    OnlineAllocator,
    Own,
    Power,
    Price,
    Reception,
    Rollouts,
    Scored,
    Settings,
    Tokens,
    Told,
    Unscorable,
    Variance,
    WorkItem,
)
from gvm_stream.allocator.budget import AnyBudget
from gvm_stream.allocator.objectives import Objective
from gvm_stream.allocator.policies import POLICIES
from gvm_stream.allocator.types import Outcome
from tests.allocator_host import state

OPTIONS: dict[str, dict[str, object]] = {
    "dapo": {"max_tries": 2},
    "gvm_two_stage": {"pilot": 2},
    "neyman": {"round_size": 2},
    "reinforce_ada_pos": {"round_size": 3, "max_rounds": 2, "keep": 2},
    "reinforce_ada_balance": {"round_size": 2, "max_rounds": 3, "keep": 2},
}
PLANS = [
    {"policy": name, "options": OPTIONS.get(name, {}), "design": design, "coefficient": coefficient}
    for name, policy in sorted(POLICIES.items())
    for design in policy.designs
    for coefficient in ("rloo", "raft")
    if coefficient == ("raft" if name == "raft_risk" else "rloo") or (name, design) == ("gvm", "planned")
]
OBJECTIVES: list[Objective] = [Own(), Log(), Power()]
NAMES = ["-".join(str(plan[key]) for key in ("policy", "design", "coefficient")) for plan in PLANS]
BUDGETS: list[AnyBudget] = [
    Rollouts(rollouts=4.0),
    Rollouts(rollouts=3.5),
    Tokens(rollouts=4.0, tokens=60.0),
    Variance(rollouts=4.0, relative=1.0),
    Price(rollouts=4.0, price=0.01),
]


def some_settings(plan: dict[str, Any], chance: random.Random) -> Settings:
    return Settings(
        **plan,
        budget=chance.choice(BUDGETS),
        objective=chance.choice(OBJECTIVES),
        prompts_per_step=chance.randint(1, 4),
        max_rollouts=6,
        keep=chance.choice([None, 2]),
        shadow_uniform=chance.choice([0.0, 0.3, 0.99]),
        retire_alpha=chance.choice([0.0, 0.5]),
        dead_below=0.3,
        solved_above=0.7,
        readmit_versions=2,
        reward_range=(0.0, 1.0),
        on_close=chance.choice(["cancel", "drain"]),
        rounds_ahead=chance.randint(0, 2),
        max_lag=chance.randint(0, 2),
        max_attempts=chance.randint(1, 3),
        steps=5,
    )


class World:
    """A host that does everything in any order, and keeps its own account of it."""

    def __init__(self, allocator: OnlineAllocator, chance: random.Random) -> None:
        self.allocator, self.chance = allocator, chance
        self.running: dict[tuple[int, int], tuple[WorkItem, int]] = {}
        """Attempt -> its item, and the version of its sampler."""
        self.ended: list[tuple[int, int]] = []
        self.gone: dict[tuple[int, int], int] = {}
        """Expired attempts that are still at work -> tokens counted."""
        self.spent = 0
        self.kept: dict[int, int] = {}
        """Scored work that may be trained on -> its tokens."""
        self.groups: list[ClosedGroup] = []
        self.settled: list[tuple[ClosedGroup, ...]] = []
        self.issued: list[WorkItem] = []
        self.added = 0

    def resumed(self, allocator: OnlineAllocator) -> World:
        """This world with another allocator in it, and the same things to come."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            setattr(other, name, copy.copy(value))
        other.allocator = allocator
        return other

    def act(self) -> None:
        """Something happens."""
        actions: list[Callable[[], None]] = [self.ask, self.tell, self.tell, self.tell, self.energy, self.settle]
        odd: list[Callable[[], None]] = [self.repeat, self.report_late, self.drop, self.quarantine, self.add]
        self.chance.choice(odd if self.chance.random() < 0.1 else actions)()
        self.check()

    def finish(self) -> None:
        """Everything that is issued is told, and nothing odd happens any more."""
        for _ in range(10_000):
            if self.allocator.settled_steps == self.allocator.settings.steps or self.allocator.exhausted:
                break
            self.ask(slots=8, behind=0)
            while self.running:
                self.tell(faults=0.0)
            self.settle()
        else:
            pytest.fail("no end")
        while self.running:
            self.tell(faults=0.0)
        self.check()

    def ask(self, slots: int | None = None, behind: int | None = None) -> None:
        a, newest = self.allocator, self.allocator.settled_steps
        version = max(0, newest - (self.chance.randrange(3) if behind is None else behind))
        for item in a.ask(self.chance.randrange(8) if slots is None else slots, version):
            assert newest <= item.step <= newest + a.settings.max_lag
            assert max(0, item.step - a.settings.max_lag) <= item.min_version <= version
            key = (item.work, item.attempt)
            assert key not in self.running
            assert key not in self.ended
            self.running[key] = (item, version)
            self.issued.append(item)

    def tell(self, faults: float = 0.2) -> None:
        if not self.running:
            return
        key = self.chance.choice(list(self.running))
        item, version = self.running.pop(key)
        outcome = self.outcome(item, version, faults)
        if isinstance(outcome, Expired):
            self.gone[key] = outcome.tokens
        self.ended.append(key)
        self.spent += outcome.tokens
        told = self.allocator.tell(*key, outcome)
        assert told.reception is Reception.ACCEPTED
        assert not told.kept or isinstance(outcome, Scored)
        if told.kept:
            self.kept[item.work] = outcome.tokens
        self.take(told)

    def take(self, told: Told) -> None:
        drain = self.allocator.settings.on_close == "drain"
        for group in told.closed:
            under_way = {key for key, (item, _) in self.running.items() if item.group == group.group}
            assert len(group.cancel) == len(set(group.cancel))
            assert set(group.cancel) == (set() if drain else under_way)
            self.groups.append(group)
            for work in group.unused:
                del self.kept[work]
            # Some of the cancelled rollouts end at once, others have not heard of it.
            for key in group.cancel:
                if self.chance.random() < 0.5:
                    del self.running[key]
                    self.ended.append(key)
                    self.spent += 1
                    assert not self.allocator.tell(*key, Cancelled(reason="not needed", tokens=1)).kept

    def outcome(self, item: WorkItem, version: int, faults: float) -> Outcome:
        chance = self.chance
        tokens = chance.randint(1, 30)
        if chance.random() < faults:
            bad: list[Outcome] = [
                Failed(reason="crash", tokens=tokens),
                Expired(reason="silence", tokens=tokens),
                Unscorable(reason="?", tokens=tokens, seconds=1.0),
                Cancelled(reason="shut down", tokens=tokens),
            ]
            return chance.choice(bad)
        return Scored(
            reward=float(chance.random() < (0.1, 0.5, 0.95)[ord(item.prompt[-1]) % 3]),
            tokens=tokens,
            seconds=1.0,
            oldest_version=version,
            newest_version=chance.choice([None, self.allocator.settled_steps]),
            energy=chance.choice([None, chance.random() * tokens]),
        )

    def energy(self) -> None:
        work = self.chance.choice([*self.kept, 10**6])
        if self.allocator.observe_energy(work, self.chance.random()):
            assert work in self.kept
            assert not self.allocator.observe_energy(work, 1.0)

    def settle(self) -> None:
        a = self.allocator
        groups = a.batch(a.settled_steps)
        if groups is None:
            return
        fates: dict[Fate, list[int]] = {Fate.TRAINED: [], Fate.ZERO_SIGNAL: [], Fate.STALE: []}
        for group in groups:
            for member in group.members:
                assert a.settled_steps - member.oldest_version <= a.settings.max_lag
                fates[self.chance.choice(list(fates))].append(member.work)
                assert self.kept.pop(member.work) == member.tokens
        self.settled.append(groups)
        a.settle(a.settled_steps, a.settled_steps + 1, fates)

    def repeat(self) -> None:
        work, attempt = self.chance.choice([*self.ended, (10**6, 0), (-3, 0), (0, 0)])
        if (work, attempt) not in self.gone:
            told = self.allocator.tell(work, attempt, Failed(reason="again", tokens=5))
            assert told == Told(Reception.DUPLICATE if (work, attempt) in self.ended else Reception.UNKNOWN)

    def report_late(self) -> None:
        if self.gone:
            key = self.chance.choice(list(self.gone))
            more = self.chance.randrange(9)
            told = self.allocator.tell(*key, Cancelled(reason="late", tokens=self.gone.pop(key) + more))
            assert told == Told(Reception.DUPLICATE)
            self.spent += more

    def drop(self) -> None:
        if self.running:
            item, _ = self.chance.choice(list(self.running.values()))
            if item.group in {group.group for group in self.groups}:
                with pytest.raises(KeyError, match="not open"):
                    self.allocator.drop(item.group, "too late")
            else:
                told = self.allocator.drop(item.group, "too late")
                assert told.closed[0].group == item.group
                assert told.closed[0].members == ()
                self.take(told)

    def quarantine(self) -> None:
        a = self.allocator
        if a.roster.ids and len(a.quarantined) < 2:
            prompt = self.chance.choice(a.roster.ids)
            a.quarantine(prompt)
            assert prompt in a.quarantined
            assert prompt not in a.retired

    def add(self) -> None:
        self.added += 1
        self.allocator.add([f"late-{self.added}"])

    def check(self) -> None:
        a = self.allocator
        assert a.ledger.conserved()
        assert {(item.work, item.attempt) for item in a.ledger.running()} == self.running.keys()
        assert a.account.generated == self.spent
        assert a.account.tokens[Fate.PENDING] == sum(self.kept.values())
        assert a.account.rollouts[Fate.PENDING] == len(self.kept)
        assert a.account.rollouts.total() == a.ledger.ended.total()
        assert min(a.account.tokens.values(), default=0) >= 0
        assert a.roster.num_usable == len(set(a.roster.ids) - set(a.quarantined) - set(a.retired))


def made(config: Settings, seed: int, source: bool) -> OnlineAllocator:
    a = OnlineAllocator(config, seed=seed)
    if source:
        a.draw_from(endless(), window=5)
    else:
        a.add(f"p{i}" for i in range(9))
    return a


def endless() -> Iterator[str]:
    return (f"s{i}" for i in count())


def reloaded(a: OnlineAllocator, seed: int, source: bool) -> OnlineAllocator:
    """Another allocator, from the saved state."""
    other = OnlineAllocator(a.settings, seed=seed)
    other.load_state_dict(msgspec.msgpack.decode(state(a)))
    if source:
        other.draw_from(endless(), window=5)
    return other
