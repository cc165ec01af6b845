"""What has to be known of the whole batch before the first gradient: how the learner's policy sees every rollout, for
losses and advantages that compare the rollouts of a prompt, on whichever rank they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.learner.advantages import Advantage, Measured
from gvm_stream.learner.batch import Comparison, MicroBatch


@dataclass(frozen=True, eq=False)
class Seen:
    """A rollout after a forward pass."""

    group: int
    log_ratios: Floats
    """[T], in nats."""
    energies: Floats
    """Those of `Measured`; empty if the advantage does not need them."""


def means_of_peers(seen: Mapping[int, Seen]) -> dict[int, float]:
    """Work -> mean summed log-ratio of the other rollouts of its prompt. The only one of a prompt is its own peer."""
    totals = {work: float(s.log_ratios.sum()) for work, s in seen.items()}
    members: dict[int, list[int]] = defaultdict(list)
    for work, s in seen.items():
        members[s.group].append(work)
    means = {}
    for works in members.values():
        total = sum(totals[work] for work in works)
        for work in works:
            means[work] = (total - totals[work]) / (len(works) - 1) if len(works) > 1 else total
    return means


def measured_advantages(
    advantage: Advantage, comparisons: Iterable[Comparison], seen: Mapping[int, Seen]
) -> dict[int, Floats]:
    """Work -> its advantage [1], or those of its tokens [T]."""
    found: dict[int, Floats] = {}
    for compared in comparisons:
        members = [seen[work] for work in compared.works]
        measured = Measured(log_ratios=[s.log_ratios for s in members], energies=[s.energies for s in members])
        found |= zip(compared.works, advantage.of_measured(compared.group, measured), strict=True)
    return found


def with_peers(batch: MicroBatch, means: Mapping[int, float]) -> MicroBatch:
    return replace(batch, peers=batch.peers.new_tensor([[means[work]] for work in batch.works]))


def with_advantages(batch: MicroBatch, advantages: Mapping[int, Floats]) -> MicroBatch:
    """Rows of groups without signal keep theirs."""
    rows = [
        advantages.get(work, np.array(old)) for work, old in zip(batch.works, batch.advantages.tolist(), strict=True)
    ]
    by_token = max(len(row) for row in rows) > 1
    padded = np.zeros((len(rows), batch.mask.shape[1] if by_token else 1), np.float32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return replace(batch, advantages=batch.advantages.new_tensor(padded))
