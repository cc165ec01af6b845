from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gvm_stream.allocator.types import Failed, Scored
from gvm_stream.errors import WireError
from gvm_stream.wire import codec
from gvm_stream.wire.check import open_rollout
from gvm_stream.wire.messages import Heartbeat, Message, Rollout, ToAllocator, ToPeer
from gvm_stream.wire.payload import pack
from tests import wire_samples

GOLDEN = Path(__file__).parent / "wire_golden"

Decode = Callable[[list[bytes]], Message]
DECODERS: dict[str, Decode] = {
    **dict.fromkeys(wire_samples.TO_ALLOCATOR, codec.decode_to_allocator),
    **dict.fromkeys(wire_samples.TO_PEER, codec.decode_to_peer),
    **dict.fromkeys(wire_samples.TO_WEIGHT_SERVER, codec.decode_to_weight_server),
    **dict.fromkeys(wire_samples.FROM_WEIGHT_SERVER, codec.decode_from_weight_server),
    **dict.fromkeys(wire_samples.TO_NCCL_SENDER, codec.decode_to_nccl_sender),
    **dict.fromkeys(wire_samples.FROM_NCCL_SENDER, codec.decode_from_nccl_sender),
}


# --- codec ---


def extends(new: object, old: object) -> bool:
    """True if everything of `old` is in `new`, which may have more fields."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and extends(new[key], old[key]) for key in old)
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(extends, new, old))
    return new == old


@pytest.mark.parametrize("name", wire_samples.SAMPLES)
def test_old_bytes_still_mean_the_same_and_new_ones_only_add_to_them(name: str) -> None:
    golden, sample = (GOLDEN / f"{name}.bin").read_bytes(), wire_samples.SAMPLES[name]
    assert DECODERS[name]([golden]) == sample
    assert extends(msgspec.msgpack.decode(codec.encode(sample)), msgspec.msgpack.decode(golden))


def test_every_message_type_has_a_sample_and_golden_bytes() -> None:
    kinds = {type(sample) for sample in wire_samples.SAMPLES.values()}
    assert kinds >= {*get_args(ToAllocator), *get_args(ToPeer)}
    assert {path.stem for path in GOLDEN.iterdir()} == set(wire_samples.SAMPLES)


def test_fields_of_a_newer_peer_are_passed_over() -> None:
    frame = msgspec.msgpack.encode({"type": "heartbeat", "waiting_for": "work", "mood": ["fine", {"really": True}]})
    assert codec.decode_to_allocator([frame]) == Heartbeat(waiting_for="work")


@pytest.mark.parametrize("frames", [[], [b"\x80", b"\x80"], [b""] * 3])
def test_a_message_is_one_frame(frames: list[bytes]) -> None:
    with pytest.raises(WireError, match=f"one frame, got {len(frames)}"):
        codec.decode_to_allocator(frames)


def frame_of(kind: bytes, key: bytes, value: bytes) -> bytes:
    return b"\x82\xa4type" + bytes([0xA0 + len(kind)]) + kind + bytes([0xA0 + len(key)]) + key + value


@pytest.mark.parametrize(
    "frame",
    [
        frame_of(b"heartbeat", b"x", b"\x91" * 100_000 + b"\xc0"),  # 100,000 lists in one another
        frame_of(b"rollouts", b"rollouts", b"\xdd\xff\xff\xff\xff"),  # four billion elements announced
        frame_of(b"heartbeat", b"running", b"\xdf\xff\xff\xff\xff"),
        frame_of(b"stop?", b"reason", b"\xa2\xff\xfe"),  # no UTF-8
        frame_of(b"loaded", b"version", b"\xc0"),
        frame_of(b"welcome", b"run", b"\xa0"),  # for the other direction
    ],
)
def test_hostile_frames_are_wire_errors(frame: bytes) -> None:
    with pytest.raises(WireError, match=f"unreadable message of {len(frame)} bytes"):
        codec.decode_to_allocator([frame])


def read_by_all(frame: bytes) -> None:
    """Message or WireError; anything else fails the test."""
    for decode in set(DECODERS.values()):
        with suppress(WireError):
            assert isinstance(decode([frame]), Message)


@given(st.binary(max_size=200))
@example(b"")
def test_random_bytes_are_messages_or_wire_errors(frame: bytes) -> None:
    read_by_all(frame)


@given(st.sampled_from(list(wire_samples.SAMPLES)), st.data())
def test_mutated_messages_are_messages_or_wire_errors(name: str, data: st.DataObject) -> None:
    frame = codec.encode(wire_samples.SAMPLES[name])
    start = data.draw(st.integers(0, len(frame)))
    end = data.draw(st.integers(start, min(len(frame), start + 8)))
    read_by_all(frame[:start] + data.draw(st.binary(max_size=8)) + frame[end:])


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(list(wire_samples.SAMPLES)), st.data())
def test_a_field_of_another_type_is_a_message_or_a_wire_error(name: str, data: st.DataObject) -> None:
    fields: dict[str, Any] = msgspec.msgpack.decode(codec.encode(wire_samples.SAMPLES[name]))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(values)
    read_by_all(msgspec.msgpack.encode(fields))


# --- check ---


def rollout(
    count: int = 2,
    /,
    *,
    outcome: Scored | Failed | None = None,
    tokens: bytes = wire_samples.TOKENS,
    logprobs: bytes = wire_samples.LOGPROBS,
    spans: tuple[tuple[int, int, int], ...] = ((6, 0, 1), (7, 1, 2)),
) -> Rollout:
    return msgspec.structs.replace(
        wire_samples.ROLLOUT,
        outcome=outcome or Scored(reward=1.0, tokens=count, seconds=0.0, oldest_version=6),
        payload=pack(tokens, logprobs, spans, truncated=False),
    )


def rollout_problem(rollout: Rollout) -> str:
    return open_rollout(rollout)[1]


def test_a_rollout_whose_parts_fit_together_has_no_problem() -> None:
    assert rollout_problem(rollout()) == ""
    assert rollout_problem(rollout(outcome=Failed(reason="r", tokens=3))) == ""
    assert rollout_problem(rollout(0, tokens=b"", logprobs=b"", spans=())) == ""
    assert rollout_problem(rollout(logprobs=struct.pack("<2f", -1.0, 5e-5))) == ""  # rounding of a certain token


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (rollout(-1), "-1 tokens"),
        (rollout(outcome=Failed(reason="r", tokens=-1)), "-1 tokens"),
        (rollout(3), "3 tokens announced, 8 bytes of ids"),
        (rollout(tokens=b"\0" * 7), "7 bytes of ids"),
        (rollout(logprobs=b"\0" * 12), "12 bytes of log-probs"),
        (rollout(logprobs=struct.pack("<2f", -1.0, float("nan"))), "not finite"),
        (rollout(logprobs=struct.pack("<2f", -1.0, float("-inf"))), "not finite"),
        (rollout(logprobs=struct.pack("<2f", -1.0, 0.01)), "above 0"),
        (rollout(spans=()), "do not cover 2 tokens"),
        (rollout(spans=((6, 0, 3),)), "do not cover 2 tokens"),
        (rollout(spans=((6, 0, 1), (7, 0, 2))), "do not follow one another"),
        (rollout(spans=((6, 0, 0), (7, 0, 2))), "do not follow one another"),
        (rollout(spans=((5, 0, 2),)), "do not follow one another"),
        (rollout(outcome=Scored(reward=float("nan"), tokens=2, seconds=0.0, oldest_version=6)), "reward nan"),
    ],
)
def test_a_rollout_whose_parts_do_not_fit_is_described(bad: Rollout, part: str) -> None:
    assert part in rollout_problem(bad)


@given(
    st.integers(-1, 3),
    st.binary(max_size=12),
    st.binary(max_size=12),
    st.lists(st.tuples(st.integers(5, 7), st.integers(0, 3), st.integers(0, 3)), max_size=3),
)
def test_what_passes_the_check_can_be_trained_on(
    n: int, tokens: bytes, logprobs: bytes, spans: list[tuple[int, int, int]]
) -> None:
    if rollout_problem(rollout(n, tokens=tokens, logprobs=logprobs, spans=tuple(spans))) == "":
        assert len(np.frombuffer(tokens, "<i4")) == len(np.frombuffer(logprobs, "<f4")) == n
        assert [i for _, start, end in spans for i in range(start, end)] == list(range(n))
