"""Bytes to messages and back. One message is one frame, behind a batch may be those with its payloads; all else is a
`WireError`, counted by whoever reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from gvm_stream.errors import WireError
from gvm_stream.wire.messages import Batch, Message, ToAllocator, ToPeer
from gvm_stream.wire.payload import fill
from gvm_stream.wire.weight_messages import FromNcclSender, FromWeightServer, ToNcclSender, ToWeightServer

T = TypeVar("T")
Frame = bytes | memoryview

_encoder = msgspec.msgpack.Encoder()
_to_allocator = msgspec.msgpack.Decoder(ToAllocator)
_to_peer = msgspec.msgpack.Decoder(ToPeer)
_to_weight_server = msgspec.msgpack.Decoder(ToWeightServer)
_from_weight_server: msgspec.msgpack.Decoder[FromWeightServer] = msgspec.msgpack.Decoder(FromWeightServer)
_to_nccl_sender: msgspec.msgpack.Decoder[ToNcclSender] = msgspec.msgpack.Decoder(ToNcclSender)
_from_nccl_sender: msgspec.msgpack.Decoder[FromNcclSender] = msgspec.msgpack.Decoder(FromNcclSender)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_allocator(frames: Sequence[Frame]) -> ToAllocator:
    return _decode(_to_allocator, frames)


def decode_to_peer(frames: list[bytes]) -> ToPeer:
    message = _decode(_to_peer, frames[:1])
    if len(frames) == 1:
        return message
    if not isinstance(message, Batch):
        raise WireError(f"{type(message).__name__} is one frame, got {len(frames)}")
    return fill(message, frames[1:])


def decode_to_weight_server(frames: Sequence[Frame]) -> ToWeightServer:
    return _decode(_to_weight_server, frames)


def decode_from_weight_server(frames: list[bytes]) -> FromWeightServer:
    return _decode(_from_weight_server, frames)


def decode_to_nccl_sender(frames: Sequence[Frame]) -> ToNcclSender:
    return _decode(_to_nccl_sender, frames)


def decode_from_nccl_sender(frames: list[bytes]) -> FromNcclSender:
    return _decode(_from_nccl_sender, frames)


def _decode(decoder: msgspec.msgpack.Decoder[T], frames: Sequence[Frame]) -> T:
    if len(frames) != 1:
        raise WireError(f"a message is one frame, got {len(frames)}")
    try:
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter: a field nobody knows, nested without end
        raise WireError(f"unreadable message of {len(frames[0])} bytes: {error}") from error
