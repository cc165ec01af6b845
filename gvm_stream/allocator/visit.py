"""An open visit to a prompt: which of its rollouts have been launched, have ended, and count.

A visit with a rule reads the outcomes in *launch order* and decides only on what it has read: deciding on what happens
to be there would select for short responses, which finish first. A rollout without a verdict is replaced by one more at
the end of the order, so a round always has as many scored rollouts as the rule says.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np

from gvm_stream.allocator.estimates import SUCCESS_REWARD
from gvm_stream.allocator.planner import PlannedVisit
from gvm_stream.allocator.policies import Outcomes
from gvm_stream.allocator.risk import RiskRule
from gvm_stream.allocator.stopping import PosteriorRule, Rule
from gvm_stream.allocator.types import Scored

AnyRule = Rule | PosteriorRule | RiskRule


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """A rollout that ended without a verdict."""


MISSING = Missing()
Entry = Scored | Missing | None
"""None: not ended."""


class Visit:
    """Mutable; owned by `OnlineAllocator`."""

    __slots__ = (
        "closed",
        "dropped",
        "entries",
        "failed",
        "failures",
        "first",
        "left",
        "missing",
        "number",
        "pilot",
        "prior",
        "prompt",
        "read",
        "rounds",
        "rule",
        "settled",
        "shadow",
        "step",
        "stragglers",
        "successes",
        "target",
        "tokens",
        "tried",
        "weight",
        "works",
    )

    def __init__(self, number: int, step: int, plan: PlannedVisit, tried: int = 0) -> None:
        self.number, self.step = number, step
        self.prompt, self.first, self.weight, self.prior, self.shadow = plan[:5]
        self.rule = cast("AnyRule | None", plan.rule)
        self.target = self.first
        """Rollouts to launch, as far as is decided."""
        self.left = self.target
        """Those of them that have not ended."""
        self.works: list[int] = []
        """Work of every launched rollout, in launch order."""
        self.entries: list[Entry] = []
        self.tokens = 0
        """Of all that ended, whatever the outcome, those of the visits that were left out before it included."""
        self.failed = 0
        """Rollouts that could not be made."""
        self.pilot = 0
        """So many of the first rollouts were a pilot and do not count."""
        self.tried = tried
        """Visits that were left out before this one took their place."""
        self.read = self.rounds = self.successes = self.failures = self.missing = 0
        """With a rule: how far the outcomes have been read, and what was found."""
        self.closed = False
        self.dropped = False
        """It ended without being trained on."""
        self.settled = False
        """Nobody will ask for it again."""
        self.stragglers = 0
        """Rollouts still running when it closed."""

    def plan(self) -> PlannedVisit:
        """What it began with."""
        return PlannedVisit(self.prompt, self.first, self.weight, self.prior, self.shadow, self.rule)

    def launch(self, work: int) -> None:
        self.works.append(work)
        self.entries.append(None)

    def record(self, index: int, outcome: Scored | None) -> None:
        """Rollout `index` has ended; None: without a verdict."""
        self.entries[index] = MISSING if outcome is None else outcome
        self.left -= 1

    def extend(self, rollouts: int) -> None:
        self.target += rollouts
        self.left += rollouts

    def read_on(self) -> bool:
        """Read the outcomes that have become readable; True if the rule ends the visit."""
        assert self.rule is not None
        while self.read < len(self.entries):
            entry = self.entries[self.read]
            if entry is None:
                return False
            self.read += 1
            if isinstance(entry, Missing):
                self.missing += 1
                continue
            if entry.reward >= SUCCESS_REWARD:
                self.successes += 1
            else:
                self.failures += 1
            counts = (self.successes, self.failures)
            if sum(counts) == self.rule.round_size * (self.rounds + 1):
                self.rounds += 1
                if self.rule.stops(counts):
                    return True
        return False

    def wanted(self, rounds_ahead: int) -> int:
        """Rollouts to add so that the current round, and `rounds_ahead` more, can be completed."""
        assert self.rule is not None
        rounds = min(self.rule.max_rounds, self.rounds + 1 + rounds_ahead)
        return self.rule.round_size * rounds + self.missing - self.target

    def begin_second_stage(self, rollouts: int) -> None:
        self.pilot = len(self.entries)
        self.extend(rollouts)

    def counted(self) -> list[tuple[int, int, Scored]]:
        """(index, work, outcome) of the scored rollouts that count, in launch order."""
        if self.dropped:
            return []
        end = len(self.entries) if self.rule is None else self.read
        return [
            (i, self.works[i], entry) for i in range(self.pilot, end) if isinstance(entry := self.entries[i], Scored)
        ]

    def unused(self) -> tuple[int, ...]:
        """Scored work that does not count: the pilot, and what was not read."""
        if not (self.pilot or self.rule or self.dropped):
            return ()
        used = {work for _, work, _ in self.counted()}
        return tuple(
            work
            for work, entry in zip(self.works, self.entries, strict=True)
            if isinstance(entry, Scored) and work not in used
        )

    def tokens_of(self, works: tuple[int, ...]) -> int:
        """Tokens of these scored rollouts."""
        wanted = set(works)
        return sum(
            entry.tokens
            for work, entry in zip(self.works, self.entries, strict=True)
            if work in wanted and isinstance(entry, Scored)
        )

    def known(self, *, drained: bool) -> list[Scored]:
        """Outcomes that may teach: those launched before the first one that is not known, and with a rule that was not
        drained those it has read. Which of the others have ended by now depends on their length."""
        entries = self.entries if drained or self.rule is None else self.entries[: self.read]
        end = entries.index(None) if None in entries else len(entries)
        return [entry for entry in entries[:end] if isinstance(entry, Scored)]

    def outcomes(self, first: int = 0) -> Outcomes:
        """The scored rollouts from launch index `first` on, as arrays."""
        scored = [e for e in self.entries[first : self.read if self.rule else None] if isinstance(e, Scored)]
        return Outcomes(
            np.array([e.reward for e in scored], np.float64), np.array([e.tokens for e in scored], np.int64), self.rule
        )

    @property
    def ended(self) -> int:
        """Rollouts that have ended."""
        return sum(entry is not None for entry in self.entries)

    def running(self) -> list[int]:
        """Work that has been launched and has not ended."""
        return [work for work, entry in zip(self.works, self.entries, strict=True) if entry is None]

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self.__slots__ if name not in ("rule", "entries", "works")}
        state["rule"] = msgspec.to_builtins(self.rule)
        state["entries"] = msgspec.to_builtins(self.entries)
        state["works"] = list(self.works)
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Visit:
        visit = cls.__new__(cls)
        for name in cls.__slots__:
            setattr(visit, name, state[name])
        visit.works, visit.prior = list(state["works"]), tuple(state["prior"])
        visit.rule = msgspec.convert(state["rule"], AnyRule | None)
        visit.entries = msgspec.convert(state["entries"], list[Entry])
        return visit


class Step(msgspec.Struct):
    """A batch that is not settled."""

    number: int
    min_version: int
    """Oldest policy version that may sample it."""
    visits: list[int] = []
    open: int = 0
    """Visits that have not ended."""
    piloting: int = 0
    """Visits of a two-stage policy whose pilot has not ended."""
