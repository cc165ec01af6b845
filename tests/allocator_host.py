"""A host of an allocator for tests: everything that is issued is told at once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gvm_stream.allocator import (
    ClosedGroup,
    Fate,
    OnlineAllocator,
    Rollouts,
    Scored,
    Settings,
    Told,
    WorkItem,
)
from gvm_stream.allocator.types import Outcome

SMALL = Settings(policy="uniform", budget=Rollouts(rollouts=3.0), prompts_per_step=2, max_rollouts=4, steps=6)


def allocator(prompts: int = 5, seed: int = 0, /, **changes: object) -> OnlineAllocator:
    made = OnlineAllocator(msgspec.structs.replace(SMALL, **changes), seed=seed)
    made.add(f"train-{i}" for i in range(prompts))
    return made


def sequential(rounds: int = 3, prompts: int = 5, **changes: object) -> OnlineAllocator:
    """Rounds of two, until there is a success and a failure."""
    changes = {"max_lag": 0, "prompts_per_step": 1, "max_rollouts": 8, "shadow_uniform": 0.0, **changes}
    options = {"round_size": 2, "max_rounds": rounds, "keep": 2}
    return allocator(prompts, 0, policy="reinforce_ada_balance", options=options, design="sequential", **changes)


def scored(reward: float = 1.0, *, tokens: int = 10, version: int = 0, energy: float | None = None) -> Scored:
    return Scored(reward=reward, tokens=tokens, seconds=1.0, oldest_version=version, energy=energy)


def tell(a: OnlineAllocator, item: WorkItem, outcome: Outcome) -> Told:
    return a.tell(item.work, item.attempt, outcome)


def tell_all(a: OnlineAllocator, items: list[WorkItem], outcome: Outcome) -> list[ClosedGroup]:
    return [group for item in items for group in tell(a, item, outcome).closed]


def train(a: OnlineAllocator, version: int) -> tuple[ClosedGroup, ...]:
    groups = a.batch(a.settled_steps)
    assert groups is not None
    a.settle(a.settled_steps, version, {Fate.TRAINED: [m.work for group in groups for m in group.members]})
    return groups


def run_steps(
    a: OnlineAllocator, steps: int, outcome: Callable[[WorkItem], Outcome] = lambda item: scored()
) -> list[tuple[ClosedGroup, ...]]:
    """The next batches, each trained on once it is complete."""
    batches = []
    for _ in range(steps):
        while a.batch(a.settled_steps) is None:
            items = a.ask(1000, a.settled_steps)
            assert items
            for item in items:
                tell(a, item, outcome(item))
        batches.append(train(a, a.settled_steps + 1))
    return batches


def prompts_of(batches: list[tuple[ClosedGroup, ...]]) -> list[list[str]]:
    return [[group.prompt for group in groups] for groups in batches]


def state(a: OnlineAllocator) -> bytes:
    return msgspec.msgpack.encode(a.state_dict())
