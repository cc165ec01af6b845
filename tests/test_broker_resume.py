"""Runs that go on: an allocator from its journal, a learner from a checkpoint, in any combination."""

from __future__ import annotations

from collections import Counter
from functools import partial

import msgspec
import pytest

from gvm_stream.allocator.spool import Changes
from gvm_stream.errors import StreamError
from gvm_stream.wire import messages as m
from gvm_stream.wire.payload import works_of
from tests.scripted_peers import Learner, Producer, Stage, config, ready


def state_of(stage: Stage) -> bytes:
    return msgspec.msgpack.encode(stage.broker.work.state.state_dict())


def has_trained(learner: Learner, batches: int) -> bool:
    return len(learner.model) >= batches


def history(learner: Learner) -> list[int]:
    return [work for batch in learner.model for work in works_of(batch)]


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("batches", [0, 1, 3])
def test_peers_that_outlive_an_allocator_go_on_with_the_next_one(batches: int, snapshot: bool) -> None:
    stage, learner, producers = ready(config(steps=4), p=4, q=3)
    stage.play(lambda: len(learner.model) == batches)
    stage.commit(snapshot=snapshot)
    in_hand = {producer.name: dict(producer.in_hand) for producer in producers}
    stage.restart()
    stage.wait(1)
    assert {producer.name: producer.in_hand for producer in producers} == in_hand
    assert stage.broker.work.state.record.restarts == 1
    stage.play()
    assert max(Counter(history(learner)).values()) == 1
    report = stage.report()
    assert (report["outcome"], report["faults"]["allocator_restarts"], report["attempts"]["issued"]) == (
        "finished",
        1,
        24,
    )
    assert (report["heldout_before"], report["heldout_after"]) == (0.25, 0.5)
    assert report["tokens"]["generated"] == sum(producer.generated for producer in producers)


def test_the_same_rollouts_are_trained_on_with_and_without_an_allocator_that_dies() -> None:
    undisturbed, whole, _ = ready(config(steps=4), p=4)
    undisturbed.play()
    stage, learner, _ = ready(config(steps=4), p=4)
    for batches in range(4):
        stage.play(partial(has_trained, learner, batches))
        stage.restart()
        stage.wait(2)
    stage.play()
    assert history(learner) == history(whole)
    assert stage.report()["rollouts_by_fate"] == undisturbed.report()["rollouts_by_fate"]


def test_a_report_that_was_written_down_but_never_confirmed_is_taken_once() -> None:
    stage, _, (producer,) = ready(config(steps=1), p=2)
    stage.deliver()
    producer.finish()
    stage.receive(producer)
    stage.turn(send=False)
    stage.restart()
    stage.wait(3)
    assert stage.broker.work.state.evaluation.ledger.duplicates == 0
    assert producer.all(m.Received)[-1] == m.Received(seq=1)
    assert len(producer.in_hand) == 2  # it got more
    stage.play()
    assert stage.report()["engine_tokens_unaccounted"] == 0


def test_orders_that_were_written_down_but_never_sent_are_given_again() -> None:
    stage, _, (producer,) = ready(config(steps=1), p=4)
    stage.deliver()
    for _ in range(4):
        producer.finish()
        stage.receive(producer)
    stage.turn(send=False)
    assert stage.broker.work.state.num_running == 4
    stage.restart()
    stage.wait(2)
    assert set(producer.in_hand.values()) == {1}
    stage.play()
    assert stage.report()["outcome"] == "finished"


def test_work_of_a_producer_that_died_with_the_allocator_goes_to_others_in_time() -> None:
    stage, _, (dead, alive) = ready(config(steps=1), dead=2, alive=2)
    stage.deliver()
    dead.silent = dead.gone = True
    stage.restart()
    stage.wait(5)
    assert "producer dead to say hello again, or its work goes to others" in [
        wait.what for wait in stage.broker.waits(stage.now)
    ]
    stage.wait(6)
    stage.play()
    report = stage.report()
    assert (report["outcome"], report["tokens"]["generated"]) == ("finished", alive.generated)


def test_an_allocator_knows_what_it_had_written_down_and_nothing_else() -> None:
    stage, learner, (producer,) = ready(config(steps=3), p=4)
    stage.play(lambda: len(learner.model) == 1)
    stage.commit()
    written = state_of(stage)
    producer.finish()
    stage.receive(producer)
    stage.broker.advance(stage.now)
    assert state_of(stage) != written
    stage.restart()
    stage.broker.work.state.record.restarts = 0
    assert state_of(stage) == written


# --- the learner ---


def test_a_learner_is_handed_again_what_its_checkpoint_does_not_have() -> None:
    stage, first, _ = ready(config(steps=4), p=4)
    stage.play(lambda: len(first.model) == 3)
    first.gone = True
    second = Learner(stage, epoch=2)
    stage.play()
    assert (second.last(m.Welcome).next_step, second.last(m.Welcome).settled) == (2, 3)
    assert second.model[:3] == first.model
    assert max(Counter(history(second)).values()) == 1
    assert [batch.step for batch in second.model] == [0, 1, 2, 3]
    report = stage.report()
    assert report["outcome"] == "finished"
    assert [row["step"] for row in report["history"]["steps"]] == [0, 1, 2, 3]


def test_everything_dies_and_goes_on() -> None:
    stage, learner, _ = ready(config(steps=4), p=4, q=2)
    for epoch in range(2, 5):
        stage.play(partial(has_trained, learner, epoch - 1))
        stage.peers.clear()
        stage.restart()
        learner = Learner(stage, epoch=epoch)
        for name in "pq":
            Producer(stage, name, epoch)
        stage.deliver()
    stage.play()
    assert stage.broker.done(stage.now)
    assert [batch.step for batch in learner.model] == [0, 1, 2, 3]
    assert max(Counter(history(learner)).values()) == 1
    assert stage.report()["faults"]["allocator_restarts"] == 3


def test_a_learner_whose_checkpoints_are_gone_is_refused() -> None:
    stage, first, _ = ready(config(steps=4), p=4)
    stage.play(lambda: len(first.model) == 3)
    stage.deliver()
    first.gone = True
    stage.checkpoints = {0: ()}
    second = Learner(stage, epoch=2)
    stage.deliver()
    assert second.last(m.Refused).reason == (
        "the learner has checkpoints after batches [0], the allocator stands after 3 and can give batches from 2 on "
        "again: none of the checkpoints goes with that"
    )


def test_a_learner_of_another_history_is_refused() -> None:
    stage, learner, _ = ready(config(steps=4), p=4)
    stage.deliver()
    learner.say(msgspec.structs.replace(learner.hello, step=3))
    stage.deliver()
    assert "it has been through 3 batches, the allocator stands after 0" in learner.last(m.Refused).reason


# --- what does not fit ---


def broken(stage: Stage, *entries: bytes, snapshot: bytes | None = None) -> str:
    """What a restart says after these have been written down."""
    stage.disk.commit([Changes(journal=list(entries), snapshot=snapshot)])
    with pytest.raises(StreamError) as caught:
        stage.restart()
    return str(caught.value)


def test_a_journal_that_does_not_fit_the_configuration_says_so() -> None:
    stage, learner, _ = ready(config(steps=4), p=30)
    stage.play(lambda: len(learner.model) == 2)
    stage.config = config(steps=4, rollouts_per_prompt=2)
    with pytest.raises(StreamError, match="the journal does not fit the configuration: 10 rollouts were issued, now 8"):
        stage.restart()


def test_a_snapshot_of_other_prompts_says_so() -> None:
    stage, _, _ = ready(config(), p=4)
    stage.deliver()
    stage.commit(snapshot=True)
    stage.train = 41
    with pytest.raises(StreamError, match="the saved state does not fit this run: it holds 40 prompts, other ones"):
        stage.restart()


@pytest.mark.parametrize("entry", [b"", b"\xc1", b"\x93\xa3ask", b"\x95\xa3ask\xa1p\x01\x00", b"\x92\xa5eaten\x01"])
def test_an_entry_that_cannot_be_read_says_so(entry: bytes) -> None:
    stage, _, _ = ready(config(), p=4)
    stage.deliver()
    number = len(stage.disk.load().journal) + 1
    assert broken(stage, entry).startswith(f"entry {number} of the journal cannot be read: ")


def test_an_entry_that_comes_twice_does_not_fit() -> None:
    stage, learner, _ = ready(config(), p=4)
    stage.play(lambda: bool(learner.model))
    stage.deliver()
    (trained,) = [entry for entry in stage.disk.load().journal if b"train" in entry and b"loss" in entry]
    number = len(stage.disk.load().journal) + 1
    assert broken(stage, trained) == (
        f"entry {number} of the journal does not fit the state: batch 0 cannot be settled: the next complete one would "
        "be 1"
    )


@pytest.mark.parametrize("snapshot", [b"", b"\x81", b"\x90", msgspec.msgpack.encode({"format": 0})])
def test_a_snapshot_that_cannot_be_read_says_so(snapshot: bytes) -> None:
    stage = Stage(config())
    assert "the saved state" in broken(stage, snapshot=snapshot)


def test_an_allocator_that_dies_over_the_goodbyes_ends_the_run_though_everybody_has_gone() -> None:
    stage, learner, producers = ready(config(), p=4)
    stage.play(lambda: stage.broker.stopping is not None)
    for peer in (learner, *producers):
        peer.gone = True
    stage.restart()
    stage.wait(11)
    assert stage.broker.done(stage.now)
    report = stage.report()
    assert (report["outcome"], report["final_version"]) == ("finished", learner.version)


def test_who_has_not_heard_of_the_end_hears_it_from_the_next_allocator() -> None:
    stage, _, _ = ready(config(), p=4)
    stage.play(lambda: stage.broker.stopping is not None)
    stage.peers.clear()
    stage.restart()
    learner, producer = Learner(stage, epoch=2), Producer(stage, "p", 2)
    stage.wait(5)
    stop = m.Stop(reason="all batches are done", final=True)
    assert (learner.last(m.Stop), producer.last(m.Stop)) == (stop, stop)
    assert not producer.all(m.Work)
    assert not stage.broker.done(stage.now)
