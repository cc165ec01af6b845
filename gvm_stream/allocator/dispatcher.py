"""Work in hand: credits become leased work items, results become closed groups with what a learner needs of them.

Every change of the run's state goes through here: it is applied, and noted for the journal. Payloads (tokens,
log-probs), which the state never sees, go to the spool beside it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

from gvm_stream.allocator.journal import (
    Asked,
    Covered,
    Ended,
    Entry,
    Lost,
    Published,
    Reported,
    Restarted,
    Result,
    Trained,
    encode_entry,
)
from gvm_stream.allocator.outcome_check import energy_problem
from gvm_stream.allocator.peers import Lease, Peer
from gvm_stream.allocator.run_state import Effects, RunState
from gvm_stream.allocator.spool import Changes
from gvm_stream.allocator.tally import Tally
from gvm_stream.allocator.types import (
    Cancelled,
    ClosedGroup,
    Expired,
    Failed,
    Fate,
    Outcome,
    Scored,
    WorkItem,
)
from gvm_stream.config import Config
from gvm_stream.data.prompts import Prompt, PromptSet
from gvm_stream.metrics import Metrics
from gvm_stream.wire import messages as m
from gvm_stream.wire.check import open_rollout

log = logging.getLogger(__name__)

ORDER_CHUNK = 16
"""Orders a producer gets before the next one's turn: keeps siblings together and the load even."""
ENTRIES_PER_SNAPSHOT = 10_000
"""A second or so of replay, or as many as there are prompts: saving the state takes time in their number."""

NOTHING = Changes()

_encode = msgspec.msgpack.Encoder().encode


class Dispatcher:
    def __init__(self, config: Config, prompts: PromptSet, metrics: Metrics, *, durable: bool) -> None:
        """`durable`: changes are written down."""
        self._durable = durable
        self._prompts: dict[str, Prompt] = {p.id: p for p in (*prompts.train, *prompts.heldout)}
        self._metrics = metrics
        self._max_tokens = config.sampling.max_tokens
        self._learner_measures = config.learner.energies != "off"
        """Energies come from the learner: the producers' estimates are in another unit."""
        heldout = [p.id for p in prompts.heldout[: config.eval.prompts]]
        self.state = RunState(config, (p.id for p in prompts.train), heldout)
        self.cancel: set[tuple[int, int]] = set()
        """(work, attempt) that run for nothing: their visit has ended."""
        self._batch: m.Batch | None = None
        """The one that was last complete."""
        self.tally = Tally()
        self._changes = Changes()
        self._entries = 0
        """Since the last snapshot."""
        self._entries_per_snapshot = max(ENTRIES_PER_SNAPSHOT, len(prompts.train))

    # --- what is to be written down ---

    def restore(self, snapshot: bytes | None, journal: Sequence[bytes]) -> None:
        """Continue from what the spool has. Raises StreamError if it does not fit this run."""
        from gvm_stream.allocator.recovery import recover

        recover(self.state, snapshot, journal)
        self._entries = len(journal)
        if snapshot is not None or journal:
            entry = Restarted()
            self.state.apply(entry)
            self._note(entry)

    def take_changes(self, *, snapshot: bool = False) -> Changes | None:
        """What has changed since the last call; None: nothing. With `snapshot`, the state goes with it."""
        if snapshot or self._entries >= self._entries_per_snapshot:
            self._changes.snapshot = _encode(self.state.state_dict())
            self._entries = 0
        elif self._changes == NOTHING:
            return None
        taken, self._changes = self._changes, Changes()
        return taken

    # --- producers ---

    def dispatch(self, producers: Sequence[Peer], now: float) -> Iterator[tuple[Peer, m.Work]]:
        """Turn credits into work, a chunk for each producer in turn."""
        waiting = deque(peer for peer in producers if peer.takes_work)
        while waiting:
            peer = waiting.popleft()
            if not self.state.can_issue(peer.version):
                continue
            slots = min(peer.credits, ORDER_CHUNK)
            items = self.state.apply_asked(peer.key, slots, peer.version)
            self._note(Asked(peer.key, slots, peer.version, len(items)))
            if not items:
                continue
            for item in items:
                peer.take(item, now)
            yield peer, m.Work(orders=tuple(self._order(item) for item in items))
            if peer.takes_work:
                waiting.append(peer)

    def receive(self, peer: Peer, rollouts: Sequence[m.Rollout], seconds: float, *, stopping: bool) -> list[str]:
        """Take results, up to message `peer.heard`; what is wrong with any, which then counts as failed, comes back in
        words.

        With `stopping`, what a producer gives up is work that nobody has done, not work that nobody wants.
        """
        problems: list[str] = []
        results = []
        payloads: dict[tuple[int, int], memoryview] = {}
        for rollout in rollouts:
            work, digest = rollout.work, 0
            outcome: Outcome = rollout.outcome
            payload, problem = open_rollout(rollout)
            if outcome.tokens > self._max_tokens:
                problem = f"{outcome.tokens} tokens, sampling.max_tokens is {self._max_tokens}"
            if problem:
                problems.append(f"work {work} of {peer.label}: {problem}")
                outcome = Failed(reason=problem, tokens=max(0, min(outcome.tokens, self._max_tokens)))
            elif payload is not None:
                digest = xxhash.xxh3_64_intdigest(payload.tokens)
                payloads.setdefault((work, rollout.attempt), rollout.payload)  # of two, the first one counts
                if self._learner_measures and isinstance(outcome, Scored) and outcome.energy is not None:
                    outcome = msgspec.structs.replace(outcome, energy=None)
            elif type(outcome) is Cancelled and stopping:
                outcome = Expired(reason="the run was interrupted", tokens=outcome.tokens)
            results.append(Result(work, rollout.attempt, outcome, digest))
            peer.returned(work, rollout.attempt)
        entry = Reported(peer.key, peer.heard, tuple(results), seconds)
        effects = self.state.apply_reported(entry)
        self._note(entry)
        self._changes.rollouts += [(key[0], payloads[key]) for key in effects.kept]
        self._take_effect(effects)
        return problems

    def expire(self, peer: Peer, leases: Sequence[Lease], why: str, seconds: float) -> None:
        """The owner of these leases is dead or stuck: its work goes back."""
        if not leases:
            return
        items = ((lease.work, lease.attempt, min(lease.tokens, self._max_tokens)) for lease in leases)
        entry = Lost(why, tuple(items), seconds)
        effects = self.state.apply_lost(entry)
        self._note(entry)
        self._take_effect(effects)
        for lease in leases:
            log.debug("work %d expired: %s", lease.work, why)
            peer.lose(lease)

    def release(self, peer: Peer, why: str, seconds: float) -> None:
        self.expire(peer, list(peer.leases.values()), f"{peer.label} {why}", seconds)

    # --- the learner ---

    def published(self, version: int, step: int) -> None:
        entry = Published(version, step)
        self.state.apply_published(entry)
        self._note(entry)

    def batch(self, step: int) -> m.Batch | None:
        """A complete batch, its payloads left out (`wire.payload.fill` puts them in); None while it is not complete."""
        if self._batch is None or self._batch.step != step:
            groups = self.state.allocator.batch(step)
            if groups is None:
                return None
            self._batch = m.Batch(step=step, groups=tuple(map(self._train_group, groups)))
        return self._batch

    def settle(self, done: m.StepDone, seconds: float) -> None:
        """The learner is done with a batch. Raises ValueError if its account of it does not fit."""
        energies = {}
        for work, energy in done.energies.items():
            if problem := energy_problem(energy):
                log.warning("the learner's energy of work %d is not used: %s", work, problem)
                self._metrics.count("gvm_messages_refused")
            else:
                energies[work] = energy
        done = msgspec.structs.replace(done, energies=energies)
        batch, groups = self.batch(done.step), self.state.allocator.batch(done.step)
        entry = Trained(done, seconds)
        self.state.apply_trained(entry)
        self._note(entry)
        assert batch is not None
        assert groups is not None, "a batch that is settled was complete"
        works = tuple(rollout.work for group in batch.groups for rollout in group.rollouts)
        self._changes.settled.append((done.step, _encode(batch), works))
        self._count_stale(groups, set(done.fates.get(Fate.STALE, ())))

    def cover(self, steps: Sequence[int]) -> None:
        """The learner has complete checkpoints behind so many batches each: what none of them needs may go."""
        oldest = min(steps)
        if oldest > self.state.covered:
            entry = Covered(oldest)
            self.state.apply(entry)
            self._note(entry)
            self._changes.covered = oldest

    def end(self) -> None:
        """Nothing is left to do: an allocator that is killed over the goodbyes must not wait for who has gone."""
        entry = Ended()
        self.state.apply(entry)
        self._note(entry)

    # --- inside ---

    def _note(self, entry: Entry) -> None:
        if not self._durable:
            return
        self._changes.journal.append(encode_entry(entry))
        self._entries += 1

    def _take_effect(self, effects: Effects) -> None:
        self._changes.forget += effects.unused
        self.cancel.update(effects.cancel)
        self.tally.ended(effects.closed)
        for group in effects.closed:
            if not group.members and not group.unused:
                log.warning("prompt %s: none of its %d rollouts has a verdict", group.prompt, group.planned)
        for row in effects.evaluated:
            self._metrics.set("gvm_heldout_accuracy", row.accuracy)
            log.info("held-out accuracy after %d batches: %.3f", row.step, row.accuracy)

    def _count_stale(self, groups: Sequence[ClosedGroup], stale: set[int]) -> None:
        """Whom age costs most: long responses, or hard prompts?"""
        for group in groups if stale else ():
            acceptance = group.successes / (group.successes + group.failures)
            for member in group.members:
                if member.work in stale:
                    self._metrics.observe("gvm_stale_acceptance", acceptance)
                    self._metrics.observe("gvm_stale_response_tokens", member.tokens)

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
        return m.TrainGroup(
            group=group.group,
            prompt=group.prompt,
            prompt_tokens=self._prompts[group.prompt].tokens,
            weight=group.weight,
            prior=group.prior,
            shadow=group.shadow,
            rollouts=tuple(
                m.TrainRollout(
                    work=member.work,
                    reward=member.reward,
                    tokens=b"",
                    logprobs=b"",
                    spans=(),
                    truncated=False,
                    lag=self.state.lag(member.oldest_version, group.step),
                    coefficient=member.coefficient,
                )
                for member in group.members
            ),
        )
