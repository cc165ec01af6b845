"""From groups on the wire to padded micro-batches.

`plan_batch` decides what is trained on and with which coefficient; `pack` lays the rows out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.types import Fate
from gvm_stream.errors import TrainingError
from gvm_stream.learner.advantages import Advantage, Group
from gvm_stream.learner.objective import Objective
from gvm_stream.wire.messages import TrainGroup, TrainRollout

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

PASS = 128
"""Tokens that the fixed costs of a forward and backward pass are worth; on a CPU 64 to 256 are equally good."""


@dataclass(frozen=True, eq=False)
class Row:
    """A rollout to train on."""

    group: int
    work: int
    prompt_length: int
    """P, in tokens."""
    tokens: Int32
    """int32 [P + T], prompt then response."""
    logprobs: Float32
    """float32 [T], at sampling, in nats."""
    advantage: float
    coefficient: float
    """Of its token terms in the loss (`Objective.coefficients`)."""


@dataclass(frozen=True)
class BatchPlan:
    rows: tuple[Row, ...]
    fates: dict[str, tuple[int, ...]]
    """Fate -> work ids, each rollout of the batch once."""
    lags: tuple[int, ...]
    """Batches behind, over the oldest tokens of all rollouts, stale ones included."""
    zero_signal_groups: int
    shares: dict[int, float]
    """Group -> its share of the prompts' weight, of all groups with a usable rollout."""
    compared: dict[int, Comparison]
    """Group -> its usable rollouts, for advantages that are `measured`; without groups in which there is no signal."""


@dataclass(frozen=True, eq=False)
class Comparison:
    group: Group
    works: tuple[int, ...]
    """Of its rollouts."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows padded on the right: B rows of L tokens, responses of at most T tokens."""

    groups: tuple[int, ...]
    """Group of every row."""
    works: tuple[int, ...]
    """Work of every row."""
    tokens: Tensor
    """int64 [B, L], 0 in the padding; a causal model needs no mask to keep tokens from seeing what follows them."""
    index: tuple[Tensor, Tensor, Tensor]
    """int64 [N] each, one entry per response token: its row, its place in the response, its place in the row."""
    mask: Tensor
    """bool [B, T], True for response tokens."""
    logprobs: Tensor
    """float32 [B, T], at sampling, 0 in the padding."""
    advantages: Tensor
    """float32 [B, 1], or [B, T] where every token has its own."""
    coefficients: Tensor
    """float32 [B, 1]."""
    peers: Tensor
    """float32 [B, 1]: `Responses.peers`, 0 until known."""


@dataclass(frozen=True, eq=False)
class _Sample:
    work: int
    reward: float
    coefficient: float
    tokens: Int32
    logprobs: Float32
    lag: int


def plan_batch(groups: Sequence[TrainGroup], objective: Objective, max_lag: int) -> BatchPlan:
    """Choose rows. Stale rollouts (more than `max_lag` batches behind) and empty ones leave their group before the
    advantages are computed; rollouts without advantage count in every coefficient and are then left out, unless the
    objective wants them and there is something to learn from others.
    """
    fates: dict[str, list[int]] = {Fate.TRAINED: [], Fate.ZERO_SIGNAL: [], Fate.STALE: []}
    lags: list[int] = []
    kept: list[tuple[TrainGroup, list[_Sample]]] = []
    compared: list[Group] = []
    for group in groups:
        _check_group(group)
        usable: list[_Sample] = []
        for sample in [_decode(group, rollout) for rollout in group.rollouts]:
            if not sample.tokens.size:
                fates[Fate.ZERO_SIGNAL].append(sample.work)
                continue
            lags.append(sample.lag)
            if sample.lag > max_lag:
                fates[Fate.STALE].append(sample.work)
            else:
                usable.append(sample)
        if usable:
            kept.append((group, usable))
            compared.append(
                Group(
                    rewards=np.array([s.reward for s in usable]),
                    lengths=np.array([float(s.tokens.size) for s in usable]),
                    coefficients=np.array([s.coefficient for s in usable]),
                    size=len(group.rollouts),
                    prior=group.prior,
                )
            )

    all_advantages = _advantages(objective.advantage, compared) if compared else []
    shares = objective.coefficients([g.weight for g, _ in kept], [g.lengths for g in compared])
    silent = [not advantages.any() for advantages in all_advantages]
    every = objective.every_rollout and not all(silent)
    rows: list[Row] = []
    for (group, samples), advantages, row_shares in zip(kept, all_advantages, shares, strict=True):
        prompt = np.frombuffer(group.prompt_tokens, "<i4")
        whole = every or (objective.advantage.measured != "" and advantages.any())
        for s, advantage, share in zip(samples, advantages.tolist(), row_shares.tolist(), strict=True):
            trained = whole or advantage != 0
            fates[Fate.TRAINED if trained else Fate.ZERO_SIGNAL].append(s.work)
            if trained:
                tokens = np.concatenate([prompt, s.tokens])
                rows.append(Row(group.group, s.work, prompt.size, tokens, s.logprobs, advantage, share))
    total = sum(group.weight for group, _ in kept)
    return BatchPlan(
        rows=tuple(rows),
        fates={str(k): tuple(v) for k, v in fates.items()},
        lags=tuple(lags),
        zero_signal_groups=sum(silent),
        shares={group.group: group.weight / total for group, _ in kept},
        compared={
            group.group: Comparison(members, tuple(s.work for s in samples))
            for (group, samples), members, nothing in zip(kept, compared, silent, strict=True)
            if not nothing
        },
    )


def pack(rows: Sequence[Row], micro_batch_tokens: int, device: torch.device | str = "cpu") -> list[MicroBatch]:
    """Micro-batches of at most `micro_batch_tokens` tokens, padding included; a longer row goes alone.

    Longest rows first, as a lack of memory then shows at once, and split where it takes the least time: that of all
    tokens, padding included, and of PASS more for every micro-batch.
    """
    longest_first = sorted(rows, key=lambda r: r.tokens.size, reverse=True)
    bounds = _split(np.array([r.tokens.size for r in longest_first]), micro_batch_tokens)
    return [_pad(longest_first[first:stop], device) for first, stop in pairwise(bounds)]


def padding_share(rows: Sequence[Row], micro_batches: Sequence[MicroBatch]) -> float:
    """Padding over all tokens of the forward passes, in [0, 1)."""
    computed = sum(m.tokens.numel() for m in micro_batches)
    return 1 - sum(r.tokens.size for r in rows) / computed if computed else 0.0


def _split(lengths: npt.NDArray[np.int64], most: int) -> list[int]:
    """Where to split descending lengths, ends included: the shortest path over the places between them."""
    cost = np.zeros(len(lengths) + 1, np.int64)
    before = [0] * len(cost)
    least = 0
    for stop in range(1, len(cost)):
        while least < stop - 1 and lengths[least] * (stop - least) > most:
            least += 1
        costs = cost[least:stop] + lengths[least:stop] * np.arange(stop - least, 0, -1)
        cheapest = int(costs.argmin())
        cost[stop] = costs[cheapest] + PASS
        before[stop] = least + cheapest
    bounds = [len(lengths)]
    while bounds[0]:
        bounds.insert(0, before[bounds[0]])
    return bounds


def _pad(rows: list[Row], device: torch.device | str) -> MicroBatch:
    lengths = np.array([r.logprobs.size for r in rows])
    prompts = np.array([r.prompt_length for r in rows])
    tokens = np.zeros((len(rows), max(r.tokens.size for r in rows)), np.int64)
    logprobs = np.zeros((len(rows), lengths.max()), np.float32)
    for b, r in enumerate(rows):
        tokens[b, : r.tokens.size] = r.tokens
        logprobs[b, : r.logprobs.size] = r.logprobs
    mask = np.arange(lengths.max()) < lengths[:, None]
    row, place = mask.nonzero()

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return MicroBatch(
        groups=tuple(r.group for r in rows),
        works=tuple(r.work for r in rows),
        tokens=tensor(tokens),
        index=(tensor(row), tensor(place), tensor(prompts[row] + place)),
        mask=tensor(mask),
        logprobs=tensor(logprobs),
        advantages=tensor(np.array([[r.advantage] for r in rows], np.float32)),
        coefficients=tensor(np.array([[r.coefficient] for r in rows], np.float32)),
        peers=tensor(np.zeros((len(rows), 1), np.float32)),
    )


def _advantages(advantage: Advantage, groups: Sequence[Group]) -> list[Floats]:
    """Raises TrainingError for a class of the user's that does not give each rollout one."""
    found = [np.asarray(advantages, np.float64) for advantages in advantage.of_batch(groups)]
    for group, advantages in zip(groups, found, strict=True):
        if advantages.shape != group.rewards.shape:
            raise TrainingError(
                f"learner.advantage ({type(advantage).__name__}) gave an array of shape {list(advantages.shape)} for a "
                f"group of {len(group.rewards)} rollouts, expected a number for each"
            )
    return found


def _check_group(group: TrainGroup) -> None:
    if not group.prompt_tokens or len(group.prompt_tokens) % 4:
        raise TrainingError(
            f"group {group.group} ({group.prompt}) has {len(group.prompt_tokens)} bytes of prompt tokens, expected a "
            "positive multiple of 4"
        )
    if not 0 < group.weight < float("inf"):
        raise TrainingError(f"group {group.group} has weight {group.weight}, expected a finite number above 0")
    if not all(0 < count < float("inf") for count in group.prior):
        raise TrainingError(f"group {group.group} has prior {group.prior}, expected two finite numbers above 0")


def _decode(group: TrainGroup, rollout: TrainRollout) -> _Sample:
    where = f"group {group.group}, work {rollout.work}"
    if len(rollout.tokens) % 4 or len(rollout.tokens) != len(rollout.logprobs):
        raise TrainingError(
            f"{where}: {len(rollout.tokens)} bytes of token ids and {len(rollout.logprobs)} bytes of log-probs, "
            "expected as many, 4 for each token"
        )
    tokens = np.frombuffer(rollout.tokens, "<i4")
    logprobs = np.frombuffer(rollout.logprobs, "<f4")
    ends = [0, *(stop for _, _, stop in rollout.spans)]
    in_order = all(start == end < stop for (_, start, stop), end in zip(rollout.spans, ends, strict=False))
    if not in_order or ends[-1] != tokens.size:
        raise TrainingError(f"{where}: version spans {rollout.spans} do not cover its {tokens.size} tokens in order")
    if not np.isfinite(logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise TrainingError(
            f"{where}: log-prob at sampling of token {at} is {logprobs[at]}, expected a finite number of nats"
        )
    for name, value in (("reward", rollout.reward), ("coefficient", rollout.coefficient)):
        if not np.isfinite(value):
            raise TrainingError(f"{where}: {name} is {value}, expected a finite number")
    return _Sample(rollout.work, rollout.reward, rollout.coefficient, tokens, logprobs, rollout.lag)
