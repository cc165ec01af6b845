"""The state of a run is a function of its journal: whatever the policy, a replay ends where the run does."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from gvm_stream.allocator.journal import Published, Trained, decode_entry
from gvm_stream.allocator.recovery import recover
from gvm_stream.allocator.run_state import RunState
from gvm_stream.allocator.types import Fate
from gvm_stream.config import Config
from tests.allocator_world import NAMES, PLANS
from tests.scripted_peers import Learner, Producer, Stage, config, done, prompt_set, ready

CHANCES: dict[str, Any] = {
    "shadow_uniform": 0.3,
    "learn_prior": True,
    "change_point": 0.1,
    "retire_alpha": 0.5,
    "dead_below": 0.3,
}


def fresh(config: Config) -> RunState:
    prompts = prompt_set()
    return RunState(config, [p.id for p in prompts.train], [p.id for p in prompts.heldout[:4]])


def encoded(state: RunState) -> bytes:
    return msgspec.msgpack.encode(state.state_dict())


def torment(stage: Stage, chance: random.Random) -> None:
    """One thing happens."""
    busy = [peer for peer in stage.peers.values() if isinstance(peer, Producer) and peer.orders]
    if busy:
        chance.choice(busy).finish(chance.choice(["scored"] * 6 + ["failed", "unscorable"]), tokens=chance.randrange(9))
    if chance.random() < 0.05 and busy:
        victim = chance.choice(busy)
        victim.gone = victim.silent = True
        del stage.peers[victim.identity]
        Producer(stage, victim.name, victim.epoch + 1, slots=4)
    stage.now += 0.1


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_a_replay_is_where_the_run_is_at_every_moment(plan: dict[str, Any]) -> None:
    chance = random.Random(7)
    made = config(steps=4, every=2, **plan, **CHANCES, rollouts_per_prompt=4, max_rollouts=6, max_lag=2, rounds_ahead=1)
    stage = Stage(made)
    Learner(stage)
    for name in ("p", "q"):
        Producer(stage, name, slots=5)
    replayed, applied = fresh(made), 0
    for moment in range(500):
        torment(stage, chance)
        stage.deliver()
        journal = stage.disk.load().journal
        for entry in journal[applied:]:
            replayed.apply(decode_entry(entry))
        applied = len(journal)
        if moment % 10 == 0:
            assert encoded(replayed) == encoded(stage.broker.work.state)
        if moment % 25 == 0:  # from here on, another one that has been saved and loaded
            state = encoded(replayed)
            replayed = fresh(made)
            recover(replayed, state, [])
            assert encoded(replayed) == state
        if stage.broker.stopping:
            break
    assert applied > 50
    assert encoded(replayed) == encoded(stage.broker.work.state)
    assert stage.report()["outcome"] == "finished"


def test_a_journal_alone_and_a_snapshot_with_the_rest_lead_to_the_same_state() -> None:
    stage, learner, _ = ready(config(steps=4, policy="neyman"), p=4)
    stage.play(lambda: len(learner.model) == 2)
    stage.commit()
    journal = stage.disk.load().journal
    for cut in range(0, len(journal), 3):
        before, after = fresh(stage.config), fresh(stage.config)
        recover(before, None, journal[:cut])
        recover(after, encoded(before), journal[cut:])
        assert encoded(after) == encoded(stage.broker.work.state)


def test_a_question_changes_nothing() -> None:
    stage, _, (producer,) = ready(config(policy="gvm_two_stage", options={"pilot": 2}), p=30)
    stage.deliver()
    while producer.orders:
        producer.finish()
        stage.receive(producer)
        stage.broker.advance(stage.now)
        state = stage.broker.work.state
        before = encoded(state)
        for version in range(-1, 3):
            state.can_issue(version)
        assert encoded(state) == before


def test_an_account_that_does_not_fit_changes_nothing() -> None:
    stage, learner, (producer,) = ready(config(steps=1), p=30)
    stage.deliver()
    learner.silent = True
    while producer.orders:
        producer.finish()
    stage.deliver()
    state, batch = stage.broker.work.state, stage.broker.work.batch(0)
    assert batch is not None
    right, before = done(batch, 1), encoded(state)
    works = right.fates["trained"]
    for fates in ({}, {"trained": works}, {**right.fates, "eaten": ()}, {**right.fates, "stale": works}):
        wrong = msgspec.structs.replace(right, fates=fates)
        with pytest.raises(ValueError, match=r"fates|Fate"):
            state.apply_trained(Trained(wrong, 9.0))
        assert encoded(state) == before
    state.apply_trained(Trained(right, 9.0))
    assert (state.allocator.account.rollouts[Fate.TRAINED], state.rollouts_trained) == (5, 6)


def test_the_lag_is_counted_in_batches_however_often_weights_were_published() -> None:
    state = fresh(config(max_lag=2))
    for version, step in ((4, 0), (5, 0), (9, 1)):
        state.apply_published(Published(version, step))
    assert [state.lag(version, 3) for version in (9, 5, 4)] == [2, 3, 3]
    assert state.lag(8, 3) == 3  # one that nobody has heard of is as old as can be
    assert state.lag(9, 0) == 0
