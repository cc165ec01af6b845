"""Verdicts from processes that can be killed: a response may hold a computation that never ends.

The clock of an item runs in the worker, as a watchdog that ends the process: starting a worker and waiting for one does
not count, code that never returns to the interpreter is stopped too, and so is a worker whose parent is gone.
"""

from __future__ import annotations

import faulthandler
import math
import resource
import signal
from collections.abc import Sequence
from types import TracebackType

import anyio
import anyio.to_process
import trio

from gvm_stream.config import VerifierSection
from gvm_stream.verify import rules
from gvm_stream.verify.verdict import Verdict, VerdictUnscorable, VerifyItem

CHUNK = 32
"""Items that one call to a worker judges: what has to be judged again when one of them takes the worker down."""
START_S = 60.0
"""Seconds a worker may take to start on a loaded machine."""
MEMORY_BYTES = 4 << 30
"""Data a worker may allocate; a number with a billion digits must not take the machine down."""

TIMEOUT = VerdictUnscorable("verifier timeout")
CRASHED = VerdictUnscorable("verifier crashed")


class VerifierPool:
    """`settings.workers` processes that judge responses. They end with the trio run they were started in."""

    def __init__(self, settings: VerifierSection) -> None:
        self._settings = settings
        self._slots = trio.CapacityLimiter(settings.workers)

    async def __aenter__(self) -> VerifierPool:
        """Start the workers, so that the first responses need not wait for them."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._settings.workers):
                nursery.start_soon(self._call, ())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    async def verify(self, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict per item, in their order. A verifier that hangs or dies over an item is a verdict too."""
        verdicts: list[Verdict] = [CRASHED] * len(items)

        async def judge_chunk(start: int) -> None:
            chunk = items[start : start + CHUNK]
            verdicts[start : start + len(chunk)] = await self._judge(chunk)

        async with trio.open_nursery() as nursery:
            for start in range(0, len(items), CHUNK):
                nursery.start_soon(judge_chunk, start)
        return verdicts

    async def _judge(self, items: Sequence[VerifyItem]) -> list[Verdict]:
        """Judge together; if that fails, each alone, so that only the item that takes workers down pays for it."""
        outcome = await self._call(items)
        if isinstance(outcome, list):
            return outcome
        if len(items) == 1 and outcome is TIMEOUT:
            return [outcome]
        verdicts: list[Verdict] = [CRASHED] * len(items)

        async def judge_alone(index: int) -> None:
            outcome = await self._call(items[index : index + 1])
            verdicts[index] = outcome[0] if isinstance(outcome, list) else outcome

        async with trio.open_nursery() as nursery:
            for index in range(len(items)):
                nursery.start_soon(judge_alone, index)
        return verdicts

    async def _call(self, items: Sequence[VerifyItem]) -> list[Verdict] | VerdictUnscorable:
        timeout_s = self._settings.timeout_s
        async with self._slots:
            started = trio.current_time()
            with trio.move_on_after(START_S + timeout_s * len(items)):
                try:
                    return await anyio.to_process.run_sync(
                        judge_in_worker,
                        self._settings,
                        tuple(items),
                        cancellable=True,
                        limiter=anyio.CapacityLimiter(math.inf),  # anyio's own is for the whole process; _slots limits
                    )
                except anyio.BrokenWorkerProcess:
                    return TIMEOUT if trio.current_time() - started >= timeout_s else CRASHED
            return TIMEOUT


def judge_in_worker(settings: VerifierSection, items: Sequence[VerifyItem]) -> list[Verdict]:
    """Runs in a worker process and ends that process when an item takes longer than `timeout_s`."""
    _become_worker(settings)
    verdicts = []
    try:
        for item in items:
            faulthandler.dump_traceback_later(settings.timeout_s, exit=True)
            verdicts.append(rules.judge(settings, item))
    finally:
        faulthandler.cancel_dump_traceback_later()
    return verdicts


def _become_worker(settings: VerifierSection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides what ends
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    if settings.kind == "math":
        import math_verify  # noqa: F401  # a second of imports that no item is charged for
