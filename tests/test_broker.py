"""Whole runs of the broker with scripted peers: no sockets, no processes, and a clock that the test turns."""

from __future__ import annotations

import msgspec
import pytest

from gvm_stream.allocator.types import Failed
from gvm_stream.wire import messages as m
from tests.scripted_peers import AGREED, Learner, Peer, Producer, Stage, config, done, ready


@pytest.mark.parametrize("order", ["lpq", "plq", "pql"])
def test_a_run_goes_from_hello_to_the_final_stop_in_any_order_of_joining(order: str) -> None:
    stage = Stage(config(steps=2))
    joined = {name: Learner(stage, name) if name == "l" else Producer(stage, name) for name in order}
    learner = joined["l"]
    assert isinstance(learner, Learner)
    stage.play()
    assert stage.broker.done(stage.now)
    assert all(peer.last(m.Stop) == m.Stop(reason="all batches are done", final=True) for peer in joined.values())
    assert [batch.step for batch in learner.batches] == [0, 1]
    report = stage.report()
    assert (report["outcome"], report["steps"], report["final_version"]) == ("finished", 2, 2)
    assert (report["heldout_before"], report["heldout_after"]) == (0.25, 0.5)
    assert report["heldout_standard_error"] == pytest.approx([(0.25 * 0.75 / 4) ** 0.5, 0.25])
    # 2 batches of 2 groups of 3 rollouts, one of each batch without a signal; 2 evaluations of 4; 3 tokens each
    assert report["tokens"]["generated"] == (12 + 8) * 3
    assert report["tokens"]["generated"] == sum(p.generated for p in joined.values() if isinstance(p, Producer))
    assert report["rollouts_by_fate"] == {"trained": 10, "zero_signal": 2, "evaluation": 8}
    assert (report["engine_tokens_unaccounted"], report["attempts"]["issued"]) == (0, 12)
    assert [step for step, _ in stage.broker.saves] == [1, 2]


def test_evaluations_on_the_way_come_between() -> None:
    stage, _, _ = ready(config(steps=4, every=2), p=3)
    stage.play()
    assert [row["step"] for row in stage.report()["history"]["evaluations"]] == [0, 2, 4]


MISFITS: list[tuple[dict[str, object], str]] = [
    ({"protocol": 99}, f"protocol 99, the allocator {m.PROTOCOL}"),
    ({"agreed": {**AGREED, "model.path": "other"}}, "model.path = other, the allocator's has model"),
    ({"agreed": {"model.path": "model"}}, "sampling.temperature = nothing, the allocator's has 1.0"),
]


@pytest.mark.parametrize(("hello", "sentence"), MISFITS)
@pytest.mark.parametrize("kind", [Producer, Learner])
def test_a_process_that_does_not_fit_is_refused_with_both_values(
    kind: type[Peer], hello: dict[str, object], sentence: str
) -> None:
    stage = Stage(config())
    peer = kind(stage, "odd", 1, **hello)
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
    assert (status.phase, status.step, status.version) == ("evaluating", 0, 0)
    assert [(peer.role, peer.in_flight) for peer in status.peers] == [("learner", 0), ("producer", 4)]
    assert "evaluation after batch 0: 4 of 4 rollouts" in status.waits


def test_a_second_learner_is_refused() -> None:
    stage, learner, _ = ready(config(steps=1), p=4)
    stage.deliver()
    second = Learner(stage, "second")
    stage.play()
    assert "a learner already" in second.last(m.Refused).reason
    assert learner.last(m.Stop).final


def test_a_producer_started_again_replaces_itself_and_its_work_is_issued_again() -> None:
    stage, _, (old,) = ready(config(steps=1), p=4)
    stage.deliver()
    lost = [(order.work, order.attempt) for order, _ in old.orders]
    new = Producer(stage, "p", epoch=2)
    stage.deliver()
    assert [(order.work, order.attempt) for order, _ in new.orders] == [(work, 1) for work, _ in lost]
    old.say(m.Heartbeat())
    ghost = Producer(stage, "p", epoch=1)
    stage.deliver()
    assert ghost.all(m.Refused) == [
        m.Refused(reason="the allocator does not know this process (any more)"),
        m.Refused(reason="producer p has been started again since"),
    ]
    old.silent = True
    stage.play()
    assert stage.report()["outcome"] == "finished"


@pytest.mark.parametrize("how", ["silent", "unreachable"])
def test_the_work_of_a_dead_producer_goes_to_the_others(how: str) -> None:
    stage, _, (dead, alive) = ready(config(steps=1), dead=4, alive=4)
    stage.deliver()
    dead.silent = True
    if how == "unreachable":
        stage.broker.unreachable(dead.identity, stage.now)
    limit = 3 if how == "unreachable" else 10
    stage.wait(limit)
    assert len(stage.broker.peers.of("producer")) == 2
    stage.wait(1)
    assert [peer.name for peer in stage.broker.peers.of("producer")] == ["alive"]
    stage.play()
    report = stage.report()
    assert (report["outcome"], report["heldout_before"]) == ("finished", 0.25)
    assert alive.generated == report["tokens"]["generated"]


def test_a_cut_that_heals_in_time_is_no_death() -> None:
    stage, _, (producer,) = ready(config(steps=1), p=4)
    stage.deliver()
    stage.broker.unreachable(producer.identity, stage.now)
    stage.wait(5)
    assert len(stage.broker.peers.get(producer.identity).leases) == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["goodbye", "unreachable", "silent"])
def test_a_run_without_its_learner_fails_and_stops_everybody(how: str) -> None:
    stage, learner, (producer,) = ready(config(), p=4)
    stage.deliver()
    if how == "goodbye":
        learner.say(m.Goodbye(reason="interrupted"))
    learner.silent = True
    if how == "unreachable":
        stage.broker.unreachable(learner.identity, stage.now)
    stage.wait(4 if how == "unreachable" else 61, p="work")
    why = {"goodbye": "left: interrupted", "unreachable": "disconnected for 3 s", "silent": "silent for 60 s"}[how]
    assert stage.broker.failure == f"the learner is gone ({why})"
    assert producer.last(m.Stop) == m.Stop(reason=stage.broker.failure, final=False)
    report = stage.report()
    assert (report["outcome"], report["reason"]) == ("failed", stage.broker.failure)
    assert report["tokens"]["generated"] == producer.generated == 4


def test_a_run_without_progress_fails_and_says_what_it_waits_for() -> None:
    stage, learner, _ = ready(config())
    stage.deliver()
    stage.wait(62, l="batch 0")
    assert stage.broker.failure.startswith(
        "no progress for 60 s; the run waits for a producer to join; evaluation after"
    )
    assert "rollouts of batch 0: 0 are running" in stage.broker.failure
    assert not learner.last(m.Stop).final


def test_long_rollouts_that_grow_are_progress_and_stuck_ones_are_given_back() -> None:
    stage, _, (producer,) = ready(config(steps=1), p=1)
    stage.deliver()
    for tokens in range(1, 100):
        producer.say(m.Heartbeat(running={-1: tokens}))
        stage.wait(1, l="batch 0", p="")
    assert not stage.broker.failure
    stage.wait(55, l="batch 0")
    assert not producer.all(m.Cancel)
    Producer(stage, "q")  # a process that joins is progress, so that the run itself goes on
    stage.wait(8, l="batch 0")
    assert producer.last(m.Cancel).works == (-1,)
    assert stage.broker.waits()[0] == "producer p to return 1 rollouts that made no progress"


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
    producer.silent = True
    stage.broker.stop("interrupted", stage.now)
    stage.wait(10)
    assert not stage.broker.done(stage.now)
    stage.wait(1)
    assert stage.broker.done(stage.now)


def test_a_learner_has_the_time_to_save_its_last_checkpoint() -> None:
    stage, learner, _ = ready(config())
    learner.silent = True
    stage.broker.stop("interrupted", stage.now)
    stage.wait(59)
    assert not stage.broker.done(stage.now)
    stage.wait(2)
    assert stage.broker.done(stage.now)


def test_a_run_none_of_whose_prompts_can_be_sampled_says_so_and_fails() -> None:
    class Broken(Producer):
        def finish(self) -> None:
            order, _ = self.orders.pop(0)
            failed = Failed(reason="out of memory", tokens=0)
            self.say(m.Rollouts(rollouts=(m.Rollout(work=order.work, attempt=order.attempt, outcome=failed),)))

    stage = Stage(config(steps=40))
    Learner(stage)
    Broken(stage, "p")
    stage.play()
    assert "all prompts are quarantined" in stage.broker.failure
    assert len(stage.broker.work.allocator.quarantined) == 40


def test_strangers_are_told_so_and_messages_of_the_wrong_role_are_counted() -> None:
    stage, learner, (producer,) = ready(config(), p=4)
    stage.deliver()
    stage.peers[b"x"] = learner
    stage.broker.receive(b"x", m.BatchRequest(step=0), stage.now)
    assert stage.broker.outbox.popleft() == (
        b"x",
        m.Refused(reason="the allocator does not know this process (any more)"),
    )
    producer.say(m.BatchRequest(step=0))
    learner.say(m.Ask(credits=5, version=0))
    assert stage.registry.get_sample_value("gvm_messages_refused_total") == 2
    assert stage.broker.peers.of("learner")[0].credits == 0


@pytest.mark.parametrize("fates", [{"trained": (1,)}, {"eaten": ()}])
def test_a_learner_whose_account_does_not_fit_ends_the_run(fates: dict[str, tuple[int, ...]]) -> None:
    stage, learner, _ = ready(config(), p=4)
    stage.deliver()
    learner.say(msgspec.structs.replace(done(m.Batch(step=0, groups=()), 1), fates=fates))
    assert stage.broker.failure.startswith("the learner's account of batch 0 does not fit: ")


def test_a_checkpoint_of_another_batch_ends_the_run() -> None:
    stage, learner, _ = ready(config())
    stage.deliver()
    learner.say(m.Checkpointed(step=3, version=3, path="checkpoint"))
    assert stage.broker.failure == "the learner saved its state after batch 3, 0 are settled"
    assert not stage.broker.saves


def test_tokens_that_a_producer_never_reported_are_in_the_report() -> None:
    stage, _, (producer,) = ready(config(), p=4)
    stage.deliver()
    producer.generated = 17
    producer.end_all(m.Goodbye(reason="leaves"))
    assert stage.report()["engine_tokens_unaccounted"] == 17
