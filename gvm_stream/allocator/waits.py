"""Since when who waits for what. No wait without a name."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gvm_stream.wire.messages import Wait

Reason = Literal[
    "learner",
    "first_weights",
    "producer",
    "return",
    "loading",
    "owed",
    "evaluation",
    "rollouts",
    "training",
    "checkpoint",
    "goodbye",
    "disk",
]
"""What a run waits for."""


class Waiting(NamedTuple):
    """Somebody waits. `who` and `why` are the same for as long as the wait goes on."""

    who: str
    what: str
    """In words, with the numbers of the moment."""
    why: str
    reason: Reason | None = None
    """Of a run that waits."""


class WaitClock:
    """Remembers when a wait was first seen. Pure; the time comes from outside."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}

    def since(self, waits: list[Waiting], now: float) -> tuple[Wait, ...]:
        self._since = {(w.who, w.why): self._since.get((w.who, w.why), now) for w in waits}
        return tuple(Wait(who=w.who, what=w.what, seconds=round(now - self._since[w.who, w.why], 1)) for w in waits)
