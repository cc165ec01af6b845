"""Turns of the allocator on their way out: first what has changed is written down, then what was said is sent.

So nobody is ever told of anything that a crash could undo. Observers alone are answered at once: what they get is a
picture, no promise, and it must not wait for a disk that hangs. While a commit is on its way to the disk, the turns
after it gather and share the next one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import trio

from gvm_stream.allocator.broker import Broker
from gvm_stream.allocator.spool import Changes, MemorySpool, Spool
from gvm_stream.errors import StreamError
from gvm_stream.wire import messages as m
from gvm_stream.wire.codec import encode
from gvm_stream.wire.payload import frames_of, works_of
from gvm_stream.wire.zmq_trio import ZmqSocket

log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")

MOST_WAITING_BYTES = 256 << 20
"""Payload of turns that are not on disk yet. Beyond it no message is read, and the producers' sends wait."""

OBSERVER = b"observer/"
"""How the identity of one begins."""

_batch = msgspec.msgpack.Decoder(m.Batch)


@dataclass(frozen=True)
class Turn:
    changes: Changes | None
    outbox: tuple[tuple[bytes, m.ToPeer], ...]
    replays: tuple[tuple[bytes, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(len(payload) for _, payload in self.changes.rollouts) if self.changes else 0

    @property
    def has_batch(self) -> bool:
        return bool(self.replays) or any(isinstance(message, m.Batch) for _, message in self.outbox)


class Writer:
    def __init__(self, broker: Broker, socket: ZmqSocket, spool: Spool) -> None:
        self._broker, self._socket, self._spool = broker, socket, spool
        self._in_memory = isinstance(spool, MemorySpool)
        self._waiting: deque[Turn] = deque()
        self._bytes = 0
        self._news, self._room, self._idle = trio.Event(), trio.Event(), trio.Event()
        self._idle.set()
        self._broken = False
        """The spool has failed: nothing more is written, and nobody is told of what is not."""

    async def put(self, *, snapshot: bool = False) -> None:
        """Take what the broker has done since the last call. Waits while too much is waiting to be written."""
        broker = self._broker
        watched = [out for out in broker.outbox if out[0].startswith(OBSERVER)]
        outbox = tuple(out for out in broker.outbox if not out[0].startswith(OBSERVER))
        broker.outbox.clear()
        self._send(watched)
        turn = Turn(broker.work.take_changes(snapshot=snapshot), outbox, tuple(broker.replays))
        broker.replays.clear()
        if self._in_memory or self._broken:
            await self._finish([turn])
        elif turn.changes is None and not turn.has_batch and self._idle.is_set():
            self._send(turn.outbox)
        else:
            self._waiting.append(turn)
            self._bytes += turn.nbytes
            broker.spool_waiting = len(self._waiting)
            self._idle = trio.Event() if self._idle.is_set() else self._idle
            self._news.set()
            while self._bytes > MOST_WAITING_BYTES:
                await self._room.wait()

    async def run(self) -> None:
        """Write and send, for ever."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._waiting:
                turns = list(self._waiting)
                self._waiting.clear()
                self._bytes, room = 0, self._room
                self._room = trio.Event()
                room.set()
                await self._finish(turns)
                self._broker.spool_waiting = len(self._waiting)
            self._idle.set()

    async def drain(self) -> None:
        """Until everything is written and sent."""
        await self._idle.wait()

    async def _finish(self, turns: Sequence[Turn]) -> None:
        if not self._broken:
            try:
                await self._write([turn.changes for turn in turns if turn.changes is not None])
                for turn in turns:
                    await self._deliver(turn)
                return
            except StreamError as error:
                self._broken = True
                self._broker.fail(str(error), trio.current_time())
        for turn in turns:
            self._send(out for out in turn.outbox if isinstance(out[1], m.Stop))

    async def _write(self, changes: Sequence[Changes]) -> None:
        if not changes:
            return
        if self._in_memory:
            self._broker.spool_bytes = self._commit(changes)
        else:
            self._broker.spool_bytes = await trio.to_thread.run_sync(self._commit, changes)

    def _commit(self, changes: Sequence[Changes]) -> int:
        self._spool.commit(changes)
        return self._spool.size()

    async def _deliver(self, turn: Turn) -> None:
        self._send(turn.outbox)
        for identity, step in turn.replays:
            await self._send_settled(identity, step)
        for identity, message in turn.outbox:
            if isinstance(message, m.Batch):
                await self._send_batch(identity, message)

    def _send(self, outbox: Iterable[tuple[bytes, m.ToPeer]]) -> None:
        """All but batches."""
        for identity, message in outbox:
            if not isinstance(message, m.Batch):
                self._try_send(identity, encode(message))

    async def _send_settled(self, identity: bytes, step: int) -> None:
        content = await self._read(self._spool.batch, step)
        if content is not None:  # else a checkpoint has it by now
            await self._send_batch(identity, _batch.decode(content))

    async def _send_batch(self, identity: bytes, batch: m.Batch) -> None:
        works = works_of(batch)
        payloads = await self._read(self._spool.rollouts, works)
        self._try_send(identity, encode(batch), *frames_of(payloads[work] for work in works))

    async def _read(self, read: Callable[[A], R], argument: A) -> R:
        if self._in_memory:
            return read(argument)
        return await trio.to_thread.run_sync(read, argument)

    def _try_send(self, identity: bytes, *frames: bytes) -> None:
        if not self._socket.try_send([identity, *frames]):
            self._broker.unreachable(identity, trio.current_time())
