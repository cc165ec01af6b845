"""The learner on several processes: who they are, what they tell each other, how model and batch are divided.

`torchrun` starts them; every rank runs the same loop, rank 0 alone talks to the allocator. Without torchrun there is
one rank, and everything here returns at once.
"""

from __future__ import annotations

import os
import select
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

from gvm_stream.errors import GvmStreamError, StreamError
from gvm_stream.learner.batch import Row
from gvm_stream.learner.feed import Feed
from gvm_stream.wire.messages import Batch, ToAllocator

T = TypeVar("T")

FOREVER = timedelta(days=365)
"""Time-out of what ranks tell each other: rank 0 may wait for a batch for as long as it likes. A rank that ends closes
its connections, which ends the others."""
ENDING_MS = 2000
"""Time that a process may take from the end of its connections to its own, which is a moment later."""
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
    For a rank that was killed, one that it leaves alone says so.
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
    ranks = Ranks(rank, size, talk, save)
    neighbours = _watch(ranks)
    try:
        yield ranks
    except Exception as error:
        # That another rank has ended is one of many RuntimeErrors of torch.
        gone = _ended(neighbours, 0 if isinstance(error, GvmStreamError) else ENDING_MS)
        mine = f"rank {gone[0]}, which is gone (killed or crashed)" if gone else f"rank {rank}: {error}"
        first = store.compare_set(_FAILURE, "", mine).decode()
        if first == mine and not gone:
            raise
        raise StreamError(f"the learner ends because of {first}") from error
    dist.destroy_process_group()


def _watch(ranks: Ranks) -> dict[int, int]:
    """Descriptors of the other ranks' processes on this host, which become readable when they end, and their ranks."""
    host = os.environ["GROUP_RANK"]
    places = ranks.gather((host, os.getpid()))
    return {os.pidfd_open(pid): rank for rank, (at, pid) in enumerate(places) if at == host and rank != ranks.rank}


def _ended(neighbours: dict[int, int], patience_ms: int) -> list[int]:
    """Ranks that have ended."""
    poller = select.poll()
    for descriptor in neighbours:
        poller.register(descriptor, select.POLLIN)
    return sorted(neighbours[descriptor] for descriptor, _ in poller.poll(patience_ms))


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


def weights_of(model: PreTrainedModel, dtype: str | None = None) -> dict[str, Tensor]:
    """The weights, of each this rank's part, by their Hugging Face names, of tied tensors one. `dtype`, a torch name,
    is what those of floating point are converted to; the others are the model's own tensors."""
    target: torch.dtype | None = getattr(torch, dtype) if dtype else None
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        distinct.setdefault(id(tensor), (name, tensor.detach()))
    return {name: t.to(target) if target and t.is_floating_point() else t for name, t in distinct.values()}


def gather_weights(
    weights: dict[str, Tensor], ranks: Ranks, into: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Copies of `weights_of` a model in the memory of the host, whole; empty on ranks other than 0, which are free as
    soon as their parts are sent. `into`: tensors to write over instead of new ones."""
    copies: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if ranks.first:
            copies[name] = into[name].copy_(whole) if into else whole.to("cpu", copy=True).contiguous()
    return copies


class SharedFeed:
    """The feed of rank 0, heard by every rank. What others send is dropped: it is the same."""

    def __init__(self, feed: Feed | None, ranks: Ranks) -> None:
        """`feed` on rank 0 only."""
        self._feed, self._ranks = feed, ranks
        self.problem: StreamError | None = None
        """Why there are no more batches, on rank 0, if it is an error."""

    def join(self) -> tuple[int, int]:
        """`Feed.join`: the batch to start with, and how many are settled."""
        welcome = self._feed.join() if self._feed else None
        return self._ranks.share((welcome.next_step, welcome.settled) if welcome else (0, 0))

    def batch(self, step: int) -> Batch | None:
        """`Feed.batch`; None also when the allocator is lost, for the model is worth saving all the same: `problem`."""
        found = None
        if self._feed:
            try:
                found = self._feed.batch(step)
            except StreamError as error:
                self.problem = error
        return self._ranks.share(found)

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

    def post(self, message: ToAllocator) -> None:
        """`send` from any thread, as soon as the main one gets to it."""
        if self._feed:
            self._feed.post(message)

    def settle(self, patience_s: float) -> None:
        """`Feed.settle`."""
        if self._feed:
            self._feed.settle(patience_s)

    def interrupt(self) -> None:
        """End a wait of the main thread, from any other."""
        if self._feed:
            self._feed.interrupted = True

    @property
    def end(self) -> str:
        """Why there are no more batches; "interrupted" without a word from the allocator."""
        return self._feed.stop.reason if self._feed and self._feed.stop else "interrupted"
