"""Work in the hands of producers, and what goes to the spool beside the journal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from gvm_stream.allocator import Cancelled, Failed, Fate, Unscorable
from gvm_stream.allocator.dispatcher import ORDER_CHUNK, Dispatcher
from gvm_stream.allocator.peers import Peer
from gvm_stream.allocator.spool import Changes, MemorySpool
from gvm_stream.config import Config, LearnerSection, VerifierSection
from gvm_stream.metrics import Metrics
from gvm_stream.wire import messages as m
from gvm_stream.wire.payload import fill, frames_of, pack, unpack, works_of
from tests.scripted_peers import config, done, prompt_set, rollout_of


class Desk:
    """A dispatcher with the spool that its changes go to."""

    def __init__(self, config: Config, *, durable: bool = True) -> None:
        self.metrics = Metrics("allocator")
        self.work = Dispatcher(config, prompt_set(), self.metrics, durable=durable)
        self.work.published(0, 0)
        self.state, self.spool = self.work.state, MemorySpool()

    def orders(self, *peers: Peer, now: float = 0.0) -> list[m.WorkOrder]:
        return [order for _, work in self.work.dispatch(peers, now) for order in work.orders]

    def training(self, peer: Peer) -> list[m.WorkOrder]:
        """Orders to train on, after the evaluation that comes first."""
        rest = []
        for order in self.orders(peer):
            if order.work < 0:
                self.tell(peer, rollout_of(order, reward=0.0))
            else:
                rest.append(order)
        return rest + self.orders(peer)

    def tell(self, peer: Peer, *rollouts: m.Rollout, stopping: bool = False) -> list[str]:
        return self.work.receive(peer, rollouts, 1.0, stopping=stopping)

    def commit(self) -> Changes:
        changes = self.work.take_changes() or Changes()
        self.spool.commit([changes])
        return changes

    def batch(self, step: int = 0) -> m.Batch:
        """With payloads, as a learner gets it."""
        batch = self.work.batch(step)
        assert batch is not None
        payloads = self.spool.rollouts(works_of(batch))
        return fill(batch, [*frames_of(payloads[work] for work in works_of(batch))])

    def counted(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0.0


def producer(name: str = "p0", slots: int = 100, version: int = 0) -> Peer:
    return Peer(
        f"producer/{name}/1".encode(), "producer", name, 1, heard_at=0.0, joined_at=0.0, slots=slots, version=version
    )


def of_tokens(d: Desk) -> dict[Fate, int]:
    return {fate: n for fate, n in d.state.allocator.account.tokens.items() if n}


def test_credits_bound_what_a_producer_holds_and_each_report_returns_one() -> None:
    d, peer = Desk(config()), producer(slots=4)
    first = d.orders(peer)
    assert (len(first), peer.credits, sorted(peer.leases)) == (4, 0, [-4, -3, -2, -1])
    assert d.orders(peer) == []
    assert d.tell(peer, rollout_of(first[2])) == []
    assert (peer.credits, sorted(peer.leases), d.state.reported[peer.key]) == (1, [-4, -2, -1], 3)
    (fifth,) = d.orders(peer)
    assert (fifth.work, peer.credits, d.state.num_running) == (1, 0, 4)
    peer.slots = 2  # fewer than it has
    assert (peer.credits, d.orders(peer)) == (0, [])


def test_orders_carry_what_a_producer_needs_and_evaluation_goes_first() -> None:
    d, peer = Desk(config()), producer()
    got = d.orders(peer)
    assert [order.prompt for order in got[:4]] == [f"heldout-{row}" for row in (1, 2, 3, 4)]
    assert [order.work for order in got] == [-1, -2, -3, -4, 1, 2, 3, 4, 5, 6]
    for order in got:
        split, row = order.prompt.split("-")
        assert np.frombuffer(order.prompt_tokens, "<i4").tolist() == [len(split), int(row)]
        assert order.answer == f"answer of {order.prompt}"


def test_load_is_spread_over_producers_in_chunks() -> None:
    d = Desk(config(per_step=16))  # 48 rollouts
    d.training(first := producer("first", slots=4))
    assert not first.credits
    a, b, idle = producer("a"), producer("b", slots=20), producer("c", version=-1)
    sent = [(peer.name, len(work.orders)) for peer, work in d.work.dispatch([a, b, idle], 0.0)]
    assert sent == [("a", ORDER_CHUNK), ("b", ORDER_CHUNK), ("a", 48 - 4 - 2 * ORDER_CHUNK)]
    assert (len(a.leases), len(b.leases), len(idle.leases)) == (28, 16, 0)


def test_a_batch_has_its_rollouts_in_launch_order_with_their_payload() -> None:
    d, peer = Desk(config()), producer()
    got = d.training(peer)
    assert d.work.batch(0) is None
    for order in reversed(got):
        d.tell(peer, rollout_of(order, reward=order.work % 2, tokens=order.work))
    d.commit()
    batch = d.batch()
    assert batch.step == 0
    assert [[r.work for r in group.rollouts] for group in batch.groups] == [[1, 2, 3], [4, 5, 6]]
    for group, order in zip(batch.groups, (got[0], got[3]), strict=True):
        assert (group.prompt, group.prompt_tokens, group.weight) == (order.prompt, order.prompt_tokens, 1.0)
        for r in group.rollouts:
            assert np.frombuffer(r.tokens, "<i4").tolist() == [r.work] * r.work
            assert np.frombuffer(r.logprobs, "<f4").tolist() == [-0.5] * r.work
            assert (r.reward, r.spans, r.truncated) == (r.work % 2, ((0, 0, r.work),), False)


def test_payloads_stay_until_a_checkpoint_covers_their_batch() -> None:
    d, peer = Desk(config()), producer()
    for order in d.training(peer):
        d.tell(peer, rollout_of(order))
    batch = d.work.batch(0)
    assert batch is not None
    with pytest.raises(ValueError, match="'eaten' is not a valid Fate"):
        d.work.settle(msgspec.structs.replace(done(batch, 1), fates={"eaten": (1,)}), 1.0)
    d.work.settle(done(batch, 1), 1.0)
    assert [step for step, _, _ in d.commit().settled] == [0]
    assert (len(d.spool.rollouts(range(9))), d.state.rollouts_trained) == (6, 6)
    assert d.state.allocator.account.rollouts == Counter({Fate.EVALUATION: 4, Fate.TRAINED: 5, Fate.ZERO_SIGNAL: 1})
    d.work.cover([1, 3])
    d.work.cover([0])  # older news changes nothing
    d.commit()
    assert (d.spool.rollouts(range(9)), d.spool.batch(0), d.state.covered) == ({}, None, 1)


def test_rollouts_whose_visit_is_over_are_to_be_cancelled_and_their_results_are_not_kept() -> None:
    """Reinforce-Ada with a round launched ahead: the first round of both prompts is mixed, so the second is in vain."""
    settings = config(
        policy="reinforce_ada_balance",
        options={"round_size": 4, "max_rounds": 4, "keep": 2},
        rounds_ahead=1,
        shadow_uniform=0,
        max_rollouts=32,
    )
    d, peer = Desk(msgspec.structs.replace(settings, learner=LearnerSection(advantage="allocated"))), producer()
    groups: dict[str, list[m.WorkOrder]] = {}
    for order in d.training(peer):
        groups.setdefault(order.prompt, []).append(order)
    for mine in groups.values():
        for i, order in enumerate(mine[:4]):
            d.tell(peer, rollout_of(order, reward=i % 2))
    rest = [order for mine in groups.values() for order in mine[4:]]
    assert len(rest) == 8
    assert d.work.cancel == {(order.work, 0) for order in rest}
    d.commit()
    assert [[r.coefficient for r in group.rollouts] for group in d.batch().groups] == [[-0.25, 0.25, 0, 0]] * 2
    d.tell(peer, rollout_of(rest[0]))  # it crossed the cancellation
    for order in rest[1:]:
        d.tell(peer, m.Rollout(work=order.work, attempt=0, outcome=Cancelled(reason="over", tokens=1)))
    d.commit()
    assert len(d.spool.rollouts(range(99))) == 8
    assert of_tokens(d)[Fate.CANCELLED] == 3 + 7
    assert d.state.conserved


def changed(**changes: Any) -> Callable[[m.Rollout], m.Rollout]:  # noqa: ANN401
    """Of its payload."""

    def change(rollout: m.Rollout) -> m.Rollout:
        p = unpack(rollout.payload)
        parts = {"tokens": bytes(p.tokens), "logprobs": bytes(p.logprobs), "spans": p.spans, "truncated": p.truncated}
        return msgspec.structs.replace(rollout, payload=pack(**{**parts, **changes}))

    return change


def with_outcome(**changes: object) -> Callable[[m.Rollout], m.Rollout]:
    return lambda rollout: msgspec.structs.replace(rollout, outcome=msgspec.structs.replace(rollout.outcome, **changes))


def test_energies_come_from_the_learner_or_from_producers_never_from_both() -> None:
    """They are in different units."""
    seen = {}
    for energies in ("off", "lm_head"):
        section = LearnerSection(energies="lm_head" if energies == "lm_head" else "off")
        d, peer = Desk(msgspec.structs.replace(config(), learner=section)), producer()
        for order in d.training(peer):
            d.tell(peer, with_outcome(energy=1e6)(rollout_of(order)))
        batch = d.work.batch(0)
        assert batch is not None
        works = works_of(batch)
        told = dict.fromkeys(works, 7.0) | {works[0]: math.nan}
        d.work.settle(msgspec.structs.replace(done(batch, 1), energies=told), 1.0)
        assert d.counted("gvm_messages_refused_total") == 1
        seen[energies] = d.state.allocator.explain(batch.groups[0].prompt).energy_success
    assert seen["off"] > 1e5
    assert seen["lm_head"] < 20


MALFORMED: list[tuple[Callable[[m.Rollout], m.Rollout], str]] = [
    (changed(tokens=b"\0" * 8), "3 tokens announced, 8 bytes of ids and 12 bytes of log-probs"),
    (changed(logprobs=b""), "3 tokens announced, 12 bytes of ids and 0 bytes of log-probs"),
    (changed(logprobs=np.array([-1, math.nan, -1], "<f4").tobytes()), "a log-prob is not finite"),
    (changed(logprobs=np.array([-1, 0.5, -1], "<f4").tobytes()), "or above 0"),
    (changed(spans=((0, 0, 2),)), "do not cover 3 tokens"),
    (changed(spans=((0, 0, 1), (1, 2, 3))), "do not follow one another"),
    (changed(spans=()), "do not cover 3 tokens"),
    (changed(truncated=True), "truncated = False, and True in its payload"),
    (lambda rollout: msgspec.structs.replace(rollout, payload=rollout.payload[:-1]), "cannot be read"),
    (with_outcome(reward=math.nan), "reward nan is not a finite number"),
    (with_outcome(tokens=-3), "-3 tokens"),
]


@pytest.mark.parametrize(("spoil", "problem"), MALFORMED)
def test_a_malformed_rollout_counts_as_failed_and_is_tried_again(
    spoil: Callable[[m.Rollout], m.Rollout], problem: str
) -> None:
    d, peer = Desk(config()), producer()
    order, *_ = d.training(peer)
    d.commit()
    (said,) = d.tell(peer, spoil(rollout_of(order)))
    assert said.startswith("work 1 of producer p0: ")
    assert problem in said
    assert d.state.allocator.account.rollouts[Fate.FAILED] == 1
    assert d.commit().rollouts == []
    (again,) = d.orders(peer)
    assert (again.work, again.attempt, again.prompt) == (order.work, 1, order.prompt)


def test_of_several_reports_of_one_work_the_payload_is_that_of_the_one_that_counts() -> None:
    d, peer = Desk(config()), producer()
    order, *others = d.training(peer)
    d.tell(peer, *(rollout_of(other) for other in others))
    late = msgspec.structs.replace(order, attempt=3)
    d.tell(peer, rollout_of(late, tokens=9), rollout_of(order, tokens=4), rollout_of(order, tokens=7))
    d.commit()
    assert len(d.batch().groups[0].rollouts[0].tokens) == 16
    assert of_tokens(d) == {Fate.EVALUATION: 12, Fate.PENDING: 5 * 3 + 4}
    assert d.state.allocator.ledger.duplicates == 2


def test_expired_work_goes_to_another_producer_and_the_late_result_is_not_used() -> None:
    d, stuck, other = Desk(config()), producer("stuck"), producer("other", slots=1)
    got = d.training(stuck)
    for order in got[1:]:
        d.tell(stuck, rollout_of(order))
    stuck.hear({1: 2}, 5.0)
    stalled = stuck.stalled(100.0, 60.0)
    d.work.expire(stuck, stalled, "no new token", 100.0)
    assert d.orders(stuck) == []  # with credits, but it still has the first attempt
    (again,) = d.orders(stuck, other)
    assert (again.work, again.attempt, sorted(other.leases), stuck.leases) == (1, 1, [1], {})
    assert d.tell(stuck, rollout_of(got[0], reward=0.0, tokens=9)) == []
    assert (stuck.owed, d.state.allocator.ledger.duplicates) == (set(), 1)
    assert d.work.batch(0) is None
    d.tell(other, rollout_of(again, reward=1.0, tokens=4))
    d.commit()
    first = d.batch().groups[0].rollouts[0]
    assert (first.reward, len(first.tokens)) == (1.0, 16)
    assert of_tokens(d) == {Fate.EVALUATION: 12, Fate.PENDING: 5 * 3 + 4, Fate.FAILED: 9}
    assert d.state.conserved


def test_a_stalled_rollout_comes_back_before_its_producer_gets_more() -> None:
    d, peer = Desk(config()), producer(slots=2)
    first, _ = d.orders(peer)
    d.work.expire(peer, [peer.leases[first.work]], "no new token", 9.0)
    peer.slots += 1
    assert d.orders(peer) == []
    d.tell(peer, m.Rollout(work=first.work, attempt=0, outcome=Cancelled(reason="cancelled", tokens=5)))
    assert [(order.work, order.attempt) for order in d.orders(peer)] == [(-1, 1), (-3, 0)]
    assert d.state.allocator.account.generated == 5


def test_released_work_keeps_the_tokens_last_heard_of() -> None:
    d, dead, other = Desk(config()), producer("dead", slots=3), producer("other", slots=3)
    d.orders(dead)
    dead.hear({-1: 5, -2: 7}, 1.0)
    d.work.release(dead, "silent for 10 s", 9.0)
    assert (dead.leases, d.state.num_running, d.state.owners) == ({}, 0, {})
    assert of_tokens(d) == {Fate.FAILED: 12}
    assert [(order.work, order.attempt) for order in d.orders(other)] == [(-1, 1), (-2, 1), (-3, 1)]


def test_evaluation_results_carry_no_payload() -> None:
    d, peer = Desk(config()), producer(slots=4)
    for order in d.orders(peer):
        d.tell(peer, rollout_of(order, reward=float(order.prompt == "heldout-2")))
    (row,) = d.state.record.evaluations
    assert (row.accuracy, row.samples, row.seconds) == (0.25, 4, 1.0)
    assert (d.commit().rollouts, of_tokens(d)) == ([], {Fate.EVALUATION: 12})
    assert d.counted("gvm_heldout_accuracy") == 0.25


def test_what_is_given_up_because_the_run_is_interrupted_is_made_by_the_next_process() -> None:
    for stopping, again in ((True, [(-1, 1)]), (False, [])):
        d, peer = Desk(config()), producer(slots=4)
        order, *_ = d.orders(peer)
        d.tell(
            peer,
            m.Rollout(work=order.work, attempt=0, outcome=Cancelled(reason="stop", tokens=2)),
            stopping=stopping,
        )
        assert [(o.work, o.attempt) for o in d.orders(peer) if o.work < 0] == again


def test_prompts_with_verdicts_that_cannot_be_trusted_are_reported_and_quarantined_if_asked() -> None:
    for ask in (False, True):
        settings = msgspec.structs.replace(config(), verifier=VerifierSection(quarantine_flaky=ask))
        d, peer = Desk(settings), producer()
        first, second, third, *_ = d.training(peer)
        d.tell(peer, rollout_of(first, reward=1.0))
        d.tell(peer, msgspec.structs.replace(rollout_of(second, reward=0.0), payload=rollout_of(first).payload))
        assert [flaky.prompt for flaky in d.state.flaky.report()] == [first.prompt]
        assert d.state.allocator.quarantined == ([first.prompt] if ask else [])
        unscorable = Unscorable(reason="verifier timeout", tokens=3, seconds=1.0)
        d.tell(peer, m.Rollout(work=third.work, attempt=third.attempt, outcome=unscorable))
        assert d.state.flaky.report()[0].unscorable == 1


# --- what is written down ---


def test_a_question_that_finds_nothing_is_not_written_down() -> None:
    d, peer = Desk(config()), producer()
    d.training(peer)
    d.commit()
    assert d.orders(peer) == []
    assert d.work.take_changes() is None


def test_without_a_spool_only_payloads_are_kept() -> None:
    d, peer = Desk(config(), durable=False), producer()
    for order in d.training(peer):
        d.tell(peer, rollout_of(order))
    changes = d.commit()
    assert (changes.journal, len(changes.rollouts)) == ([], 6)
    d.batch()


def test_a_snapshot_comes_when_the_journal_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gvm_stream.allocator.dispatcher.ENTRIES_PER_SNAPSHOT", 41)
    d, peer = Desk(config(max_attempts=99)), producer(slots=1)
    snapshots = []
    for turn in range(50):
        (order,) = d.orders(peer)  # an entry
        d.tell(peer, m.Rollout(work=order.work, attempt=order.attempt, outcome=Failed(reason="?")))  # another one
        if d.commit().snapshot is not None:
            snapshots.append(turn)
    assert snapshots == [19, 40]  # the first entry was the weights
