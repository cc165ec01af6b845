"""Whatever arrives is a message or a `WireError`: nothing else is raised, run or allocated."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.errors import WireError
from gvm_stream.wire import codec
from gvm_stream.wire import messages as m
from gvm_stream.wire import weight_messages as w
from tests.strangers import PickleBomb
from tests.wire_samples import SAMPLES

DIRECTIONS: dict[Callable[[list[bytes]], m.Message], object] = {
    codec.decode_to_allocator: m.ToAllocator,
    codec.decode_to_peer: m.ToPeer,
    codec.decode_to_weight_server: w.ToWeightServer,
    codec.decode_from_weight_server: w.FromWeightServer,
    codec.decode_to_nccl_sender: w.ToNcclSender,
    codec.decode_from_nccl_sender: w.FromNcclSender,
}
DECODERS = {kind: decode for decode, kinds in DIRECTIONS.items() for kind in get_args(kinds) or (kinds,)}
FRAMES = {name: codec.encode(sample) for name, sample in SAMPLES.items()}
MOST_BYTES = 1 << 20
"""More than any sample takes; what a message announces must cost nothing before it is there."""


# --- every message there can be ---


def anything_of(kind: Any) -> st.SearchStrategy[Any]:  # noqa: ANN401 (a type)
    """Values of a type that messages are made of."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of(*map(anything_of, inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(anything_of(inner[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(anything_of, inner))
    if origin is dict:
        return st.dictionaries(*map(anything_of, inner), max_size=3)
    if issubclass(kind, msgspec.Struct):
        fields = {field.name: anything_of(field.type) for field in msgspec.structs.fields(kind)}
        return st.builds(kind, **fields)
    return {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
        memoryview: st.binary(max_size=20).map(lambda content: memoryview(content)),
        bool: st.booleans(),
        type(None): st.none(),
        Any: st.recursive(st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5), st.lists, max_leaves=5),
    }[kind]


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_every_message_comes_out_as_it_went_in(kind: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(anything_of(kind))
    frame = codec.encode(message)
    again = DECODERS[kind]([frame])
    assert type(again) is kind
    assert codec.encode(again) == frame  # bytes, for a NaN is unequal to itself
    for decode, kinds in DIRECTIONS.items():
        if kind not in (get_args(kinds) or (kinds,)):
            with pytest.raises(WireError):
                decode([frame])


# --- and everything else ---


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def read(name: str, frame: bytes) -> None:
    with suppress(WireError):
        assert isinstance(DECODERS[type(SAMPLES[name])]([frame]), m.Message)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_that_breaks_off_is_a_wire_error(name: str) -> None:
    frame = FRAMES[name]
    for end in range(len(frame)):
        with pytest.raises(WireError):
            DECODERS[type(SAMPLES[name])]([frame[:end]])
    with pytest.raises(WireError):
        DECODERS[type(SAMPLES[name])]([frame + b"\xc0"])


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_with_one_wrong_byte_is_a_message_or_a_wire_error(name: str) -> None:
    frame = bytearray(FRAMES[name])
    for place, right in enumerate(FRAMES[name]):
        for byte in range(256):
            frame[place] = byte
            read(name, bytes(frame))
        frame[place] = right


def headers(length: int) -> list[bytes]:
    """Of text, bytes, an extension, a list and a map that are said to be so long."""
    return [code + length.to_bytes(4, "big") for code in (b"\xdb", b"\xc6", b"\xc9", b"\xdd", b"\xdf")]


@pytest.mark.parametrize("length", [2**16, 2**31 - 1, 2**31, 2**32 - 1])
def test_what_is_announced_but_not_there_is_a_wire_error_and_takes_no_memory(length: int) -> None:
    with little_memory():
        for name, frame in FRAMES.items():
            for place in range(1, len(frame)):
                for header in headers(length):
                    read(name, frame[:place] + header + frame[place:])


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("layer", [b"\x91", b"\x81\xa1k", b"\x81\xa4type"], ids=["lists", "maps", "tagged maps"])
def test_depth_without_end_is_a_wire_error(name: str, layer: bytes) -> None:
    depths = layer * 20_000 + b"\xc0"
    pairs = [msgspec.msgpack.encode(key) + msgspec.msgpack.encode(value) for key, value in fields_of(name).items()]
    unknown_field = b"\xdf" + (len(pairs) + 1).to_bytes(4, "big") + b"".join(pairs) + b"\xa1?" + depths
    for nested in (depths, unknown_field):
        with pytest.raises(WireError):
            DECODERS[type(SAMPLES[name])]([nested])


def fields_of(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(FRAMES[name])
    return fields


@pytest.mark.parametrize("name", SAMPLES)
def test_fields_that_nobody_knows_are_passed_over_and_tags_that_nobody_knows_are_not(name: str) -> None:
    decode, fields = DECODERS[type(SAMPLES[name])], fields_of(name)
    assert decode([msgspec.msgpack.encode({**fields, "mood": ["fine", {"really": True}]})]) == SAMPLES[name]
    for tag in ("", "Hello", "hello?", "__class__", 3, None, ["hello"]):
        with pytest.raises(WireError, match=r"Invalid value|Expected `str`"):
            decode([msgspec.msgpack.encode({**fields, "type": tag})])
    del fields["type"]
    if decode is not codec.decode_to_weight_server:  # which hears one kind of message only
        with pytest.raises(WireError, match="missing required field `type`"):
            decode([msgspec.msgpack.encode(fields)])


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_without_a_required_field_is_a_wire_error_that_names_it(name: str) -> None:
    for field in msgspec.structs.fields(type(SAMPLES[name])):
        fields = fields_of(name)
        del fields[field.name]
        frame = msgspec.msgpack.encode(fields)
        if field.required:
            with pytest.raises(WireError, match=f"missing required field `{field.name}`"):
                DECODERS[type(SAMPLES[name])]([frame])
        else:
            read(name, frame)


@given(st.sampled_from(sorted(SAMPLES)), st.binary(max_size=300))
def test_random_bytes_are_a_message_or_a_wire_error(name: str, frame: bytes) -> None:
    read(name, frame)


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    bomb = PickleBomb(tmp_path / "marker")
    for decode in DIRECTIONS:
        with pytest.raises(WireError):
            decode([bomb.message()])
    bomb.assert_harmless()
