"""A producer's side of weights by NCCL: it asks the learner's sender for a version, and its vLLM does what vLLM's
trainer side, at the sender, then calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import zmq

from gvm_stream.config import StreamSection
from gvm_stream.errors import ModelError, StreamError, WeightsError, WireError
from gvm_stream.producers.causal_lm import Shapes, check_tensors
from gvm_stream.wire.codec import decode_from_nccl_sender, encode
from gvm_stream.wire.handshake import HandshakeWatch
from gvm_stream.wire.link import identity_of, new_epoch
from gvm_stream.wire.sockets import connect_dealer
from gvm_stream.wire.weight_messages import (
    CallName,
    FromNcclSender,
    Pull,
    Pulled,
    PullRefused,
    ToNcclSender,
    WorkerAnswer,
    WorkerCall,
)

KINDS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""dtypes, as safetensors calls them."""

Call = Callable[[CallName, dict[str, Any]], None]
"""In all workers of a vLLM."""


class NcclWeights:
    """Weights for the `workers` of one vLLM. Everything happens in the thread that calls `pull`."""

    def __init__(self, stream: StreamSection, name: str, *, workers: int, shapes: Shapes, call: Call) -> None:
        self._stream, self._workers, self._shapes, self._call = stream, workers, shapes, call
        self._identity = identity_of("producer", name, new_epoch())
        """The sender keeps a group for it."""
        self._begun = False
        """vLLM's model is in pieces until the transfer ends."""

    def pull(self, version: int) -> None:
        """Raises `WeightsError`: the weights before are in force. `ModelError`: the model is not usable."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            raw, watch = connect_dealer(
                context,
                self._stream.nccl_address,
                "stream.nccl_address",
                stream=self._stream,
                role="producer",
                identity=self._identity,
                server="learner",
            )
            raw.linger = 0  # a question that nobody has read
            with watch, closing(raw):
                self._pull(Conversation(raw, watch, self._stream), version)
        finally:
            context.term()

    def _pull(self, sender: Conversation, version: int) -> None:
        self._begun = False
        try:
            sender.say(Pull(version=version, workers=self._workers))
            while not isinstance(message := sender.hear(), Pulled):
                if isinstance(message, PullRefused):
                    raise WeightsError(message.reason)
                sender.say(WorkerAnswer(number=message.number, problem=self._obey(message)))
        except (WeightsError, StreamError, WireError) as error:
            what = f"weights of version {version} do not come from {self._stream.nccl_address}: {error}"
            raise (ModelError if self._begun else WeightsError)(what) from error

    def _obey(self, call: WorkerCall) -> str:
        """What is wrong, if anything is: it comes back as the reason of the sender's refusal."""
        try:
            if call.name == "start_weight_update":
                kinds, shapes = call.info["kinds"], call.info["shapes"]
                found = {name: (KINDS.get(kind, kind), tuple(shapes[name])) for name, kind in kinds.items()}
                check_tensors(self._shapes, found, "the learner's file")
                self._begun = True
            self._call(call.name, call.info)
        except Exception as error:  # vLLM raises what it likes
            return " ".join(str(error).split()) or type(error).__name__
        return ""


class Conversation:
    def __init__(self, socket: zmq.Socket[bytes], watch: HandshakeWatch, stream: StreamSection) -> None:
        self._socket, self._watch, self._stream = socket, watch, stream

    def say(self, message: ToNcclSender) -> None:
        self._socket.send(encode(message))

    def hear(self) -> FromNcclSender:
        """Raises `StreamError` when the sender refuses this producer, or is silent for as long as a transfer may be."""
        deadline = time.monotonic() + self._stream.progress_s
        while time.monotonic() < deadline:
            self._watch.check()
            if self._socket.poll(int(1000 * self._stream.heartbeat_s)):
                return decode_from_nccl_sender(self._socket.recv_multipart())
        raise StreamError(f"silence for {self._stream.progress_s:g} s")
