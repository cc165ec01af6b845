"""Whole runs of the broker with scripted peers: no sockets, no processes, and a clock that the test turns."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gvm_stream.wire import messages as m
from tests.scripted_peers import AGREED, Learner, Peer, Producer, Stage, config, ready, weights


@pytest.mark.parametrize("order", ["lpq", "plq", "pql"])
def test_a_run_goes_from_hello_to_the_final_stop_in_any_order_of_joining(order: str) -> None:
    stage = Stage(config(steps=2))
    joined = {name: Learner(stage, name) if name == "l" else Producer(stage, name) for name in order}
    learner = joined["l"]
    assert isinstance(learner, Learner)
    stage.play()
    assert stage.broker.done(stage.now)
    assert all(peer.last(m.Stop) == m.Stop(reason="all batches are done", final=True) for peer in joined.values())
    assert [batch.step for batch in learner.model] == [0, 1]
    report = stage.report()
    assert (report["outcome"], report["steps"], report["final_version"]) == ("finished", 2, 2)
    assert (report["heldout_before"], report["heldout_after"]) == (0.25, 0.5)
    assert report["heldout_standard_error"] == pytest.approx([(0.25 * 0.75 / 4) ** 0.5, 0.25])
    # 2 batches of 2 groups of 3 rollouts, one of each batch without a signal; 2 evaluations of 4; 3 tokens each
    assert report["tokens"]["generated"] == (12 + 8) * 3
    assert report["tokens"]["generated"] == sum(p.generated for p in joined.values() if isinstance(p, Producer))
    assert report["rollouts_by_fate"] == {"trained": 10, "zero_signal": 2, "evaluation": 8}
    assert (
        report["engine_tokens_unaccounted"],
        report["attempts"]["issued"],
        report["faults"]["allocator_restarts"],
    ) == (0, 12, 0)


def test_without_lag_every_rollout_is_sampled_by_the_policy_that_its_batch_is_made_for() -> None:
    """Synchronous on-policy training: while the learner trains nothing is made."""
    stage, learner, _ = ready(config(steps=4, max_lag=0), p=30)
    stage.play()
    assert stage.report()["outcome"] == "finished"
    for batch in learner.model:
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        assert [rollout.lag for rollout in rollouts] == [0] * 6
        assert {version for rollout in rollouts for version, _, _ in rollout.spans} == {batch.step}


def test_with_lag_nothing_is_older_than_allowed() -> None:
    stage, learner, _ = ready(config(steps=6, max_lag=2), p=30)
    stage.play()
    lags = {rollout.lag for batch in learner.model for group in batch.groups for rollout in group.rollouts}
    assert lags == {0, 1, 2}


def test_evaluations_on_the_way_come_between() -> None:
    stage, _, _ = ready(config(steps=4, every=2), p=3)
    stage.play()
    assert [row["step"] for row in stage.report()["history"]["evaluations"]] == [0, 2, 4]


def test_a_run_that_writes_nothing_down_goes_the_same_way() -> None:
    stage = Stage(config(steps=2), durable=False)
    learner = Learner(stage)
    Producer(stage, "p")
    stage.play()
    assert (stage.report()["outcome"], len(learner.model)) == ("finished", 2)
    assert stage.disk.load().journal == []


# --- who takes part ---

MISFITS: list[tuple[dict[str, object], str]] = [
    ({"protocol": 99}, f"protocol 99, the allocator {m.PROTOCOL}"),
    ({"agreed": {**AGREED, "model.path": "other"}}, "model.path = other, the allocator's has model"),
    ({"agreed": {"model.path": "model"}}, "sampling.temperature = nothing, the allocator's has 1.0"),
    ({"name": "another"}, "its hello is not of the process that its socket belongs to"),
    ({"epoch": 2}, "its hello is not of the process that its socket belongs to"),
    ({"role": "observer"}, "its hello is not of the process that its socket belongs to"),
]


@pytest.mark.parametrize(("hello", "sentence"), MISFITS)
@pytest.mark.parametrize("kind", [Producer, Learner])
def test_a_process_that_does_not_fit_is_refused_with_the_reason(
    kind: type[Peer], hello: dict[str, Any], sentence: str
) -> None:
    stage = Stage(config())
    peer = kind(stage, "odd")
    peer.to_allocator[0] = msgspec.structs.replace(peer.hello, **hello)
    stage.deliver()
    assert sentence in peer.last(m.Refused).reason
    assert stage.broker.peers.all() == []


def test_an_observer_need_not_agree_and_sees_the_run() -> None:
    stage, _, _ = ready(config(), p=4)
    observer = Peer(stage, "o", agreed={})
    stage.deliver()
    observer.say(m.StatusRequest())
    stage.deliver()
    status = observer.last(m.Status)
    assert (status.phase, status.step, status.version, status.running) == ("evaluating", 0, 0, 4)
    assert [(peer.role, peer.in_flight) for peer in status.peers] == [("learner", 0), ("producer", 4)]
    assert "evaluation after batch 0: 4 of 4 rollouts" in [wait.what for wait in status.waits]


def test_a_producer_started_again_replaces_itself_and_its_work_is_issued_again() -> None:
    stage, _, (old,) = ready(config(steps=1), p=4)
    stage.deliver()
    lost = list(old.orders)
    old.gone = True
    new = Producer(stage, "p", epoch=2)
    stage.deliver()
    assert [(order.work, order.attempt) for order, _ in new.orders.values()] == [(work, 1) for work in lost]
    ghost = Producer(stage, "p", epoch=1)
    stage.deliver()
    assert ghost.all(m.Refused) == [m.Refused(reason="producer p has been started again since")]
    stage.play()
    assert stage.report()["outcome"] == "finished"


def test_rollouts_of_an_older_epoch_are_not_taken() -> None:
    stage, _, (old,) = ready(config(steps=1), p=4)
    stage.deliver()
    Producer(stage, "p", epoch=2)
    stage.deliver()
    before = stage.broker.work.state.state_dict()
    old.finish()
    stage.receive(old)
    stage.broker.advance(stage.now)
    assert stage.broker.outbox.pop() == (old.identity, m.Unknown())
    assert stage.broker.work.state.state_dict() == before


@pytest.mark.parametrize("how", ["silent", "unreachable"])
def test_the_work_of_a_dead_producer_goes_to_the_others(how: str) -> None:
    stage, _, (dead, alive) = ready(config(steps=1), dead=4, alive=4)
    stage.deliver()
    dead.silent = True
    if how == "unreachable":
        stage.broker.unreachable(dead.identity, stage.now)
    stage.wait(3 if how == "unreachable" else 10)
    assert stage.broker.peers.get(dead.identity) is not None
    stage.wait(1)
    assert stage.broker.peers.get(dead.identity) is None
    stage.play()
    report = stage.report()
    assert (report["outcome"], report["heldout_before"]) == ("finished", 0.25)
    assert alive.generated == report["tokens"]["generated"]


def test_who_was_cut_off_says_hello_again_keeps_its_work_and_hears_what_it_has_missed() -> None:
    stage, learner, (producer,) = ready(config(steps=1), p=4)
    stage.deliver()
    stage.broker.unreachable(producer.identity, stage.now)
    learner.say(m.Published(weights=weights(7), step=0))
    stage.deliver()
    assert producer.version == 0
    assert "producer p to say hello again, or its work goes to others" in [
        wait.what for wait in stage.broker.waits(stage.now)
    ]
    stage.wait(2)
    assert (producer.version, len(producer.all(m.Work))) == (7, 1)
    peer = stage.broker.peers.get(producer.identity)
    assert peer is not None
    assert sorted(peer.leases) == sorted(producer.in_hand)


@pytest.mark.parametrize("how", ["goodbye", "unreachable", "silent"])
def test_a_run_without_its_learner_waits_for_it_and_goes_on(how: str) -> None:
    stage, learner, (producer,) = ready(config(steps=2), p=4)
    stage.deliver()
    if how == "goodbye":
        learner.leave(m.Goodbye(reason="interrupted"))
    learner.silent = True
    if how == "unreachable":
        stage.broker.unreachable(learner.identity, stage.now)
    stage.play()
    stage.wait(4 if how != "silent" else 1)
    stage.play()
    again = Learner(stage, epoch=2)
    stage.play()
    assert stage.broker.done(stage.now)
    assert [batch.step for batch in again.model] == [0, 1]
    assert (stage.report()["outcome"], producer.gone) == ("finished", True)


def test_a_learner_that_cannot_go_on_ends_the_run() -> None:
    stage, learner, (producer,) = ready(config(), p=4)
    stage.deliver()
    learner.leave(m.Goodbye(reason="no memory", failed=True))
    stage.deliver()
    assert stage.broker.failure == "learner l cannot go on: no memory"
    assert producer.last(m.Stop) == m.Stop(reason=stage.broker.failure, final=False)
    report = stage.report()
    assert (report["outcome"], report["reason"]) == ("failed", stage.broker.failure)
    assert report["tokens"]["generated"] == producer.generated == 4


# --- progress ---


def test_a_run_without_progress_fails_and_says_what_it_waits_for() -> None:
    stage, learner, _ = ready(config())
    stage.deliver()
    stage.wait(62, l="batch 0")
    failure = stage.broker.failure
    assert failure.startswith("no progress for 60 s; waits: run: a producer to join; run: evaluation after batch 0")
    assert "run: rollouts of batch 0: 0 are running; learner l: batch 0" in failure
    assert not learner.last(m.Stop).final


def test_long_rollouts_that_grow_are_progress_and_stuck_ones_are_given_back() -> None:
    stage, _, (producer,) = ready(config(steps=1), p=1)
    stage.deliver()
    for tokens in range(1, 100):
        producer.say(m.Heartbeat(running={-1: tokens}))
        stage.wait(1, l="batch 0")
    assert not stage.broker.failure
    producer.orders.clear()  # it hangs
    stage.wait(55, l="batch 0")
    assert not producer.all(m.Cancel)
    Producer(stage, "q")  # a process that joins is progress, so that the run itself goes on
    stage.wait(8, l="batch 0")
    assert producer.last(m.Cancel) == m.Cancel(works=(-1,), reason="no progress")
    assert "producer p to return 1 rollouts that are not its own any more" in [
        wait.what for wait in stage.broker.waits(stage.now)
    ]


def test_an_order_that_never_arrived_is_given_again() -> None:
    stage, _, (producer,) = ready(config(steps=1), p=2)
    stage.deliver()
    producer.orders.clear()
    producer.in_hand.clear()
    stage.wait(10)
    assert not producer.orders
    stage.wait(1)
    assert producer.in_hand == {-1: 1, -2: 1}
    stage.play()
    assert stage.report()["outcome"] == "finished"


def test_the_first_reason_to_stop_wins() -> None:
    stage, learner, (producer,) = ready(config(), p=4)
    stage.deliver()
    stage.broker.stop("interrupted", stage.now)
    stage.broker.stop("again", stage.now)
    stage.broker.fail("too late", stage.now)
    stage.deliver()
    stops = [message for peer in (learner, producer) for message in peer.heard if isinstance(message, m.Stop)]
    assert stops == [m.Stop(reason="interrupted", final=False)] * 2
    assert stage.broker.done(stage.now)
    assert (stage.report()["outcome"], stage.report()["reason"]) == ("interrupted", "interrupted")


def test_who_joins_a_run_that_stops_is_told_so() -> None:
    stage, _, _ = ready(config(), p=4)
    stage.deliver()
    stage.broker.stop("interrupted", stage.now)
    late = Producer(stage, "late")
    stage.deliver()
    assert late.all(m.Stop) == [m.Stop(reason="interrupted", final=False)]
    assert not late.all(m.Work)


def test_a_producer_that_does_not_say_goodbye_is_waited_for_only_so_long() -> None:
    stage, _, (producer,) = ready(config(), p=4)
    stage.deliver()
    producer.silent = True
    stage.broker.stop("interrupted", stage.now)
    stage.wait(10)
    assert not stage.broker.done(stage.now)
    stage.wait(1)
    assert stage.broker.done(stage.now)


def test_a_learner_has_the_time_to_save_its_last_checkpoint() -> None:
    stage, learner, _ = ready(config())
    stage.deliver()
    learner.silent = True
    stage.broker.stop("interrupted", stage.now)
    stage.wait(59)
    assert not stage.broker.done(stage.now)
    stage.wait(2)
    assert stage.broker.done(stage.now)


def test_a_run_none_of_whose_prompts_can_be_sampled_says_so_and_fails() -> None:
    stage, _, (producer,) = ready(config(steps=40), p=4)
    stage.deliver()
    while producer.orders:
        producer.finish("failed", tokens=0)
        stage.deliver()
    assert "all prompts are quarantined" in stage.broker.failure
    assert len(stage.broker.work.state.allocator.quarantined) == 40
