"""The batches under way: their visits, from opening to settlement.

A visit ends when its planned rollouts have, or when its rule says so. What it has shown then goes into the estimates,
and once its batch is settled, its error and its cost into the measured gain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

import msgspec

from gvm_stream.allocator.account import TokenAccount
from gvm_stream.allocator.by_acceptance import ByAcceptance
from gvm_stream.allocator.closing import close_visit
from gvm_stream.allocator.estimates import SUCCESS_REWARD
from gvm_stream.allocator.gain import GainMeter
from gvm_stream.allocator.learning import learn
from gvm_stream.allocator.ledger import Ledger
from gvm_stream.allocator.planner import PlannedVisit, Planner
from gvm_stream.allocator.roster import Roster
from gvm_stream.allocator.types import (
    Cancelled,
    ClosedGroup,
    Exit,
    Expired,
    Failed,
    Fate,
    Member,
    Outcome,
    Scored,
    Unscorable,
    WorkItem,
)
from gvm_stream.allocator.visit import Step, Visit

FATE_OF: dict[type[Outcome], Fate] = {
    Scored: Fate.PENDING,
    Unscorable: Fate.UNSCORABLE,
    Cancelled: Fate.CANCELLED,
    Failed: Fate.FAILED,
    Expired: Fate.FAILED,
}
"""Where the tokens of an attempt go when it ends."""

UNMADE = (Failed, Expired)
"""Outcomes of attempts that another attempt may mend."""


class Visits:
    def __init__(
        self,
        planner: Planner,
        roster: Roster,
        ledger: Ledger,
        account: TokenAccount,
        replacement: Callable[[frozenset[int]], list[int]],
    ) -> None:
        """`replacement(exclude)` names another prompt to visit in the place of one without signal, if there is one."""
        self._settings = planner.settings
        self._planner, self._roster, self._ledger, self._account = planner, roster, ledger, account
        self._replacement = replacement
        self.version = 0
        """Policy version after the newest settled batch."""
        self.steps: dict[int, Step] = {}
        """Batches that are not settled."""
        self.visits: dict[int, Visit] = {}
        """Visits that are not settled, or have rollouts running."""
        self._closed: dict[int, ClosedGroup] = {}
        self._next_visit = 0
        self._busy: Counter[int] = Counter()
        """`visits` by prompt."""
        self._launch: list[tuple[int, int]] = []
        """Heap of (step, visit) with rollouts to issue: the oldest step is the most urgent."""
        self._pending: dict[int, tuple[int, float | None]] = {}
        """Scored work whose fate is open -> (visit, energy that came late)."""
        self.gain = GainMeter()
        self.by_acceptance = ByAcceptance()
        self.variance = math.nan
        """Of the mean gradient of the newest settled batch, as its energies and coefficients say."""

    # --- opening and launching ---

    def open_step(self, number: int, min_version: int, planned: Iterable[PlannedVisit]) -> None:
        step = self.steps[number] = Step(number=number, min_version=min_version)
        for p in planned:
            if p.rollouts:
                self._open(step, p)

    def next_to_launch(self) -> Visit | None:
        """The visit whose rollouts come next; None if there is nothing to issue."""
        while self._launch:
            number = self._launch[0][1]
            if self._wants_launch(number):
                return self.visits[number]
            heappop(self._launch)
        return None

    def is_open(self, number: int) -> bool:
        visit = self.visits.get(number)
        return visit is not None and not visit.closed

    def is_busy(self, prompt: int) -> bool:
        """True while a visit to it is not settled, or has rollouts running."""
        return self._busy[prompt] > 0

    # --- outcomes ---

    def record(self, item: WorkItem, outcome: Outcome) -> tuple[bool, tuple[ClosedGroup, ...]]:
        """The last attempt at a rollout has ended. True if it is kept, and the visits that this ended."""
        visit = self.visits[item.group]
        if visit.closed:
            self._straggler(visit, item, outcome)
            return False, ()
        self._account.add(FATE_OF[type(outcome)], outcome.tokens)
        visit.tokens += outcome.tokens
        visit.failed += isinstance(outcome, UNMADE)
        scored = outcome if isinstance(outcome, Scored) else None
        if scored is not None:
            self._pending[item.work] = (visit.number, None)
        visit.record(item.index, scored)
        return scored is not None, self._advance(visit)

    def attempt_failed(self, item: WorkItem, outcome: Outcome) -> None:
        """An attempt has ended that will be followed by another one."""
        self._account.add(FATE_OF[type(outcome)], outcome.tokens)
        self.visits[item.group].tokens += outcome.tokens

    def observe_energy(self, work: int, energy: float) -> bool:
        if work not in self._pending:
            return False
        number, known = self._pending[work]
        visit = self.visits[number]
        entry = visit.entries[visit.works.index(work)]
        if known is not None or not isinstance(entry, Scored) or entry.energy is not None:
            return False
        self._pending[work] = (number, energy)
        self._planner.estimates.observe_energies(visit.prompt, [(entry.reward >= SUCCESS_REWARD, entry.tokens, energy)])
        return True

    def drop(self, number: int, reason: str) -> tuple[ClosedGroup, ...]:
        if not self.is_open(number):
            raise KeyError(f"group {number} is not open")
        visit = self.visits[number]
        piloting = self._is_pilot(visit) and visit.left > 0
        closed: tuple[ClosedGroup, ...] = self._close(visit, "dropped", reason, dropped=True)
        return closed + self._pilot_ended(visit) if piloting else closed

    # --- batches ---

    def batch(self, step: int) -> tuple[ClosedGroup, ...] | None:
        if step not in self.steps or self.steps[step].open:
            return None
        closed = (self._closed[number] for number in self.steps[step].visits)
        return tuple(group for group in closed if group.members)

    def settle(self, step: int, version: int, fates: list[tuple[Fate, int, int]]) -> None:
        """`fates`: (fate, work, tokens) of every member of the batch."""
        self._measure(self.steps[step])
        for _, work, _ in fates:
            del self._pending[work]
        for fate in dict.fromkeys(fate for fate, _, _ in fates):
            tokens = [tokens for of, _, tokens in fates if of is fate]
            self._account.move(Fate.PENDING, fate, sum(tokens), len(tokens))
        for number in self.steps.pop(step).visits:
            del self._closed[number]
            self._settled(self.visits[number])
        self.version = version

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "steps": msgspec.to_builtins(list(self.steps.values())),
            "visits": [visit.state_dict() for visit in self.visits.values()],
            "closed": msgspec.to_builtins(list(self._closed.values())),
            "next_visit": self._next_visit,
            # Entries that are over go when somebody looks, and a look is no change of the state.
            "launch": [list(entry) for entry in sorted({e for e in self._launch if self._wants_launch(e[1])})],
            "pending": [[work, *entry] for work, entry in self._pending.items()],
            "gain": msgspec.to_builtins(self.gain),
            "by_acceptance": msgspec.to_builtins(self.by_acceptance),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]
        self.steps = {step.number: step for step in msgspec.convert(state["steps"], list[Step])}
        self.visits = {visit.number: visit for visit in map(Visit.from_state, state["visits"])}
        self._closed = {group.group: group for group in msgspec.convert(state["closed"], list[ClosedGroup])}
        self._next_visit = state["next_visit"]
        self._launch = [(step, visit) for step, visit in state["launch"]]
        self._pending = {work: (visit, energy) for work, visit, energy in state["pending"]}
        self._busy = Counter(visit.prompt for visit in self.visits.values())
        self.gain = msgspec.convert(state["gain"], GainMeter)
        self.by_acceptance = msgspec.convert(state["by_acceptance"], ByAcceptance)

    def redo(self) -> None:
        """Begin every batch that is not settled anew, with the same prompts and plans."""
        lost, self.visits = self.visits, {}
        self._closed.clear()
        self._launch.clear()
        self._pending.clear()
        self._busy.clear()
        for step in self.steps.values():
            numbers, step.visits = step.visits, []
            step.open = step.piloting = 0
            for v in map(lost.__getitem__, numbers):
                self._open(step, v.plan(), v.tried)

    # --- inside ---

    def _wants_launch(self, number: int) -> bool:
        """True if it is open and has rollouts to issue."""
        return self.is_open(number) and len(self.visits[number].works) < self.visits[number].target

    def _open(self, step: Step, plan: PlannedVisit, tried: int = 0) -> Visit:
        visit = Visit(self._next_visit, step.number, plan, tried)
        if visit.rule is not None:
            visit.extend(visit.wanted(self._settings.rounds_ahead))
        self._next_visit += 1
        self.visits[visit.number] = visit
        self._busy[visit.prompt] += 1
        step.visits.append(visit.number)
        step.open += 1
        step.piloting += self._planner.two_stage and not visit.shadow
        heappush(self._launch, (step.number, visit.number))
        return visit

    def _advance(self, visit: Visit) -> tuple[ClosedGroup, ...]:
        """What follows from an outcome: more rollouts, the end of the visit, or nothing yet."""
        if visit.rule is not None:
            return self._advance_by_rule(visit)
        if visit.left:
            return ()
        if self._is_pilot(visit):
            return self._pilot_ended(visit)
        if self._planner.refills and self._wants_refill(visit) and self._refill(visit):
            return self._close(visit, "no_signal", "no signal: another prompt takes its place", dropped=True)
        return self._close(visit, "all_ended", f"all {visit.target} rollouts have ended")

    def _advance_by_rule(self, visit: Visit) -> tuple[ClosedGroup, ...]:
        if visit.read_on():
            return self._close(visit, "rule", f"the rule: {visit.successes} successes, {visit.failures} failures")
        if visit.missing > self._settings.max_rollouts:
            return self._close(visit, "missing_verdicts", f"{visit.missing} rollouts without a verdict", dropped=True)
        more = visit.wanted(self._settings.rounds_ahead)
        if more > 0:
            visit.extend(more)
            heappush(self._launch, (visit.step, visit.number))
        return ()

    def _is_pilot(self, visit: Visit) -> bool:
        """True in the first of two stages."""
        return self._planner.two_stage and not visit.shadow and not visit.pilot

    def _pilot_ended(self, visit: Visit) -> tuple[ClosedGroup, ...]:
        step = self.steps[visit.step]
        step.piloting -= 1
        visits = [v for v in map(self.visits.__getitem__, step.visits) if not (v.shadow or v.closed)]
        return self._second_stage(step, visits) if visits and not step.piloting else ()

    def _second_stage(self, step: Step, visits: list[Visit]) -> tuple[ClosedGroup, ...]:
        prompts, pilot = [v.prompt for v in visits], tuple(v.outcomes() for v in visits)
        sizes = self._planner.second_stage(prompts, pilot, step.number, self.version)
        closed: tuple[ClosedGroup, ...] = ()
        for visit, size in zip(visits, sizes, strict=True):
            visit.begin_second_stage(size)
            if size:
                heappush(self._launch, (visit.step, visit.number))
            else:
                closed += self._close(visit, "empty_stage", "nothing in the second stage")
        return closed

    def _wants_refill(self, visit: Visit) -> bool:
        return not visit.shadow and self._planner.policy.refill(visit.outcomes(), visit.tried)

    def _refill(self, visit: Visit) -> bool:
        """Open a visit to another prompt in the place of this one; False if there is none."""
        step = self.steps[visit.step]
        exclude = frozenset(self.visits[number].prompt for number in step.visits) | {visit.prompt}
        prompts = self._replacement(exclude)
        if not prompts:
            return False
        place = step.visits.index(visit.number)
        stand_in = self._planner.stand_in(prompts[0], visit.first, self.version)
        # What it takes to fill the place, for the measured gain.
        self._open(step, stand_in, visit.tried + 1).tokens = visit.tokens
        step.visits[place] = step.visits.pop()
        return True

    def _close(self, visit: Visit, exit: Exit, reason: str, *, dropped: bool = False) -> tuple[ClosedGroup]:
        attempts = ((work, self._ledger.attempt_of(work)) for work in visit.running())
        running = tuple((work, attempt) for work, attempt in attempts if attempt is not None)
        drain = self._settings.on_close == "drain"
        visit.closed, visit.dropped, visit.stragglers = True, dropped, len(running)
        cancel = () if drain else running
        group = close_visit(visit, self._roster.ids[visit.prompt], self._planner, exit, reason, cancel)
        for work in group.unused:
            del self._pending[work]
        if group.unused:
            self._account.move(Fate.PENDING, Fate.ZERO_SIGNAL, visit.tokens_of(group.unused), len(group.unused))
        step = self.steps[visit.step]
        step.open -= 1
        if not (drain and running):
            learn(visit, self._planner, self._roster, self.version)
        if visit.failed == visit.ended >= visit.first:  # a rule may have asked for more that have not ended
            self._roster.quarantine(visit.prompt)
        if dropped and visit.number not in step.visits:
            self._settled(visit)
        else:
            self._closed[visit.number] = group
        return (group,)

    def _straggler(self, visit: Visit, item: WorkItem, outcome: Outcome) -> None:
        """The outcome of a rollout whose visit had ended."""
        drain = self._settings.on_close == "drain"
        fate = FATE_OF[type(outcome)]
        if fate is Fate.PENDING:
            fate = Fate.ZERO_SIGNAL if drain else Fate.CANCELLED
        self._account.add(fate, outcome.tokens)
        visit.tokens += outcome.tokens
        visit.record(item.index, outcome if isinstance(outcome, Scored) else None)
        visit.stragglers -= 1
        if not visit.stragglers:
            if drain:
                learn(visit, self._planner, self._roster, self.version)
            if visit.settled:
                self._forget(visit)

    def _settled(self, visit: Visit) -> None:
        """Nobody will ask for this visit any more."""
        visit.settled = True
        if not visit.stragglers:
            self._forget(visit)

    def _forget(self, visit: Visit) -> None:
        del self.visits[visit.number]
        self._busy[visit.prompt] -= 1

    def _measure(self, step: Step) -> None:
        """Take the error and cost of a batch's visits for the gain and the price."""
        visits = rollouts = tokens = 0
        variance = 0.0
        for number in step.visits:
            visit = self.visits[number]
            if not visit.dropped:
                error = self._error(visit, self._closed[number].members)
                variance += error
                self.gain.observe(visit.shadow, error, visit.tokens)
                self.by_acceptance.observe(self._closed[number], visit.tokens)
            if visit.rule is not None:
                visits, rollouts, tokens = visits + 1, rollouts + len(visit.works), tokens + visit.tokens
        self.variance = variance / len(step.visits) ** 2 if step.visits else math.nan
        if visits and self._planner.design == "sequential":
            self._planner.spent(visits, rollouts, tokens)

    def _error(self, visit: Visit, members: tuple[Member, ...]) -> float:
        error = 0.0
        for member in members:
            entry = visit.entries[member.index]
            assert isinstance(entry, Scored)
            energy = entry.energy
            if energy is None:
                energy = self._pending[member.work][1]
            error += member.coefficient**2 * (member.tokens if energy is None else energy)
        return visit.weight**2 * error
