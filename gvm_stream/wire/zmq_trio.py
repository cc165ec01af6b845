"""Trio access to one ZeroMQ socket.

libzmq offers a single file descriptor (ZMQ_FD) that becomes *readable* when the socket's state may have
changed, also when the news is "you may send again". It is edge-triggered: any call on the socket can
swallow the edge, including a send made by another task. Three rules follow, and this file is where they live:

1. Never sleep on the descriptor before EVENTS has been read and found wanting.
2. Trio lets one task wait per descriptor, so the first waiter sleeps on it (the leader) and the others park.
3. After every successful operation, wake a sleeper whose event is already there (`_wake_sleepers`).

Operations are cancellation-safe: a message is either still in the socket or returned, never in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar, final

import trio
import zmq

Frames = list[bytes]
Request = tuple[bytes, list[memoryview]]
"""Who sent it, and its frames as views: nothing is copied."""

T = TypeVar("T")

# pyzmq's own `send_multipart` and `recv_multipart` make enumerations at every frame, for longer than a frame takes to
# send.
_NOW = int(zmq.DONTWAIT)
_NOW_AND_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_ZERO_COPY_BYTES = 64 * 2**10


@final
class ZmqSocket:
    """Own a plain `zmq.Socket`; every method belongs to the trio thread that made it."""

    def __init__(self, socket: zmq.Socket[bytes], admits: Callable[[zmq.Frame], bool] | None = None) -> None:
        """`admits` is asked about the identity frame of every message of a ROUTER; what it refuses is dropped."""
        if socket.linger == -1:
            raise ValueError("set socket.linger first: the default (-1) makes context.term() wait for ever")
        self._socket, self._admits = socket, admits
        self._fd = socket.fileno()
        self._parked = trio.lowlevel.ParkingLot()
        self._leader: trio.CancelScope | None = None
        self._wanted = 0  # events the sleeping tasks wait for

    async def recv(self) -> Frames:
        """Return the next message; wait for one if there is none."""
        return (await self.recv_batch(1))[0]

    async def recv_batch(self, limit: int) -> list[Frames]:
        """Wait for one message, then take up to `limit` that are already here: one checkpoint per batch."""
        return await self._take(limit, self._receive_into)

    async def recv_requests(self, limit: int) -> list[Request]:
        """The same, of a ROUTER."""
        return await self._take(limit, self._request_into)

    async def _take(self, limit: int, receive_into: Callable[[list[T]], None]) -> list[T]:
        await trio.lowlevel.checkpoint()
        batch: list[T] = []
        while not batch:
            try:
                for _ in range(limit):
                    receive_into(batch)
            except zmq.Again:
                if not batch:
                    await self._wait_for(zmq.POLLIN)
            else:
                if not batch:  # refused, all of it: a flood must not keep the others from running
                    await trio.lowlevel.checkpoint()
        self._wake_sleepers()
        return batch

    def _receive_into(self, batch: list[Frames]) -> None:
        if self._admits is None:
            batch.append(self._socket.recv_multipart(zmq.DONTWAIT))
            return
        identity = self._socket.recv(zmq.DONTWAIT, copy=False)  # only a Frame knows whose key it came with
        content = self._socket.recv_multipart(zmq.DONTWAIT)
        if self._admits(identity):
            batch.append([identity.bytes, *content])

    def _request_into(self, batch: list[Request]) -> None:
        socket, admits = self._socket, self._admits
        admitted = True
        if admits is None:
            identity = socket.recv(_NOW)
        else:
            first = socket.recv(_NOW, copy=False)
            identity, admitted = first.bytes, admits(first)
        frame = socket.recv(_NOW, copy=False)
        content = [frame.buffer]
        while frame.more:
            frame = socket.recv(_NOW, copy=False)
            content.append(frame.buffer)
        if admitted:
            batch.append((identity, content))

    async def send(self, frames: Iterable[bytes]) -> None:
        """Queue one message, waiting while the high-water mark is reached (that wait is the backpressure)."""
        await trio.lowlevel.checkpoint()
        parts = list(frames)
        while True:
            try:
                self._socket.send_multipart(parts, zmq.DONTWAIT)
            except zmq.Again:
                await self._wait_for(zmq.POLLOUT)
                continue
            self._wake_sleepers()
            return

    def try_send(self, frames: Iterable[bytes]) -> bool:
        """Queue one message without waiting; False if the peer is gone or does not read.

        For ROUTER sockets, where `send` could not wait: POLLOUT says nothing about a single peer.
        """
        *parts, last = frames
        try:
            for part in parts:
                self._socket.send(part, _NOW_AND_MORE, copy=len(part) < _ZERO_COPY_BYTES)
            self._socket.send(last, _NOW, copy=len(last) < _ZERO_COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        self._wake_sleepers()
        return True

    async def _wait_for(self, event: int) -> None:
        while not self._events() & event:
            self._wanted |= event
            if self._leader is not None:
                await self._parked.park()
                continue
            try:
                with trio.CancelScope() as self._leader:
                    await trio.lowlevel.wait_readable(self._fd)
            finally:
                self._leader, self._wanted = None, 0
                self._parked.unpark_all()

    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))

    def _wake_sleepers(self) -> None:
        if self._leader is not None and self._events() & self._wanted:
            self._leader.cancel()

    def close(self) -> None:
        """Close the socket; a task still waiting gets `trio.ClosedResourceError`."""
        if not self._socket.closed:
            trio.lowlevel.notify_closing(self._fd)
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
