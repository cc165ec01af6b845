"""The broker: one state machine between the peers' messages and the allocator library. Pure: messages and the time come
in by `receive` and `tick`; what follows from them, by `advance`; messages go out by `outbox`, changes to write down by
`work.take_changes`. What is in the outbox may leave once the changes before it are safe.

A run goes through: the learner publishes its first weights and producers load them; a held-out evaluation; training;
the final evaluation; stop. Whatever ends a run early goes through the same stop. Every process may die and come back:
a producer's work goes to others, a learner goes on from its newest checkpoint, the allocator from its journal.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Any

from gvm_stream.allocator import picture
from gvm_stream.allocator.dispatcher import Dispatcher
from gvm_stream.allocator.joining import check_hello, first_batch
from gvm_stream.allocator.peers import Peer, PeerTable, absent_producer
from gvm_stream.allocator.spool import Saved
from gvm_stream.allocator.waits import WaitClock
from gvm_stream.config import Config
from gvm_stream.data.prompts import PromptSet
from gvm_stream.errors import StreamError
from gvm_stream.logs import set_version
from gvm_stream.metrics import Metrics
from gvm_stream.wire import messages as m

log = logging.getLogger(__name__)

STOP_GRACE_S = 10.0
"""Time for the producers' goodbyes after a stop. The learner has `stream.progress_s`: it saves its last checkpoint."""

FromProducer = m.Ask | m.Loaded
FromLearner = m.Published | m.BatchRequest | m.StepDone | m.Checkpointed


class Broker:
    def __init__(
        self,
        config: Config,
        agreed: dict[str, str],
        prompts: PromptSet,
        metrics: Metrics,
        *,
        run: str,
        now: float,
        saved: Saved | None,
    ) -> None:
        """Continues from `saved`, if there is anything in it; None: nothing is written down. Raises StreamError if it
        does not fit this run."""
        self.config, self._agreed, self._metrics, self.run = config, agreed, metrics, run
        self.work = Dispatcher(config, prompts, metrics, durable=saved is not None)
        if saved is not None:
            self.work.restore(saved.snapshot, saved.journal)
        self.peers = PeerTable()
        self.outbox: deque[tuple[bytes, m.ToPeer]] = deque()
        self.replays: deque[tuple[bytes, int]] = deque()
        """(learner, batch): settled batches to hand out again."""
        self.failure = ""
        """Why the run failed; empty while it has not."""
        self.weights: m.WeightsInfo | None = None
        self.wanted: int | None = None
        """Batch the learner waits for."""
        self.checkpoints: tuple[int, ...] = ()
        """Training batches behind each complete checkpoint of the learner."""
        self._reporting: dict[bytes, Peer] = {}
        """Producers with reports that have not been taken, or not been answered."""
        self.refused = 0
        self.lost: Counter[str] = Counter()
        """Processes that died, by role, as far as this allocator has seen."""
        self.spool_bytes = self.spool_waiting = 0
        """Of the spool, as whoever writes it says."""
        self._seconds_before = self.work.state.seconds
        self._started_at = self._ticked_at = self.progress_at = now
        self.connected_s = self.verifying_s = 0.0
        """Time of all producers, and that in which all they had waited for verdicts; as this allocator has seen it."""
        self.stopping: m.Stop | None = None
        self._stopped_at = 0.0
        self._farewell_s = 0.0
        """Least time between a stop and the end."""
        self.unaccounted_tokens = 0
        self.waiting = WaitClock()
        self._await_owners(now)
        if self.work.state.ended:  # whoever has not heard of it says hello within this time
            self._farewell_s = config.stream.silence_s
            self._end(now)

    # --- what comes in ---

    def receive(self, identity: bytes, message: m.ToAllocator, now: float) -> None:
        if isinstance(message, m.Hello):
            self._take_reports(now)
            self._hello(identity, message, now)
            return
        peer = self.peers.get(identity)
        if peer is None or peer.joined_at is None:
            self._send(identity, m.Unknown())
            return
        peer.heard_at = now
        if isinstance(message, m.Rollouts) and peer.role == "producer":
            self._rollouts(peer, message)
            return
        self._take_reports(now)
        match message:
            case m.Heartbeat():
                self._heartbeat(peer, message, now)
            case m.StatusRequest():
                self._send(identity, self.status(now))
            case m.Goodbye():
                self._goodbye(peer, message, now)
            case m.Ask() | m.Loaded() if peer.role == "producer":
                self._from_producer(peer, message, now)
            case m.Published() | m.BatchRequest() | m.StepDone() | m.Checkpointed() if peer.role == "learner":
                self._from_learner(peer, message, now)
            case _:
                self.refuse(f"{peer.label} sent {type(message).__name__}, which is not for its role")

    def refuse(self, why: str) -> None:
        """Count a message that cannot be used. It never ends the service."""
        log.warning("message refused: %s", why)
        self.refused += 1
        self._metrics.count("gvm_messages_refused")

    def tick(self, now: float) -> None:
        """To be called about once a heartbeat: what has *not* happened shows only by the clock."""
        stream = self.config.stream
        self._take_reports(now)
        for peer, why in self.peers.dead(now, stream):
            if peer.role != "observer":
                log.warning("%s is taken for dead: %s", peer.label, why)
                self.lost[peer.role] += 1
            self._leave(peer, why, now)
        for peer in self.peers.of("producer"):
            stalled = peer.stalled(now, stream.progress_s)
            self.work.expire(peer, stalled, f"no new token for {stream.progress_s:g} s", self.seconds(now))
            if stalled:
                self._send(peer.identity, m.Cancel(works=tuple(s.work for s in stalled), reason="no progress"))
            astray = peer.astray(now, stream.silence_s)
            self.work.expire(peer, astray, f"{peer.label} has never got it", self.seconds(now))
            peer.owed.difference_update((lease.work, lease.attempt) for lease in astray)
        if not self.stopping and now - self.progress_at > stream.progress_s:
            waits = "; ".join(f"{wait.who}: {wait.what}" for wait in self.waits(now)) or "nothing that it knows of"
            self.fail(f"no progress for {stream.progress_s:g} s; waits: {waits}", now)
        elapsed, self._ticked_at = now - self._ticked_at, now
        producers = self.peers.of("producer")
        self.connected_s += elapsed * len(producers)
        self.verifying_s += elapsed * sum(peer.waiting_for == "verdicts" for peer in producers)
        self.work.tally.show(self._metrics)
        picture.export(self, self._metrics, now, elapsed)

    def unreachable(self, identity: bytes, now: float) -> None:
        """A message could not be sent: the connection is gone, for now or for good. Who comes back has missed something
        and says hello again."""
        peer = self.peers.get(identity)
        if peer is not None and peer.joined_at is not None:
            peer.joined_at, peer.unreachable_at = None, now

    # --- joining and leaving ---

    def _await_owners(self, now: float) -> None:
        """After a restart: those who have work in hand will say hello, or be taken for dead."""
        works: dict[str, dict[int, int]] = {}
        for work, owner in self.work.state.owners.items():
            works.setdefault(owner, {})[work] = self.work.state.attempt_of(work)
        for owner, in_hand in works.items():
            self.peers.add(absent_producer(owner, in_hand, now))

    def _hello(self, identity: bytes, hello: m.Hello, now: float) -> None:
        peer = Peer(identity, hello.role, hello.name, hello.epoch, heard_at=now, joined_at=now)
        try:
            check_hello(identity, hello, self._agreed)
            next_step = first_batch(hello, self.work.state) if hello.role == "learner" else 0
            replaced = self.peers.add(peer)
        except StreamError as error:
            log.warning("%s %s refused: %s", hello.role, hello.name, error)
            self._send(identity, m.Refused(reason=str(error)))
            return
        settled = self.work.state.allocator.settled_steps
        self._send(identity, m.Welcome(run=self.run, next_step=next_step, settled=settled, weights=self.weights))
        if hello.role == "producer":
            peer.heard = self.work.state.heard.get(peer.key, 0)
            self._take_over(peer, replaced, hello, now)
        elif hello.role == "learner":
            self.wanted, self.checkpoints = None, hello.checkpoints
            if next_step < settled:
                log.info("learner %s goes on after batch %d and trains again up to %d", hello.name, next_step, settled)
        if hello.role != "observer":
            self.lost[hello.role] += replaced is not None and replaced.identity != identity
            log.info("%s %s has joined%s", hello.role, hello.name, " again" if replaced else "")
            self.progress_at = now
        if self.stopping:
            self._send(identity, self.stopping)

    def _take_over(self, peer: Peer, replaced: Peer | None, hello: m.Hello, now: float) -> None:
        """What a producer has in hand and what it should have, after its hello."""
        if replaced is not None and replaced.identity == peer.identity:
            peer.leases = replaced.leases
        elif replaced is not None:
            self.work.release(replaced, "started again", self.seconds(now))
        lost, foreign = peer.reconcile(hello.in_hand, now)
        self.work.expire(peer, lost, f"{peer.label} has never got it", self.seconds(now))
        peer.owed.difference_update((lease.work, lease.attempt) for lease in lost)
        if foreign:
            self._send(peer.identity, m.Cancel(works=tuple(foreign), reason="it is no longer yours"))

    def _goodbye(self, peer: Peer, goodbye: m.Goodbye, now: float) -> None:
        if peer.role != "observer":
            log.info("%s has left: %s", peer.label, goodbye.reason)
        reported = self.work.state.reported[peer.key]
        if peer.role == "producer" and goodbye.generated_tokens != reported:
            unaccounted = goodbye.generated_tokens - reported
            log.error("%s generated %d tokens more than it reported", peer.label, unaccounted)
            self.unaccounted_tokens += unaccounted
        self._leave(peer, f"left: {goodbye.reason}", now)
        if goodbye.failed:
            self.fail(f"{peer.label} cannot go on: {goodbye.reason}", now)

    def _leave(self, peer: Peer, why: str, now: float) -> None:
        self.peers.remove(peer.identity)
        self.work.release(peer, why, self.seconds(now))
        if peer.role == "learner":
            self.wanted = None

    # --- producers and learner ---

    def _heartbeat(self, peer: Peer, message: m.Heartbeat, now: float) -> None:
        peer.waiting_for = message.waiting_for
        if peer.hear(message.running, now) or (peer.role == "learner" and not message.waiting_for):
            self.progress_at = now

    def _from_producer(self, peer: Peer, message: FromProducer, now: float) -> None:
        match message:
            case m.Ask():
                peer.slots, peer.version = max(0, message.slots), message.version
            case m.Loaded():
                peer.version = message.version
                self.progress_at = now

    def _rollouts(self, peer: Peer, message: m.Rollouts) -> None:
        """In the order of their numbers, each once. After a gap the producer hears what is missing and sends again."""
        if message.seq == peer.heard + 1:
            peer.heard = message.seq
            peer.reports += message.rollouts
        self._reporting[peer.identity] = peer

    def _take_reports(self, now: float) -> None:
        """Take what producers have reported since the last time: it costs less together."""
        if not self._reporting:
            return
        interrupted = self.stopping is not None and not self.stopping.final
        for peer in self._reporting.values():
            if peer.heard > self.work.state.heard.get(peer.key, 0):  # even if there is nothing in it
                reports, peer.reports = peer.reports, []
                for problem in self.work.receive(peer, reports, self.seconds(now), stopping=interrupted):
                    self.refuse(problem)
                self.progress_at = now
            self._send(peer.identity, m.Received(seq=peer.heard))
        self._reporting.clear()

    def _from_learner(self, peer: Peer, message: FromLearner, now: float) -> None:
        self.progress_at = now
        match message:
            case m.Published():
                self._published(message)
            case m.BatchRequest():
                self._batch_wanted(peer, message.step)
            case m.StepDone():
                self._step_done(peer, message, now)
            case m.Checkpointed():
                self._checkpointed(peer, message)

    def _published(self, message: m.Published) -> None:
        if self.weights is not None and message.weights.version <= self.weights.version:
            return  # said again after a hello
        self.work.published(message.weights.version, message.step)
        self.weights = message.weights
        set_version(message.weights.version)
        for producer in self.peers.of("producer"):
            self._send(producer.identity, m.NewWeights(weights=message.weights))

    def _checkpointed(self, peer: Peer, message: m.Checkpointed) -> None:
        settled = self.work.state.allocator.settled_steps
        if not message.steps or not all(0 <= step <= settled for step in message.steps):
            self.refuse(f"{peer.label} has checkpoints after batches {list(message.steps)}, {settled} are settled")
            return
        self.checkpoints = message.steps
        self.work.cover(message.steps)

    def _batch_wanted(self, peer: Peer, step: int) -> None:
        state = self.work.state
        if step < state.covered:
            self.refuse(f"{peer.label} asks for batch {step}, all before {state.covered} are in its checkpoints")
        elif step < state.allocator.settled_steps:
            self.replays.append((peer.identity, step))
        else:
            self.wanted = step

    def _step_done(self, peer: Peer, done: m.StepDone, now: float) -> None:
        settled = self.work.state.allocator.settled_steps
        if done.step > settled:
            self.fail(f"the learner is done with batch {done.step}, the allocator stands after {settled}", now)
            return
        if done.step == settled:
            try:
                self.work.settle(done, self.seconds(now))
            except ValueError as error:
                self.fail(f"the learner's account of batch {done.step} does not fit: {error}", now)
                return
        else:
            self._metrics.count("gvm_batches_repeated")
        self._send(peer.identity, m.Settled(step=done.step))

    # --- what follows from it ---

    def advance(self, now: float) -> None:
        """Do whatever the state allows now: hand out work and batches, end the run."""
        work, allocator = self.work, self.work.state.allocator
        self._take_reports(now)
        if self.stopping or self.weights is None:
            return
        learners = self.peers.of("learner")
        trained = self.config.run.steps == allocator.settled_steps
        if allocator.exhausted and not trained:
            self.fail("no rollout of any prompt can be made: all prompts are quarantined (see the log)", now)
            return
        if trained and work.state.evaluation.current is None and self.config.run.steps in self.checkpoints:
            self.work.end()
            self._end(now)
            return
        self._cancel_what_is_over()
        for peer, order in work.dispatch(self.peers.of("producer"), now):
            self._send(peer.identity, order)
        batch = work.batch(self.wanted) if learners and self.wanted is not None else None
        if batch is not None:
            self.wanted = None
            self._send(learners[0].identity, batch)

    def _cancel_what_is_over(self) -> None:
        """Tell producers which of their rollouts nothing will come of."""
        over, self.work.cancel = self.work.cancel, set()
        if not over:
            return
        for peer in self.peers.of("producer"):
            works = tuple(work for work, lease in peer.leases.items() if (work, lease.attempt) in over)
            if works:
                self._send(peer.identity, m.Cancel(works=works, reason="its visit has ended"))

    def stop(self, reason: str, now: float) -> None:
        """End the run early and in order: checkpoint, report, goodbyes."""
        if not self.stopping:
            self._begin_stop(m.Stop(reason=reason, final=False), now)

    def fail(self, reason: str, now: float) -> None:
        """As `stop`, for a failure; the first one counts."""
        if not self.stopping:
            self.failure = reason
            log.error("the run stops: %s", reason)
            self._begin_stop(m.Stop(reason=reason, final=False), now)

    def _end(self, now: float) -> None:
        self._begin_stop(m.Stop(reason="all batches are done", final=True), now)

    def _begin_stop(self, stop: m.Stop, now: float) -> None:
        self.stopping, self._stopped_at = stop, now
        for role in ("producer", "learner"):
            for peer in self.peers.of(role):
                self._send(peer.identity, stop)

    def done(self, now: float) -> bool:
        """True when the run has ended and everybody has said goodbye, or has had the time to."""
        if not self.stopping:
            return False
        waited, here = now - self._stopped_at, {peer.role for peer in self.peers.all()}
        if waited < self._farewell_s:
            return False
        producers = "producer" in here and waited <= STOP_GRACE_S
        learner = "learner" in here and waited <= self.config.stream.progress_s
        return not producers and not learner

    # --- for people ---

    @property
    def version(self) -> int:
        """Newest published policy version; -1 before the first."""
        return self.weights.version if self.weights else -1

    def seconds(self, now: float) -> float:
        """Since the run began, that of earlier processes of it included."""
        return self._seconds_before + now - self._started_at

    def waits(self, now: float) -> tuple[m.Wait, ...]:
        """What the run and its processes wait for."""
        return self.waiting.since(picture.waits(self), now)

    def status(self, now: float) -> m.Status:
        return picture.status(self, now)

    def report(self, now: float) -> dict[str, Any]:
        """The content of report.json, once the run is done."""
        return picture.report(self, now)

    def _send(self, identity: bytes, message: m.ToPeer) -> None:
        self.outbox.append((identity, message))
