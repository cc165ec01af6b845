"""How a visit to a prompt goes: what is launched, what counts, what it comes to."""

from __future__ import annotations

from collections import Counter

import pytest

from gvm_stream.allocator import (
    Cancelled,
    Failed,
    Fate,
    Log,
    Reception,
    Rollouts,
    Scored,
    Told,
    Unscorable,
    WorkItem,
)
from tests.allocator_host import (
    allocator,
    prompts_of,
    run_steps,
    scored,
    sequential,
    tell,
    tell_all,
    train,
)


def test_groups_close_with_their_last_rollout_and_keep_launch_order() -> None:
    a = allocator(max_lag=0)
    items = a.ask(6, 0)
    assert [(item.index, item.group) for item in items] == [(i, g) for g in (0, 1) for i in range(3)]
    told = [tell(a, item, scored(item.index / 2, tokens=item.work)).closed for item in reversed(items)]
    assert [len(closed) for closed in told] == [0, 0, 1] * 2
    assert a.batch(0) == told[5] + told[2]
    for group in a.batch(0) or ():
        assert [(m.index, m.reward) for m in group.members] == [(0, 0.0), (1, 0.5), (2, 1.0)]
        assert [m.tokens for m in group.members] == [m.work for m in group.members]
        assert [m.coefficient for m in group.members] == [-0.25, 0.0, 0.25]
        assert (group.planned, group.weight, group.shadow) == (3, 1.0, False)
        assert (group.successes, group.failures, group.versions) == (2, 1, (0, 0))


def test_a_failed_rollout_is_tried_again_and_then_counts_as_failed() -> None:
    a = allocator(max_lag=0, max_attempts=3)
    items = a.ask(6, 0)
    tell_all(a, items[1:], scored())
    for attempt in range(3):
        assert a.batch(0) is None
        told = a.tell(items[0].work, attempt, Failed(reason="error", tokens=4))
        again = a.ask(10, 0)
        assert [(item.work, item.attempt) for item in again] == ([(items[0].work, attempt + 1)] if attempt < 2 else [])
    (group,) = told.closed
    assert [m.index for m in group.members] == [1, 2]
    assert a.tell(items[0].work, 2, scored()).reception is Reception.DUPLICATE
    assert (a.account.tokens[Fate.FAILED], a.account.rollouts[Fate.FAILED]) == (12, 3)
    assert a.quarantined == []


def test_a_rule_reads_rollouts_in_launch_order_and_replaces_those_without_a_verdict() -> None:
    a = sequential()
    first, second = a.ask(9, 0)
    assert not tell(a, second, scored(0.0)).closed
    assert a.ask(9, 0) == []  # what comes next depends on the first
    assert not tell(a, first, Unscorable(reason="?", tokens=1, seconds=1.0)).closed
    (third,) = a.ask(9, 0)
    (group,) = tell(a, third, scored(1.0)).closed
    assert [m.index for m in group.members] == [1, 2]
    assert (group.planned, group.unused, group.cancel) == (2, (), ())


def test_a_rule_goes_on_until_it_has_what_it_wants_or_the_last_round() -> None:
    a = sequential(rounds=3)
    for _ in range(2):
        assert tell_all(a, a.ask(9, 0), scored(0.0)) == []
    (group,) = tell_all(a, a.ask(9, 0), scored(0.0))
    assert (len(group.members), group.successes) == (6, 0)


@pytest.mark.parametrize("on_close", ["cancel", "drain"])
def test_rounds_launched_ahead_are_cancelled_or_drained_and_never_trained_on(on_close: str) -> None:
    a = sequential(on_close=on_close, rounds_ahead=2)
    items = a.ask(9, 0)
    assert [item.index for item in items] == [0, 1, 2, 3, 4, 5]
    tell(a, items[4], scored(1.0, tokens=7))  # short ones end first
    tell(a, items[1], scored(0.0))
    told = tell(a, items[0], scored(1.0))
    (group,) = told.closed
    assert [m.index for m in group.members] == [0, 1]
    assert group.unused == (items[4].work,)
    running = tuple((items[i].work, 0) for i in (2, 3, 5))
    assert told.cancel == (running if on_close == "cancel" else ())
    train(a, 1)
    position = a.roster.position[items[0].prompt]
    assert a.estimates.evidence(position) == ((1, 1) if on_close == "cancel" else (0, 0))
    assert tell(a, items[2], scored(1.0, tokens=5)) == Told(Reception.ACCEPTED)
    tell(a, items[3], Cancelled(reason="not needed", tokens=3))
    tell(a, items[5], Failed(reason="crash", tokens=2))
    assert a.ask(9, 0) == []  # not made again
    wasted = {"trained": 20, "zero_signal": 7, "cancelled": 3, "failed": 2}
    wasted["zero_signal" if on_close == "drain" else "cancelled"] += 5
    assert {fate.value: n for fate, n in a.account.tokens.items() if n} == wasted
    assert a.estimates.evidence(position) == ((1, 1) if on_close == "cancel" else (3, 1))


def test_a_dropped_visit_is_not_trained_on_and_what_runs_of_it_is_cancelled() -> None:
    a = allocator(max_lag=0)
    items = a.ask(6, 0)
    tell(a, items[0], scored(1.0))
    tell(a, items[1], Failed(reason="crash"))  # waits to be made again
    told = a.drop(items[0].group, "too late")
    (group,) = told.closed
    assert (group.members, group.unused, group.reason) == ((), (items[0].work,), "too late")
    assert told.cancel == ((items[2].work, 0),)
    assert a.account.tokens[Fate.ZERO_SIGNAL] == 10
    assert a.ask(9, 0) == []
    assert tell(a, items[2], scored()).kept is False
    tell_all(a, items[3:], scored())
    assert prompts_of([train(a, 1)]) == [[items[3].prompt]]
    with pytest.raises(KeyError, match="group 0 is not open"):
        a.drop(0, "again")


@pytest.mark.parametrize("dropped", [0, 2])
def test_the_second_stage_does_not_wait_for_a_visit_that_was_dropped(dropped: int) -> None:
    a = allocator(
        policy="gvm_two_stage",
        options={"pilot": 2},
        budget=Rollouts(rollouts=4.0),
        prompts_per_step=3,
        max_lag=0,
        shadow_uniform=0.0,
    )
    items = a.ask(99, 0)
    tell_all(a, items[:4], scored())  # two pilots have ended, the third is dropped, or one of the two
    a.drop(dropped, "not wanted")
    if dropped != 2:
        assert a.ask(99, 0) == []
        tell_all(a, items[4:], scored())
    second = a.ask(99, 0)
    assert Counter(item.index for item in second) == {2: 2, 3: 2}
    groups = tell_all(a, second, scored())
    assert all([m.index for m in group.members] == [2, 3] for group in groups)
    assert len(train(a, 1)) == 2


def test_a_step_of_which_every_visit_is_dropped_can_be_settled() -> None:
    a = allocator(policy="gvm_two_stage", options={"pilot": 2}, shadow_uniform=0.0, max_lag=0)
    for number in {item.group for item in a.ask(99, 0)}:
        a.drop(number, "not wanted")
    assert train(a, 1) == ()


def test_a_group_without_signal_gives_its_place_to_another_prompt_with_a_weight_of_its_own() -> None:
    a = allocator(2, policy="dapo", objective=Log(), prompts_per_step=1, shadow_uniform=0.0, max_lag=0)

    def mixed(item: WorkItem) -> Scored:
        return scored(float(item.index == 0 or item.prompt == "train-1"))

    run_steps(a, 2, mixed)
    while (items := a.ask(9, a.settled_steps))[0].prompt != "train-1":
        tell_all(a, items[:2], scored(0.0))
        tell(a, items[2], scored(1.0))
        train(a, a.settled_steps + 1)
    weights = {prompt: a.explain(prompt).weight for prompt in a.roster.ids}
    assert weights["train-0"] > 1.5 * weights["train-1"]
    (left_out,) = tell_all(a, items, scored(1.0))
    assert (left_out.members, left_out.unused) == ((), tuple(item.work for item in items))
    others = a.ask(9, a.settled_steps)
    tell_all(a, others[:2], scored(0.0))
    (group,) = tell(a, others[2], scored(1.0)).closed
    assert (group.prompt, group.weight) == ("train-0", weights["train-0"])
    assert a.batch(a.settled_steps) == (group,)
