"""What an allocator does, one behaviour at a time. `test_allocator_properties.py` has what always holds."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator import (
    Cancelled,
    Expired,
    Failed,
    Fate,
    OnlineAllocator,
    Plan,
    Price,
    Reception,
    Rollouts,
    Scored,
    Settings,
    Tokens,
    Told,
    WorkItem,
)
from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.budget import AnyBudget
from gvm_stream.allocator.policies import POLICIES, Policy, View, register
from tests.allocator_host import (
    allocator,
    run_steps,
    scored,
    sequential,
    state,
    tell,
    tell_all,
    train,
)
from tests.allocator_world import NAMES, PLANS, World, made, reloaded, some_settings

# --- pacing ---


def test_with_no_lag_sampling_and_training_take_turns() -> None:
    a = allocator(max_lag=0)
    for step in range(3):
        items = a.ask(100, step)
        assert [item.step for item in items] == [step] * 6
        tell_all(a, items, scored())
        assert a.ask(100, step) == []
        train(a, step + 1)
        assert a.ask(100, step) == []  # not with the old policy
    assert [item.min_version for item in a.ask(100, 3)] == [3] * 6


def test_a_sampler_may_be_as_many_versions_behind_as_the_lag_allows() -> None:
    a = allocator(max_lag=1)
    for step in range(3):
        items = a.ask(6, max(0, step - 1))
        assert [(item.step, item.min_version) for item in items] == [(step, max(0, step - 1))] * 6
        tell_all(a, items, scored())
        train(a, step + 1)


def test_versions_count_from_the_one_that_a_run_starts_with() -> None:
    a = allocator(max_lag=1)
    a.start(40)
    assert a.ask(1, 39) == []
    assert [item.min_version for item in a.ask(12, 40)] == [40] * 12


def test_a_skipped_batch_leaves_the_version_and_the_work_goes_on() -> None:
    a = allocator(max_lag=0)
    tell_all(a, a.ask(100, 0), Cancelled(reason="stop"))
    assert a.batch(0) == ()
    a.settle(0, 0, {})
    assert [(item.step, item.min_version) for item in a.ask(1, 0)] == [(1, 0)]


def test_the_oldest_batch_is_served_first() -> None:
    a = allocator(max_lag=1, max_attempts=2)
    items = a.ask(12, 0)
    for item in reversed(items):
        tell(a, item, Failed(reason="crash"))
    assert [item.work for item in a.ask(6, 0)] == [item.work for item in items[:6]]


def test_a_sampler_with_old_weights_still_gets_what_it_may_make() -> None:
    a = sequential(rounds=2, max_lag=1)
    old = a.ask(2, 0)
    tell_all(a, old, scored())
    tell_all(a, a.ask(2, 0), scored())
    train(a, 5)  # version 5: batch 2 will need it, batch 1 does not
    (first, second) = a.ask(2, 0)
    newer = a.ask(2, 5)
    assert [item.step for item in (first, second, *newer)] == [1, 1, 2, 2]
    tell_all(a, newer, scored())  # wants a second round
    tell_all(a, [first, second], scored())  # so does this one, which is older
    assert [item.step for item in a.ask(9, 0)] == [1, 1]


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_work_can_be_issued_exactly_when_asking_for_it_gives_some_or_changes_something(
    plan: dict[str, Any], seed: int
) -> None:
    chance = random.Random(seed)
    world = World(made(some_settings(plan, chance), seed, source=False), chance)
    for _ in range(60):
        world.act()
        before = state(world.allocator)
        for version in (0, world.allocator.settled_steps - 1, world.allocator.settled_steps):
            could = world.allocator.can_issue(version)
            assert state(world.allocator) == before
            asked = reloaded(world.allocator, seed, source=False)
            assert could == (bool(asked.ask(1, version)) or state(asked) != before)


# --- budgets ---


@pytest.mark.parametrize("budget", [Tokens(rollouts=3.0, tokens=40.0), Price(rollouts=3.0, price=1e-9)])
def test_before_any_length_is_known_a_budget_in_tokens_is_one_in_rollouts(budget: Tokens | Price) -> None:
    a = allocator(policy="neyman", budget=budget, shadow_uniform=0.0, max_tokens=20, max_lag=0)
    batches = run_steps(a, 2, lambda item: scored(tokens=10))
    assert [sum(group.planned for group in groups) for groups in batches] == [6, 8]


def test_when_responses_have_outgrown_a_budget_in_tokens_every_visit_has_the_fewest_rollouts() -> None:
    a = allocator(policy="neyman", budget=Tokens(rollouts=3.0, tokens=40.0), shadow_uniform=0.0)
    batches = run_steps(a, 4, lambda item: scored(tokens=30))
    assert [group.planned for groups in batches[2:] for group in groups] == [2] * 4


def test_shadow_visits_are_a_random_share_of_the_same_size() -> None:
    a = allocator(40, policy="neyman", prompts_per_step=40, shadow_uniform=0.25, max_lag=0, steps=None)

    def uneven(item: WorkItem) -> Scored:
        return scored(float(item.prompt < "train-2" and item.index == 0))

    groups = [group for batch in run_steps(a, 25, uneven) for group in batch]
    share = np.mean([group.shadow for group in groups])
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 1000) ** 0.5
    assert {group.planned for group in groups if group.shadow} == {3}
    assert len({group.planned for group in groups if not group.shadow}) > 1
    assert (a.gain.uniform_visits, a.gain.allocated_visits) == (round(share * 1000), 1000 - round(share * 1000))


def test_a_down_sampled_group_keeps_all_members_but_trains_on_few() -> None:
    a = allocator(policy="uniform", budget=Rollouts(rollouts=4.0), keep=2, max_lag=0)
    (batch,) = run_steps(a, 1, lambda item: scored(float(item.index > 0)))
    for group in batch:
        coefficients = [m.coefficient for m in group.members]
        assert len(coefficients) == 4
        assert [c != 0 for c in coefficients] == [True, True, False, False]
        assert sum(coefficients) == pytest.approx(0.0)


# --- energies ---


def test_an_energy_may_come_after_the_verdict_and_until_the_batch_is_settled() -> None:
    a = allocator(max_lag=0)
    items = a.ask(6, 0)
    assert not a.observe_energy(items[0].work, 4.0)  # no verdict yet
    tell_all(a, items[:3], scored(energy=None))
    tell_all(a, items[3:], scored(energy=1.0))
    before = a.explain(items[0].prompt).energy_success
    assert a.observe_energy(items[0].work, 400.0)
    assert a.explain(items[0].prompt).energy_success > before
    assert not a.observe_energy(items[0].work, 4.0)
    assert not a.observe_energy(items[3].work, 4.0)
    train(a, 1)
    assert not a.observe_energy(items[1].work, 4.0)


# --- the end, and after it ---


def test_a_closed_allocator_issues_nothing_and_names_what_still_runs() -> None:
    a = allocator()
    items = a.ask(4, 0)
    assert a.close() == items
    tell(a, items[0], Failed(reason="error"))
    assert a.ask(100, 0) == []
    assert a.ledger.num_running == 3


def test_what_was_lost_is_made_again_by_the_same_plan() -> None:
    a = allocator(policy="neyman", shadow_uniform=0.5, max_lag=1)
    run_steps(a, 2, lambda item: scored(float(item.work % 2)))
    items = a.ask(100, 2)
    planned = [(item.step, item.prompt, item.index, item.min_version) for item in items]
    tell_all(a, items[:4], scored(version=2))
    resumed = allocator(0, policy="neyman", shadow_uniform=0.5, max_lag=1)
    resumed.load_state_dict(msgspec.msgpack.decode(state(a)))
    resumed.redo_unsettled()
    again = resumed.ask(100, 2)
    assert [(item.step, item.prompt, item.index, item.min_version) for item in again] == planned
    assert {item.work for item in again}.isdisjoint(item.work for item in items)
    assert resumed.account.tokens[Fate.CANCELLED] == a.account.tokens[Fate.PENDING] == 40
    # A sampler that outlived the allocator reports what it made: its tokens count, its verdict does not.
    assert tell(resumed, items[5], scored(tokens=9)) == Told(Reception.DUPLICATE)
    assert tell(resumed, items[0], scored(tokens=9)) == Told(Reception.DUPLICATE)
    assert resumed.account.generated == a.account.generated + 9
    tell_all(resumed, again, scored(version=2))
    assert len(train(resumed, 3)) == 2


def test_late_reports_of_an_expired_attempt_count_only_what_came_after_it() -> None:
    a = allocator()
    (item,) = a.ask(1, 0)
    tell(a, item, Expired(reason="silent", tokens=7))
    assert tell(a, item, scored(tokens=30)) == Told(Reception.DUPLICATE)
    assert a.account.tokens[Fate.FAILED] == 30
    assert a.ask(1, 0)[0].attempt == 1


def test_a_policy_that_plans_less_than_nothing_is_refused() -> None:
    class Debtor(Policy, frozen=True, kw_only=True):
        def plan(self, view: View, budget: AnyBudget) -> Plan:
            return Plan(np.full(len(view.prompts), -1), math.nan)

    a = OnlineAllocator(Settings(), seed=0, policy=Debtor())
    a.add(["one"])
    with pytest.raises(ValueError, match="plans -1 rollouts for a prompt"):
        a.ask(1, 0)


def test_a_registered_policy_is_planned_by() -> None:
    @register("by name")
    class ByName(Policy, frozen=True, kw_only=True):
        def values(self, view: View) -> Floats:
            return np.where(view.prompts == 0, 1.0, 0.0)

    try:
        a = allocator(2, policy="by name", shadow_uniform=0.0)
        assert Counter(item.prompt for item in a.ask(6, 0)) == {"train-0": 4, "train-1": 2}
    finally:
        del POLICIES["by name"]
