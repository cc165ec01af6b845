"""Messages between a producer and those that hand out the learner's weights."""

from __future__ import annotations

from typing import Any, Literal

from gvm_stream.wire.messages import Message

# --- producer <-> weight server ----------------------------------------------------------------------------------


class ChunkRequest(Message, tag="chunk?", frozen=True, kw_only=True):
    """Bytes of published weights, from `offset` on."""

    version: int
    offset: int


class Chunk(Message, tag="chunk", frozen=True, kw_only=True):
    version: int
    offset: int
    data: bytes


class ChunkRefused(Message, tag="nochunk", frozen=True, kw_only=True):
    version: int
    reason: str


# --- producer <-> NCCL sender ------------------------------------------------------------------------------------
# A pull, then every call that vLLM's trainer makes of vLLM's workers and its answer, then the end.

CallName = Literal["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]


class Pull(Message, tag="pull", frozen=True, kw_only=True):
    """Send these weights to all `workers` of the producer's vLLM."""

    version: int
    workers: int


class WorkerCall(Message, tag="call", frozen=True, kw_only=True):
    number: int
    name: CallName
    info: dict[str, Any]
    """What vLLM's workers are told. With `start_weight_update`, what `update_weights` is going to say: a producer that
    cannot use it refuses before anybody waits for it in NCCL."""


class WorkerAnswer(Message, tag="called", frozen=True, kw_only=True):
    number: int
    problem: str = ""


class Pulled(Message, tag="pulled", frozen=True, kw_only=True):
    version: int


class PullRefused(Message, tag="nopull", frozen=True, kw_only=True):
    version: int
    reason: str


ToWeightServer = ChunkRequest
FromWeightServer = Chunk | ChunkRefused
ToNcclSender = Pull | WorkerAnswer
FromNcclSender = WorkerCall | Pulled | PullRefused
