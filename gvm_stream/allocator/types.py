"""What goes in and out of the allocator library: work items, outcomes, closed groups.

Plain msgspec structs, so that the service can put them on the wire and an embedder can log them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

PromptId = str
"""Stable identity of a prompt (a row id, never its text)."""


class Struct(msgspec.Struct, frozen=True, gc=False):
    """Without cycles, so the garbage collector need not look at the many there are."""


class WorkItem(Struct, frozen=True, kw_only=True, gc=False):
    """One rollout to make: the `attempt`-th try at rollout `index` of `group`."""

    work: int
    """Identity of the rollout, the same for all attempts at it."""
    attempt: int
    """0 for the first try."""
    group: int
    prompt: PromptId
    index: int
    """Launch order within the group."""
    step: int
    """Training batch the group belongs to."""
    min_version: int
    """Oldest policy version that may sample it."""
    reason: str
    """Why this rollout is worth its tokens, for people."""


class Scored(Struct, tag="scored", frozen=True, kw_only=True, gc=False):
    """A rollout with a verdict. A response cut off at the length cap is one of these, too."""

    reward: float
    tokens: int
    """Response tokens generated."""
    seconds: float
    oldest_version: int
    """Policy version of the oldest span of its tokens."""
    newest_version: int | None = None
    """That of the newest span; None: the same."""
    truncated: bool = False
    energy: float | None = None
    """Squared gradient norm ||grad log pi(response)||^2, or a proxy for it, in any unit; None: not known (yet)."""


class Unscorable(Struct, tag="unscorable", frozen=True, kw_only=True, gc=False):
    """The verifier failed, not the response: never a wrong answer."""

    reason: str
    tokens: int
    seconds: float


class Cancelled(Struct, tag="cancelled", frozen=True, kw_only=True, gc=False):
    reason: str
    tokens: int = 0
    """Tokens generated before the cancellation took effect."""


class Failed(Struct, tag="failed", frozen=True, kw_only=True, gc=False):
    """The engine or the producer could not make this rollout."""

    reason: str
    tokens: int = 0


class Expired(Struct, tag="expired", frozen=True, kw_only=True, gc=False):
    """Its owner died or made no progress."""

    reason: str
    tokens: int = 0
    """Tokens it was last known to have."""


Outcome = Scored | Unscorable | Cancelled | Failed | Expired


class Fate(StrEnum):
    """Where the tokens of a rollout ended. Every generated token has exactly one fate."""

    PENDING = "pending"
    TRAINED = "trained"
    ZERO_SIGNAL = "zero_signal"
    STALE = "stale"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNSCORABLE = "unscorable"
    EVALUATION = "evaluation"


Exit = Literal["all_ended", "rule", "no_signal", "missing_verdicts", "empty_stage", "dropped"]
"""How a visit ends: all its rollouts have; its stopping rule says so; another prompt takes its place, as this one gives
no signal; too many rollouts without a verdict; nothing granted in its second stage; somebody dropped it."""


class Member(Struct, frozen=True, kw_only=True, gc=False):
    """A scored rollout of a closed group."""

    work: int
    index: int
    reward: float
    tokens: int
    oldest_version: int
    coefficient: float
    """c_j: the estimate of the prompt's gradient is sum_j c_j grad log pi(y_j), over the members of the group."""


class ClosedGroup(Struct, frozen=True, kw_only=True, gc=False):
    """A visit to a prompt has ended. `members` are the rollouts that count, in launch order."""

    group: int
    prompt: PromptId
    step: int
    planned: int
    """Rollouts asked for, those that were made again not counted."""
    weight: float
    """Weight of the prompt in the objective; the number of rollouts never changes it."""
    prior: tuple[float, float]
    """Beta (successes, failures) of its acceptance rate from earlier visits only: a baseline may use it."""
    members: tuple[Member, ...]
    successes: int
    failures: int
    """Of the members."""
    versions: tuple[int, int] | None
    """Oldest and newest policy version in the members; None without members."""
    tokens: int
    """All that the visit took, those of rollouts that do not count included."""
    shadow: bool
    """One of the visits that get the same number of rollouts whatever the policy says."""
    exit: Exit
    reason: str
    """Why it ended, for people."""
    cancel: tuple[tuple[int, int], ...] = ()
    """(work, attempt) still running that nothing will come of: cancel them."""
    unused: tuple[int, ...] = ()
    """Work that was scored and is not among the members: nobody will ask for it again."""
