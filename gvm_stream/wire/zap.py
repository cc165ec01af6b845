"""Who may talk to a socket that listens: CURVE proves which key a client has, this says whether that key may join.

A CURVE server without a handler of ZAP requests (ZeroMQ RFC 27) lets in anybody who knows its public key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import trio
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from gvm_stream.config import StreamSection
from gvm_stream.errors import ConfigError
from gvm_stream.wire.handshake import FAILED
from gvm_stream.wire.keys import CLIENTS, PUBLIC, Entry, Server, fingerprint, load_entries
from gvm_stream.wire.messages import Role
from gvm_stream.wire.sockets import bind_router
from gvm_stream.wire.zmq_trio import Frames, ZmqSocket

log = logging.getLogger(__name__)

Reason = Literal["key", "revoked", "role", "handshake"]
"""A key that is not on the list; one that is not any more; a message in the name of another role; a connection that
never came to show its key: no encryption, the wrong key for this server, another protocol."""

ENDPOINT = "inproc://zeromq.zap.01"
REREAD_S = 1.0
"""The list of keys is looked at again when it is needed, but no more often than this."""
LOG_WINDOW_S = 60.0
LOG_LINES = 20
"""Refusals logged in a window, each subject once: a flood must not fill a disk."""


class Refusals:
    """Counts every refusal and logs some."""

    def __init__(self, count: Callable[[Reason], None]) -> None:
        self._count = count
        self._since, self._logged = 0.0, set[str]()

    def add(self, reason: Reason, subject: str, text: str) -> None:
        """`subject` is what is logged once in a window."""
        self._count(reason)
        now = time.monotonic()
        if now - self._since >= LOG_WINDOW_S:
            self._since, self._logged = now, set()
        if subject not in self._logged and len(self._logged) < LOG_LINES:
            self._logged.add(subject)
            log.warning("refused: %s", text)


class Guard:
    """Decides who comes in and who is heard. A revoked key counts at once, on open connections, too."""

    def __init__(self, folder: Path, clients: Collection[Role], refusals: Refusals) -> None:
        """Raises ConfigError if the list in `folder` cannot be used."""
        self._folder, self._clients, self._refusals = folder, clients, refusals
        self._look_at, self._seen = 0.0, self._state()
        self._entries = _by_key(load_entries(folder))

    def answer(self, request: Frames) -> Frames:
        """The reply to a ZAP request of a CURVE server. Whoever is let in has his public key for a User-Id."""
        version, request_id, _, address, _, _, raw_key = request
        self._reread()
        key = z85.encode(raw_key)
        entry = self._entries.get(key.decode())
        if entry is not None and entry.role in self._clients:
            return [version, request_id, b"200", b"OK", key, b""]
        whose = f"of {entry.role} {entry.name}" if entry is not None else fingerprint(key)
        self._refusals.add("key", whose, f"a client at {address.decode()}: the key {whose} may not join here")
        return [version, request_id, b"400", b"this key may not join here", b"", b""]

    def admits(self, identity: zmq.Frame) -> bool:
        """Whether a message may be heard: its key is still on the list, and its identity is one of that key's role."""
        self._reread()
        key = str(identity.get("User-Id"))
        entry = self._entries.get(key)
        if entry is None:
            whose = fingerprint(key.encode())
            self._refusals.add("revoked", whose, f"{identity.bytes!r}: its key {whose} has been revoked")
            return False
        if not identity.bytes.startswith(f"{entry.role}/".encode()):
            self._refusals.add("role", key, f"{identity.bytes!r}: it has the key of {entry.role} {entry.name}")
            return False
        return True

    def _reread(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + REREAD_S
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self._entries = _by_key(load_entries(self._folder))
        except ConfigError as error:  # half copied, or badly edited: no reason to end a run
            log.error("the list of keys as it was stays in force: %s", error)

    def _state(self) -> tuple[int, int] | None:
        """Changes whenever the list does: our commands put a new file in its place, an editor may not."""
        try:
            found = (self._folder / PUBLIC).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def _by_key(entries: Collection[Entry]) -> dict[str, Entry]:
    return {entry.key: entry for entry in entries}


@asynccontextmanager
async def listening(
    address: str,
    key: str,
    *,
    stream: StreamSection,
    server: Server,
    count: Callable[[Reason], None],
) -> AsyncIterator[ZmqSocket]:
    """A ROUTER on `address` (configured as `key`). With keys, only clients of `server` that have one get through.

    `count` is told the reason of every refusal. Raises what `bind_router` does, before anything is listened on; what
    the block raises comes in an exception group.
    """
    refusals = Refusals(count)
    guard = Guard(Path(stream.keys), CLIENTS[server], refusals) if stream.keys else None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        zap = context.socket(zmq.REP)
        zap.linger = 0
        with ZmqSocket(zap) as requests:
            zap.bind(ENDPOINT)  # before there is a connection to ask about; of those without keys nobody asks
            raw = bind_router(context, address, key, stream=stream, server=server)
            monitor = raw.get_monitor_socket(FAILED)
            monitor.linger = 0
            with ZmqSocket(monitor) as failures, ZmqSocket(raw, guard.admits if guard is not None else None) as socket:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(count_failures, failures, refusals)
                    if guard is not None:
                        nursery.start_soon(answer_requests, requests, guard)
                    yield socket
                    nursery.cancel_scope.cancel()
    finally:
        context.term()


async def answer_requests(requests: ZmqSocket, guard: Guard) -> None:
    while True:
        await requests.send(guard.answer(await requests.recv()))


async def count_failures(failures: ZmqSocket, refusals: Refusals) -> None:
    while True:
        event = parse_monitor_message(await failures.recv())
        if event["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # those have been counted where they were refused
            refusals.add("handshake", "handshake", "a connection with no key, a wrong one, or another protocol")
