"""`OnlineAllocator`: which prompt gets the next rollout, and when a visit to a prompt is over.

Pure and synchronous: no sockets, no clock, no global randomness. Time is counted in *training batches* (steps) and
*policy versions*, both given by the caller:

    items = allocator.ask(slots, version)          # work for a sampler that has policy `version`
    told = allocator.tell(item.work, item.attempt, outcome)
    groups = allocator.batch(step)                 # None until every visit of that batch has ended
    allocator.settle(step, version, fates)         # the learner is done with it; its policy is now `version`

Batch b may be sampled once b - max_lag batches are settled, and only by versions from that moment on. So no token
can be more than max_lag batches old when it is trained on and nothing has to be dropped for age. A batch is a fixed
set of prompts: a slow (long, hard) visit is waited for, never replaced by a fast one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import Any

import msgspec

from gvm_stream.allocator.account import TokenAccount
from gvm_stream.allocator.by_acceptance import ByAcceptance
from gvm_stream.allocator.estimates import Estimates
from gvm_stream.allocator.explain import Explanation, explain
from gvm_stream.allocator.gain import Gain
from gvm_stream.allocator.ledger import Ledger, Reception
from gvm_stream.allocator.outcome_check import energy_problem, outcome_problem
from gvm_stream.allocator.planner import Planner
from gvm_stream.allocator.policies import Policy
from gvm_stream.allocator.roster import Roster
from gvm_stream.allocator.settings import Settings
from gvm_stream.allocator.types import (
    ClosedGroup,
    Expired,
    Fate,
    Outcome,
    PromptId,
    WorkItem,
)
from gvm_stream.allocator.visits import UNMADE, Visits

STATE_FORMAT = 4


class Told(msgspec.Struct, frozen=True):
    """What became of an outcome."""

    reception: Reception
    kept: bool = False
    """The rollout waits for its visit to end and may be trained on; otherwise nobody will ask for it again."""
    closed: tuple[ClosedGroup, ...] = ()
    """The visits that it ended."""

    @property
    def cancel(self) -> tuple[tuple[int, int], ...]:
        """(work, attempt) of running rollouts that nothing will come of any more."""
        return tuple(entry for group in self.closed for entry in group.cancel)


class OnlineAllocator:
    """Plans batches of visits to prompts, issues their rollouts, learns from the outcomes. See the module docstring."""

    def __init__(self, settings: Settings, *, seed: int, policy: Policy | None = None) -> None:
        """`policy`: one that is made already, instead of the one that the settings name."""
        self.settings = settings
        self.estimates = Estimates(
            memory=settings.memory_versions,
            prior=settings.prior,
            learn_prior=settings.learn_prior,
            change_point=settings.change_point,
            max_tokens=settings.max_tokens,
        )
        self.roster = Roster(seed, self.estimates.grow, self.estimates.reset)
        self.planner = Planner(settings, self.estimates, seed, policy)
        self.ledger = Ledger()
        self.account = TokenAccount()
        self.settled_steps = 0
        self._visits = Visits(
            self.planner, self.roster, self.ledger, self.account, lambda exclude: self._next_prompts(1, exclude)
        )
        self._versions = deque([0], maxlen=settings.max_lag + 1)
        """Policy versions after the newest settled batches."""
        self._retry: list[tuple[int, int, WorkItem]] = []
        """Heap of (step, work, last attempt) to make again: the oldest step is the most urgent."""
        self._ended = False

    # --- prompts ---

    def add(self, prompts: Iterable[PromptId]) -> None:
        """Add prompts; they take part from the next epoch on. Raises ValueError for one that is there already or is not
        a text; none has been added then."""
        self.roster.add(prompts)

    def draw_from(self, source: Iterable[PromptId], window: int) -> None:
        """Take prompts from `source`, which may be endless, as steps need them. The newest `window` are held, or more
        where more are under way.

        They are visited once each, in the order of the source; epochs over what is held follow when it ends. A policy
        that selects its prompts chooses among what is held. After `load_state_dict` give the same source again: what
        had been drawn is skipped. Raises ValueError for a window below 1.
        """
        self.roster.draw_from(source, window)

    def start(self, version: int) -> None:
        """Set the policy version that sampling starts from."""
        self._versions[-1] = self._visits.version = version

    def quarantine(self, prompt: PromptId) -> None:
        """Do not visit this prompt again; rollouts under way go on. Raises KeyError for an unknown prompt."""
        self.roster.quarantine(self.roster.position[prompt])

    # --- ask / tell / close ---

    def ask(self, slots: int, version: int) -> list[WorkItem]:
        """Up to `slots` work items for a sampler that has policy `version`; fewer when pacing allows no more.

        Raises ValueError for a negative number of slots, and what the policy and the source of prompts raise when a
        batch is planned.
        """
        if slots < 0:
            raise ValueError(f"{slots} slots were asked for, expected 0 or more")
        items: list[WorkItem] = []
        while len(items) < slots and not self._ended:
            if self._retry and self._retry[0][-1].min_version <= version:
                *_, item = heappop(self._retry)
                if self._visits.is_open(item.group):
                    items.append(self.ledger.reissue(item))
            elif visit := self._visits.next_to_launch():
                min_version = self._visits.steps[visit.step].min_version
                if min_version > version:
                    break
                # Side by side: their samplers can share the work on the prompt.
                prompt = self.roster.ids[visit.prompt]
                kind = "shadow-uniform" if visit.shadow else self.settings.policy
                for index in range(len(visit.works), min(len(visit.works) + slots - len(items), visit.target)):
                    item = self.ledger.issue(
                        group=visit.number,
                        prompt=prompt,
                        index=index,
                        step=visit.step,
                        min_version=min_version,
                        reason=f"{kind}: {index + 1} of {visit.target}",
                    )
                    visit.launch(item.work)
                    items.append(item)
            elif not self._plan_next():
                break
        return items

    def can_issue(self, version: int) -> bool:
        """False if `ask` would find nothing for a sampler with policy `version`, and change nothing."""
        if self._ended:
            return False
        if self._retry and self._retry[0][-1].min_version <= version:
            return True
        if visit := self._visits.next_to_launch():
            return self._visits.steps[visit.step].min_version <= version
        return self._next_step() is not None

    def tell(self, work: int, attempt: int, outcome: Outcome) -> Told:
        """Take the outcome of an attempt. In any order, twice, or late: what does not count is counted and ignored.

        Raises ValueError for a reward that is not finite or outside the declared range, a negative number of tokens or
        seconds, an energy that is not a finite number of at least 0, numbers of other types than Python's (numpy's
        would be taken here and refused when the state is saved), or version spans out of order; nothing has changed
        then.
        """
        if problem := outcome_problem(outcome, self.settings.reward_range):
            raise ValueError(f"work {work}: {problem}")
        return self.take(work, attempt, outcome)

    def take(self, work: int, attempt: int, outcome: Outcome) -> Told:
        """`tell`, for an outcome that has been found good (`outcome_check.outcome_problem`) already."""
        reception, item, tokens = self.ledger.settle(work, attempt, outcome)
        if item is None:
            self.account.extend(Fate.FAILED, tokens)
            return Told(reception)
        again = isinstance(outcome, UNMADE) and item.attempt + 1 < self.settings.max_attempts
        if again and self._visits.is_open(item.group):
            self._visits.attempt_failed(item, outcome)
            heappush(self._retry, (item.step, item.work, item))
            return Told(reception)
        return Told(reception, *self._visits.record(item, outcome))

    def observe_energy(self, work: int, energy: float) -> bool:
        """The squared gradient norm of a scored rollout, measured later than its verdict but before its batch is
        settled. False if the work is not known (any more) or its energy was.

        Raises ValueError for an energy that is not a finite number of at least 0.
        """
        if problem := energy_problem(energy):
            raise ValueError(f"work {work}: {problem}")
        return self._visits.observe_energy(work, energy)

    def drop(self, group: int, reason: str) -> Told:
        """End a visit without training on it (too late, not wanted). Its finished rollouts still teach the estimates.

        Raises KeyError for a group that is not open.
        """
        return Told(Reception.ACCEPTED, False, self._visits.drop(group, reason))

    def close(self) -> list[WorkItem]:
        """Nothing more is issued; the items still running come back (the caller cancels them)."""
        self._ended = True
        return self.ledger.running()

    # --- batches ---

    def batch(self, step: int) -> tuple[ClosedGroup, ...] | None:
        """The closed groups of a batch, in plan order; None while it is not complete. Groups without a single scored
        rollout are left out."""
        return self._visits.batch(step)

    def settle(self, step: int, version: int, fates: Mapping[Fate, Iterable[int]]) -> None:
        """The learner is done with batch `step`; its policy is `version` now. `fates` names every rollout of it once.

        Raises ValueError if it is not the next batch or not complete, the version goes backwards, a fate is still open,
        or the fates do not match the batch; nothing has changed then.
        """
        groups = self.batch(step)
        if step != self.settled_steps or groups is None:
            raise ValueError(f"batch {step} cannot be settled: the next complete one would be {self.settled_steps}")
        if version < self._versions[-1]:
            raise ValueError(f"policy version {version} is older than {self._versions[-1]}")
        if Fate.PENDING in fates:
            raise ValueError("pending is not the fate of a settled rollout")
        tokens = {member.work: member.tokens for group in groups for member in group.members}
        named = [(fate, work) for fate, works in fates.items() for work in works]
        works = {work for _, work in named}
        if len(named) != len(tokens) or works != tokens.keys():
            raise ValueError(
                f"the fates of batch {step} name {len(named)} rollouts, the batch has {len(tokens)}; "
                f"{len(tokens.keys() ^ works)} are not in both"
            )
        self._visits.settle(step, version, [(fate, work, tokens[work]) for fate, work in named])
        self.settled_steps += 1
        self._versions.append(version)

    # --- for people ---

    def explain(self, prompt: PromptId) -> Explanation:
        """Why a prompt gets what it gets. Raises KeyError for an unknown prompt."""
        return explain(prompt, self.planner, self.roster, self._visits)

    @property
    def quarantined(self) -> list[PromptId]:
        """Prompts that are not visited again: `quarantine` said so, or no rollout of a visit could be made."""
        return [self.roster.ids[i] for i in sorted(self.roster.quarantined)]

    @property
    def retired(self) -> list[PromptId]:
        """Prompts shown to be dead or solved, not visited for `readmit_versions`."""
        return [self.roster.ids[i] for i in self.roster.retired]

    @property
    def exhausted(self) -> bool:
        """True when every prompt is quarantined: there is nothing left to plan."""
        return self.roster.exhausted

    @property
    def gain(self) -> Gain:
        """What the policy saves over uniform so far, from the shadow-uniform visits."""
        return self._visits.gain.estimate()

    @property
    def by_acceptance(self) -> ByAcceptance:
        """What visits have got, by the acceptance rate that was expected before them."""
        return self._visits.by_acceptance

    @property
    def price(self) -> float:
        """Decrease of variance per token of the last rollout granted in the newest batch; NaN if there is no price."""
        return self.planner.price

    @property
    def variance(self) -> float:
        """Variance of the mean gradient of the newest settled batch, in the unit of the energies, from those and the
        coefficients of its rollouts; NaN before the first batch, and after `load_state_dict` until the next."""
        return self._visits.variance

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Plain data (dicts, lists, text, numbers, bytes: for msgpack or pickle, not JSON): an allocator that loads it
        continues exactly as this one would."""
        return {
            "format": STATE_FORMAT,
            "roster": self.roster.state_dict(),
            "estimates": self.estimates.state_dict(),
            "planner": self.planner.state_dict(),
            "ledger": self.ledger.state_dict(),
            "account": self.account.state_dict(),
            "visits": self._visits.state_dict(),
            "settled_steps": self.settled_steps,
            "versions": list(self._versions),
            "retry": msgspec.to_builtins(self._retry),
            "ended": self._ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, given the same settings and seed. Prompts need not be added again; if they were,
        they must be the saved ones. Raises ValueError if the state does not fit."""
        if (found := state.get("format")) != STATE_FORMAT:
            raise ValueError(f"allocator state of format {found}, expected {STATE_FORMAT}")
        self.roster.load_state_dict(state["roster"])
        self.estimates.load_state_dict(state["estimates"])
        self.planner.load_state_dict(state["planner"])
        self.ledger.load_state_dict(state["ledger"])
        self.account.load_state_dict(state["account"])
        self._visits.load_state_dict(state["visits"])
        self.settled_steps = state["settled_steps"]
        self._versions = deque(state["versions"], maxlen=self.settings.max_lag + 1)
        self._retry = msgspec.convert(state["retry"], list[tuple[int, int, WorkItem]])
        self._ended = state["ended"]

    def redo_unsettled(self) -> None:
        """After `load_state_dict`, when what was running and what had been scored is lost: the batches that are not
        settled keep their prompts and plans, their rollouts are all made again."""
        for item in self.ledger.running():
            self.ledger.settle(item.work, item.attempt, Expired(reason="lost with the process that ran it"))
            self.account.add(Fate.FAILED, 0)
        self.account.close()
        self._retry.clear()
        self._visits.redo()
        self._ended = False

    # --- inside ---

    def _next_step(self) -> int | None:
        """The batch to plan next; None while pacing admits none."""
        settings, step = self.settings, self.settled_steps + len(self._visits.steps)
        if step > self.settled_steps + settings.max_lag or (settings.steps is not None and step >= settings.steps):
            return None
        return step

    def _plan_next(self) -> bool:
        """Plan the next batch if pacing admits it."""
        settings, step = self.settings, self._next_step()
        if step is None:
            return False
        version = self._versions[-1]
        prompts = None
        if self.planner.selects:
            candidates = self.roster.candidates(
                settings.prompts_per_step, version, settings.readmit_versions, self._visits.is_busy
            )
            prompts = self.planner.select(candidates, step, version)
        if prompts is None:
            prompts = self._next_prompts(settings.prompts_per_step)
        if not prompts:
            return False
        # The policy after step - max_lag batches, or the first one.
        behind = min(self.settled_steps - (step - settings.max_lag), len(self._versions) - 1)
        self._visits.open_step(step, self._versions[-1 - behind], self.planner.plan(prompts, step, version))
        return True

    def _next_prompts(self, count: int, exclude: frozenset[int] = frozenset()) -> list[int]:
        return self.roster.next(
            count, self._versions[-1], self.settings.readmit_versions, self._visits.is_busy, exclude
        )
