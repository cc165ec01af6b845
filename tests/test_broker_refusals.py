"""What a broker is told and cannot use: counted, never fatal, and the state stays as it is."""

from __future__ import annotations

import msgspec
import pytest

from gvm_stream.allocator.types import Failed
from gvm_stream.wire import messages as m
from tests.scripted_peers import Stage, config, done, ready, weights


def state_of(stage: Stage) -> bytes:
    return msgspec.msgpack.encode(stage.broker.work.state.state_dict())


@pytest.mark.parametrize(
    "message",
    [m.Ask(slots=4, version=0), m.Heartbeat(), m.BatchRequest(step=0), m.StatusRequest(), m.Goodbye(reason="bye")],
)
def test_strangers_are_told_to_say_hello(message: m.ToAllocator) -> None:
    stage, _, _ = ready(config(), p=4)
    stage.deliver()
    before = state_of(stage)
    stage.broker.receive(b"producer/x/1", message, stage.now)
    assert stage.broker.outbox.pop() == (b"producer/x/1", m.Unknown())
    assert state_of(stage) == before


def test_messages_of_the_wrong_role_are_counted_and_change_nothing() -> None:
    stage, learner, (producer,) = ready(config(), p=4)
    stage.deliver()
    before = state_of(stage)
    stats = done(m.Batch(step=0, groups=()), 1)
    published = m.Published(weights=weights(9), step=0)
    producer.to_allocator.extend([m.BatchRequest(step=0), stats, m.Checkpointed(steps=(0,)), published])
    learner.to_allocator.extend([m.Ask(slots=5, version=0), m.Loaded(version=0), m.Rollouts(seq=1, rollouts=())])
    stage.deliver()
    assert stage.broker.refused == 7
    assert stage.metrics.registry.get_sample_value("gvm_messages_refused_total") == 7
    assert state_of(stage) == before


@pytest.mark.parametrize("steps", [(), (1,), (-1,), (0, 2**40)])
def test_a_checkpoint_of_batches_that_are_not_settled_is_refused(steps: tuple[int, ...]) -> None:
    stage, learner, _ = ready(config(), p=4)
    stage.deliver()
    before = state_of(stage)
    learner.say(m.Checkpointed(steps=steps))
    stage.deliver()
    assert (stage.broker.refused, stage.broker.checkpoints) == (1, (0,))
    assert state_of(stage) == before


def test_rollouts_of_work_that_was_never_issued_are_counted_and_cost_nothing() -> None:
    stage, _, (producer,) = ready(config(), p=4)
    stage.deliver()
    ended = [
        m.Rollout(work=work, attempt=-1, outcome=Failed(reason="?", tokens=9)) for work in (0, 99, 2**63, -(2**63))
    ]
    stage.broker.receive(producer.identity, m.Rollouts(seq=1, rollouts=tuple(ended)), stage.now)
    stage.turn(snapshot=True)
    state = stage.broker.work.state
    assert state.allocator.ledger.unknown + state.evaluation.ledger.unknown == 4
    assert (state.allocator.account.generated, state.conserved) == (0, True)


def test_numbers_of_tokens_beyond_reason_are_refused() -> None:
    """They would not fit into what is written down."""
    stage, _, (producer,) = ready(config(max_attempts=9), p=4)
    stage.deliver()
    most = stage.config.sampling.max_tokens
    producer.say(m.Heartbeat(running=dict.fromkeys(producer.in_hand, 2**63)))
    producer.finish("failed", tokens=2**63)
    stage.deliver()
    stage.commit(snapshot=True)
    assert (stage.broker.refused, stage.broker.work.state.allocator.account.generated) == (1, most)
    producer.silent = producer.gone = True
    stage.wait(11)
    stage.commit(snapshot=True)
    assert stage.broker.work.state.allocator.account.generated == 4 * most


def test_a_message_that_comes_twice_or_after_a_gap_is_taken_once_and_in_order() -> None:
    stage, _, (producer,) = ready(config(), p=4)
    stage.deliver()
    for _ in range(3):
        producer.finish()
    first, second, third = producer.to_allocator
    producer.to_allocator.clear()
    for message, heard in ((second, 0), (first, 1), (first, 1), (third, 1), (second, 2), (third, 3)):
        producer.say(message)
        stage.deliver()
        assert producer.last(m.Received) == m.Received(seq=heard)
    state = stage.broker.work.state
    assert (state.evaluation.ledger.duplicates, state.reported[producer.identity.decode()]) == (0, 9)


def test_a_batch_that_is_in_every_checkpoint_is_not_handed_out_again() -> None:
    stage, learner, _ = ready(config(steps=4), p=4)
    stage.play(lambda: len(learner.model) == 3)
    heard = len(learner.heard)
    for step in (1, -1):
        learner.say(m.BatchRequest(step=step))
    stage.deliver()
    assert (stage.broker.refused, len(learner.heard)) == (2, heard)


def test_an_empty_report_counts_too() -> None:
    """Its number must not be forgotten: the next one would come after a gap."""
    stage, _, (producer,) = ready(config(steps=1), p=4)
    stage.deliver()
    producer.seq += 1
    producer.say(m.Rollouts(seq=1, rollouts=()))
    stage.deliver()
    stage.restart()
    stage.wait(2)
    stage.play()
    assert (producer.last(m.Received).seq, stage.report()["outcome"]) == (producer.seq, "finished")


@pytest.mark.parametrize("fates", [{"trained": (1,)}, {"eaten": ()}])
def test_a_learner_whose_account_does_not_fit_ends_the_run(fates: dict[str, tuple[int, ...]]) -> None:
    stage, learner, (producer,) = ready(config(), p=30)
    stage.deliver()
    learner.silent = True
    while producer.orders:
        producer.finish()
    stage.deliver()
    learner.say(msgspec.structs.replace(done(m.Batch(step=0, groups=()), 1), fates=fates))
    stage.deliver()
    assert stage.broker.failure.startswith("the learner's account of batch 0 does not fit: ")


def test_a_learner_that_is_ahead_of_the_allocator_ends_the_run() -> None:
    stage, learner, _ = ready(config())
    stage.deliver()
    learner.say(done(m.Batch(step=3, groups=()), 3))
    stage.deliver()
    assert stage.broker.failure == "the learner is done with batch 3, the allocator stands after 0"


def test_a_batch_that_is_settled_twice_counts_once() -> None:
    stage, learner, _ = ready(config(steps=2), p=4)
    stage.play(lambda: bool(learner.model))
    learner.say(done(learner.model[0], 1))
    stage.play()
    assert learner.all(m.Settled).count(m.Settled(step=0)) == 2
    assert stage.metrics.registry.get_sample_value("gvm_batches_repeated_total") == 1
    assert stage.report()["rollouts_by_fate"]["trained"] == 10


def test_tokens_that_a_producer_never_reported_are_in_the_report() -> None:
    stage, _, (producer,) = ready(config(), p=4)
    stage.deliver()
    producer.leave(m.Goodbye(reason="leaves", generated_tokens=17))
    stage.deliver()
    assert stage.report()["engine_tokens_unaccounted"] == 17


def test_a_rollout_whose_attempts_all_fail_is_left_out_and_the_batch_goes_on() -> None:
    stage, learner, (producer,) = ready(config(steps=1, max_attempts=2), p=30)
    stage.deliver()
    while producer.orders:
        order, _ = next(iter(producer.orders.values()))
        if order.work == 2:
            failed = Failed(reason="out of memory", tokens=1)
            producer.report([m.Rollout(work=2, attempt=order.attempt, outcome=failed)])
        else:
            producer.finish()
        stage.deliver()
    assert [len(group.rollouts) for group in learner.model[0].groups] == [2, 3]
    assert stage.report()["outcome"] == "finished"
