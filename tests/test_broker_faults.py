"""Whole runs in which everything goes wrong in any order: nothing is lost, nothing is used twice, the run ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from gvm_stream.allocator.recovery import recover
from gvm_stream.allocator.run_state import RunState
from gvm_stream.allocator.types import Fate
from gvm_stream.config import Config
from gvm_stream.wire import messages as m
from gvm_stream.wire.payload import works_of
from tests.scripted_peers import Learner, Peer, Producer, Stage, config, prompt_set, rollout_of

CONFIGS: dict[str, dict[str, Any]] = {
    "uniform, in turn": {"max_lag": 0},
    "uniform, ahead": {"max_lag": 2, "shadow_uniform": 0.3},
    "neyman": {"policy": "neyman", "max_lag": 2, "shadow_uniform": 0.3},
    "gvm in two stages": {"policy": "gvm_two_stage", "options": {"pilot": 2}, "max_lag": 0},
    "reinforce-ada": {
        "policy": "reinforce_ada_balance",
        "options": {"round_size": 2, "max_rounds": 3, "keep": 2},
        "max_lag": 2,
        "rounds_ahead": 1,
        "max_rollouts": 8,
    },
}

LOSABLE = (m.Work, m.Received, m.Cancel, m.Settled, m.Batch, m.Rollouts, m.Heartbeat, m.BatchRequest, m.StepDone)
"""What its sender, or the clock, mends without the connection being lost."""
names = st.sampled_from(["p", "q"])


def encoded(state: RunState) -> bytes:
    return msgspec.msgpack.encode(state.state_dict())


class Faults(RuleBasedStateMachine):
    made: Config

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(self.made)
        self.learner = Learner(self.stage)
        self.producers = {name: Producer(self.stage, name) for name in ("p", "q")}
        self.stage.commit()
        self.committed = encoded(self.state)
        self.epoch = 1

    @property
    def state(self) -> RunState:
        return self.stage.broker.work.state

    @property
    def live(self) -> list[Peer]:
        return [self.learner, *self.producers.values()]

    # --- what goes on ---

    @rule(number=st.integers(0, 2), count=st.integers(1, 4))
    def speak(self, number: int, count: int) -> None:
        peer = self.live[number]
        for _ in range(min(count, len(peer.to_allocator))):
            self.stage.receive(peer)

    @rule(number=st.integers(0, 2), count=st.integers(1, 4))
    def hear(self, number: int, count: int) -> None:
        peer = self.live[number]
        for _ in range(min(count, len(peer.from_allocator))):
            peer.hear(peer.from_allocator.popleft())

    @rule(snapshot=st.booleans())
    def turn(self, snapshot: bool) -> None:
        self.stage.turn(snapshot=snapshot)
        self.committed = encoded(self.state)

    @rule(name=names, kind=st.sampled_from(["scored", "scored", "unscorable", "failed"]), tokens=st.integers(0, 5))
    def finish(self, name: str, kind: str, tokens: int) -> None:
        if self.producers[name].orders:
            self.producers[name].finish(kind, tokens)

    @rule()
    def go_on(self) -> None:
        """For a while everything works, so that faults come at any time of a run."""
        for producer in self.producers.values():
            while producer.orders:
                producer.finish()
        self.stage.deliver()
        self.committed = encoded(self.state)

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.stage.now += seconds
        for peer in self.live:
            peer.say(peer.heartbeat())
        self.stage.broker.tick(self.stage.now)

    # --- faults ---

    @rule(number=st.integers(0, 2))
    def say_twice(self, number: int) -> None:
        peer = self.live[number]
        if peer.to_allocator:
            self.stage.broker.receive(peer.identity, peer.to_allocator[0], self.stage.now)

    @rule(number=st.integers(0, 2))
    def lose_what_was_said(self, number: int) -> None:
        peer = self.live[number]
        if peer.to_allocator and isinstance(peer.to_allocator[0], LOSABLE):
            peer.to_allocator.popleft()

    @rule(number=st.integers(0, 2))
    def lose_what_was_to_be_heard(self, number: int) -> None:
        peer = self.live[number]
        if peer.from_allocator and isinstance(peer.from_allocator[0], LOSABLE):
            peer.from_allocator.popleft()

    @rule(number=st.integers(0, 2), swap=st.integers(0, 5))
    def reorder(self, number: int, swap: int) -> None:
        queue = self.live[number].to_allocator
        if swap + 1 < len(queue) and isinstance(queue[swap], m.Rollouts):
            queue[swap], queue[swap + 1] = queue[swap + 1], queue[swap]

    @rule(number=st.integers(0, 2))
    def cut(self, number: int) -> None:
        """The connection is lost with all that is on its way, and is back at once."""
        peer = self.live[number]
        peer.to_allocator.clear()
        peer.from_allocator.clear()
        self.stage.broker.unreachable(peer.identity, self.stage.now)

    @rule(name=names)
    def producer_is_killed(self, name: str) -> None:
        self.epoch += 1
        self._gone(self.producers[name])
        self.producers[name] = Producer(self.stage, name, self.epoch)

    @rule()
    def learner_is_killed(self) -> None:
        self.epoch += 1
        self._gone(self.learner)
        self.learner = Learner(self.stage, epoch=self.epoch)

    @rule(advanced=st.booleans(), written=st.booleans())
    def allocator_is_killed(self, advanced: bool, written: bool) -> None:
        if advanced:
            self.stage.broker.advance(self.stage.now)
        if written:  # but nothing of it sent
            self.stage.commit(send=False)
            self.committed = encoded(self.state)
        saved = self.stage.disk.load()
        state = RunState(self.made, [p.id for p in prompt_set().train], [p.id for p in prompt_set().heldout[:4]])
        recover(state, saved.snapshot, saved.journal)
        assert encoded(state) == self.committed
        self.stage.restart()
        self.stage.commit()
        self.committed = encoded(self.state)

    @rule(name=names, works=st.dictionaries(st.integers(-9, 40), st.integers(0, 2), max_size=3), honest=st.booleans())
    def lie_about_what_is_in_hand(self, name: str, works: dict[int, int], honest: bool) -> None:
        producer = self.producers[name]
        said = (producer.in_hand if honest else {}) | works
        producer.say(msgspec.structs.replace(producer.hello, in_hand=said))

    @rule(name=names, work=st.integers(-9, 40), attempt=st.integers(0, 2))
    def report_what_is_not_its_own(self, name: str, work: int, attempt: int) -> None:
        order = m.WorkOrder(work=work, attempt=attempt, prompt="train-1", prompt_tokens=b"", answer="")
        producer = self.producers[name]
        if work not in producer.orders:
            producer.report([rollout_of(order, tokens=abs(work))])

    @rule(number=st.integers(0, 2))
    def talk_nonsense(self, number: int) -> None:
        peer, before = self.live[number], self.stage.broker.refused
        known = self.stage.broker.peers.get(peer.identity)
        said: list[m.ToAllocator] = [m.BatchRequest(step=0), m.Ask(slots=9, version=9)]
        self.stage.broker.receive(peer.identity, said[peer is self.learner], self.stage.now)
        self.stage.broker.receive(b"producer/stranger/1", m.Ask(slots=9, version=9), self.stage.now)
        if known is not None and known.joined_at is not None:
            assert self.stage.broker.refused == before + 1

    def _gone(self, peer: Peer) -> None:
        peer.gone = True
        peer.to_allocator.clear()
        del self.stage.peers[peer.identity]

    def _start_those_that_have_left(self) -> None:
        if self.learner.gone:
            self.learner_is_killed()
        for name, producer in self.producers.items():
            if producer.gone:
                self.producer_is_killed(name)

    # --- what holds ---

    @invariant()
    def conserved(self) -> None:
        assert self.state.conserved
        assert not self.stage.broker.failure

    @invariant()
    def no_rollout_is_trained_on_twice(self) -> None:
        for model in (self.learner.model, *self.stage.checkpoints.values()):
            works = [work for batch in model for work in works_of(batch)]
            assert len(works) == len(set(works))
            assert [batch.step for batch in model] == list(range(len(model)))

    def teardown(self) -> None:
        """Without further faults the run ends, and every batch is in the last checkpoint. Who has left a run that
        was then killed over its end is started again, as a user would."""
        for _ in range(60):
            if self.stage.broker.done(self.stage.now):
                break
            if not self.stage.broker.stopping:
                self._start_those_that_have_left()
            for peer in self.live:
                peer.again()
            self.stage.wait(1)
            self.stage.play()
        report = self.stage.report()
        assert report["outcome"] == "finished", self.stage.broker.waits(self.stage.now)
        assert report["tokens"]["pending"] == 0
        self.no_rollout_is_trained_on_twice()
        trained = 0
        for batch in self.stage.checkpoints[self.made.run.steps]:
            rollouts = [r for group in batch.groups for r in group.rollouts]
            trained += max(0, len(rollouts) - 1)  # the first of a batch counts as without signal
            for r in rollouts:
                assert len(r.tokens) == len(r.logprobs)
                assert set(memoryview(r.tokens).cast("i")) <= {r.work}
        assert report["rollouts_by_fate"].get(Fate.TRAINED, 0) == trained


@pytest.mark.parametrize("name", CONFIGS)
def test_whatever_goes_wrong_nothing_is_lost_or_used_twice_and_the_run_ends(name: str) -> None:
    class Run(Faults):
        made = config(steps=5, every=2, progress_s=1000, **CONFIGS[name])

    run_state_machine_as_test(
        Run,
        settings=settings(
            max_examples=20,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            phases=[Phase.generate],  # to make a failure smaller takes minutes
        ),
    )
