"""Bytes to messages and back. One message is one frame; anything else is a `WireError`, counted by whoever reads."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from gvm_stream.errors import WireError
from gvm_stream.wire.messages import Message, ToAllocator, ToPeer

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_to_allocator = msgspec.msgpack.Decoder(ToAllocator)
_to_peer = msgspec.msgpack.Decoder(ToPeer)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_allocator(frames: list[bytes]) -> ToAllocator:
    return _decode(_to_allocator, frames)


def decode_to_peer(frames: list[bytes]) -> ToPeer:
    return _decode(_to_peer, frames)


def _decode(decoder: msgspec.msgpack.Decoder[T], frames: list[bytes]) -> T:
    if len(frames) != 1:
        raise WireError(f"a message is one frame, got {len(frames)}")
    try:
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"unreadable message of {len(frames[0])} bytes: {error}") from error
