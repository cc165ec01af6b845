"""Which prompts are visited, and which are left out."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator import (
    Failed,
    Scored,
    Unscorable,
    WorkItem,
)
from gvm_stream.allocator.arrays import Ints
from gvm_stream.allocator.policies import POLICIES, View, register
from gvm_stream.allocator.policies.planned import Uniform
from tests.allocator_host import (
    allocator,
    prompts_of,
    run_steps,
    scored,
    sequential,
    state,
    tell,
    tell_all,
    train,
)

# --- which prompts ---


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 6))
def test_an_epoch_visits_every_prompt_once_and_a_batch_none_twice(prompts: int, per_step: int) -> None:
    a = allocator(prompts, prompts_per_step=per_step, steps=None)
    steps = -(-3 * prompts // min(prompts, per_step))  # three epochs
    batches = prompts_of(run_steps(a, steps))
    assert all(len(set(batch)) == len(batch) == min(prompts, per_step) for batch in batches)
    visits = [prompt for batch in batches for prompt in batch]
    for epoch in range(3):
        assert sorted(visits[epoch * prompts : (epoch + 1) * prompts]) == sorted(a.roster.ids)
    assert visits[:prompts] != visits[prompts : 2 * prompts] or prompts < 4


def test_prompts_join_at_the_next_epoch_and_only_once() -> None:
    a = allocator(2, prompts_per_step=1, max_lag=0, steps=None)
    first = prompts_of(run_steps(a, 1))
    a.add(["train-9"])
    a.add(["train-8"])
    second, *epoch = prompts_of(run_steps(a, 5))
    assert sorted([*first, second]) == [["train-0"], ["train-1"]]
    assert sorted(epoch) == [["train-0"], ["train-1"], ["train-8"], ["train-9"]]


def test_an_allocator_without_prompts_waits_for_some() -> None:
    a = allocator(0)
    assert a.ask(9, 0) == []
    a.add(["late"])
    assert {item.prompt for item in a.ask(9, 0)} == {"late"}


def test_an_endless_source_is_visited_in_its_order_and_held_by_the_window() -> None:
    a = allocator(0, steps=None)
    a.draw_from((f"s{i}" for i in count()), window=6)
    batches = prompts_of(run_steps(a, 50))
    assert [prompt for batch in batches for prompt in batch] == [f"s{i}" for i in range(100)]
    assert len(a.roster.ids) == len(a.roster.position) == 6
    sizes = []
    for _ in range(2):
        run_steps(a, 20)
        sizes.append(len(state(a)))
    assert sizes[1] <= sizes[0] + 100  # longer numbers, no more


def test_a_window_that_is_too_small_holds_what_is_under_way_and_no_more() -> None:
    a = allocator(0, max_lag=1, steps=None)
    a.draw_from((f"s{i}" for i in count()), window=1)
    batches = prompts_of(run_steps(a, 20))
    assert [prompt for batch in batches for prompt in batch] == [f"s{i}" for i in range(40)]
    assert len(a.roster.ids) <= 4


def test_a_prompt_with_rollouts_running_is_not_given_up_for_a_new_one() -> None:
    a = sequential(prompts=0, on_close="drain", rounds_ahead=1, steps=None)
    a.draw_from((f"s{i}" for i in count()), window=1)
    first, second, late, last = a.ask(4, 0)
    tell(a, first, scored(0.0))
    assert tell(a, second, scored(1.0)).closed
    train(a, 1)
    run_steps(a, 3)
    assert "s0" in a.roster.position
    tell(a, late, scored(0.0))
    tell(a, last, scored(0.0))
    assert a.estimates.evidence(a.roster.position["s0"]) == (1, 3)
    run_steps(a, 2)
    assert "s0" not in a.roster.position


def test_what_was_said_of_a_prompt_goes_with_it_when_a_new_one_takes_its_seat() -> None:
    a = allocator(0, prompts_per_step=1, max_lag=0, steps=None)
    a.draw_from((f"s{i}" for i in count()), window=2)
    run_steps(a, 2)
    a.roster.retire(a.roster.position["s0"], 2)
    a.quarantine("s1")
    assert prompts_of(run_steps(a, 2)) == [["s2"], ["s3"]]
    assert (a.retired, a.quarantined) == ([], [])
    assert a.explain("s2").visits == a.explain("s3").visits == 1
    with pytest.raises(KeyError, match="s0"):
        a.explain("s0")


def test_a_source_that_ends_is_followed_by_epochs_over_what_is_held() -> None:
    a = allocator(1, prompts_per_step=1, max_lag=0, steps=None)
    a.draw_from(["s0", "s1", "s2"], window=2)
    visited = [prompt for (prompt,) in prompts_of(run_steps(a, 9))]
    assert visited[:3] == ["s0", "s1", "s2"]
    assert sorted(visited[3:6]) == sorted(visited[6:]) == ["s1", "s2", "train-0"]


def test_a_policy_that_selects_chooses_among_new_prompts_too() -> None:
    a = allocator(0, policy="vade", prompts_per_step=2, steps=None, shadow_uniform=0.0)
    a.draw_from((f"s{i}" for i in count()), window=8)
    visited = {prompt for batch in prompts_of(run_steps(a, 20)) for prompt in batch}
    assert len(visited) > 10
    assert len(a.roster.ids) == 8


def test_a_policy_may_leave_the_selection_to_the_epochs() -> None:
    @register("now and then")
    class NowAndThen(Uniform, frozen=True, kw_only=True):
        def select(self, view: View, count: int) -> Ints | None:
            return None

    try:
        a = allocator(4, policy="now and then")
        assert sorted(prompt for batch in prompts_of(run_steps(a, 2)) for prompt in batch) == sorted(a.roster.ids)
    finally:
        del POLICIES["now and then"]


# --- what is left out ---


def test_a_prompt_whose_rollouts_all_fail_is_not_visited_again() -> None:
    a = allocator(3, prompts_per_step=1, max_lag=0, max_attempts=1, steps=None)
    visits: Counter[str] = Counter()
    for step in range(9):
        for item in a.ask(10, step):
            visits[item.prompt] += 1
            tell(a, item, Failed(reason="error") if item.prompt == "train-1" else scored())
        assert all(group.prompt != "train-1" for group in train(a, step + 1))
    assert a.quarantined == ["train-1"]
    assert a.explain("train-1").status == "quarantined"
    assert visits == {"train-0": 12, "train-1": 3, "train-2": 12}


@pytest.mark.parametrize("rounds_ahead", [0, 1])
def test_a_rule_gives_up_a_prompt_whose_rollouts_all_fail(rounds_ahead: int) -> None:
    a = sequential(prompts=1, max_attempts=1, rounds_ahead=rounds_ahead)
    for _ in range(9):  # as many as a visit may have, and one more
        assert a.quarantined == []
        tell(a, a.ask(1, 0)[0], Failed(reason="error"))
    assert a.quarantined == ["train-0"]
    assert a.exhausted
    assert (train(a, 1), a.ask(10, 1)) == ((), [])


def test_nothing_is_left_to_ask_when_everything_is_quarantined() -> None:
    a = allocator(2, max_lag=0, max_attempts=1)
    tell_all(a, a.ask(10, 0), Failed(reason="error"))
    assert train(a, 1) == ()
    assert len(a.quarantined) == 2
    assert a.exhausted
    assert (a.ask(10, 1), a.batch(1)) == ([], None)


def test_unscorable_or_cancelled_rollouts_quarantine_nothing() -> None:
    a = allocator(2, max_lag=0, max_attempts=1)
    first, *others = a.ask(10, 0)
    tell(a, first, Unscorable(reason="?", tokens=3, seconds=1.0))
    tell_all(a, others, Failed(reason="error"))
    assert len(a.quarantined) == 1
    assert first.prompt not in a.quarantined


def test_a_batch_goes_on_though_its_prompts_are_quarantined_meanwhile() -> None:
    a = allocator(2, max_lag=0)
    items = a.ask(10, 0)
    for prompt in ("train-0", "train-1"):
        a.quarantine(prompt)
    tell_all(a, items, scored())
    assert len(train(a, 1)) == 2
    assert a.ask(10, 1) == []


RETIRING: dict[str, Any] = {
    "retire_alpha": 0.2,
    "dead_below": 0.3,
    "solved_above": 0.9,
    "readmit_versions": 4,
    "change_point": 0.0,
}


def test_a_prompt_shown_to_be_dead_is_left_out_for_a_while() -> None:
    a = allocator(3, prompts_per_step=1, max_lag=0, steps=None, **RETIRING)

    def outcome(item: WorkItem) -> Scored:
        return scored(0.0 if item.prompt == "train-1" else item.index / 2)

    visited: list[str] = []
    while not a.retired:
        visited += prompts_of(run_steps(a, 1, outcome))[0]
    assert a.retired == ["train-1"] == [visited[-1]]
    assert a.explain("train-1").status == "retired"
    assert a.explain("train-1").acceptance_interval == (0.0, 1.0)  # begins anew when it is back
    assert "train-1" not in {prompt for batch in prompts_of(run_steps(a, 4, outcome)) for prompt in batch}
    assert "train-1" in {prompt for batch in prompts_of(run_steps(a, 4, outcome)) for prompt in batch}


def test_when_every_prompt_is_retired_the_one_that_has_been_for_longest_comes_back() -> None:
    a = allocator(2, prompts_per_step=1, max_lag=0, steps=None, **RETIRING)
    while len(a.retired) < 2:
        run_steps(a, 1, lambda item: scored(0.0))
    first = a.retired[0]
    assert prompts_of(run_steps(a, 1, lambda item: scored(1.0))) == [[first]]


@pytest.mark.parametrize("policy", ["uniform", "vade"])
def test_retired_prompts_come_back_whoever_selects(policy: str) -> None:
    a = allocator(1, policy=policy, prompts_per_step=1, max_lag=0, steps=None, shadow_uniform=0.0, **RETIRING)
    run_steps(a, 30, lambda item: scored(0.0))
    assert a.settled_steps == 30


def test_a_quarantined_prompt_is_not_retired_on_top_of_it() -> None:
    a = allocator(2, prompts_per_step=1, max_lag=0, steps=None, **RETIRING)
    while not a.retired:
        items = a.ask(9, a.settled_steps)
        if not a.quarantined:
            a.quarantine(items[0].prompt)
        tell_all(a, items, scored(0.0))
        train(a, a.settled_steps + 1)
    assert set(a.retired).isdisjoint(a.quarantined)
    assert a.roster.num_usable == 0
