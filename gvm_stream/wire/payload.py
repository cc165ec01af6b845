"""What a learner needs of a rollout and the allocator does not: packed once, then passed on as it is.

The allocator keeps it as bytes, and sends it in a frame of its own behind the batch that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gvm_stream.errors import WireError
from gvm_stream.wire.messages import Batch, Rollout, TrainRollout


class Payload(msgspec.Struct, frozen=True, array_like=True):
    tokens: bytes
    logprobs: bytes
    spans: tuple[tuple[int, int, int], ...]
    truncated: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)


def pack(rollout: Rollout, *, truncated: bool) -> bytes:
    return _encoder.encode(Payload(rollout.tokens, rollout.logprobs, rollout.spans, truncated))


def works_of(batch: Batch) -> list[int]:
    """In the order of their payloads."""
    return [rollout.work for group in batch.groups for rollout in group.rollouts]


def fill(batch: Batch, payloads: Sequence[bytes]) -> Batch:
    """The batch with the payloads of its rollouts, in their order. Raises WireError if they do not fit."""
    if len(payloads) != (expected := len(works_of(batch))):
        raise WireError(f"batch {batch.step} came with {len(payloads)} payloads, expected {expected}")
    rest, replace = iter(payloads), msgspec.structs.replace

    def filled(rollout: TrainRollout) -> TrainRollout:
        try:
            p = _decoder.decode(next(rest))
        except msgspec.MsgspecError as error:
            raise WireError(f"the payload of work {rollout.work} cannot be read: {error}") from error
        return replace(rollout, tokens=p.tokens, logprobs=p.logprobs, spans=p.spans, truncated=p.truncated)

    groups = (replace(group, rollouts=tuple(map(filled, group.rollouts))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))
