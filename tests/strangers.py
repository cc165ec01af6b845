"""What strangers send to an open port: other protocols, garbage, lies about sizes, and a pickle with a fuse."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
from contextlib import suppress
from pathlib import Path

from gvm_stream.wire.sockets import parse_address

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(16) + b"\0" + bytes(31)


def ready(kind: bytes) -> bytes:
    """The command that ends a handshake without keys (ZMTP 3.0, RFC 23)."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return b"\x04" + bytes([len(body)]) + body


STRANGERS = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: allocator\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "random": random.Random(0).randbytes(10_000),
    "all ones": b"\xff" * 1000,
    "half a greeting": GREETING[:11],
    "a greeting and garbage": GREETING + random.Random(1).randbytes(1000),
    "a frame of 2^63 bytes in the handshake": GREETING + b"\x02" + b"\x7f" + b"\xff" * 7,
    "a frame of 2^63 bytes": GREETING + ready(b"DEALER") + b"\x02" + b"\x7f" + b"\xff" * 7,
    "half a frame": GREETING + ready(b"DEALER") + b"\x02" + struct.pack(">Q", 1 << 19) + bytes(1000),
    "the wrong kind of socket": GREETING + ready(b"PUB"),
}


class PickleBomb:
    """Makes a folder wherever somebody loads it."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._marker),)

    def message(self) -> bytes:
        return pickle.dumps(self)

    def throw_at(self, address: str) -> None:
        """By plain TCP; as a message it is sent by whoever has a socket of the right kind."""
        with socket.create_connection(parse_address(address, "address")) as connection, suppress(ConnectionError):
            connection.sendall(self.message())

    def assert_harmless(self) -> None:
        assert not self._marker.exists()
        pickle.loads(self.message())
        assert self._marker.exists()  # it would have gone off
