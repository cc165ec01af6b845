"""The one thread of a producer: it owns the engine, and everything that touches the engine happens in it.

Commands go in by a queue and are taken between two steps; events come back to trio by `run_sync_soon`, once per step,
never per token. Idle, the thread sleeps on its queue.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import trio

from gvm_stream.errors import WeightsError
from gvm_stream.producers.engine import Completion, Engine, EngineLoad, Request
from gvm_stream.wire.messages import Canary

log = logging.getLogger(__name__)

HAND_OVER_S = 0.02
"""Least time between two hand-overs of completions while the engine works: each costs trio, the verifier and the
allocator a wake-up, and this thread the interpreter lock, which a small model's steps of 5 ms would feel."""
CLOSE_S = 60.0
"""Longest that an engine may take to end. One that hangs, in NCCL perhaps, is left behind: its process ends anyway."""
PROGRESS_INTERVAL_S = 0.5
"""How often the thread leaves a picture of the running requests for the heartbeat."""


@dataclass(frozen=True)
class Completed:
    completions: list[Completion]


@dataclass(frozen=True)
class WeightsLoaded:
    version: int
    seconds: float
    """That generation has stood still."""
    difference: float | None
    """Mean absolute difference of the canary's log-probs from the learner's, in nats; None without a canary."""


@dataclass(frozen=True)
class WeightsFailed:
    version: int
    reason: str


@dataclass(frozen=True)
class EngineDied:
    """The engine raised; nothing more will come."""

    error: Exception


Test = Callable[[Engine, Path], None]
"""Raises when an engine with the weights of a file is not fit for work."""
Event = Completed | WeightsLoaded | WeightsFailed | EngineDied


@dataclass(frozen=True)
class _Submit:
    requests: list[Request]


@dataclass(frozen=True)
class _Abort:
    ids: list[int]


@dataclass(frozen=True)
class _Load:
    path: Path
    version: int
    canary: Canary | None


class _Close:
    pass


_Command = _Submit | _Abort | _Load | _Close


class EngineThread:
    """Handle for the trio side. Made by `run_engine`."""

    def __init__(self, events: Callable[[Event], None], test: Test | None) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._emit, self._test = events, test
        self._tested = 0
        """Tokens of the test: they belong to no rollout."""
        self.progress: dict[int, int] = {}
        """Request -> tokens so far; a picture at most `PROGRESS_INTERVAL_S` old while the engine works."""
        self.load = EngineLoad(running=0, waiting=0, cache_used=0.0, preemptions=0)
        """As old as `progress`."""
        self.generated_tokens = 0

    def submit(self, requests: list[Request]) -> None:
        self._commands.put(_Submit(requests))

    def abort(self, ids: list[int]) -> None:
        self._commands.put(_Abort(ids))

    def load_weights(self, path: Path, version: int, canary: Canary | None) -> None:
        """Load them and score the canary, with nothing submitted in between."""
        self._commands.put(_Load(path, version, canary))

    def close(self) -> None:
        self._commands.put(_Close())

    def run(self, make_engine: Callable[[], Engine], ready: Callable[[], None]) -> None:
        """The thread's body."""
        engine = make_engine()
        ready()
        try:
            self._serve(engine)
        except Exception as error:  # the engine is third-party code: whatever it raises is its death, reported once
            log.exception("the engine died")
            self._emit(EngineDied(error))
        finally:
            self.generated_tokens = engine.generated_tokens - self._tested
            engine.close()

    def _serve(self, engine: Engine) -> None:
        pictured_at = handed_over_at = 0.0
        ended: list[Completion] = []
        while True:
            idle = not engine.has_work()
            if idle:
                self.progress, self.load = {}, engine.load()
            while idle or not self._commands.empty():
                command = self._commands.get()
                if isinstance(command, _Close):
                    return
                self._obey(engine, command)
                idle = False
            ended += engine.step()
            self.generated_tokens = engine.generated_tokens - self._tested
            now = time.monotonic()
            if ended and (now - handed_over_at > HAND_OVER_S or not engine.has_work()):
                self._emit(Completed(ended))
                ended, handed_over_at = [], now
            if now - pictured_at > PROGRESS_INTERVAL_S:
                self.progress, self.load, pictured_at = engine.progress(), engine.load(), now

    def _obey(self, engine: Engine, command: _Submit | _Abort | _Load) -> None:
        match command:
            case _Submit(requests):
                for request in requests:
                    engine.submit(request)
            case _Abort(ids):
                engine.abort(ids)
            case _Load(path, version, canary):
                started = time.monotonic()
                try:
                    engine.load_weights(path, version)
                except WeightsError as error:
                    self._emit(WeightsFailed(version, str(error)))
                else:
                    difference = difference_from(canary, engine)
                    if self._test:
                        self._test(engine, path)
                        self._test, self._tested = None, engine.generated_tokens
                    self._emit(WeightsLoaded(version, time.monotonic() - started, difference))


def difference_from(canary: Canary | None, engine: Engine) -> float | None:
    if canary is None:
        return None
    found = engine.score(np.frombuffer(canary.tokens, "<i4"))
    difference = float(np.abs(found - np.frombuffer(canary.logprobs, "<f4")).mean(axis=1).max())
    return difference if np.isfinite(difference) else math.inf


@asynccontextmanager
async def run_engine(
    make_engine: Callable[[], Engine], events: trio.MemorySendChannel[Event], test: Test | None = None
) -> AsyncIterator[EngineThread]:
    """Make an engine in a thread of its own and run it until the block ends; the thread is gone then, unless it hangs.

    `test` is called once, with the first weights: what it raises is the engine's death. `events` must be unbounded:
    what it can hold is bounded by the requests submitted. Errors of `make_engine` are raised here.
    """
    token = trio.lowlevel.current_trio_token()
    thread = EngineThread(lambda event: token.run_sync_soon(events.send_nowait, event), test)
    ready = trio.Event()
    patience = trio.CancelScope(shield=True)

    async def body() -> None:
        with patience:
            await trio.to_thread.run_sync(
                thread.run,
                make_engine,
                lambda: token.run_sync_soon(ready.set),
                abandon_on_cancel=True,
                limiter=trio.CapacityLimiter(1),
            )
        if patience.cancelled_caught:
            log.error("the engine has not ended for %g s; it is left behind", CLOSE_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(body)
        try:
            await ready.wait()
            yield thread
        finally:
            thread.close()
            patience.deadline = trio.current_time() + CLOSE_S
