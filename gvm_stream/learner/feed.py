"""The learner's side of the stream: one blocking socket, no event loop. Every wait has a deadline.

The allocator may be killed and started again at any moment: the learner then says hello again and sends again what has
not been acknowledged. Until then it trains on what it has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque

import msgspec
import zmq

from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError
from gvm_stream.health import Health
from gvm_stream.wire.codec import decode_to_peer, encode
from gvm_stream.wire.link import identity_of, new_epoch
from gvm_stream.wire.messages import (
    PROTOCOL,
    Alive,
    Batch,
    BatchRequest,
    Checkpointed,
    Heartbeat,
    Hello,
    Published,
    Refused,
    Settled,
    StepDone,
    Stop,
    ToAllocator,
    ToPeer,
    Unknown,
    Welcome,
)
from gvm_stream.wire.sockets import connect_dealer

log = logging.getLogger(__name__)


class Feed:
    """Batches from the allocator, and what the learner says to it. Belongs to one thread; only `post` may be called by
    others."""

    def __init__(
        self, stream: StreamSection, *, name: str, agreed: dict[str, str], checkpoints: tuple[int, ...], health: Health
    ) -> None:
        self._stream, self._health = stream, health
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        epoch = new_epoch()
        self._socket, self._watch = connect_dealer(
            self._context,
            stream.address,
            "stream.address",
            stream=stream,
            role="learner",
            identity=identity_of("learner", name, epoch),
        )
        self._hello = Hello(
            protocol=PROTOCOL, role="learner", name=name, epoch=epoch, agreed=agreed, checkpoints=checkpoints
        )
        self._posted: deque[ToAllocator] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        """Readable when something has been posted."""
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._step = 0
        """Batches behind the model in memory."""
        self._unsettled: dict[int, StepDone] = {}
        self._published: Published | None = None
        self._checkpointed: Checkpointed | None = None
        self._heard_at = self._beat_at = time.monotonic()
        self._greeted_at = 0.0
        self.stop: Stop | None = None
        """Set once the allocator has ended the run."""
        self.interrupted = False
        """Set from outside (a signal) to end a wait."""

    def join(self) -> Welcome:
        """Say hello and wait for the allocator, up to `stream.progress_s`. Raises StreamError if it is not there."""
        deadline = time.monotonic() + self._stream.progress_s
        while time.monotonic() < deadline and not self.interrupted:
            if time.monotonic() - self._greeted_at > self._stream.silence_s:  # it may have died over the last one
                self._greet(self._hello)
            message = self._receive(self._stream.heartbeat_s)
            if isinstance(message, Welcome):
                self._step = message.next_step
                return message
        if self.interrupted:
            raise StreamError("interrupted while waiting for the allocator")
        raise StreamError(f"no allocator has answered at {self._stream.address} within {self._stream.progress_s:g} s")

    def batch(self, step: int) -> Batch | None:
        """Ask for batch `step` and wait for it; None when the run ends instead, or on `interrupted`.

        Raises StreamError when the allocator refuses this learner or is silent for `stream.progress_s`.
        """
        self._step = step
        asked_at = self._ask(step)
        self._heard_at = time.monotonic()
        while self.stop is None and not self.interrupted:
            message = self._wait(f"batch {step}")
            if isinstance(message, Batch) and message.step == step:
                return message
            if isinstance(message, Welcome):
                asked_at = self._ask(step)
            elif time.monotonic() - asked_at > self._stream.silence_s:  # what was said, or the answer, may be lost
                self._say_again()
                asked_at = self._ask(step)
        return None

    def wait_for_stop(self) -> None:
        """Wait until the allocator ends the run (it evaluates the last weights meanwhile)."""
        said_at = time.monotonic()
        while self.stop is None and not self.interrupted:
            self._wait("the end of the run")
            if time.monotonic() - said_at > self._stream.silence_s:
                self._say_again()
                said_at = time.monotonic()

    def settle(self, patience_s: float) -> None:
        """Before the end: wait until everything that was done is safe, up to `patience_s`."""
        deadline = time.monotonic() + patience_s
        while self._unsettled and time.monotonic() < deadline:
            self._receive(min(patience_s, self._stream.heartbeat_s))

    def working(self) -> None:
        """To be called between micro-batches: says that the learner is alive and at work."""
        self._health.turn()
        self._send_posted()
        self._beat("")

    def send(self, message: ToAllocator) -> None:
        """What the allocator must not miss is sent again to one that has been started again."""
        match message:
            case StepDone():
                self._step = message.step + 1
                self._unsettled[message.step] = message
            case Published():
                self._published = message
            case Checkpointed():
                self._checkpointed = message
            case _:
                pass
        self._socket.send(encode(message))

    def post(self, message: ToAllocator) -> None:
        """As `send`, from any thread: sent by its owner, at once if it waits, else by its next call."""
        self._posted.append(message)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._watch.close()
        self._socket.close()
        os.close(self._wake)
        self._context.term()

    def _ask(self, step: int) -> float:
        self.send(BatchRequest(step=step))
        return time.monotonic()

    def _wait(self, waiting_for: str) -> ToPeer | None:
        """The next message, or None after at most a heartbeat."""
        message = self._receive(self._stream.heartbeat_s)
        self._beat(waiting_for)
        silent_s = time.monotonic() - self._heard_at
        if silent_s > self._stream.progress_s:
            raise StreamError(
                f"the allocator at {self._stream.address} has been silent for {silent_s:.0f} s: it is dead or cut off"
            )
        return message

    def _receive(self, timeout_s: float) -> ToPeer | None:
        self._health.turn()
        self._watch.check()
        self._send_posted()
        if self._socket not in dict(self._poller.poll(int(timeout_s * 1000))):
            self._send_posted()
            return None
        message = decode_to_peer(self._socket.recv_multipart())
        self._heard_at = time.monotonic()
        match message:
            case Refused():
                raise StreamError(f"the allocator at {self._stream.address} refused this learner: {message.reason}")
            case Stop():
                self.stop = message
            case Settled():
                self._unsettled.pop(message.step, None)
            case Unknown():
                if time.monotonic() - self._greeted_at > self._stream.silence_s / 3:
                    log.info("the allocator has been started again; saying hello")
                    self._greet(msgspec.structs.replace(self._hello, step=self._step))
            case Welcome():
                self._greeted_at = 0.0
                self._say_again()
            case _:
                pass
        return None if isinstance(message, Alive) else message

    def _greet(self, hello: Hello) -> None:
        self._greeted_at = time.monotonic()
        self._socket.send(encode(hello))

    def _say_again(self) -> None:
        """What the allocator may not have heard, or not have written down."""
        for message in (self._published, *self._unsettled.values(), self._checkpointed):
            if message is not None:
                self._socket.send(encode(message))

    def _send_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nothing new
            os.eventfd_read(self._wake)  # first: what is posted from now on wakes the next wait
        while self._posted:
            self.send(self._posted.popleft())

    def _beat(self, waiting_for: str) -> None:
        now = time.monotonic()
        if now - self._beat_at >= self._stream.heartbeat_s:
            self._beat_at = now
            self._socket.send(encode(Heartbeat(waiting_for=waiting_for)))
