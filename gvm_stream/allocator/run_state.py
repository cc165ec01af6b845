"""The state of a run, as far as it must survive: the allocator, the evaluation, who has which work, the history.

Pure and deterministic. It changes by `apply_...` with an entry of the journal and in no other way, so the newest saved
state and the entries after it restore it exactly.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from gvm_stream.allocator.evaluation import Evaluation
from gvm_stream.allocator.from_config import allocator_settings
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
)
from gvm_stream.allocator.ledger import Reception
from gvm_stream.allocator.online import OnlineAllocator
from gvm_stream.allocator.outcome_check import JUDGED
from gvm_stream.allocator.record import EvalRow, Record
from gvm_stream.allocator.types import (
    ClosedGroup,
    Expired,
    Fate,
    PromptId,
    Scored,
    WorkItem,
)
from gvm_stream.config import Config
from gvm_stream.errors import StreamError
from gvm_stream.verify.flaky import FlakyPrompts

log = logging.getLogger(__name__)

STATE_FORMAT = 1


class Effects:
    """What outcomes have led to, beyond the state."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, int]] = []
        """(work, attempt) whose payload is needed until their batch is trained on."""
        self.unused: list[int] = []
        """Kept works that nobody will ask for."""
        self.cancel: list[tuple[int, int]] = []
        """(work, attempt) that run for nothing: their visit has ended."""
        self.closed: list[ClosedGroup] = []
        self.evaluated: list[EvalRow] = []


class RunState:
    def __init__(self, config: Config, train: Iterable[PromptId], heldout: list[PromptId]) -> None:
        self._config = config
        settings = allocator_settings(config.allocation, max_tokens=config.sampling.max_tokens, steps=config.run.steps)
        self.allocator = OnlineAllocator(settings, seed=config.run.seed)
        self.allocator.add(train)
        self.evaluation = Evaluation(heldout, self.allocator.account, config.allocation.max_attempts)
        self.flaky = FlakyPrompts(config.verifier.flaky_share)
        self.record = Record()
        self.owners: dict[int, str] = {}
        """Work in hand -> identity of the producer that has it."""
        self.heard: dict[str, int] = {}
        """Identity of a producer -> its newest message of rollouts."""
        self.reported: Counter[str] = Counter()
        """Identity of a producer -> tokens of all outcomes that it has sent."""
        self.covered = 0
        """Batches before this one are in every checkpoint that there is."""
        self.seconds = 0.0
        """Since the run began, when it was last heard of."""
        self.started = False
        """True once the learner has published."""
        self.ended = False
        """True once there is nothing left to do."""
        self._steps: dict[int, int] = {}
        """Policy version -> training batches behind it."""

    # --- changes ---

    def apply(self, entry: Entry) -> None:
        """Repeat an entry of the journal. Raises StreamError if it does not fit the state."""
        match entry:
            case Asked():
                items = self.apply_asked(entry.owner, entry.slots, entry.version)
                if len(items) != entry.issued:
                    raise StreamError(
                        f"the journal does not fit the configuration: {entry.issued} rollouts were issued, now "
                        f"{len(items)} would be; resume the run once with the configuration it had"
                    )
            case Reported():
                self.apply_reported(entry)
            case Lost():
                self.apply_lost(entry)
            case Published():
                self.apply_published(entry)
            case Trained():
                self.apply_trained(entry)
            case Covered():
                self.covered = entry.step
            case Ended():
                self.ended = True
            case Restarted():
                self.record.restarts += 1

    def can_issue(self, version: int) -> bool:
        """False if `apply_asked` would find nothing for a producer with policy `version`, and change nothing."""
        return self.evaluation.can_issue(version) or self.allocator.can_issue(version)

    def apply_asked(self, owner: str, slots: int, version: int) -> list[WorkItem]:
        items = self.evaluation.ask(slots, version)
        items += self.allocator.ask(slots - len(items), version)
        for item in items:
            self.owners[item.work] = owner
        return items

    def apply_reported(self, entry: Reported) -> Effects:
        self.heard[entry.owner], self.seconds = entry.seq, entry.seconds
        effects = Effects()
        for result in entry.results:
            self.reported[entry.owner] += result.outcome.tokens
            self._tell(result, effects)
        return effects

    def apply_lost(self, entry: Lost) -> Effects:
        effects, self.seconds = Effects(), entry.seconds
        for work, attempt, tokens in entry.items:
            self._tell(Result(work, attempt, Expired(reason=entry.reason, tokens=tokens)), effects)
        return effects

    def apply_published(self, entry: Published) -> None:
        self._steps[entry.version] = entry.step
        if entry.step == self.allocator.settled_steps:
            self.allocator.start(entry.version)
        if not self.started:
            self.started = True
            self._evaluate_if_due(entry.step, entry.version)

    def apply_trained(self, entry: Trained) -> None:
        """Raises ValueError if the account does not fit the batch; nothing has changed then, but energies."""
        done, allocator = entry.done, self.allocator
        for work, energy in done.energies.items():
            allocator.observe_energy(work, energy)
        allocator.settle(done.step, done.version, {Fate(name): works for name, works in done.fates.items()})
        self._steps[done.version] = allocator.settled_steps
        oldest = allocator.settled_steps - self._config.allocation.max_lag
        self._steps = {version: step for version, step in self._steps.items() if step >= oldest}
        self.seconds = entry.seconds
        self.record.step_done(
            done, seconds=entry.seconds, generated=allocator.account.generated, rollouts=self.rollouts_trained
        )
        self._evaluate_if_due(allocator.settled_steps, done.version)

    # --- questions ---

    def lag(self, version: int, step: int) -> int:
        """Training batches between the policy that batch `step` was made for and policy `version`."""
        return max(0, step - self._steps.get(version, 0))  # one long forgotten is as old as can be

    @property
    def newest_version(self) -> int:
        """That has ever been heard of; -1 before the first."""
        return max(self._steps, default=-1)

    def attempt_of(self, work: int) -> int:
        """The attempt at a work in hand."""
        ledger = self.evaluation.ledger if work < 0 else self.allocator.ledger
        item = ledger.item(work)
        assert item is not None, "work in somebody's hands is running"
        return item.attempt

    @property
    def num_running(self) -> int:
        return self.allocator.ledger.num_running + self.evaluation.ledger.num_running

    @property
    def conserved(self) -> bool:
        """Attempts: issued = running + ended. Tokens: reported = the sum of the fates."""
        ledgers = self.allocator.ledger, self.evaluation.ledger
        tokens = sum(ledger.tokens for ledger in ledgers) == self.allocator.account.generated
        return tokens and all(ledger.conserved() for ledger in ledgers)

    @property
    def rollouts_trained(self) -> int:
        """Training rollouts that the learner is done with."""
        rollouts = self.allocator.account.rollouts
        return rollouts[Fate.TRAINED] + rollouts[Fate.ZERO_SIGNAL] + rollouts[Fate.STALE]

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "allocator": self.allocator.state_dict(),
            "evaluation": self.evaluation.state_dict(),
            "flaky": self.flaky.state_dict(),
            "record": msgspec.to_builtins(self.record),
            "owners": self.owners,
            "heard": self.heard,
            "reported": self.reported,
            "covered": self.covered,
            "seconds": self.seconds,
            "started": self.started,
            "ended": self.ended,
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises StreamError for a state that does not fit this run."""
        if (found := state.get("format")) != STATE_FORMAT:
            raise StreamError(f"the saved state has format {found}, expected {STATE_FORMAT}")
        try:
            self.allocator.load_state_dict(state["allocator"])
        except ValueError as error:
            raise StreamError(f"the saved state does not fit this run: {error}") from error
        self.evaluation.load_state_dict(state["evaluation"])
        self.flaky.load_state_dict(state["flaky"])
        self.record = msgspec.convert(state["record"], Record)
        self.owners = dict(state["owners"])
        self.heard, self.reported = dict(state["heard"]), Counter(state["reported"])
        self.covered, self.seconds = state["covered"], state["seconds"]
        self.started, self.ended = state["started"], state["ended"]
        self._steps = dict(state["steps"])

    # --- inside ---

    def _tell(self, result: Result, effects: Effects) -> None:
        work, attempt, outcome = result.work, result.attempt, result.outcome
        ledger = self.evaluation.ledger if work < 0 else self.allocator.ledger
        item = ledger.item(work)
        if work < 0:
            reception, finished = self.evaluation.tell(work, attempt, outcome)
            if finished is not None:
                effects.evaluated.append(self.record.evaluated(finished, self.seconds, self.allocator.account))
        else:
            told = self.allocator.take(work, attempt, outcome)
            reception = told.reception
            if told.kept:
                effects.kept.append((work, attempt))
            if told.closed:
                effects.cancel += told.cancel
                effects.closed += told.closed
                effects.unused += [unused for group in told.closed for unused in group.unused]
        if reception is not Reception.ACCEPTED or item is None:
            return
        self.owners.pop(work, None)
        if isinstance(outcome, JUDGED):
            self._watch_verdict(item, result)

    def _watch_verdict(self, item: WorkItem, result: Result) -> None:
        """Tell prompts whose verdicts cannot be trusted."""
        reward = result.outcome.reward if isinstance(result.outcome, Scored) else None
        self.flaky.observe(item.prompt, result.digest, reward)
        if self._config.verifier.quarantine_flaky and item.work > 0 and self.flaky.is_flaky(item.prompt):
            log.warning("prompt %s is quarantined: its verdicts cannot be trusted", item.prompt)
            self.allocator.quarantine(item.prompt)

    def _evaluate_if_due(self, step: int, version: int) -> None:
        evaluate = self._config.eval
        if step in (0, self._config.run.steps):
            self.evaluation.schedule(step, version, evaluate.samples)
        elif evaluate.every_steps and step % evaluate.every_steps == 0:
            self.evaluation.schedule(step, version, evaluate.curve_samples)
