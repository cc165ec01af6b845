"""A peer's side of the stream in trio: one DEALER to the allocator, handshake, heartbeats, silence noticed."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
import zmq

from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError, WireError
from gvm_stream.wire.codec import decode_to_peer, encode
from gvm_stream.wire.messages import PROTOCOL, Alive, Heartbeat, Hello, Refused, Role, ToAllocator, ToPeer, Welcome
from gvm_stream.wire.sockets import connect_dealer
from gvm_stream.wire.zmq_trio import ZmqSocket

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
        self._heard_at = trio.current_time()

    async def send(self, message: ToAllocator) -> None:
        await self._socket.send([encode(message)])

    async def messages(self) -> AsyncIterator[ToPeer]:
        """Everything the allocator says except answers to heartbeats. Raises StreamError if it refuses this peer or is
        silent for `stream.silence_s`."""
        while True:
            for frames in await self._receive():
                message = decode_to_peer(frames)
                if isinstance(message, Refused):
                    raise StreamError(f"the allocator refused this process: {message.reason}")
                if not isinstance(message, Alive):
                    yield message

    async def beat(self, state: Callable[[], Heartbeat]) -> None:
        """Send a heartbeat every `stream.heartbeat_s`, for ever."""
        while True:
            await self.send(state())
            await trio.sleep(self._stream.heartbeat_s)

    async def _receive(self) -> list[list[bytes]]:
        with trio.move_on_after(self._stream.silence_s):
            batch = await self._socket.recv_batch(BATCH)
            self._heard_at = trio.current_time()
            return batch
        raise StreamError(
            f"the allocator at {self._stream.address} has been silent for {self._stream.silence_s:g} s: it is dead or "
            "cut off"
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
            yield Link(socket, answer, stream)
    finally:
        context.term()
