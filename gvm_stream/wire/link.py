"""A peer's side of the stream in trio: one DEALER to the allocator, handshake, heartbeats, silence noticed."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio
import zmq
from msgspec import structs

from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError, WireError
from gvm_stream.wire.codec import decode_to_peer, encode
from gvm_stream.wire.handshake import HandshakeWatch
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
    Unknown,
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
    """A connection to the allocator after a successful handshake, which outlives an allocator that is started again.
    Belongs to one trio task tree."""

    def __init__(
        self, socket: ZmqSocket, watch: HandshakeWatch, hello: Hello, welcome: Welcome, stream: StreamSection
    ) -> None:
        self._socket, self._watch, self._hello, self.welcome, self._stream = socket, watch, hello, welcome, stream
        self._received: deque[Frames] = deque()
        self._greeted_at = -math.inf
        """When the last hello was sent that has not been answered; -inf: there is none."""
        self.in_hand: Callable[[], dict[int, int]] = dict
        """What a hello says of the work in hand; replaced by a producer."""
        self.heartbeat: Callable[[], Heartbeat] = lambda: Heartbeat(waiting_for="its own start")
        """What the next heartbeat says; replaced by whoever knows more."""
        self.silent_since: float | None = None
        """Since when the allocator has not been heard of; None: it has, within `stream.silence_s`."""

    async def send(self, message: ToAllocator) -> None:
        await self._socket.send([encode(message)])

    async def receive(self) -> ToPeer:
        """The next thing the allocator says, its heartbeats left out. A `Welcome` says that it did not know this peer
        any more: what it has not acknowledged is to be sent again.

        Raises StreamError if it refuses this peer, or is silent for `stream.progress_s`.
        """
        while True:
            if not self._received:
                await self._take_batch()
            message = decode_to_peer(self._received.popleft())
            match message:
                case Refused():
                    raise StreamError(f"the allocator refused this process: {message.reason}")
                case Unknown():
                    await self._greet()
                case Welcome() if self._greeted_at > -math.inf:
                    self._greeted_at = -math.inf
                    return message
                case Alive() | Welcome():  # the latter: once more, to a hello that was said twice
                    pass
                case _:
                    return message

    async def status(self) -> Status:
        """For observers: a picture of the run now. An allocator that has been started again is asked again."""
        await self.send(StatusRequest())
        while not isinstance(message := await self.receive(), Status):
            if isinstance(message, Welcome):
                await self.send(StatusRequest())
        return message

    async def beat(self) -> None:
        """Send a heartbeat every `stream.heartbeat_s`, for ever. To be started at once: an engine may take minutes to
        start, and a peer that says nothing is taken for dead."""
        while True:
            self._watch.check()
            await self.send(self.heartbeat())
            await trio.sleep(self._stream.heartbeat_s)

    async def _greet(self) -> None:
        """Say hello again, once for the many messages that an allocator may not have known the sender of."""
        now = trio.current_time()
        if now - self._greeted_at > self._stream.silence_s / 3:
            self._greeted_at = now
            await self.send(structs.replace(self._hello, in_hand=self.in_hand()))

    async def _take_batch(self) -> None:
        """Wait for messages. A silent allocator may be on its way back: it is waited for, with a warning."""
        stream, since = self._stream, trio.current_time()
        while True:
            with trio.move_on_after(stream.silence_s):
                self._received.extend(await self._socket.recv_batch(BATCH))
                self.silent_since = None
                return
            silent_s = trio.current_time() - since
            if silent_s >= stream.progress_s:
                raise StreamError(
                    f"the allocator at {stream.address} has been silent for {silent_s:.0f} s: it is dead or cut off"
                )
            if self.silent_since is None:
                self.silent_since = since
                log.warning("the allocator at %s is silent; waiting for it to come back", stream.address)


@asynccontextmanager
async def open_link(
    stream: StreamSection, *, role: Role, name: str, agreed: dict[str, str], patience_s: float
) -> AsyncIterator[Link]:
    """Connect to the allocator, if it starts within `patience_s`. Raises StreamError if it does not, or refuses."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    epoch = new_epoch()
    hello = Hello(protocol=PROTOCOL, role=role, name=name, epoch=epoch, agreed=agreed)
    try:
        raw, watch = connect_dealer(
            context,
            stream.address,
            "stream.address",
            stream=stream,
            role=role,
            identity=identity_of(role, name, epoch),
        )
        raw.linger = 0  # a hello that nobody has read need not outlive this process
        with watch, ZmqSocket(raw) as socket:
            with trio.move_on_after(patience_s) as scope:
                welcome = await watch.unless_refused(partial(_join, socket, hello, stream))
            if scope.cancelled_caught:
                raise StreamError(f"no allocator has answered at {stream.address} within {patience_s:g} s")
            raw.linger = LINGER_MS
            yield Link(socket, watch, hello, welcome, stream)
    finally:
        context.term()


async def _join(socket: ZmqSocket, hello: Hello, stream: StreamSection) -> Welcome:
    """Say hello until there is an answer: the allocator may have died over the first one."""
    while True:
        await socket.send([encode(hello)])
        with trio.move_on_after(stream.silence_s):
            while True:
                answer = decode_to_peer(await socket.recv())
                match answer:
                    case Welcome():
                        return answer
                    case Refused():
                        raise StreamError(f"the allocator at {stream.address} refused this process: {answer.reason}")
                    case Alive():  # not ours: of a hello before this one
                        pass
                    case _:
                        kind = type(answer).__name__
                        raise WireError(f"the allocator at {stream.address} answered a hello with {kind}")
