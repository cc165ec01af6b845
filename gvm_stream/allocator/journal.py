"""What happens to a run, as entries of its journal. The state of the run is a function of them and of nothing else."""

from __future__ import annotations

import msgspec

from gvm_stream.allocator.types import Outcome
from gvm_stream.wire.messages import StepDone


class _Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Asked(_Entry, tag="ask", frozen=True, array_like=True, gc=False):
    """A producer was given work."""

    owner: str
    """Identity of its connection."""
    slots: int
    version: int
    """Policy version that it samples with."""
    issued: int
    """Items that it got: the same on a replay, or the journal is of another run."""


class Result(_Entry, frozen=True, array_like=True, gc=False):
    work: int
    attempt: int
    outcome: Outcome
    digest: int = 0
    """Of the response's token ids, 64 bits; 0 unless there is a verdict on them."""


class Reported(_Entry, tag="report", frozen=True, array_like=True, gc=False):
    """A producer's message `seq`."""

    owner: str
    seq: int
    results: tuple[Result, ...]
    seconds: float
    """Since the run began."""


class Lost(_Entry, tag="lost", frozen=True, array_like=True, gc=False):
    """Work whose owner is dead or stuck goes back."""

    reason: str
    items: tuple[tuple[int, int, int], ...]
    """(work, attempt, tokens last heard of)."""
    seconds: float


class Published(_Entry, tag="publish", frozen=True, array_like=True, gc=False):
    version: int
    step: int
    """Training batches behind these weights."""


class Trained(_Entry, tag="train", frozen=True, array_like=True, gc=False):
    """The learner is done with a batch."""

    done: StepDone
    seconds: float


class Covered(_Entry, tag="cover", frozen=True, array_like=True, gc=False):
    """Batches before `step` will never be asked for again: every checkpoint that there is has them behind it."""

    step: int


class Ended(_Entry, tag="end", frozen=True, array_like=True, gc=False):
    """All batches are trained on, the last weights are evaluated and in a checkpoint: nothing is left but goodbyes."""


class Restarted(_Entry, tag="restart", frozen=True, array_like=True, gc=False):
    """The allocator began again from here."""


Entry = Asked | Reported | Lost | Published | Trained | Covered | Ended | Restarted

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    return _encoder.encode(entry)


def decode_entry(data: bytes) -> Entry:
    """Raises msgspec.DecodeError or msgspec.ValidationError for what is not an entry."""
    return _decoder.decode(data)
