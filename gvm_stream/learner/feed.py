"""The learner's side of the stream: one blocking socket, no event loop. Every wait has a deadline."""

from __future__ import annotations

import time

import zmq

from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError
from gvm_stream.wire.codec import decode_to_peer, encode
from gvm_stream.wire.link import identity_of, new_epoch
from gvm_stream.wire.messages import (
    PROTOCOL,
    Alive,
    Batch,
    BatchRequest,
    Heartbeat,
    Hello,
    Refused,
    Stop,
    ToAllocator,
    ToPeer,
    Welcome,
)
from gvm_stream.wire.sockets import connect_dealer


class Feed:
    """Batches from the allocator, and what the learner says to it. Not thread-safe."""

    def __init__(
        self, stream: StreamSection, *, name: str, agreed: dict[str, str], checkpoints: tuple[int, ...]
    ) -> None:
        self._stream = stream
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        epoch = new_epoch()
        self._socket = connect_dealer(
            self._context,
            stream.address,
            "stream.address",
            identity=identity_of("learner", name, epoch),
            limit_mib=stream.max_message_mib,
        )
        self._hello = Hello(
            protocol=PROTOCOL, role="learner", name=name, epoch=epoch, agreed=agreed, checkpoints=checkpoints
        )
        self._heard_at = self._beat_at = time.monotonic()
        self.stop: Stop | None = None
        """Set once the allocator has ended the run."""
        self.interrupted = False
        """Set from outside (a signal) to end a wait."""

    def join(self) -> Welcome:
        """Say hello and wait for the allocator, up to `stream.progress_s`. Raises StreamError if it is not there."""
        self.send(self._hello)
        deadline = time.monotonic() + self._stream.progress_s
        while time.monotonic() < deadline and not self.interrupted:
            message = self._receive(self._stream.heartbeat_s)
            if isinstance(message, Welcome):
                return message
        if self.interrupted:
            raise StreamError("interrupted while waiting for the allocator")
        raise StreamError(f"no allocator has answered at {self._stream.address} within {self._stream.progress_s:g} s")

    def batch(self, step: int) -> Batch | None:
        """Ask for batch `step` and wait for it; None when the run ends instead, or on `interrupted`.

        Raises StreamError when the allocator refuses this learner or is silent for `stream.silence_s`.
        """
        self.send(BatchRequest(step=step))
        self._heard_at = time.monotonic()
        while self.stop is None and not self.interrupted:
            message = self._receive(self._stream.heartbeat_s)
            if isinstance(message, Batch) and message.step == step:
                return message
            self._beat(f"batch {step}")
            if time.monotonic() - self._heard_at > self._stream.silence_s:
                raise StreamError(
                    f"the allocator at {self._stream.address} has been silent for {self._stream.silence_s:g} s: it is "
                    "dead or cut off"
                )
        return None

    def wait_for_stop(self) -> None:
        """Wait until the allocator ends the run (it evaluates the last weights meanwhile)."""
        while self.stop is None and not self.interrupted:
            self._receive(self._stream.heartbeat_s)
            self._beat("the end of the run")
            if time.monotonic() - self._heard_at > self._stream.silence_s:
                return

    def working(self) -> None:
        """To be called between micro-batches: says that the learner is alive and at work."""
        self._beat("")

    def send(self, message: ToAllocator) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _receive(self, timeout_s: float) -> ToPeer | None:
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        message = decode_to_peer(self._socket.recv_multipart())
        self._heard_at = time.monotonic()
        if isinstance(message, Refused):
            raise StreamError(f"the allocator at {self._stream.address} refused this learner: {message.reason}")
        if isinstance(message, Stop):
            self.stop = message
        return None if isinstance(message, Alive) else message

    def _beat(self, waiting_for: str) -> None:
        now = time.monotonic()
        if now - self._beat_at >= self._stream.heartbeat_s:
            self._beat_at = now
            self.send(Heartbeat(waiting_for=waiting_for))
