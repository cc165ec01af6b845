"""What a verifier is asked and what it says. "Wrong" and "I could not tell" are different answers."""

from __future__ import annotations

from typing import Literal

import msgspec


class VerifyItem(msgspec.Struct, frozen=True, kw_only=True):
    """One response to judge."""

    answer: str
    """Gold answer."""
    response: str
    """Decoded response, without the end token."""
    truncated: bool = False
    """Cut off at the length cap."""
    kind: str = ""
    """Verifier of this row; empty: the configured one."""
    prompt: str = ""
    """Prompt id, for verifiers that ask somebody else."""
    tokens: int = 0
    """Length of the response."""
    max_tokens: int = 0
    """Length cap; 0: none."""


class VerdictScored(msgspec.Struct, frozen=True, tag="scored"):
    reward: float
    """1 right, 0 wrong; between and beyond with weights and penalties. At least 0.5 counts as a success."""
    extracted: str = ""
    """What was taken for the answer; empty if nothing was."""
    expected: str = ""
    """What it was compared with, as read from the gold answer."""
    rule: str = ""
    """The rule that decided, in a few words."""


Cause = Literal["timeout", "crashed", "unreadable_gold", "sandbox", "external", "other"]
"""Why there is no verdict."""


class VerdictUnscorable(msgspec.Struct, frozen=True, tag="unscorable"):
    """The verifier failed, or the gold answer is no answer. Says nothing about the response."""

    reason: str
    """For people."""
    cause: Cause = "other"


Verdict = VerdictScored | VerdictUnscorable
