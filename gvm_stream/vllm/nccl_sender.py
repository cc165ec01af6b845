"""`python -m gvm_stream.vllm.nccl_sender FOLDER STREAM DEVICE`: published weights from GPU to GPU, by vLLM's own
`nccl` backend.

A process of its own, started by the learner: a transfer to a producer that dies in the midst of it never returns. Each
producer that asks has a group of its own with this process, so producers come and go as they like and each takes what
it wants when it wants it. vLLM's trainer side drives the transfer; what it calls in the producer's vLLM goes there, and
comes back, as messages.
"""

from __future__ import annotations

import math
import os
import socket as sockets
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from gvm_stream.config import StreamSection
from gvm_stream.errors import WeightsError, WireError
from gvm_stream.learner.beside import run_beside
from gvm_stream.vllm.transfer import mapped
from gvm_stream.wire.codec import decode_to_nccl_sender, encode
from gvm_stream.wire.sockets import parse_address
from gvm_stream.wire.weight_messages import CallName, Pull, Pulled, PullRefused, WorkerAnswer, WorkerCall
from gvm_stream.wire.zmq_trio import ZmqSocket

BUFFER_BYTES = 256 << 20
"""vLLM packs tensors into buffers of this size, two of them, on either GPU."""


class FileSource(WeightSource):
    """The tensors of a published file, one by one on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def open(self, path: Path) -> None:
        self._tensors = mapped(path)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, tensor.to(self._device)


class Receiver:
    """A producer's vLLM as vLLM's trainer side sees it, a `VLLMWeightSyncClient`. Its methods are for threads."""

    def __init__(self, identity: bytes, socket: ZmqSocket, device: torch.device, patience_s: float) -> None:
        self._identity, self._socket, self._patience_s = identity, socket, patience_s
        self._token = trio.lowlevel.current_trio_token()
        self._number = self.version = 0
        self._tell: trio.MemorySendChannel[WorkerAnswer]
        self._tell, self._answers = trio.open_memory_channel[WorkerAnswer](math.inf)
        self.source = FileSource(device)
        self.engine: TrainerWeightTransferEngine[Any] | None = None
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """Its own: a transfer that never ends must not hold up those to others."""
        self.busy = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        found = self.source.metadata()
        kinds = {meta.name: str(meta.dtype).removeprefix("torch.") for meta in found}
        self._call("start_weight_update", {"kinds": kinds, "shapes": {meta.name: list(meta.shape) for meta in found}})

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        assert isinstance(update_info, dict)
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", {"weight_version": weight_version or str(self.version)})

    def take(self, answer: WorkerAnswer) -> None:
        self._tell.send_nowait(answer)

    def _call(self, name: CallName, info: dict[str, Any]) -> None:
        trio.from_thread.run(self._ask, name, info, trio_token=self._token)

    async def _ask(self, name: CallName, info: dict[str, Any]) -> None:
        self._number += 1
        call = WorkerCall(number=self._number, name=name, info=info)
        if not self._socket.try_send([self._identity, encode(call)]):
            raise WeightsError(f"the producer has gone before {name}")
        with trio.move_on_after(self._patience_s):
            while True:
                answer = await self._answers.receive()
                if answer.number == call.number:
                    break
            if answer.problem:
                raise WeightsError(answer.problem)
            return
        raise WeightsError(f"the producer has not answered {name} for {self._patience_s:g} s")


class NcclSender:
    def __init__(
        self, folder: Path, host: str, device: torch.device, patience_s: float, *, packed: bool = True
    ) -> None:
        """`host` is where the workers of producers reach this process. `packed` goes through streams of a GPU."""
        self._folder, self._host, self._device, self._patience_s = folder, host, device, patience_s
        self._packed = packed
        self._receivers: dict[bytes, Receiver] = {}

    async def serve(self, socket: ZmqSocket) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                ((identity, content),) = await socket.recv_requests(1)
                try:
                    message = decode_to_nccl_sender(content)
                except WireError:
                    continue  # a stray peer; there is nobody to answer in a way it would understand
                if isinstance(message, Pull):
                    nursery.start_soon(self._pull, socket, identity, message)
                elif identity in self._receivers:
                    self._receivers[identity].take(message)

    async def _pull(self, socket: ZmqSocket, identity: bytes, pull: Pull) -> None:
        if identity not in self._receivers:
            self._receivers[identity] = Receiver(identity, socket, self._device, self._patience_s)
        receiver = self._receivers[identity]
        reply: Pulled | PullRefused
        if receiver.busy:
            reply = PullRefused(version=pull.version, reason="the transfer before has not ended")
        else:
            receiver.busy = True
            try:
                # One that hangs in NCCL is left behind: it can be waited for no more than it can be ended.
                await trio.to_thread.run_sync(
                    self._send, receiver, pull, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
                )
                reply = Pulled(version=pull.version)
            except Exception as error:  # of vLLM, of NCCL, or what the producer's vLLM said: it ends this group only
                del self._receivers[identity]
                reply = PullRefused(version=pull.version, reason=" ".join(str(error).split()))
            receiver.busy = False
        socket.try_send([identity, encode(reply)])

    def _send(self, receiver: Receiver, pull: Pull) -> None:
        with self._on_stream_of(receiver):
            receiver.version = pull.version
            receiver.source.open(self._folder / f"v{pull.version:08d}.safetensors")
            if receiver.engine is None:
                receiver.engine = self._join(receiver, 1 + pull.workers)
            receiver.engine.send_weights()

    def _join(self, receiver: Receiver, world_size: int) -> TrainerWeightTransferEngine[Any]:
        info = NCCLTrainerInitInfo(
            master_address=self._host,
            master_port=free_port(self._host),
            world_size=world_size,
            rank=0,
            packed=self._packed,
            packed_buffer_size_bytes=BUFFER_BYTES,
        )
        engine = WeightTransferTrainerFactory.trainer_init(info, client=receiver, source=receiver.source)
        if not engine.model_update_group.available:  # type: ignore[attr-defined]
            raise WeightsError("NCCL cannot be loaded here: vLLM would send nothing")
        return engine

    def _on_stream_of(self, receiver: Receiver) -> AbstractContextManager[object]:
        if receiver.stream is None:
            return nullcontext()
        torch.cuda.set_device(self._device)  # of this thread
        return torch.cuda.stream(receiver.stream)


def free_port(host: str) -> int:
    with sockets.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def main() -> int:
    folder, section, device = sys.argv[1:]
    stream = msgspec.json.decode(section, type=StreamSection)
    host, _ = parse_address(stream.nccl_address, "stream.nccl_address")
    sender = partial(NcclSender, Path(folder), host, torch.device(device), stream.progress_s)
    return run_beside(
        "nccl-sender", stream.nccl_address, "stream.nccl_address", stream, lambda socket: sender().serve(socket)
    )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread that hangs in NCCL would be waited for
