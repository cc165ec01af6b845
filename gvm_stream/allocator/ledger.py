"""The ledger: every attempt at every rollout, from issue to exactly one terminal state.

Conservation law, checked by tests after every fault: issued = running + all terminal states, in attempts. A result for
an attempt that already ended, or for work long forgotten, is recognised and never used twice.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Any, NamedTuple, get_args

import msgspec

from gvm_stream.allocator.types import Expired, Outcome, PromptId, WorkItem

MOST_EXPIRED = 100_000
"""Expired attempts remembered for late reports; older ones count as plain duplicates."""


NAMES: dict[type[Outcome], str] = {kind: kind.__name__.lower() for kind in get_args(Outcome)}
"""Of the terminal states."""


class Reception(StrEnum):
    """What became of a reported outcome."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """This attempt had ended before."""
    UNKNOWN = "unknown"
    """Never issued."""


class Settlement(NamedTuple):
    reception: Reception
    item: WorkItem | None
    """The work, if this outcome is the one that counts."""
    tokens: int
    """Generated tokens that this report adds to what is known."""


class Ledger:
    """Owns the identities of work. `stride` is 1, or -1 for a second ledger with disjoint (negative) identities."""

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
        self._next = stride
        self._running: dict[int, WorkItem] = {}
        self.issued = 0
        self.ended: Counter[str] = Counter()
        self.tokens = 0
        """Of all reports: what is generated, as far as anybody knows."""
        self.duplicates = 0
        self.unknown = 0
        self._expired: dict[tuple[int, int], int] = {}
        """Tokens counted for expired attempts, in case their owner still reports."""

    def issue(self, *, group: int, prompt: PromptId, index: int, step: int, min_version: int, reason: str) -> WorkItem:
        item = WorkItem(
            work=self._next,
            attempt=0,
            group=group,
            prompt=prompt,
            index=index,
            step=step,
            min_version=min_version,
            reason=reason,
        )
        self._next += self._stride
        self._start(item)
        return item

    def reissue(self, item: WorkItem) -> WorkItem:
        """A new attempt at work whose last attempt has ended."""
        if item.work in self._running:
            raise ValueError(f"work {item.work} is still running as attempt {self._running[item.work].attempt}")
        again = msgspec.structs.replace(item, attempt=item.attempt + 1, reason=f"attempt {item.attempt + 2}")
        self._start(again)
        return again

    def settle(self, work: int, attempt: int, outcome: Outcome) -> Settlement:
        """Record the end of an attempt."""
        item = self._running.get(work)
        if item is not None and item.attempt == attempt:
            del self._running[work]
            self.ended[NAMES[type(outcome)]] += 1
            if isinstance(outcome, Expired):
                self._expired[work, attempt] = outcome.tokens
                if len(self._expired) > MOST_EXPIRED:
                    del self._expired[next(iter(self._expired))]
            self.tokens += outcome.tokens
            return Settlement(Reception.ACCEPTED, item, outcome.tokens)
        if not 0 < work * self._stride < self._next * self._stride:
            self.unknown += 1
            return Settlement(Reception.UNKNOWN, None, 0)
        self.duplicates += 1
        # An owner taken for dead may have gone on: only what it did after that is not in the account yet.
        known = self._expired.pop((work, attempt), None)
        late = 0 if known is None else max(0, outcome.tokens - known)
        self.tokens += late
        return Settlement(Reception.DUPLICATE, None, late)

    def item(self, work: int) -> WorkItem | None:
        """The attempt that is running; None if none is."""
        return self._running.get(work)

    def attempt_of(self, work: int) -> int | None:
        """The attempt that is running; None if none is."""
        item = self._running.get(work)
        return None if item is None else item.attempt

    def running(self) -> list[WorkItem]:
        return list(self._running.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    def conserved(self) -> bool:
        """The conservation law."""
        return self.issued == len(self._running) + sum(self.ended.values())

    def state_dict(self) -> dict[str, Any]:
        return {
            "next": self._next,
            "running": msgspec.to_builtins(list(self._running.values())),
            "issued": self.issued,
            "ended": dict(self.ended),
            "duplicates": self.duplicates,
            "unknown": self.unknown,
            "tokens": self.tokens,
            "expired": [[*key, tokens] for key, tokens in self._expired.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self.issued = state["next"], state["issued"]
        self.duplicates, self.unknown, self.tokens = state["duplicates"], state["unknown"], state["tokens"]
        self.ended = Counter(state["ended"])
        self._running = {item.work: item for item in msgspec.convert(state["running"], list[WorkItem])}
        self._expired = {(work, attempt): tokens for work, attempt, tokens in state["expired"]}

    def _start(self, item: WorkItem) -> None:
        self._running[item.work] = item
        self.issued += 1
