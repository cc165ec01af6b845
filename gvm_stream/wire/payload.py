"""What a learner needs of a rollout and the allocator does not: packed once, by the producer, then passed on as it is.

The allocator looks at it, keeps it as bytes, and sends it in the frames behind the batch that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gvm_stream.errors import WireError
from gvm_stream.wire.messages import Batch, TrainRollout

Span = tuple[int, int, int]
"""(policy version, start, end): which version sampled which tokens."""


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of a scored rollout. Its arrays are views of what it was unpacked from."""

    tokens: memoryview
    """Response token ids, int32 [T], the end token included when there was one."""
    logprobs: memoryview
    """Log-probs of those tokens under the distribution they were sampled from (temperature included), float32 [T]."""
    spans: tuple[Span, ...]
    truncated: bool


FRAME_BYTES = 256 * 2**10
"""Of payloads that share a frame, about: small ones cost more to send one by one than to copy once more."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)
_frame_decoder = msgspec.msgpack.Decoder(list[memoryview])


def pack(tokens: bytes, logprobs: bytes, spans: tuple[Span, ...], *, truncated: bool) -> memoryview:
    return memoryview(_encoder.encode(Payload(memoryview(tokens), memoryview(logprobs), spans, truncated)))


def unpack(payload: bytes | memoryview) -> Payload:
    """Raises msgspec.MsgspecError for what is not one."""
    return _decoder.decode(payload)


def works_of(batch: Batch) -> list[int]:
    """In the order of their payloads."""
    return [rollout.work for group in batch.groups for rollout in group.rollouts]


def frames_of(payloads: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """To be sent behind a batch."""
    group: list[bytes | memoryview] = []
    size = 0
    for payload in payloads:
        group.append(payload)
        size += len(payload)
        if size >= FRAME_BYTES:
            yield _encoder.encode(group)
            group, size = [], 0
    if group:
        yield _encoder.encode(group)


def fill(batch: Batch, frames: Sequence[bytes]) -> Batch:
    """The batch with the payloads of its rollouts, from the frames behind it. Raises WireError if they do not fit."""
    try:
        payloads = [payload for frame in frames for payload in _frame_decoder.decode(frame)]
    except msgspec.MsgspecError as error:
        raise WireError(f"the payloads of batch {batch.step} cannot be read: {error}") from error
    if len(payloads) != (expected := len(works_of(batch))):
        raise WireError(f"batch {batch.step} came with {len(payloads)} payloads, expected {expected}")
    rest, replace = iter(payloads), msgspec.structs.replace

    def filled(rollout: TrainRollout) -> TrainRollout:
        try:
            p = unpack(next(rest))
        except msgspec.MsgspecError as error:
            raise WireError(f"the payload of work {rollout.work} cannot be read: {error}") from error
        return replace(
            rollout, tokens=bytes(p.tokens), logprobs=bytes(p.logprobs), spans=p.spans, truncated=p.truncated
        )

    groups = (replace(group, rollouts=tuple(map(filled, group.rollouts))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))
