"""Settings of a process that moves many payloads through memory, with a thread that writes them down."""

from __future__ import annotations

import ctypes
import sys

SWITCH_S = 5e-4
"""The thread that writes waits so long for the interpreter's lock while the event loop is busy; a commit takes it some
ten times. Python's 5 ms are for programs with many threads that compute."""
KEPT_BYTES = 512 << 20
"""Freed memory that the process keeps. Payloads come and go by the hundred megabytes, and each page that is given back
is cleared by the system before it comes again: more work than all copying."""
PORTION_BYTES = 64 << 20
"""By which memory is asked for. As large as what glibc gives a thread at a time, as that goes back otherwise."""
_TRIM_THRESHOLD, _TOP_PAD = -1, -2


def tune() -> None:
    sys.setswitchinterval(SWITCH_S)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_TOP_PAD, PORTION_BYTES)
