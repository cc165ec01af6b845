"""Prompts whose verdicts cannot be trusted: one response text with two rewards, or too often no verdict at all. Pure.

Memory is bounded: of each prompt the `RESPONSES` texts seen last (their digests), of `PROMPTS` prompts. Beyond that the
prompt not heard of for longest is forgotten, those found flaky last of all. About 42 MB when every place is taken by
digests of 8 bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from gvm_stream.allocator.types import PromptId

RESPONSES = 64
PROMPTS = 4096
LEAST_ROLLOUTS = 4
"""Rollouts of a prompt before its share of unscorable ones means anything."""


class FlakyPrompt(msgspec.Struct, frozen=True, kw_only=True):
    prompt: PromptId
    reason: str
    """For people."""
    scored: int
    """Rollouts with a reward."""
    unscorable: int
    """Rollouts without one."""
    disagreements: int
    """Rewards that differ from the one before for the same text."""


class FlakyPrompts:
    """Observes verdicts. `share`: of at least four rollouts, the share of unscorable ones that makes a prompt flaky.

    An unscorable rollout beside a scored one of the same text is no disagreement: it says nothing about the response.
    """

    def __init__(self, share: float, *, prompts: int = PROMPTS, responses: int = RESPONSES) -> None:
        self._share = share
        self._most_prompts = prompts
        self._most_responses = responses
        self._records: OrderedDict[PromptId, _Record] = OrderedDict()

    def observe(self, prompt_id: PromptId, response_digest: int, reward: float | None) -> None:
        """Count one verdict; `reward` is None for an unscorable rollout."""
        record = self._records.get(prompt_id)
        if record is None:
            record = self._records[prompt_id] = _Record()
        else:
            self._records.move_to_end(prompt_id)
        if reward is None:
            record.unscorable += 1
        else:
            record.scored += 1
            record.disagreements += record.rewards.pop(response_digest, reward) != reward
            record.rewards[response_digest] = reward  # now the newest
            if len(record.rewards) > self._most_responses:
                del record.rewards[next(iter(record.rewards))]
        if len(self._records) > self._most_prompts:
            self._forget_one()

    def is_flaky(self, prompt_id: PromptId) -> bool:
        record = self._records.get(prompt_id)
        return record is not None and bool(self._reason(record))

    def report(self) -> tuple[FlakyPrompt, ...]:
        """The flaky prompts, those with most disagreements first, then those with most unscorable rollouts."""
        found = [
            FlakyPrompt(
                prompt=prompt,
                reason=reason,
                scored=record.scored,
                unscorable=record.unscorable,
                disagreements=record.disagreements,
            )
            for prompt, record in self._records.items()
            if (reason := self._reason(record))
        ]
        return tuple(sorted(found, key=lambda flaky: (-flaky.disagreements, -flaky.unscorable, flaky.prompt)))

    def state_dict(self) -> list[Any]:
        return [[prompt, msgspec.to_builtins(record)] for prompt, record in self._records.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        self._records = OrderedDict((prompt, msgspec.convert(record, _Record)) for prompt, record in state)

    def _reason(self, record: _Record) -> str:
        reasons = []
        if record.disagreements:
            times = "once" if record.disagreements == 1 else f"{record.disagreements} times"
            reasons.append(f"the same response got a different reward {times}")
        rollouts = record.scored + record.unscorable
        if rollouts >= LEAST_ROLLOUTS and record.unscorable / rollouts >= self._share:
            reasons.append(f"{record.unscorable} of {rollouts} rollouts are unscorable")
        return "; ".join(reasons)

    def _forget_one(self) -> None:
        healthy = (prompt for prompt, record in self._records.items() if not self._reason(record))
        del self._records[next(healthy, next(iter(self._records)))]


class _Record(msgspec.Struct, array_like=True):
    scored: int = 0
    unscorable: int = 0
    disagreements: int = 0
    rewards: dict[int, float] = {}
    """Digest of a response to its reward, the newest last."""
