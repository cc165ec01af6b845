"""The broker: one state machine between the peers' messages and the allocator library. Pure: messages and the time come
in by `receive` and `tick`, messages go out by `outbox`, states to write by `saves`.

A run goes through: the learner publishes its first weights and producers load them; a held-out evaluation; training;
the final evaluation; stop. Whatever ends a run early goes through the same stop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from gvm_stream.allocator import picture
from gvm_stream.allocator.dispatcher import Dispatcher
from gvm_stream.allocator.peers import Peer, PeerTable
from gvm_stream.allocator.record import Record
from gvm_stream.allocator.types import Fate
from gvm_stream.config import Config
from gvm_stream.data.prompts import PromptSet
from gvm_stream.errors import StreamError
from gvm_stream.metrics import Metrics
from gvm_stream.wire import messages as m

log = logging.getLogger(__name__)

STOP_GRACE_S = 10.0
"""Time for the producers' goodbyes after a stop. The learner has `stream.progress_s`: it saves its last checkpoint."""

FromProducer = m.Ask | m.Loaded | m.Rollouts
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
        load_state: Callable[[tuple[int, ...]], dict[str, Any] | None] | None = None,
    ) -> None:
        """`load_state` is given when a run is resumed: from the learner's checkpoints to the newest state saved with
        one of them, or None to begin at the beginning."""
        self.config, self._agreed, self._metrics, self._run = config, agreed, metrics, run
        self._load_state = load_state
        self.work = Dispatcher(config, prompts, metrics)
        self.peers = PeerTable()
        self.outbox: deque[tuple[bytes, m.ToPeer]] = deque()
        self.saves: deque[tuple[int, dict[str, Any]]] = deque()
        self.failure = ""
        """Why the run failed; empty while it has not."""
        self.record = Record()
        self._evaluations_recorded = 0
        self.weights: m.WeightsInfo | None = None
        self.wanted: int | None = None
        """Batch the learner waits for."""
        self._started_at, self._progress_at = now, now
        self.stopping: m.Stop | None = None
        self._stopped_at = 0.0
        self.unaccounted_tokens = 0

    # --- what comes in ---

    def receive(self, identity: bytes, message: m.ToAllocator, now: float) -> None:
        if isinstance(message, m.Hello):
            self._hello(identity, message, now)
            return
        peer = self.peers.get(identity)
        if peer is None:
            self._send(identity, m.Refused(reason="the allocator does not know this process (any more)"))
            return
        peer.heard_at, peer.unreachable_at = now, None
        match message:
            case m.Heartbeat():
                peer.waiting_for = message.waiting_for
                if peer.hear(message.running, now) or (peer.role == "learner" and not message.waiting_for):
                    self._progress_at = now
            case m.StatusRequest():
                self._send(identity, self.status(now))
            case m.Goodbye():
                self._goodbye(peer, message, now)
            case m.Ask() | m.Loaded() | m.Rollouts() if peer.role == "producer":
                self._from_producer(peer, message, now)
            case m.Published() | m.BatchRequest() | m.StepDone() | m.Checkpointed() if peer.role == "learner":
                self._from_learner(message, now)
            case _:
                self.refuse(f"{peer.label} sent {type(message).__name__}, which is not for its role")
        self._advance(now)

    def refuse(self, why: str) -> None:
        """Count a message that cannot be used. It never ends the service."""
        log.warning("message refused: %s", why)
        self._metrics.count("gvm_messages_refused")

    def tick(self, now: float) -> None:
        """To be called about once a heartbeat: what has *not* happened shows only by the clock."""
        stream = self.config.stream
        for peer, why in self.peers.dead(now, stream):
            if peer.role != "observer":
                log.warning("%s is taken for dead: %s", peer.label, why)
            self._leave(peer, why, now)
        for peer in self.peers.of("producer"):
            stalled = peer.stalled(now, stream.progress_s)
            for lease in stalled:
                self.work.expire(peer, lease, f"no new token for {stream.progress_s:g} s")
            if stalled:
                self._send(peer.identity, m.Cancel(works=tuple(s.work for s in stalled), reason="no progress"))
        if not self.stopping and now - self._progress_at > stream.progress_s:
            waits = "; ".join(self.waits()) or "nothing that it knows of"
            self.fail(f"no progress for {stream.progress_s:g} s; the run waits for {waits}", now)
        self._advance(now)
        for peer in self.peers.all():
            self._send(peer.identity, m.Alive())
        picture.export(self, self._metrics)

    def unreachable(self, identity: bytes, now: float) -> None:
        """A message could not be sent: the connection is gone, for now or for good."""
        peer = self.peers.get(identity)
        if peer is not None and peer.unreachable_at is None:
            peer.unreachable_at = now

    # --- joining and leaving ---

    def _hello(self, identity: bytes, hello: m.Hello, now: float) -> None:
        try:
            self._check_hello(hello)
            replaced = self.peers.add(Peer(identity, hello.role, hello.name, hello.epoch, heard_at=now))
        except StreamError as error:
            log.warning("%s %s refused: %s", hello.role, hello.name, error)
            self._send(identity, m.Refused(reason=str(error)))
            return
        if replaced is not None:
            self.work.release(replaced, "started again")
        if hello.role != "observer":
            log.info("%s %s has joined", hello.role, hello.name)
            self._progress_at = now
        welcome = m.Welcome(
            run=self._run,
            next_step=self.work.allocator.settled_steps,
            weights=self.weights,
        )
        self._send(identity, welcome)
        if self.stopping:
            self._send(identity, self.stopping)
        self._advance(now)

    def _check_hello(self, hello: m.Hello) -> None:
        if hello.protocol != m.PROTOCOL:
            raise StreamError(
                f"it speaks protocol {hello.protocol}, the allocator {m.PROTOCOL}: use the same gvm-stream everywhere"
            )
        if hello.role == "observer":
            return
        for key, ours in self._agreed.items():
            theirs = hello.agreed.get(key, "nothing")
            if theirs != ours:
                raise StreamError(
                    f"its configuration has {key} = {theirs}, the allocator's has {ours}: they must be the same"
                )
        if hello.role == "learner":
            self._check_learner(hello)

    def _check_learner(self, hello: m.Hello) -> None:
        if any(peer.name != hello.name for peer in self.peers.of("learner")):
            raise StreamError("the run has a learner already")
        if self._load_state is not None and self.weights is None:
            self._restore(self._load_state(hello.checkpoints))
        settled = self.work.allocator.settled_steps
        if settled and settled not in hello.checkpoints:
            raise StreamError(
                f"the allocator stands after batch {settled}, for which the learner has no checkpoint: stop the run "
                "and start it again with --resume"
            )

    def _goodbye(self, peer: Peer, goodbye: m.Goodbye, now: float) -> None:
        if peer.role != "observer":
            log.info("%s has left: %s", peer.label, goodbye.reason)
        if peer.role == "producer" and goodbye.generated_tokens != peer.reported_tokens:
            unaccounted = goodbye.generated_tokens - peer.reported_tokens
            log.error("%s generated %d tokens more than it reported", peer.label, unaccounted)
            self.unaccounted_tokens += unaccounted
        self._leave(peer, f"left: {goodbye.reason}", now)

    def _leave(self, peer: Peer, why: str, now: float) -> None:
        self.peers.remove(peer.identity)
        self.work.release(peer, why)
        if peer.role == "learner" and not self.stopping:
            self.fail(f"the learner is gone ({why})", now)

    # --- producers and learner ---

    def _from_producer(self, peer: Peer, message: FromProducer, now: float) -> None:
        self._progress_at = now
        match message:
            case m.Ask():
                peer.credits += max(0, message.credits)
                peer.version = message.version
            case m.Loaded():
                peer.version = message.version
            case m.Rollouts():
                for rollout in message.rollouts:
                    problem = self.work.receive(peer, rollout)
                    if problem:
                        self.refuse(problem)

    def _from_learner(self, message: FromLearner, now: float) -> None:
        self._progress_at = now
        match message:
            case m.Published():
                self._published(message)
            case m.BatchRequest():
                self.wanted = message.step
            case m.StepDone():
                self._step_done(message, now)
            case m.Checkpointed():
                self._checkpointed(message, now)

    def _published(self, message: m.Published) -> None:
        if self.weights is None:
            self.work.allocator.start(message.weights.version)
            self._evaluate_if_due(message.step, message.weights.version)
        self.weights = message.weights
        for producer in self.peers.of("producer"):
            self._send(producer.identity, m.NewWeights(weights=message.weights))

    def _step_done(self, done: m.StepDone, now: float) -> None:
        try:
            self.work.settle(done)
        except ValueError as error:
            self.fail(f"the learner's account of batch {done.step} does not fit: {error}", now)
            return
        generated = self.work.allocator.account.generated
        self.record.step_done(done, seconds=self.seconds(now), generated=generated, rollouts=self.work.rollouts_trained)
        self._evaluate_if_due(self.work.allocator.settled_steps, done.version)

    def _evaluate_if_due(self, step: int, version: int) -> None:
        evaluate = self.config.eval
        if any(row.step == step for row in self.record.evaluations):
            return  # by an earlier process of this run
        if step in (0, self.config.run.steps):
            self.work.evaluation.schedule(step, version, evaluate.samples)
        elif evaluate.every_steps and step % evaluate.every_steps == 0:
            self.work.evaluation.schedule(step, version, evaluate.curve_samples)

    def _checkpointed(self, message: m.Checkpointed, now: float) -> None:
        settled = self.work.allocator.settled_steps
        if message.step != settled:
            self.fail(f"the learner saved its state after batch {message.step}, {settled} are settled", now)
            return
        record = msgspec.structs.replace(self.record, seconds_before=self.seconds(now))
        state = {"allocator": self.work.allocator.state_dict(), "record": msgspec.to_builtins(record)}
        self.saves.append((message.step, state))

    def _restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            log.info("no checkpoint to continue from: the run begins at the beginning")
            return
        try:
            self.work.restore(state["allocator"])
        except ValueError as error:
            raise StreamError(f"the saved state does not fit this run: {error}") from error
        self.record = msgspec.convert(state["record"], Record)
        log.info("continuing after batch %d", self.work.allocator.settled_steps)

    # --- what follows from it ---

    def _advance(self, now: float) -> None:
        """Do whatever the state allows now: record evaluations, hand out work and batches, end the run."""
        work = self.work
        for result in work.evaluation.finished[self._evaluations_recorded :]:
            self._evaluations_recorded += 1
            account = work.allocator.account
            row = self.record.evaluated(
                result,
                seconds=self.seconds(now),
                generated=account.generated,
                evaluation=account.tokens[Fate.EVALUATION],
            )
            self._metrics.set("gvm_heldout_accuracy", row.accuracy)
            log.info("held-out accuracy after %d batches: %.3f", row.step, row.accuracy)
        if self.stopping or self.weights is None:
            return
        if work.allocator.exhausted:
            self.fail("no rollout of any prompt can be made: all prompts are quarantined (see the log)", now)
            return
        if work.allocator.settled_steps == self.config.run.steps and work.evaluation.current is None:
            self._begin_stop(m.Stop(reason="all batches are done", final=True), now)
            return
        self._cancel_what_is_over()
        for peer, order in work.dispatch(self.peers.of("producer"), now):
            self._send(peer.identity, order)
        learners = self.peers.of("learner")
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

    def _begin_stop(self, stop: m.Stop, now: float) -> None:
        self.stopping, self._stopped_at = stop, now
        self.work.withdraw()
        for role in ("producer", "learner"):
            for peer in self.peers.of(role):
                self._send(peer.identity, stop)

    def done(self, now: float) -> bool:
        """True when the run has ended and everybody has said goodbye, or has had the time to."""
        if not self.stopping:
            return False
        waited = now - self._stopped_at
        producers = bool(self.peers.of("producer")) and waited <= STOP_GRACE_S
        learner = bool(self.peers.of("learner")) and waited <= self.config.stream.progress_s
        return not producers and not learner

    # --- for people ---

    @property
    def version(self) -> int:
        """Newest published policy version; -1 before the first."""
        return self.weights.version if self.weights else -1

    def seconds(self, now: float) -> float:
        return self.record.seconds_before + now - self._started_at

    def waits(self) -> list[str]:
        """What the run waits for, in words."""
        return picture.waits(self)

    def status(self, now: float) -> m.Status:
        return picture.status(self, now)

    def report(self, now: float) -> dict[str, Any]:
        """The content of report.json, once the run is done."""
        return picture.report(self, now)

    def _send(self, identity: bytes, message: m.ToPeer) -> None:
        self.outbox.append((identity, message))
