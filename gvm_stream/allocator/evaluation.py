"""Held-out evaluation through the same stream: rounds of rollouts that are scored and never trained on."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import msgspec

from gvm_stream.allocator.account import TokenAccount
from gvm_stream.allocator.ledger import Ledger, Reception
from gvm_stream.allocator.types import Cancelled, Expired, Failed, Fate, Outcome, PromptId, Scored, WorkItem


class EvalRound(msgspec.Struct):
    """Rollouts of held-out prompts, by policy `version` or newer."""

    step: int
    """Training batches behind that policy."""
    version: int
    planned: int
    left: int
    """Rollouts that have not ended."""
    queue: list[PromptId]
    """Of the rollouts to issue, next last."""
    rewards: list[float] = []

    @property
    def accuracy(self) -> float:
        """Mean reward of the scored rollouts; NaN if there is none."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else math.nan

    @property
    def standard_error(self) -> float:
        """Of `accuracy` over all samples, std / sqrt(n): the binomial formula for 0/1 rewards; NaN if there is none."""
        return statistics.pstdev(self.rewards) / math.sqrt(len(self.rewards)) if self.rewards else math.nan


class Evaluation:
    """Runs rounds one after another. Work identities are negative, so they never meet those of training."""

    def __init__(self, prompts: list[PromptId], account: TokenAccount, max_attempts: int) -> None:
        self._prompts = prompts
        self._account = account
        self._max_attempts = max_attempts
        self.ledger = Ledger(stride=-1)
        self._rounds: deque[EvalRound] = deque()
        self._retry: deque[WorkItem] = deque()

    def schedule(self, step: int, version: int, samples: int) -> None:
        queue = [prompt for prompt in reversed(self._prompts) for _ in range(samples)]
        self._rounds.append(EvalRound(step, version, len(queue), len(queue), queue))

    def can_issue(self, version: int) -> bool:
        """False if `ask` would find nothing for a sampler with policy `version`."""
        current = self.current
        return current is not None and version >= current.version and bool(self._retry or current.queue)

    @property
    def current(self) -> EvalRound | None:
        return self._rounds[0] if self._rounds else None

    def ask(self, slots: int, version: int) -> list[WorkItem]:
        """Up to `slots` items of the current round for a sampler that has policy `version`."""
        current = self.current
        if current is None or not self.can_issue(version):
            return []
        items: list[WorkItem] = []
        while len(items) < slots and (self._retry or current.queue):
            if self._retry:
                items.append(self.ledger.reissue(self._retry.popleft()))
                continue
            items.append(
                self.ledger.issue(
                    group=-1,
                    prompt=current.queue.pop(),
                    index=0,
                    step=current.step,
                    min_version=current.version,
                    reason=f"evaluation after {current.step} batches",
                )
            )
        return items

    def tell(self, work: int, attempt: int, outcome: Outcome) -> tuple[Reception, EvalRound | None]:
        """Take the outcome of an attempt; the round that it completes comes back."""
        reception, item, tokens = self.ledger.settle(work, attempt, outcome)
        if item is None:
            self._account.extend(Fate.FAILED, tokens)
            return reception, None
        current = self.current
        assert current is not None, "work of a round is issued and settled while the round is current"
        match outcome:
            case Scored(reward=reward):
                current.rewards.append(reward)
                self._account.add(Fate.EVALUATION, tokens)
            case Cancelled():
                self._account.add(Fate.CANCELLED, tokens)
            case Failed() | Expired():
                self._account.add(Fate.FAILED, tokens)
                if attempt + 1 < self._max_attempts:
                    self._retry.append(item)
                    return reception, None
            case _:
                self._account.add(Fate.UNSCORABLE, tokens)
        current.left -= 1
        return reception, None if current.left else self._rounds.popleft()

    def state_dict(self) -> dict[str, Any]:
        return {
            "ledger": self.ledger.state_dict(),
            "rounds": msgspec.to_builtins(list(self._rounds)),
            "retry": msgspec.to_builtins(list(self._retry)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])
        self._rounds = deque(msgspec.convert(state["rounds"], list[EvalRound]))
        self._retry = deque(msgspec.convert(state["retry"], list[WorkItem]))
