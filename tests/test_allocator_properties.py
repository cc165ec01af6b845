"""What holds of an allocator whatever its settings are and in whatever order things happen to it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator import (
    ClosedGroup,
    Fate,
    OnlineAllocator,
    Rollouts,
    Scored,
    Settings,
    Unscorable,
    WorkItem,
)
from gvm_stream.allocator.types import Outcome
from tests.allocator_host import state
from tests.allocator_world import NAMES, PLANS, World, made, reloaded, some_settings


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**9), source=st.booleans())
def test_everything_is_accounted_for_and_every_run_ends(plan: dict[str, Any], seed: int, source: bool) -> None:
    chance = random.Random(seed)
    world = World(made(some_settings(plan, chance), seed, source), chance)
    for _ in range(chance.randrange(200)):
        world.act()
    world.finish()
    a = world.allocator
    assert a.ledger.num_running == 0
    assert len({group.group for group in world.groups}) == len(world.groups)
    # Nothing is left behind by what is over.
    left = a._visits.state_dict()
    assert a.exhausted or (left["steps"], left["visits"], left["closed"], left["pending"]) == ([], [], [], [])


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**9), source=st.booleans())
def test_loading_what_was_saved_equals_never_having_stopped(plan: dict[str, Any], seed: int, source: bool) -> None:
    chance = random.Random(seed)
    world = World(made(some_settings(plan, chance), seed, source), chance)
    for _ in range(chance.randrange(150)):
        world.act()
    resumed = world.resumed(reloaded(world.allocator, seed, source))
    assert state(resumed.allocator) == state(world.allocator)
    for _ in range(30):
        world.act()
        resumed.act()
    world.finish()
    resumed.finish()
    assert resumed.issued == world.issued
    assert resumed.settled == world.settled
    assert state(resumed.allocator) == state(world.allocator)


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_what_was_not_settled_can_be_made_again(plan: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    world = World(made(some_settings(plan, chance), seed, False), chance)
    for _ in range(chance.randrange(150)):
        world.act()
    a = reloaded(world.allocator, seed, False)
    a.redo_unsettled()
    assert a.account.generated == world.allocator.account.generated
    assert a.account.tokens[Fate.PENDING] == a.ledger.num_running == 0
    redone = World(a, chance)
    redone.spent, redone.added = world.spent, world.added
    redone.gone = world.gone | dict.fromkeys(world.running, 0)
    redone.ended = [*world.ended, *world.running]
    redone.check()
    for _ in range(30):
        redone.act()
    redone.finish()
    assert a.exhausted or a.settled_steps == 5


def in_order(a: OnlineAllocator, chance: random.Random | None) -> list[ClosedGroup]:
    """The first batch, with outcomes that depend on prompt and index only, in launch order or shuffled."""
    running: list[WorkItem] = []
    while (groups := a.batch(0)) is None:
        running += a.ask(4 if chance is None else chance.randrange(1, 9), 0)
        item = running.pop(0 if chance is None else chance.randrange(len(running)))
        fixed = random.Random(f"{item.prompt} {item.index}")
        tokens, reward, faulty = fixed.randint(1, 30), float(fixed.random() < 0.4), fixed.random() < 0.2
        outcome: Outcome = Scored(reward=reward, tokens=tokens, seconds=1.0, oldest_version=0, energy=2.0)
        if faulty:
            outcome = Unscorable(reason="?", tokens=tokens, seconds=1.0)
        told = a.tell(item.work, 0, outcome)
        running = [item for item in running if (item.work, 0) not in told.cancel]
    return list(groups)


@pytest.mark.parametrize(
    ("plan", "name"), [(plan, name) for plan, name in zip(PLANS, NAMES, strict=True) if plan["policy"] != "dapo"]
)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_what_a_visit_comes_to_does_not_depend_on_which_rollout_ends_first(
    plan: dict[str, Any], name: str, seed: int
) -> None:
    chance = random.Random(seed)
    config = msgspec.structs.replace(some_settings(plan, chance), max_lag=0)
    first, second = (made(config, seed, False) for _ in range(2))
    ordered, shuffled = in_order(first, None), in_order(second, chance)

    def known(groups: list[ClosedGroup]) -> list[object]:
        return [(g.prompt, g.weight, [(m.index, m.reward, m.tokens, m.coefficient) for m in g.members]) for g in groups]

    assert known(shuffled) == known(ordered)
    if len(ordered) == 1 and config.on_close == "cancel":
        # Of several visits, the one that ends first is also the first that the estimates hear of.
        assert second.estimates.state_dict() == first.estimates.state_dict()


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_the_same_seed_gives_the_same_run(plan: dict[str, Any]) -> None:
    runs = []
    for seed in (1, 1, 2):
        chance = random.Random(0)
        world = World(made(some_settings(plan, chance), seed, False), chance)
        world.finish()
        runs.append(world.issued)
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_numbers_keep_their_bounds_and_the_budget_of_every_step(plan: dict[str, Any]) -> None:
    chance = random.Random(3)
    config = Settings(
        **plan, budget=Rollouts(rollouts=4.0), prompts_per_step=4, max_rollouts=6, shadow_uniform=0.3, steps=20
    )
    world = World(made(config, 3, False), chance)
    world.finish()
    if config.design != "planned":
        assert all(group.planned <= 6 for group in world.groups) or plan["policy"] == "gvm_two_stage"
        return
    for groups in world.settled:
        planned = [group.planned for group in groups]
        assert sum(planned) == 16
        assert all(2 <= n <= 6 for n in planned)
        assert all(group.planned == 4 for group in groups if group.shadow)
