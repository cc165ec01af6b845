"""Whether a process lives and whether it takes part in the run, for whoever has to restart it or send it work."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

TURN_INTERVAL_S = 1.0


class Health:
    """Written by a process's main loop, read by the thread that answers probes."""

    def __init__(self, bound_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`bound_s`: a main loop that makes no turn for so many seconds hangs. `stream.silence_s` for an event loop, as
        its peers then take it for dead, too; `stream.progress_s` for a learner between micro-batches."""
        self._bound_s, self._clock = bound_s, clock
        self._turned_at = clock()
        self.waiting_for = "its own start"
        """What keeps the process from taking part; empty: it does."""

    def turn(self) -> None:
        """The main loop has made a turn."""
        self._turned_at = self._clock()

    @asynccontextmanager
    async def turning(self) -> AsyncIterator[None]:
        """While the block runs, a turn a second, for as long as nothing blocks the event loop."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_turning)
            yield
            nursery.cancel_scope.cancel()

    async def _keep_turning(self) -> None:
        while True:
            self.turn()
            await trio.sleep(TURN_INTERVAL_S)

    def hanging(self) -> str:
        """Why the process is not well, as a sentence; empty: it is."""
        silent_s = self._clock() - self._turned_at
        if silent_s <= self._bound_s:
            return ""
        return f"the main loop has made no turn for {silent_s:.0f} s; at least one in {self._bound_s:g} s was expected"

    def absent(self) -> str:
        """Why the process takes no part in the run, as a sentence; empty: it does."""
        return self.hanging() or (f"waits for {self.waiting_for}" if self.waiting_for else "")
