"""The learner on several processes: who they are, what they tell each other, how model and batch are divided.

`torchrun` starts them; every rank runs the same loop, rank 0 alone talks to the allocator. Without torchrun there is
one rank, and everything here returns at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gvm_stream.errors import StreamError
from gvm_stream.learner.batch import Row
from gvm_stream.learner.feed import Feed
from gvm_stream.wire.messages import Batch, ToAllocator

T = TypeVar("T")

FOREVER = timedelta(days=365)
"""Time-out of what ranks tell each other: rank 0 may wait for a batch for as long as it likes. A rank that ends closes
its connections, which ends the others."""
_FAILURE = "gvm_stream_failure"


class Ranks:
    """The processes of the learner, as one of them sees them."""

    def __init__(
        self, rank: int = 0, size: int = 1, talk: dist.ProcessGroup | None = None, save: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self.talk = talk
        """For small messages between the main threads."""
        self.save = save
        """For the threads that write checkpoints."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.talk)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.talk)
        return values


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """Meet the other ranks, if torchrun has started this process. `device` is a torch device type.

    The first rank to fail leaves its reason in the store of torchrun; the others end with StreamError and that reason.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    store, rank, size = next(rendezvous("env://"))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo", store=store, rank=rank, world_size=size
    )
    talk, save = (dist.new_group(backend="gloo", timeout=FOREVER) for _ in range(2))
    try:
        yield Ranks(rank, size, talk, save)
    except Exception as error:
        mine = f"rank {rank}: {error}"
        first = store.compare_set(_FAILURE, "", mine).decode()
        if first == mine:
            raise
        raise StreamError(f"the learner ends because of {first}") from error
    dist.destroy_process_group()


def shard(model: PreTrainedModel, ranks: Ranks, device: str, dtype: str) -> PreTrainedModel:
    """Divide the parameters of `model` among the ranks' devices (FSDP2), decoder layer by decoder layer, in place.

    Gradients are summed, not averaged: the coefficients of the loss count the whole batch. With `dtype = "bfloat16"`
    layers are gathered and computed in it; masters and sums of gradients are float32.
    """
    if ranks.size == 1:
        return model
    mesh = init_device_mesh(device, (ranks.size,))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if dtype == "bfloat16" else MixedPrecisionPolicy()
    layers = set(model._no_split_modules or ())
    for module in [m for m in model.modules() if type(m).__name__ in layers] + [model]:
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # a factor of our own needs it where there is no NCCL
    return model


def balance(rows: Sequence[Row], ranks: Ranks) -> list[Row]:
    """This rank's rows: the longest first, each to the rank with the fewest tokens so far."""
    tokens = [0] * ranks.size
    mine: list[Row] = []
    for row in sorted(rows, key=lambda r: r.tokens.size, reverse=True):
        least = tokens.index(min(tokens))
        tokens[least] += row.tokens.size
        if least == ranks.rank:
            mine.append(row)
    return mine


def gather_weights(model: PreTrainedModel, ranks: Ranks, dtype: str | None = None) -> dict[str, Tensor]:
    """Copies of the weights in the memory of the host, whole, by their Hugging Face names, of tied tensors one; empty
    on ranks other than 0, which are free as soon as their parts are sent.

    `dtype`, a torch name, is what floating-point weights are converted to; None: as they are.
    """
    target: torch.dtype | None = getattr(torch, dtype) if dtype else None
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        whole = tensor.detach()
        if target and whole.is_floating_point():
            whole = whole.to(target)  # before it is sent
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if ranks.first:
            weights[name] = whole.to("cpu", copy=True).contiguous()
    return weights


class SharedFeed:
    """The feed of rank 0, heard by every rank. What others send is dropped: it is the same."""

    def __init__(self, feed: Feed | None, ranks: Ranks) -> None:
        """`feed` on rank 0 only."""
        self._feed, self._ranks = feed, ranks

    def join(self) -> int:
        """`Feed.join`; the step to start with."""
        return self._ranks.share(self._feed.join().next_step if self._feed else 0)

    def batch(self, step: int) -> Batch | None:
        return self._ranks.share(self._feed.batch(step) if self._feed else None)

    def wait_for_stop(self) -> None:
        if self._feed:
            self._feed.wait_for_stop()
        self._ranks.share(None)

    def working(self) -> None:
        if self._feed:
            self._feed.working()

    def send(self, message: ToAllocator) -> None:
        if self._feed:
            self._feed.send(message)

    @property
    def end(self) -> str:
        """Why there are no more batches; "interrupted" without a word from the allocator."""
        return self._feed.stop.reason if self._feed and self._feed.stop else "interrupted"
