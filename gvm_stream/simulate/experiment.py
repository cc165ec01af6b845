"""One policy in one world."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gvm_stream.allocator.online import OnlineAllocator
from gvm_stream.allocator.settings import Settings
from gvm_stream.simulate.drive import drive
from gvm_stream.simulate.measure import Measured, measure, oracle_over_uniform
from gvm_stream.simulate.world import World, WorldSettings


@dataclass(frozen=True)
class Result:
    measured: Measured
    oracle_over_uniform: float
    predicted: float
    """Mean V / (n - offset) over that of the uniform numbers, V as the allocator estimates it in the end."""
    shadow_gain: float | None


def experiment(settings: Settings, world_settings: WorldSettings, *, steps: int, slots: int, seed: int) -> Result:
    """Drive an allocator that visits every prompt in each of `steps` steps."""
    world = World(world_settings, seed)
    allocator = OnlineAllocator(settings, seed=seed)
    allocator.add(world.ids)
    allocator.start(0)
    measured = measure(world, drive(allocator, world, steps=steps, slots=slots))
    uniform = settings.budget.rollouts
    believed = np.array([allocator.explain(prompt).variance for prompt in world.ids])
    left = (believed / np.maximum(measured.rollouts - world.offset, 1)).mean()
    return Result(
        measured=measured,
        oracle_over_uniform=oracle_over_uniform(world, uniform, settings.min_rollouts, settings.max_rollouts),
        predicted=float(left / (believed / (uniform - world.offset)).mean()),
        shadow_gain=allocator.gain.gain,
    )
