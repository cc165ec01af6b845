"""How noisy the gradient of a step is, measured on the step itself.

The prompt groups of a step are split at random into parts of whole groups; coefficients are normalised over the whole
step, so the parts' gradients g_k add up to its gradient g. Groups are independent, and with w_k the share of the
prompts' weight in part k all parts estimate one direction: E g_k = w_k E g. As inner products of different parts have
no noise in them,

    ||E g||^2  is estimated by  signal   = (||g||^2 - sum_k ||g_k||^2) / (1 - sum_k w_k^2)
    tr Cov(g)  is estimated by  variance = ||g||^2 - signal

both without bias, whatever the sizes of the parts; for K equal ones the variance is K/(K-1) sum_k ||g_k - g/K||^2. It
counts the choice of prompts, too. As an estimate for these prompts, with only the rollouts drawn anew, it is too high
by the spread of the prompts' own gradients: for B groups of one weight by B/(B-1) times the sum of the squared
distances of their expected gradients from the mean of these. What advantages or coefficients take from the batch as a
whole (whitening, the number of tokens) is counted as if it were constant.

Norms come from a sketch: the gradient is cut into runs of BUCKETS coordinates that are added up with random signs, the
same for every part (CountSketch, Charikar, Chen and Farach-Colton 2002). It is linear, so the sketch of a part is that
of the accumulated gradient after its backward pass minus the one before, and no second gradient is kept.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from gvm_stream.allocator.arrays import Floats
from gvm_stream.wire.messages import NoiseStats

PARTS = 16
"""Enough for a relative standard error of sqrt(2 / 15) = 37 % were the noise in one direction, less in many."""
BUCKETS = 1 << 14
"""Relative standard deviation of a squared norm by the sketch: about sqrt(2 / BUCKETS) = 1 %; none for models of fewer
parameters."""
CHUNK = 1 << 20
"""Coordinates sketched at a time."""


def random_parts(shadow: Sequence[bool], seed: int) -> list[list[int]]:
    """Deal the groups of a step into about PARTS parts, as indices; shadow-uniform groups have parts of their own.

    `shadow` says of every group which it is. Groups without signal belong to parts as well: their gradient of 0 is an
    estimate like any other.
    """
    rng = random.Random(seed)
    parts = []
    for kind in (False, True):
        members = [i for i, is_shadow in enumerate(shadow) if is_shadow == kind]
        rng.shuffle(members)
        count = min(len(members), max(1, round(PARTS * len(members) / len(shadow))))
        parts += [members[k::count] for k in range(count)]
    return parts


class GradientNoise:
    """Watches one step; `part` after the backward passes of each part, `result` at the end.

        noise = GradientNoise(parameters, seed=step)
        for part in random_parts([g.shadow for g in groups], seed=step):
            ...                                     # forward and backward passes of the part's groups
            noise.part(share, tokens, shadow)
        noise.result()

    Gradients must be zero (or None) at the beginning, accumulate in `.grad`, and not be changed in between. Sharded
    ones (FSDP2) are measured shard by shard; then all ranks make the same calls, with the figures of the whole part.

    Every part costs a pass over the gradient (3 to 6 ns per parameter on one core of a CPU) and BUCKETS numbers.
    """

    def __init__(self, parameters: Iterable[Tensor], seed: int) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._device = self._parameters[0].device
        self._sharded = isinstance(self._parameters[0], DTensor)
        self._seed = seed
        self._sketches = [torch.zeros(BUCKETS, device=self._device)]
        """Of the accumulated gradient: at first, and after every part."""
        self._parts: list[tuple[float, int, bool]] = []

    def part(self, share: float, tokens: int, shadow: bool = False) -> None:
        """A part has been added to the gradient: its share of the weight of all prompts in the step, the tokens
        generated for it, and whether its groups are shadow-uniform."""
        self._sketches.append(self._sketch())
        self._parts.append((share, tokens, shadow))

    def result(self) -> NoiseStats:
        """Raises ValueError if there were fewer than three parts."""
        count = len(self._parts)
        if count < 3:
            raise ValueError(f"{count} parts say nothing about the noise of a gradient, expected at least 3")
        gradients = torch.stack(self._sketches).double().diff(dim=0)
        products = gradients @ gradients.T
        if self._sharded:
            distributed.all_reduce(products)
        inner = products.cpu().numpy()
        shares, tokens, shadow = (np.array(column) for column in zip(*self._parts, strict=True))
        squares, total, concentration = inner.diagonal(), inner.sum(), (shares**2).sum()
        variance = _variance(squares.sum(), total, concentration)
        signal = total - variance
        # Without each of the parts, in proportion to the whole step.
        rest = 1 - shares
        without = _variance(
            squares.sum() - squares, total - 2 * inner.sum(1) + squares, (concentration - shares**2) / rest**2
        )

        def variance_tokens(kind: npt.NDArray[np.bool_]) -> float | None:
            if not kind.any():
                return None
            noise = (squares - shares**2 * signal)[kind].sum()
            return float(noise / shares[kind].sum() ** 2 * tokens[kind].sum())

        return NoiseStats(
            variance=float(variance),
            standard_error=float((without / rest).std() * math.sqrt(count - 1)),
            signal=float(signal),
            tokens=int(tokens.sum()),
            allocated=variance_tokens(~shadow),
            shadow=variance_tokens(shadow),
        )

    @torch.no_grad()
    def _sketch(self) -> Tensor:
        """Sketch [BUCKETS] of the gradient, as if all parameters were one vector."""
        generator = torch.Generator(self._device).manual_seed(self._seed)
        sketch = torch.zeros(BUCKETS, device=self._device)
        first = 0
        for parameter in self._parameters:
            gradient = parameter.grad
            for chunk in torch.split(_local(parameter if gradient is None else gradient).flatten(), CHUNK):
                signs = _signs(chunk.numel(), generator)
                if gradient is not None:
                    padded = torch.nn.functional.pad(chunk.float() * signs, (0, -chunk.numel() % BUCKETS))
                    sketch += padded.view(-1, BUCKETS).sum(0).roll(first % BUCKETS)
                first += chunk.numel()
        return sketch


def _variance(squares: Floats, total: Floats, concentration: Floats) -> Floats:
    """From sum ||g_k||^2, ||g||^2 and sum w_k^2 of parts whose shares add up to 1."""
    return (squares - concentration * total) / (1 - concentration)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _signs(count: int, generator: torch.Generator) -> Tensor:
    """int8 [count] of -1 and 1, each byte of a random integer giving one."""
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.int8)[:count] >> 7 | 1
