from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator import (
    Cancelled,
    ClosedGroup,
    Failed,
    Fate,
    OnlineAllocator,
    Reception,
    Scored,
    Settings,
    Unscorable,
    WorkItem,
)
from gvm_stream.allocator.types import Outcome

SMALL = Settings(policy="uniform", prompts_per_step=2, rollouts_per_step=6, max_rollouts=4, max_lag=1, steps=6)


def allocator(
    prompts: int = 5, settings: Settings = SMALL, *, seed: int = 0, **changes: str | int | None
) -> OnlineAllocator:
    made = OnlineAllocator(msgspec.structs.replace(settings, **changes), seed=seed)
    made.add(f"train-{i}" for i in range(prompts))
    return made


def scored(reward: float = 1.0, *, tokens: int = 10, version: int = 0) -> Scored:
    return Scored(reward=reward, tokens=tokens, seconds=1.0, oldest_version=version)


def tell_all(a: OnlineAllocator, items: list[WorkItem], outcome: Outcome) -> None:
    for item in items:
        a.tell(item.work, item.attempt, outcome)


def train(a: OnlineAllocator, step: int, version: int) -> tuple[ClosedGroup, ...]:
    groups = a.batch(step)
    assert groups is not None
    a.settle(step, version, {Fate.TRAINED: [member.work for group in groups for member in group.members]})
    return groups


def run_steps(a: OnlineAllocator, steps: int, reward: float = 1.0) -> list[list[str]]:
    """Prompts of the next batches, each trained on once it is complete."""
    visited = []
    for _ in range(steps):
        version = a.settled_steps
        tell_all(a, a.ask(1000, version), scored(reward, version=version))
        visited.append([group.prompt for group in train(a, a.settled_steps, version + 1)])
    return visited


def state(a: OnlineAllocator) -> bytes:
    return msgspec.msgpack.encode(a.state_dict())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3))
def test_nothing_runs_ahead_of_pacing_and_everything_is_accounted_for(seed: int, max_lag: int) -> None:
    chance = random.Random(seed)
    a = allocator(7, max_lag=max_lag, steps=5, policy="neyman")
    running: list[WorkItem] = []
    spent = 0
    while a.settled_steps < 5:
        newest = a.settled_steps
        version = max(0, newest - chance.randrange(3))  # some samplers load new weights late
        for item in a.ask(chance.randrange(8), version):
            assert item.step - a.settled_steps <= max_lag
            assert max(0, item.step - max_lag) <= item.min_version <= version
            running.append(msgspec.structs.replace(item, min_version=version))
        chance.shuffle(running)
        for item in [running.pop() for _ in range(chance.randrange(len(running) + 1))]:
            tokens = chance.randrange(20)
            spent += tokens
            reward = float(chance.random() < 0.5)
            outcomes: list[Outcome] = [scored(reward, tokens=tokens, version=item.min_version)] * 4
            outcomes += [Failed(reason="error", tokens=tokens)]
            outcomes += [Unscorable(reason="?", tokens=tokens, seconds=1.0)]
            a.tell(item.work, item.attempt, chance.choice(outcomes))
        if a.batch(a.settled_steps) is not None:
            for group in train(a, newest, newest + 1):
                assert [m.index for m in group.members] == sorted({m.index for m in group.members})
                assert all(newest - m.oldest_version <= max_lag for m in group.members)
        assert a.ledger.conserved()
        assert a.account.generated == spent
    assert a.ask(100, 5) == []


def test_with_no_lag_sampling_and_training_take_turns() -> None:
    a = allocator(max_lag=0)
    for step in range(3):
        items = a.ask(100, step)
        assert [item.step for item in items] == [step] * 6
        tell_all(a, items, scored())
        assert a.ask(100, step) == []
        train(a, step, step + 1)
        assert a.ask(100, step) == []  # not with the old policy
    assert [item.min_version for item in a.ask(100, 3)] == [3] * 6


def test_a_sampler_may_be_as_many_versions_behind_as_the_lag_allows() -> None:
    a = allocator(max_lag=1)
    for step in range(3):
        items = a.ask(6, max(0, step - 1))
        assert [(item.step, item.min_version) for item in items] == [(step, max(0, step - 1))] * 6
        tell_all(a, items, scored())
        train(a, step, step + 1)


def test_a_skipped_batch_leaves_the_version_and_the_work_goes_on() -> None:
    a = allocator(max_lag=0)
    tell_all(a, a.ask(100, 0), Cancelled(reason="stop"))
    assert a.batch(0) == ()
    a.settle(0, 0, {})
    assert [(item.step, item.min_version) for item in a.ask(1, 0)] == [(1, 0)]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 6))
def test_an_epoch_visits_every_prompt_once_and_a_batch_none_twice(prompts: int, per_step: int) -> None:
    a = allocator(prompts, prompts_per_step=per_step, rollouts_per_step=2 * per_step, steps=None)
    steps = -(-3 * prompts // min(prompts, per_step))  # three epochs
    batches = run_steps(a, steps)
    assert all(len(set(batch)) == len(batch) == min(prompts, per_step) for batch in batches)
    visits = [prompt for batch in batches for prompt in batch]
    for epoch in range(3):
        assert sorted(visits[epoch * prompts : (epoch + 1) * prompts]) == sorted(a._prompts)


def test_the_order_is_the_seeds_alone() -> None:
    orders = [run_steps(allocator(30, steps=None, seed=seed), 20, reward) for seed, reward in [(1, 1), (1, 0), (2, 1)]]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:15] != orders[0][15:] + orders[0][:10]


def test_a_plan_is_fixed_before_its_first_rollout() -> None:
    a = allocator(2, policy="neyman", max_lag=0, rollouts_per_step=8, max_rollouts=6)
    tell_all(a, first := a.ask(100, 0), scored(0.0))
    even = first[0].prompt
    train(a, 0, 1)
    tell_all(a, a.ask(1, 1), scored(0.0, version=1))
    planned = {prompt: a.explain(prompt).planned for prompt in (even, first[-1].prompt)}
    tell_all(a, a.ask(100, 1), scored(1.0, version=1))
    assert {prompt: a.explain(prompt).planned for prompt in planned} == planned
    assert {group.prompt: {1: len(group.members)} for group in a.batch(1) or ()} == planned


def test_groups_close_with_their_last_rollout_and_keep_launch_order() -> None:
    a = allocator(max_lag=0)
    items = a.ask(6, 0)
    assert [(item.index, item.group) for item in items] == [(i, g) for g in (0, 1) for i in range(3)]
    told = [a.tell(item.work, 0, scored(item.index, tokens=item.work)).closed for item in reversed(items)]
    assert [group is not None for group in told] == [False, False, True] * 2
    assert a.batch(0) == (told[5], told[2])
    for group in a.batch(0) or ():
        assert [(m.index, m.reward) for m in group.members] == [(0, 0.0), (1, 1.0), (2, 2.0)]
        assert [m.tokens for m in group.members] == [m.work for m in group.members]
        assert (group.planned, group.weight) == (3, 1.0)


def test_a_failed_rollout_is_tried_again_and_then_counts_as_failed() -> None:
    a = allocator(max_lag=0, max_attempts=3)
    items = a.ask(6, 0)
    tell_all(a, items[1:], scored())
    for attempt in range(3):
        assert a.batch(0) is None
        told = a.tell(items[0].work, attempt, Failed(reason="error", tokens=4))
        again = a.ask(10, 0)
        assert [(item.work, item.attempt) for item in again] == ([(items[0].work, attempt + 1)] if attempt < 2 else [])
    assert told.closed is not None
    assert [m.index for m in told.closed.members] == [1, 2]
    assert a.tell(items[0].work, 2, scored()).reception is Reception.DUPLICATE
    assert (a.account.tokens[Fate.FAILED], a.account.rollouts[Fate.FAILED]) == (12, 3)
    assert a.quarantined == []


def test_a_prompt_whose_rollouts_all_fail_is_not_visited_again() -> None:
    a = allocator(3, prompts_per_step=1, rollouts_per_step=2, max_lag=0, max_attempts=1, steps=None)
    broken = "train-1"
    visits: Counter[str] = Counter()
    for step in range(9):
        for item in a.ask(10, 0):
            visits[item.prompt] += 1
            a.tell(item.work, 0, Failed(reason="error") if item.prompt == broken else scored())
        groups = train(a, step, 0)
        assert all(group.prompt != broken for group in groups)
    assert a.quarantined == [broken]
    assert a.explain(broken).quarantined
    assert visits == {"train-0": 8, "train-1": 2, "train-2": 8}


def test_nothing_is_left_to_ask_when_everything_is_quarantined() -> None:
    a = allocator(2, max_lag=0, max_attempts=1)
    tell_all(a, a.ask(10, 0), Failed(reason="error"))
    assert train(a, 0, 1) == ()
    assert len(a.quarantined) == 2
    assert (a.ask(10, 1), a.batch(1)) == ([], None)


def test_unscorable_or_cancelled_rollouts_quarantine_nothing() -> None:
    a = allocator(2, max_lag=0, max_attempts=1)
    first, *others = a.ask(10, 0)
    a.tell(first.work, 0, Unscorable(reason="?", tokens=3, seconds=1.0))
    tell_all(a, others, Failed(reason="error"))
    assert len(a.quarantined) == 1
    assert first.prompt not in a.quarantined


def test_a_batch_is_settled_only_as_it_is() -> None:
    a = allocator(max_lag=1)
    items = a.ask(12, 0)
    with pytest.raises(ValueError, match="batch 0 cannot be settled"):
        a.settle(0, 1, {})  # nothing has been sampled yet
    tell_all(a, items, scored())
    works = [item.work for item in items[:6]]
    before = state(a)
    wrong: list[tuple[int, int, dict[Fate, list[int]], str]] = [
        (1, 1, {Fate.TRAINED: [item.work for item in items[6:]]}, "batch 1 cannot .* would be 0"),
        (7, 1, {Fate.TRAINED: works}, "batch 7 cannot be settled"),
        (0, -1, {Fate.TRAINED: works}, "version -1 is older than 0"),
        (0, 1, {Fate.TRAINED: works[1:]}, "name 5 rollouts, the batch has 6; 1 are not in both"),
        (0, 1, {Fate.TRAINED: works, Fate.STALE: works[:1]}, "name 7 rollouts, the batch has 6; 0"),
        (0, 1, {Fate.TRAINED: [*works[1:], 12]}, "name 6 rollouts, the batch has 6; 2"),
    ]
    for step, version, fates, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            a.settle(step, version, fates)
        assert state(a) == before
    a.settle(0, 1, {Fate.TRAINED: iter(works[:2]), Fate.ZERO_SIGNAL: iter(works[2:5]), Fate.STALE: iter(works[5:])})
    fates_of = {fate.value: n for fate, n in a.account.tokens.items() if n}
    assert fates_of == {"trained": 20, "zero_signal": 30, "stale": 10, "pending": 60}


@pytest.mark.parametrize("bad", [scored(float("nan")), scored(float("inf")), scored(tokens=-1)])
def test_an_outcome_that_is_no_outcome_changes_nothing(bad: Scored) -> None:
    a = allocator()
    (item,) = a.ask(1, 0)
    with pytest.raises(ValueError, match="work 1: "):
        a.tell(item.work, 0, bad)
    assert (a.ledger.num_running, a.account.generated) == (1, 0)


def test_withdrawn_work_ends_and_is_not_replaced() -> None:
    a = allocator()
    items = a.ask(4, 0)
    assert a.withdraw() == items
    a.tell(items[0].work, 0, Failed(reason="error"))
    assert a.ask(100, 0) == []
    assert a.ledger.num_running == 3


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["uniform", "neyman"]))
def test_an_interrupted_run_skips_nothing_and_repeats_only_what_was_not_settled(seed: int, policy: str) -> None:
    chance = random.Random(seed)
    whole = allocator(5, policy=policy)
    a = allocator(5, policy=policy)
    visited = run_steps(a, chance.randrange(6))
    for item in a.ask(chance.randrange(12), a.settled_steps):
        if chance.random() < 0.7:
            a.tell(item.work, 0, scored(version=a.settled_steps))
    saved = msgspec.msgpack.decode(state(a))
    resumed = allocator(5, policy=policy)
    resumed.load_state_dict(saved)
    assert (resumed.account.generated, resumed.account.tokens[Fate.PENDING]) == (a.account.generated, 0)
    for prompt in a._prompts:
        assert resumed.explain(prompt) == a.explain(prompt)
    visited += run_steps(resumed, 6 - len(visited))
    assert visited == run_steps(whole, 6)
    assert resumed.ask(100, 6) == []


def test_a_state_that_does_not_fit_is_refused() -> None:
    saved = allocator(3).state_dict()
    with pytest.raises(ValueError, match="the state holds 3 prompts, this allocator 4"):
        allocator(4).load_state_dict(saved)
    with pytest.raises(ValueError, match="format 9, expected 1"):
        allocator(3).load_state_dict({**saved, "format": 9})


def test_prompts_join_at_the_next_epoch_and_only_once() -> None:
    a = allocator(2, prompts_per_step=1, rollouts_per_step=2, max_lag=0, steps=None)
    first = run_steps(a, 1)
    a.add(["train-9"])
    with pytest.raises(ValueError, match="'train-9' is there already"):
        a.add(["train-8", "train-9"])
    a.add(["train-8"])
    (second, *epoch) = run_steps(a, 5)
    assert sorted([*first, second]) == [["train-0"], ["train-1"]]
    assert sorted(epoch) == [["train-0"], ["train-1"], ["train-8"], ["train-9"]]
