"""What the metrics say of visits that have ended. Kept turn by turn, counted once a second: an allocator that takes
tens of thousands of rollouts a second has no time for more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gvm_stream.allocator.types import ClosedGroup
from gvm_stream.metrics import Metrics


class Tally:
    def __init__(self) -> None:
        self._groups: list[ClosedGroup] = []

    def ended(self, groups: Sequence[ClosedGroup]) -> None:
        self._groups += groups

    def show(self, metrics: Metrics) -> None:
        """Count the visits that have ended since the last call."""
        groups, self._groups = self._groups, []
        metrics.observe_counts("gvm_group_tokens", Counter([group.tokens for group in groups]))
        ends = Counter([(len(group.members), group.successes, group.exit) for group in groups])
        for (rollouts, successes, exit), number in ends.items():
            metrics.observe_counts("gvm_group_rollouts", {rollouts: number})
            if rollouts:
                metrics.observe_counts("gvm_acceptance", {successes / rollouts: number})
            metrics.count("gvm_exits", number, label=exit)
