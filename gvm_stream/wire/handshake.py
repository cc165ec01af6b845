"""What becomes of a connection before its first message: libzmq tells only those who ask its socket monitor.

A client that is refused gives up for good and says nothing, so each one has a `HandshakeWatch` beside its socket.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NamedTuple, NoReturn, Self, TypeVar

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from gvm_stream.errors import StreamError
from gvm_stream.process import leaf_error
from gvm_stream.wire.zmq_trio import ZmqSocket

T = TypeVar("T")

FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_WATCHED = FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED
_HUNG_UP = (errno.EPIPE, errno.ECONNRESET)


class Explanation(NamedTuple):
    """What to say to people when a handshake fails, by what was not right."""

    key: str
    """Of this client."""
    mechanism: str
    """One side has keys, the other not."""
    hung_up: str
    """The server closed the connection: the key it is expected to have is not its own. Empty: that says nothing."""


class HandshakeWatch:
    """Whether the server has refused a client. Not thread-safe; to be closed before the context is."""

    def __init__(self, socket: zmq.Socket[bytes], explanation: Explanation, patience_s: float) -> None:
        """To be made before `socket` connects. A server that hangs up may just be ending: `patience_s` of it count."""
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._monitor.linger = 0
        self._explanation, self._patience_s = explanation, patience_s
        self._problem = ""
        self._hung_up_since: float | None = None

    def check(self) -> None:
        """Raises StreamError if this client will never get through, with the reason. Does not wait."""
        while self._monitor.poll(0):
            self._note(self._monitor.recv_multipart())
        if self._problem:
            raise StreamError(self._problem)

    async def unless_refused(self, wanted: Callable[[], Awaitable[T]]) -> T:
        """What `wanted` returns, under trio. Raises StreamError as soon as the server refuses this client."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._wait_for_problem)
                result = await wanted()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:  # to the caller this is one wait
            ours = leaf_error(group)
            if ours is None:
                raise
            raise ours from group
        return result

    async def _wait_for_problem(self) -> NoReturn:
        monitor = ZmqSocket(self._monitor)
        while not self._problem:
            self._note(await monitor.recv())
        raise StreamError(self._problem)

    def close(self) -> None:
        self._monitor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _note(self, frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        event, value = message["event"], message["value"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._problem = self._explanation.key
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._problem = self._explanation.mechanism
        elif event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # through, or nobody listens
            self._hung_up_since = None
        elif value in _HUNG_UP:
            now = time.monotonic()
            self._hung_up_since = self._hung_up_since or now
            if now - self._hung_up_since >= self._patience_s:
                self._problem = self._explanation.hung_up
