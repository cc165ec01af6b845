from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from gvm_stream.allocator import Cancelled, Failed, Fate, Unscorable
from gvm_stream.allocator.dispatcher import ORDER_CHUNK, Dispatcher
from gvm_stream.allocator.peers import Peer
from gvm_stream.config import AllocationSection, Config, LearnerSection, VerifierSection
from gvm_stream.metrics import Metrics
from gvm_stream.wire import messages as m
from tests.scripted_peers import config, done, prompt_set, rollout_of


def dispatcher(config: Config) -> Dispatcher:
    return Dispatcher(config, prompt_set(), Metrics("allocator"))


def producer(name: str = "p0", credits: int = 100, version: int = 0) -> Peer:
    return Peer(name.encode(), "producer", name, 1, heard_at=0.0, credits=credits, version=version)


def orders(d: Dispatcher, *peers: Peer, now: float = 0.0) -> list[m.WorkOrder]:
    return [order for _, work in d.dispatch(list(peers), now) for order in work.orders]


def counted(d: Dispatcher, name: str) -> float:
    return d._metrics.registry.get_sample_value(name) or 0.0


def test_credits_bound_what_a_producer_holds_and_each_report_returns_one() -> None:
    d, peer = dispatcher(config()), producer(credits=4)
    first = orders(d, peer)
    assert (len(first), peer.credits, sorted(peer.leases)) == (4, 0, [1, 2, 3, 4])
    assert orders(d, peer) == []
    assert d.receive(peer, rollout_of(first[2])) == ""
    assert (peer.credits, sorted(peer.leases), peer.reported_tokens) == (1, [1, 2, 4], 3)
    (fifth,) = orders(d, peer)
    assert (fifth.work, peer.credits, d.num_running) == (5, 0, 4)
    with pytest.raises(ValueError, match="producer p0 has no credit left"):
        peer.take(d.allocator.ledger.running()[0], 0.0)


def test_orders_carry_what_a_producer_needs_and_evaluation_goes_first() -> None:
    d, peer = dispatcher(config()), producer()
    d.evaluation.schedule(0, 0, 1)
    got = orders(d, peer)
    assert [order.prompt for order in got[:4]] == [f"heldout-{row}" for row in (1, 2, 3, 4)]
    assert [order.work for order in got] == [-1, -2, -3, -4, 1, 2, 3, 4, 5, 6]
    for order in got:
        split, row = order.prompt.split("-")
        assert np.frombuffer(order.prompt_tokens, "<i4").tolist() == [len(split), int(row)]
        assert order.answer == f"answer of {order.prompt}"


def test_load_is_spread_over_producers_in_chunks() -> None:
    d = dispatcher(config(per_step=16))  # 48 rollouts
    a, b, idle = producer("a"), producer("b", credits=20), producer("c", version=-1)
    sent = [(peer.name, len(work.orders)) for peer, work in d.dispatch([a, b, idle], 0.0)]
    assert sent == [("a", ORDER_CHUNK), ("b", ORDER_CHUNK), ("a", ORDER_CHUNK)]
    assert (len(a.leases), len(b.leases), len(idle.leases)) == (32, 16, 0)


def test_a_batch_has_its_rollouts_in_launch_order_with_their_payload() -> None:
    d, peer = dispatcher(config()), producer()
    got = orders(d, peer)
    assert d.batch(0) is None
    for order in reversed(got):
        d.receive(peer, rollout_of(order, reward=order.work % 2, tokens=order.work))
    batch = d.batch(0)
    assert batch is not None
    assert batch.step == 0
    assert [[r.work for r in group.rollouts] for group in batch.groups] == [[1, 2, 3], [4, 5, 6]]
    for group, order in zip(batch.groups, (got[0], got[3]), strict=True):
        assert (group.prompt, group.prompt_tokens, group.weight) == (order.prompt, order.prompt_tokens, 1.0)
        for r in group.rollouts:
            assert np.frombuffer(r.tokens, "<i4").tolist() == [r.work] * r.work
            assert np.frombuffer(r.logprobs, "<f4").tolist() == [-0.5] * r.work
            assert (r.reward, r.spans, r.truncated) == (r.work % 2, ((0, 0, r.work),), False)


def test_settling_a_batch_forgets_its_payload() -> None:
    d, peer = dispatcher(config()), producer()
    for order in orders(d, peer):
        d.receive(peer, rollout_of(order))
    batch = d.batch(0)
    assert batch is not None
    with pytest.raises(ValueError, match="'eaten' is not a valid Fate"):
        d.settle(msgspec.structs.replace(done(batch, 1), fates={"eaten": (1,)}))
    d.settle(done(batch, 1))
    assert (d._payload, d.rollouts_trained) == ({}, 6)
    assert d.allocator.account.tokens == Counter({Fate.TRAINED: 15, Fate.ZERO_SIGNAL: 3, Fate.PENDING: 0})


def test_rollouts_whose_visit_is_over_are_to_be_cancelled_and_their_results_are_not_kept() -> None:
    """Reinforce-Ada with a round launched ahead: the first round of both prompts is mixed, so the second is in vain."""
    allocation = AllocationSection(
        policy="reinforce_ada_balance",
        options={"round_size": 4, "max_rounds": 4, "keep": 2},
        rounds_ahead=1,
        prompts_per_step=2,
        rollouts_per_prompt=3,
        max_lag=0,
        shadow_uniform=0,
    )
    learner = LearnerSection(advantage="allocated")
    d, peer = dispatcher(msgspec.structs.replace(config(), allocation=allocation, learner=learner)), producer()
    first = orders(d, peer)
    later = orders(d, peer)
    groups: dict[str, list[m.WorkOrder]] = {}
    for order in (*first, *later):
        groups.setdefault(order.prompt, []).append(order)
    for mine in groups.values():
        for i, order in enumerate(mine[:4]):
            d.receive(peer, rollout_of(order, reward=i % 2))
    rest = [order for mine in groups.values() for order in mine[4:]]
    assert len(rest) == 8
    assert d.cancel == {(order.work, 0) for order in rest}
    batch = d.batch(0)
    assert batch is not None
    assert [[r.coefficient for r in group.rollouts] for group in batch.groups] == [[-0.25, 0.25, 0, 0]] * 2
    d.receive(peer, rollout_of(rest[0]))  # it crossed the cancellation
    for order in rest[1:]:
        d.receive(peer, m.Rollout(work=order.work, attempt=0, outcome=Cancelled(reason="over", tokens=1)))
    assert len(d._payload) == 8
    d.settle(done(batch, 1))
    assert d._payload == {}
    assert d.allocator.account.tokens[Fate.CANCELLED] == 3 + 7
    assert d.conserved


def changed(**changes: object) -> Callable[[m.Rollout], m.Rollout]:
    return lambda rollout: msgspec.structs.replace(rollout, **changes)


def with_outcome(**changes: object) -> Callable[[m.Rollout], m.Rollout]:
    return lambda rollout: msgspec.structs.replace(rollout, outcome=msgspec.structs.replace(rollout.outcome, **changes))


def test_energies_come_from_the_learner_or_from_producers_never_from_both() -> None:
    """They are in different units."""
    seen = {}
    for energies in ("off", "lm_head"):
        section = LearnerSection(energies="lm_head" if energies == "lm_head" else "off")
        d, peer = dispatcher(msgspec.structs.replace(config(), learner=section)), producer()
        for order in orders(d, peer):
            rollout = rollout_of(order)
            outcome = msgspec.structs.replace(rollout.outcome, energy=1e6)
            d.receive(peer, msgspec.structs.replace(rollout, outcome=outcome))
        batch = d.batch(0)
        assert batch is not None
        works = [r.work for group in batch.groups for r in group.rollouts]
        d.settle(msgspec.structs.replace(done(batch, 1), energies=dict.fromkeys(works, 7.0) | {works[0]: math.nan}))
        assert counted(d, "gvm_messages_refused_total") == 1
        seen[energies] = d.allocator.explain(batch.groups[0].prompt).energy_success
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
    (with_outcome(reward=math.nan), "reward nan is not a finite number"),
    (with_outcome(tokens=-3), "-3 tokens"),
]


@pytest.mark.parametrize(("spoil", "problem"), MALFORMED)
def test_a_malformed_rollout_counts_as_failed_and_is_tried_again(
    spoil: Callable[[m.Rollout], m.Rollout], problem: str
) -> None:
    d, peer = dispatcher(config()), producer(credits=1)
    (order,) = orders(d, peer)
    said = d.receive(peer, spoil(rollout_of(order)))
    assert said.startswith("work 1 of producer p0: ")
    assert problem in said
    assert d.allocator.account.rollouts == {Fate.FAILED: 1}
    assert d._payload == {}
    (again,) = orders(d, peer)
    assert (again.work, again.attempt, again.prompt) == (order.work, 1, order.prompt)


def test_expired_work_goes_to_another_producer_and_the_late_result_is_not_used() -> None:
    d, stuck, other = dispatcher(config()), producer("stuck", credits=7), producer("other", credits=0)
    got = orders(d, stuck)
    for order in got[1:]:
        d.receive(stuck, rollout_of(order))
    stuck.hear({1: 2}, 5.0)
    (lease,) = stuck.stalled(100.0, 60.0)
    d.expire(stuck, lease, "no new token")
    assert orders(d, stuck) == []  # with credits, but it still has the first attempt
    other.credits = 1
    (again,) = orders(d, stuck, other)
    assert (again.work, again.attempt, sorted(other.leases), stuck.leases) == (1, 1, [1], {})
    credits = stuck.credits
    assert d.receive(stuck, rollout_of(got[0], reward=0.0, tokens=9)) == ""
    assert (stuck.credits, counted(d, "gvm_rollouts_duplicate_total")) == (credits + 1, 1)
    assert d.batch(0) is None
    d.receive(other, rollout_of(again, reward=1.0, tokens=4))
    batch = d.batch(0)
    assert batch is not None
    assert (batch.groups[0].rollouts[0].reward, len(batch.groups[0].rollouts[0].tokens)) == (1.0, 16)
    assert d.allocator.account.tokens == {Fate.PENDING: 5 * 3 + 4, Fate.FAILED: 9}
    assert d.conserved


def test_a_stalled_rollout_comes_back_before_its_producer_gets_more() -> None:
    d, peer = dispatcher(config()), producer(credits=2)
    first, _ = orders(d, peer)
    d.expire(peer, peer.leases[first.work], "no new token")
    peer.credits += 1
    assert orders(d, peer) == []
    cancelled = m.Rollout(work=first.work, attempt=0, outcome=Cancelled(reason="cancelled", tokens=5))
    d.receive(peer, cancelled)
    assert [(order.work, order.attempt) for order in orders(d, peer)] == [(1, 1), (3, 0)]
    assert d.allocator.account.generated == 5


def test_progress_renews_a_lease_and_mere_presence_does_not() -> None:
    d, peer = dispatcher(config()), producer(credits=2)
    orders(d, peer)
    assert peer.hear({1: 5, 2: 5, 99: 1}, 30.0)
    assert not peer.hear({1: 5, 2: 4, 99: 2}, 55.0)
    assert peer.hear({1: 6, 2: 5}, 60.0)
    assert [lease.work for lease in peer.stalled(95.0, 60.0)] == [2]


def test_released_work_keeps_the_tokens_last_heard_of() -> None:
    d, dead, other = dispatcher(config()), producer("dead", credits=3), producer("other", credits=3)
    orders(d, dead)
    dead.hear({1: 5, 2: 7}, 1.0)
    d.release(dead, "silent for 10 s")
    assert (dead.leases, d.num_running) == ({}, 0)
    assert d.allocator.account.tokens == {Fate.FAILED: 12}
    assert [(order.work, order.attempt) for order in orders(d, other)] == [(1, 1), (2, 1), (3, 1)]


def test_evaluation_results_carry_no_payload_and_withdrawn_work_is_not_replaced() -> None:
    d, peer = dispatcher(config()), producer(credits=5)
    d.evaluation.schedule(0, 0, 1)
    *held_out, training = orders(d, peer)
    for order in held_out:
        d.receive(peer, rollout_of(order, reward=float(order.prompt == "heldout-2")))
    assert d.evaluation.finished[0].accuracy == 0.25
    assert (d._payload, d.allocator.account.tokens) == ({}, {Fate.EVALUATION: 12})
    d.withdraw()
    d.receive(peer, m.Rollout(work=training.work, attempt=0, outcome=Failed(reason="producer leaves", tokens=2)))
    assert (orders(d, peer), d.num_running, d.conserved) == ([], 0, True)


def test_prompts_with_verdicts_that_cannot_be_trusted_are_reported_and_quarantined_if_asked() -> None:
    for ask in (False, True):
        settings = msgspec.structs.replace(config(), verifier=VerifierSection(quarantine_flaky=ask))
        d, peer = dispatcher(settings), producer()
        first, second, third, *_ = orders(d, peer)
        d.receive(peer, rollout_of(first, reward=1.0))
        same_text = msgspec.structs.replace(rollout_of(second, reward=0.0), tokens=rollout_of(first).tokens)
        d.receive(peer, same_text)
        assert [flaky.prompt for flaky in d.flaky.report()] == [first.prompt]
        assert d.allocator.quarantined == ([first.prompt] if ask else [])
        unscorable = Unscorable(reason="verifier timeout", tokens=3, seconds=1.0)
        d.receive(peer, m.Rollout(work=third.work, attempt=third.attempt, outcome=unscorable))
        assert d.flaky.report()[0].unscorable == 1
