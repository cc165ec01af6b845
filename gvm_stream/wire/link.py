"""A peer's side of the stream in trio: one DEALER to the allocator, handshake, heartbeats, silence noticed."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
import zmq

from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError, WireError
from gvm_stream.wire.codec import decode_to_peer, encode
from gvm_stream.wire.messages import (
    PROTOCOL,
    Alive,
    Heartbeat,
    Hello,
    Refused,
    Role,
    Status,
    StatusRequest,
    ToAllocator,
    ToPeer,
    Welcome,
)
from gvm_stream.wire.sockets import LINGER_MS, connect_dealer
from gvm_stream.wire.zmq_trio import Frames, ZmqSocket

log = logging.getLogger(__name__)

BATCH = 64
"""Messages taken from the socket per wake-up."""


def new_epoch() -> int:
    """A number that grows with every start of a process."""
    return time.time_ns()


def identity_of(role: Role, name: str, epoch: int) -> bytes:
    return f"{role}/{name}/{epoch:x}".encode()


class Link:
    """A connection to the allocator after a successful handshake. Belongs to one trio task tree."""

    def __init__(self, socket: ZmqSocket, welcome: Welcome, stream: StreamSection) -> None:
        self._socket, self.welcome, self._stream = socket, welcome, stream
        self._received: deque[Frames] = deque()
        self.heartbeat: Callable[[], Heartbeat] = lambda: Heartbeat(waiting_for="its own start")
        """What the next heartbeat says; replaced by whoever knows more."""

    async def send(self, message: ToAllocator) -> None:
        await self._socket.send([encode(message)])

    async def receive(self) -> ToPeer:
        """The next thing the allocator says, its heartbeats left out.

        Raises StreamError if it refuses this peer or is silent for `stream.silence_s`.
        """
        while True:
            if not self._received:
                await self._take_batch()
            message = decode_to_peer(self._received.popleft())
            if isinstance(message, Refused):
                raise StreamError(f"the allocator refused this process: {message.reason}")
            if not isinstance(message, Alive):
                return message

    async def status(self) -> Status:
        """For observers: a picture of the run now."""
        await self.send(StatusRequest())
        while not isinstance(message := await self.receive(), Status):
            log.debug("an observer was sent %s", type(message).__name__)
        return message

    async def beat(self) -> None:
        """Send a heartbeat every `stream.heartbeat_s`, for ever. To be started at once: an engine may take minutes to
        start, and a peer that says nothing is taken for dead."""
        while True:
            await self.send(self.heartbeat())
            await trio.sleep(self._stream.heartbeat_s)

    async def _take_batch(self) -> None:
        with trio.move_on_after(self._stream.silence_s) as scope:
            self._received.extend(await self._socket.recv_batch(BATCH))
        if scope.cancelled_caught:
            raise StreamError(
                f"the allocator at {self._stream.address} has been silent for {self._stream.silence_s:g} s: it is dead "
                "or cut off"
            )


@asynccontextmanager
async def open_link(
    stream: StreamSection, *, role: Role, name: str, agreed: dict[str, str], patience_s: float
) -> AsyncIterator[Link]:
    """Connect to the allocator, if it starts within `patience_s`. Raises StreamError if it does not, or refuses."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    epoch = new_epoch()
    try:
        raw = connect_dealer(
            context,
            stream.address,
            "stream.address",
            identity=identity_of(role, name, epoch),
            limit_mib=stream.max_message_mib,
        )
        raw.linger = 0  # a hello that nobody has read need not outlive this process
        with ZmqSocket(raw) as socket:
            await socket.send([encode(Hello(protocol=PROTOCOL, role=role, name=name, epoch=epoch, agreed=agreed))])
            with trio.move_on_after(patience_s) as scope:
                frames = await socket.recv()
            if scope.cancelled_caught:
                raise StreamError(f"no allocator has answered at {stream.address} within {patience_s:g} s")
            answer = decode_to_peer(frames)
            if isinstance(answer, Refused):
                raise StreamError(f"the allocator at {stream.address} refused this process: {answer.reason}")
            if not isinstance(answer, Welcome):
                raise WireError(f"the allocator at {stream.address} answered a hello with {type(answer).__name__}")
            raw.linger = LINGER_MS
            yield Link(socket, answer, stream)
    finally:
        context.term()
