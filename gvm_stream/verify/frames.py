"""Messages between the verifier pool and its processes: 4 bytes of length, big-endian, then so much msgpack."""

from __future__ import annotations

from typing import Protocol

import msgspec

READY = b"ready\n"
"""What a template process says when workers can be got from it."""
HEADER = 4


class Readable(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


def frame(message: object) -> bytes:
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(HEADER, "big") + content


def content_length(header: bytes) -> int:
    return int.from_bytes(header, "big")


def split_frames(received: bytes) -> tuple[list[bytes], bytes]:
    """The contents of the complete frames at the start of `received`, and what is left."""
    contents = []
    while len(received) >= HEADER and len(received) >= (end := HEADER + content_length(received[:HEADER])):
        contents.append(received[HEADER:end])
        received = received[end:]
    return contents, received


def read_frame(stream: Readable) -> bytes | None:
    """The content of the next frame of a blocking stream; None at its end."""
    header = _read(stream, HEADER)
    return _read(stream, content_length(header)) if len(header) == HEADER else None


def _read(stream: Readable, size: int) -> bytes:
    """`size` bytes, fewer only at the end: an unbuffered stream returns what a pipe holds."""
    content = b""
    while len(content) < size and (more := stream.read(size - len(content))):
        content += more
    return content
