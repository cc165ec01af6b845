"""Turns of the allocator on their way out: first what has changed is written down, then what was said is sent.

So nobody is ever told of anything that a crash could undo. Observers alone are answered at once: what they get is a
picture, no promise, and it must not wait for a disk that hangs. While a commit is on its way to the disk, the turns
after it gather and share the next one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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

MOST_WAITING_BYTES = 256 << 20
"""Payload of turns that are not on disk yet. Beyond it no message is read, and the producers' sends wait."""

OBSERVER = b"observer/"
"""How the identity of one begins."""

Batches = list[tuple[bytes, list[bytes]]]
"""(learner, frames)."""

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
        self._spool_bytes = 0
        self._unsent = 0
        """Turns that have been put and not been sent."""
        self._news, self._room, self._idle = trio.Event(), trio.Event(), trio.Event()
        self._idle.set()
        # While what is written is sent, the next commit is under way.
        self._write_out, self._written = trio.open_memory_channel[list[tuple[Turn, Batches]]](1)
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
        if self._broken:
            self._send_stops([turn])
        elif self._in_memory:
            for pair in self._store([turn]):
                self._deliver(*pair)
            broker.spool_bytes = self._spool_bytes
        elif turn.changes is None and not turn.has_batch and self._idle.is_set():
            self._send(turn.outbox)
        else:
            self._waiting.append(turn)
            self._bytes += turn.nbytes
            self._unsent += 1
            broker.spool_waiting = len(self._waiting)
            self._idle = trio.Event() if self._idle.is_set() else self._idle
            self._news.set()
            while self._bytes > MOST_WAITING_BYTES:
                await self._room.wait()

    async def run(self) -> None:
        """Write and send, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_all)
            nursery.start_soon(self._send_all)

    async def drain(self) -> None:
        """Until everything is written and sent."""
        await self._idle.wait()

    # --- loops ---

    async def _write_all(self) -> None:
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._waiting:
                turns = list(self._waiting)
                self._waiting.clear()
                self._bytes, room = 0, self._room
                self._room = trio.Event()
                room.set()
                await self._write(turns)
                self._broker.spool_waiting = len(self._waiting)

    async def _write(self, turns: list[Turn]) -> None:
        if not self._broken:
            try:
                pairs = await trio.to_thread.run_sync(self._store, turns)
            except StreamError as error:
                self._broken = True
                self._broker.fail(str(error), trio.current_time())
            else:
                await self._write_out.send(pairs)
                return
        self._send_stops(turns)
        self._count_sent(len(turns))

    async def _send_all(self) -> None:
        async for pairs in self._written:
            for pair in pairs:
                self._deliver(*pair)
            self._broker.spool_bytes = self._spool_bytes
            self._count_sent(len(pairs))

    def _count_sent(self, turns: int) -> None:
        self._unsent -= turns
        if not self._unsent:
            self._idle.set()

    # --- in a thread of its own, but for a spool in memory ---

    def _store(self, turns: Sequence[Turn]) -> list[tuple[Turn, Batches]]:
        """Write them down, and put the batches that they hand out together."""
        changes = [turn.changes for turn in turns if turn.changes is not None]
        if changes:
            self._spool.commit(changes)
            self._spool_bytes = self._spool.size()
        return [(turn, self._batches_of(turn)) for turn in turns]

    def _batches_of(self, turn: Turn) -> Batches:
        batches = []
        for identity, step in turn.replays:
            content = self._spool.batch(step)
            if content is not None:  # else a checkpoint has it by now
                batches.append((identity, self._framed(_batch.decode(content))))
        for identity, message in turn.outbox:
            if isinstance(message, m.Batch):
                batches.append((identity, self._framed(message)))
        return batches

    def _framed(self, batch: m.Batch) -> list[bytes]:
        works = works_of(batch)
        payloads = self._spool.rollouts(works)
        return [encode(batch), *frames_of(payloads[work] for work in works)]

    # --- sending ---

    def _deliver(self, turn: Turn, batches: Batches) -> None:
        self._send(turn.outbox)
        for identity, frames in batches:
            self._try_send(identity, *frames)

    def _send(self, outbox: Iterable[tuple[bytes, m.ToPeer]]) -> None:
        """All but batches."""
        for identity, message in outbox:
            if not isinstance(message, m.Batch):
                self._try_send(identity, encode(message))

    def _send_stops(self, turns: Sequence[Turn]) -> None:
        """Of turns that cannot be written down."""
        for turn in turns:
            self._send(out for out in turn.outbox if isinstance(out[1], m.Stop))

    def _try_send(self, identity: bytes, *frames: bytes) -> None:
        if not self._socket.try_send([identity, *frames]):
            self._broker.unreachable(identity, trio.current_time())
