"""Held-out evaluation through the same stream: rounds of rollouts that are scored and never trained on."""

from __future__ import annotations

import math
import statistics
from collections import deque

from gvm_stream.allocator.account import TokenAccount
from gvm_stream.allocator.ledger import Ledger, Reception
from gvm_stream.allocator.types import Cancelled, Expired, Failed, Fate, Outcome, PromptId, Scored, WorkItem


class EvalRound:
    """`samples` rollouts of each prompt, by policy `version` or newer. `step` is the batch it stands after."""

    def __init__(self, step: int, version: int, prompts: list[PromptId], samples: int) -> None:
        self.step, self.version = step, version
        self.planned = len(prompts) * samples
        self.left = self.planned
        self.rewards: list[float] = []
        self.queue = deque(prompt for prompt in prompts for _ in range(samples))

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
        self._withdrawn = False
        self.finished: list[EvalRound] = []

    def schedule(self, step: int, version: int, samples: int) -> None:
        self._rounds.append(EvalRound(step, version, self._prompts, samples))

    @property
    def current(self) -> EvalRound | None:
        return self._rounds[0] if self._rounds else None

    def ask(self, slots: int, version: int) -> list[WorkItem]:
        """Up to `slots` items of the current round for a sampler that has policy `version`."""
        current = self.current
        if current is None or self._withdrawn or version < current.version:
            return []
        items: list[WorkItem] = []
        while len(items) < slots and (self._retry or current.queue):
            if self._retry:
                items.append(self.ledger.reissue(self._retry.popleft()))
                continue
            items.append(
                self.ledger.issue(
                    group=-1,
                    prompt=current.queue.popleft(),
                    index=0,
                    step=current.step,
                    min_version=current.version,
                    reason=f"evaluation after {current.step} batches",
                )
            )
        return items

    def tell(self, work: int, attempt: int, outcome: Outcome) -> Reception:
        """Take the outcome of an attempt; a completed round moves to `finished`."""
        reception, item, tokens = self.ledger.settle(work, attempt, outcome)
        if item is None:
            self._account.extend(Fate.FAILED, tokens)
            return reception
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
                    return reception
            case _:
                self._account.add(Fate.UNSCORABLE, tokens)
        current.left -= 1
        if current.left == 0 and not self._withdrawn:
            self.finished.append(self._rounds.popleft())
        return reception

    def withdraw(self) -> list[WorkItem]:
        """No more rounds, nothing more issued; the items still running come back."""
        self._withdrawn = True
        return self.ledger.running()
