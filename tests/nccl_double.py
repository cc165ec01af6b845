"""NCCL where there is no GPU: a communicator that broadcasts through the store of its group. All else is vLLM's own:
the rendezvous, both ends of the transfer, the loading.

`python -m tests.nccl_double` is vLLM's server with it.
"""

from __future__ import annotations

import runpy
import threading
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.utils import StatelessProcessGroup


class StoreCommunicator:
    available = True
    broken_after: int | None = None
    """Broadcasts that a receiver gets until one fails."""
    stuck = threading.Event()
    """Set: who broadcasts hangs."""

    def __init__(self, group: StatelessProcessGroup, device: object) -> None:
        self._group = group

    def destroy(self) -> None:
        pass

    def broadcast(self, tensor: Tensor, src: int, stream: object) -> None:
        if self.stuck.is_set():
            threading.Event().wait()
        if self._group.rank == src:
            self._group.broadcast_obj(tensor.clone(), src)
            return
        received = self._group.broadcast_obj(None, src)
        if StoreCommunicator.broken_after is not None:
            StoreCommunicator.broken_after -= 1
            if StoreCommunicator.broken_after < 0:
                raise RuntimeError("NCCL error: unhandled system error")
        tensor.copy_(received)


PATCHES: list[tuple[object, str, Any]] = [
    (pynccl, "PyNcclCommunicator", StoreCommunicator),
    # Of the device and the stream that vLLM's transfer is on.
    (torch.accelerator, "current_device_index", lambda: 0),
    (torch.accelerator, "synchronize", lambda device=None: None),
    (torch.cuda, "current_stream", lambda device=None: None),
]

if __name__ in ("__main__", "__mp_main__"):  # the latter: in a process that the server starts
    for target, name, value in PATCHES:
        setattr(target, name, value)
    if __name__ == "__main__":
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
