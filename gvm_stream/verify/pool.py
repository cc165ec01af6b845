"""Verdicts from processes that can be killed: a response may hold a computation that never ends.

Each call's items are judged a few at a time, in order, by `workers` processes. The clock of an item runs in the process
that judges it, which ends itself when it is up: starting and waiting do not count, and code that never returns to the
interpreter is stopped too. An item that takes much longer than the others is slow: it keeps its process, after a
while at a lower priority, and another process takes its place, so that a computation without end holds up nobody. There
are never more slow processes than workers. Runs in asyncio and in trio; `blocking.py` is for all other code.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

import anyio
import anyio.abc
import msgspec

from gvm_stream.config import VerifierSection
from gvm_stream.verify.verdict import Verdict, VerdictUnscorable, VerifyItem
from gvm_stream.verify.workers import LOST, Template, Worker

CHUNK = 32
"""Most items that a worker is sent at once."""
CHUNK_S = 0.005
"""Seconds that a chunk is meant to take."""
PATIENCE_S = 0.03
SLOW_FACTOR = 5.0
"""An item is slow after `PATIENCE_S`, and after so many times the mean of late."""
GRACE_S = 5.0
"""Seconds after which a worker that should have ended itself is killed: it may have been stopped from outside."""
MEAN_WEIGHT = 0.05
"""Of one more verdict in the mean time of one."""
LATENCIES = 1000

TIMEOUT = VerdictUnscorable("verifier timeout", "timeout")
CRASHED = VerdictUnscorable("verifier crashed", "crashed")


def _ignore(index: int, verdict: Verdict) -> None:
    pass


class PoolStats(msgspec.Struct):
    """Read it at any time."""

    waiting: int = 0
    """Items that no worker has yet."""
    running: int = 0
    """Items that a worker has."""
    killed: int = 0
    """Workers that ended over an item or were ended from outside, so far."""
    recycled: int = 0
    """Workers replaced because of their age, so far."""
    seconds: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=LATENCIES))
    """From a worker's last verdict (or its start) to the next: judging times of the last verdicts."""


class _Call(msgspec.Struct):
    """What one call of `verify` has still to do."""

    items: Sequence[VerifyItem]
    verdicts: list[Verdict]
    queue: deque[int]
    """Indices of items that no worker has."""
    tasks: anyio.abc.TaskGroup
    on_verdict: Callable[[int, Verdict], None]
    lost: set[int] = msgspec.field(default_factory=set)
    """Items that a worker has died over once."""


class _Turn(msgspec.Struct):
    """A worker with the items it judges, oldest first."""

    call: _Call
    worker: Worker
    indices: deque[int]
    slot: ExitStack
    slow: bool = False
    """One of the items was slow, so that the worker has been given less than its turn, or a lower priority."""
    aside: bool = False
    """It has given up its slot for a place among the slow."""


class VerifierPool:
    """`settings.workers` processes that judge responses. An asynchronous context manager; all have ended after it."""

    def __init__(self, settings: VerifierSection) -> None:
        self.stats = PoolStats()
        self._settings = settings
        self._template = Template(settings)
        self._slots = anyio.Semaphore(settings.workers)
        self._slow = anyio.Semaphore(settings.workers)
        self._idle: list[Worker] = []
        self._mean_s = CHUNK_S

    async def __aenter__(self) -> VerifierPool:
        """Start the workers, so that the first responses need not wait for them."""
        try:
            await self._template.prepare(set(self._settings.weights) or {self._settings.kind})
            for _ in range(self._settings.workers):
                self._idle.append(await self._template.fork())
        except BaseException:
            await self._template.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._discard_idle()
        await self._template.close()

    async def verify(
        self, items: Sequence[VerifyItem], on_verdict: Callable[[int, Verdict], None] = _ignore
    ) -> list[Verdict]:
        """One verdict per item, in their order. A verifier that hangs or dies over an item is a verdict too.

        `on_verdict` gets the index of an item and its verdict as soon as it is known: others may take long.
        When cancelled, the processes that judge these items are killed before it returns.
        """
        if await self._template.prepare({item.kind for item in items if item.kind}):
            await self._discard_idle()
        verdicts: list[Verdict] = [CRASHED] * len(items)
        queue = deque(range(len(items)))
        self.stats.waiting += len(items)
        try:
            async with anyio.create_task_group() as tasks:
                call = _Call(items, verdicts, queue, tasks, on_verdict)
                for _ in range(min(self._settings.workers, len(items))):
                    tasks.start_soon(self._take_turn, call)
        finally:
            self.stats.waiting -= len(queue)
        return verdicts

    async def _take_turn(self, call: _Call) -> None:
        """Have some items judged, then queue again: calls share the workers by turns."""
        await self._slots.acquire()
        with ExitStack() as slot:
            slot.callback(self._slots.release)
            worker = await self._worker()
            turn = _Turn(call, worker, self._take(call, self._settings.recycle_after - worker.judged), slot)
            keep = False
            try:
                keep = await self._judge(turn)
            finally:
                self.stats.running -= len(turn.indices)
                await self._give_back(worker, keep=keep)
        if call.queue:
            call.tasks.start_soon(self._take_turn, call)

    async def _judge(self, turn: _Turn) -> bool:
        """Fill in the verdicts of a turn; False if its worker is not to be used again."""
        started = anyio.current_time()
        try:
            await turn.worker.send([turn.call.items[index] for index in turn.indices])
            while turn.indices:
                with anyio.fail_after(self._settings.timeout_s + GRACE_S):
                    verdicts = await self._next_verdicts(turn)
                now = anyio.current_time()
                for verdict in verdicts[: len(turn.indices)]:  # the rest is of items that others have by now
                    self._settle(turn.call, turn.indices, verdict, (now - started) / len(verdicts))
                started = now
        except LOST:
            self.stats.killed += 1
            self._settle_lost(turn.call, turn.indices, anyio.current_time() - started)
            return False
        return not turn.slow

    async def _next_verdicts(self, turn: _Turn) -> list[Verdict]:
        while True:
            with anyio.move_on_after(max(PATIENCE_S, SLOW_FACTOR * self._mean_s)):
                return await turn.worker.receive()
            self._set_aside(turn)

    def _set_aside(self, turn: _Turn) -> None:
        """The first item is slow: others judge the rest, in its slot as soon as there is room for it elsewhere."""
        if turn.slow:  # for the second time at least
            turn.worker.give_way()
        turn.slow = True
        while len(turn.indices) > 1:
            self._put_back(turn.call, [turn.indices.pop()])
        if not turn.aside:
            with contextlib.suppress(anyio.WouldBlock):
                self._slow.acquire_nowait()
                turn.aside = True
                turn.slot.close()
                turn.slot.callback(self._slow.release)
                turn.call.tasks.start_soon(self._take_turn, turn.call)

    def _take(self, call: _Call, most: int) -> deque[int]:
        """Items off the queue: few if they take long, so that all workers are busy until the end."""
        share = math.ceil(len(call.queue) / (2 * self._settings.workers))
        size = min(share, most, max(1, min(CHUNK, int(CHUNK_S / self._mean_s))))
        self.stats.waiting -= size
        self.stats.running += size
        return deque(call.queue.popleft() for _ in range(size))

    def _put_back(self, call: _Call, indices: Sequence[int]) -> None:
        self.stats.waiting += len(indices)
        self.stats.running -= len(indices)
        call.queue.extendleft(reversed(indices))

    def _settle(self, call: _Call, indices: deque[int], verdict: Verdict, seconds: float) -> None:
        index = indices.popleft()
        call.verdicts[index] = verdict
        call.on_verdict(index, verdict)
        self.stats.running -= 1
        self.stats.seconds.append(seconds)
        self._mean_s += MEAN_WEIGHT * (min(seconds, PATIENCE_S + self._mean_s) - self._mean_s)

    def _settle_lost(self, call: _Call, indices: deque[int], seconds: float) -> None:
        """The worker has died over the first item. Another tries it, but for its own limit and the second time."""
        first = indices[0]
        if seconds >= self._settings.timeout_s:
            self._settle(call, indices, TIMEOUT, seconds)
        elif first in call.lost:
            self._settle(call, indices, CRASHED, seconds)
        call.lost.add(first)
        self._put_back(call, [*indices])
        indices.clear()

    async def _worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended():
                return worker
            self.stats.killed += 1
            await worker.kill()
        return await self._template.fork()

    async def _give_back(self, worker: Worker, *, keep: bool) -> None:
        if keep and worker.judged < self._settings.recycle_after and len(self._idle) < self._settings.workers:
            self._idle.append(worker)
            return
        self.stats.recycled += keep
        with anyio.CancelScope(shield=True):
            await worker.kill()

    async def _discard_idle(self) -> None:
        with anyio.CancelScope(shield=True):
            while self._idle:
                await self._idle.pop().kill()
