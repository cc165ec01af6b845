"""Work in hand: credits become leased work items, results become closed groups with what a learner needs of them.

Joins the ledgers of training and evaluation to the payload (tokens, log-probs) that the allocator library never sees.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from gvm_stream.allocator.evaluation import Evaluation
from gvm_stream.allocator.from_config import allocator_settings
from gvm_stream.allocator.ledger import Reception
from gvm_stream.allocator.online import OnlineAllocator
from gvm_stream.allocator.outcome_check import energy_problem
from gvm_stream.allocator.peers import Lease, Peer
from gvm_stream.allocator.types import (
    ClosedGroup,
    Expired,
    Failed,
    Fate,
    Outcome,
    PromptId,
    Scored,
    Unscorable,
    WorkItem,
)
from gvm_stream.config import Config
from gvm_stream.data.prompts import Prompt, PromptSet
from gvm_stream.metrics import Metrics
from gvm_stream.verify.flaky import FlakyPrompts
from gvm_stream.wire import messages as m
from gvm_stream.wire.check import rollout_problem

log = logging.getLogger(__name__)

ORDER_CHUNK = 16
"""Orders a producer gets before the next one's turn: keeps siblings together and the load even."""


class Dispatcher:
    def __init__(self, config: Config, prompts: PromptSet, metrics: Metrics) -> None:
        self._prompts: dict[str, Prompt] = {p.id: p for p in (*prompts.train, *prompts.heldout)}
        self._metrics = metrics
        self.flaky = FlakyPrompts(config.verifier.flaky_share)
        self._quarantine_flaky = config.verifier.quarantine_flaky
        self._learner_measures = config.learner.energies != "off"
        """Energies come from the learner: the producers' estimates are in another unit."""
        self._payload: dict[int, m.Rollout] = {}
        """Scored training rollouts until the learner is done with their batch."""
        self.cancel: set[tuple[int, int]] = set()
        """(work, attempt) that run for nothing: their visit has ended."""
        settings = allocator_settings(config.allocation, max_tokens=config.sampling.max_tokens, steps=config.run.steps)
        self.allocator = OnlineAllocator(settings, seed=config.run.seed)
        self.allocator.add(p.id for p in prompts.train)
        heldout = [p.id for p in prompts.heldout[: config.eval.prompts]]
        self.evaluation = Evaluation(heldout, self.allocator.account, config.allocation.max_attempts)

    def dispatch(self, producers: list[Peer], now: float) -> Iterator[tuple[Peer, m.Work]]:
        """Turn credits into work, a chunk for each producer in turn."""
        waiting = deque(peer for peer in producers if peer.credits and peer.version >= 0 and not peer.owed)
        while waiting:
            peer = waiting.popleft()
            slots = min(peer.credits, ORDER_CHUNK)
            items = self.evaluation.ask(slots, peer.version)
            items += self.allocator.ask(slots - len(items), peer.version)
            if not items:
                continue
            for item in items:
                peer.take(item, now)
            yield peer, m.Work(orders=tuple(self._order(item) for item in items))
            if peer.credits:
                waiting.append(peer)

    def receive(self, peer: Peer, rollout: m.Rollout) -> str:
        """Take a result; what is wrong with it, if anything, comes back in words (it then counts as failed)."""
        outcome: Outcome = rollout.outcome
        problem = rollout_problem(rollout)
        if problem:
            outcome = Failed(reason=problem, tokens=max(0, outcome.tokens))
        lease = peer.leases.get(rollout.work)
        if lease is not None and lease.attempt == rollout.attempt:
            del peer.leases[rollout.work]
        peer.owed.discard((rollout.work, rollout.attempt))
        peer.credits += 1
        peer.reported_tokens += outcome.tokens
        if self._learner_measures and isinstance(outcome, Scored):
            outcome = msgspec.structs.replace(outcome, energy=None)
        accepted = self._tell(rollout.work, rollout.attempt, outcome, rollout)
        if accepted and lease is not None:
            self._watch_verdict(lease.prompt, rollout, outcome)
        if accepted and isinstance(outcome, Scored):
            self._metrics.observe("gvm_response_tokens", outcome.tokens)
        return problem and f"work {rollout.work} of {peer.label}: {problem}"

    def _watch_verdict(self, prompt: PromptId, rollout: m.Rollout, outcome: Outcome) -> None:
        """Tell prompts whose verdicts cannot be trusted."""
        if not isinstance(outcome, Scored | Unscorable):
            return
        digest = hashlib.blake2b(rollout.tokens, digest_size=16).digest()
        self.flaky.observe(prompt, digest, outcome.reward if isinstance(outcome, Scored) else None)
        if self._quarantine_flaky and rollout.work > 0 and self.flaky.is_flaky(prompt):
            log.warning("prompt %s is quarantined: its verdicts cannot be trusted", prompt)
            self.allocator.quarantine(prompt)

    def expire(self, peer: Peer, lease: Lease, why: str) -> None:
        """The owner of a lease is dead or stuck: its work goes back."""
        log.debug("work %d expired: %s", lease.work, why)
        del peer.leases[lease.work]
        peer.owed.add((lease.work, lease.attempt))
        self._tell(lease.work, lease.attempt, Expired(reason=why, tokens=lease.tokens))

    def release(self, peer: Peer, why: str) -> None:
        for lease in list(peer.leases.values()):
            self.expire(peer, lease, f"{peer.label} {why}")

    def batch(self, step: int) -> m.Batch | None:
        """A complete batch, with payload; None while it is not complete."""
        groups = self.allocator.batch(step)
        if groups is None:
            return None
        return m.Batch(step=step, groups=tuple(self._train_group(group) for group in groups))

    def settle(self, done: m.StepDone) -> None:
        """The learner is done with a batch. Raises ValueError if its account of it does not fit."""
        for work, energy in done.energies.items():
            if problem := energy_problem(energy):
                log.warning("the learner's energy of work %d is not used: %s", work, problem)
                self._metrics.count("gvm_messages_refused")
            else:
                self.allocator.observe_energy(work, energy)
        self.allocator.settle(done.step, done.version, {Fate(name): works for name, works in done.fates.items()})
        for works in done.fates.values():
            for work in works:
                del self._payload[work]

    def withdraw(self) -> None:
        """Issue nothing more. What runs ends as its producers report it."""
        self.allocator.close()
        self.evaluation.withdraw()

    def restore(self, state: dict[str, Any]) -> None:
        self.allocator.load_state_dict(state)
        self.allocator.redo_unsettled()
        self._payload.clear()

    @property
    def num_running(self) -> int:
        return self.allocator.ledger.num_running + self.evaluation.ledger.num_running

    @property
    def conserved(self) -> bool:
        """Attempts: issued = running + ended."""
        return self.allocator.ledger.conserved() and self.evaluation.ledger.conserved()

    @property
    def rollouts_trained(self) -> int:
        """Training rollouts that the learner is done with."""
        rollouts = self.allocator.account.rollouts
        return rollouts[Fate.TRAINED] + rollouts[Fate.ZERO_SIGNAL] + rollouts[Fate.STALE]

    def _tell(self, work: int, attempt: int, outcome: Outcome, payload: m.Rollout | None = None) -> bool:
        """True if this outcome is the one that counts."""
        if work < 0:
            reception = self.evaluation.tell(work, attempt, outcome)
        else:
            told = self.allocator.tell(work, attempt, outcome)
            reception = told.reception
            if told.kept and payload is not None:
                self._payload[work] = payload
            self.cancel.update(told.cancel)
            for group in told.closed:
                self._closed(group)
        if reception is not Reception.ACCEPTED:
            self._metrics.count("gvm_rollouts_duplicate")
            return False
        self._metrics.count("gvm_rollouts", label=type(outcome).__name__.lower())
        return True

    def _closed(self, group: ClosedGroup) -> None:
        self._metrics.observe("gvm_group_rollouts", len(group.members))
        for work in group.unused:
            del self._payload[work]
        if not group.members and not group.unused:
            log.warning("prompt %s: none of its %d rollouts has a verdict", group.prompt, group.planned)

    def _order(self, item: WorkItem) -> m.WorkOrder:
        prompt = self._prompts[item.prompt]
        return m.WorkOrder(
            work=item.work,
            attempt=item.attempt,
            prompt=item.prompt,
            prompt_tokens=prompt.tokens,
            answer=prompt.answer,
            verifier=prompt.verifier,
        )

    def _train_group(self, group: ClosedGroup) -> m.TrainGroup:
        rollouts = []
        for member in group.members:
            payload = self._payload[member.work]
            rollouts.append(
                m.TrainRollout(
                    work=member.work,
                    reward=member.reward,
                    tokens=payload.tokens,
                    logprobs=payload.logprobs,
                    spans=payload.spans,
                    truncated=isinstance(payload.outcome, Scored) and payload.outcome.truncated,
                    coefficient=member.coefficient,
                )
            )
        return m.TrainGroup(
            group=group.group,
            prompt=group.prompt,
            prompt_tokens=self._prompts[group.prompt].tokens,
            weight=group.weight,
            prior=group.prior,
            shadow=group.shadow,
            rollouts=tuple(rollouts),
        )
