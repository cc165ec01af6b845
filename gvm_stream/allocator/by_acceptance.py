"""What visits got, by the acceptance rate that was expected before them."""

from __future__ import annotations

import msgspec

from gvm_stream.allocator.types import ClosedGroup

BINS = 10


class Bin(msgspec.Struct):
    """Sums over the visits in it."""

    visits: int = 0
    rollouts: int = 0
    tokens: int = 0
    accepted: int = 0


class ByAcceptance(msgspec.Struct):
    """Part of the saved state. Shadow-uniform visits are not the policy's doing, and left out."""

    bins: list[Bin] = msgspec.field(default_factory=lambda: [Bin() for _ in range(BINS)])

    def observe(self, group: ClosedGroup, tokens: int) -> None:
        """A visit that has ended; `tokens` are all that were spent on it."""
        if group.shadow:
            return
        a, b = group.prior
        found = self.bins[min(int(a / (a + b) * BINS), BINS - 1)]
        found.visits += 1
        found.rollouts += group.successes + group.failures
        found.tokens += tokens
        found.accepted += group.successes

    def table(self) -> list[dict[str, float]]:
        """For report.json."""
        return [{"low": i / BINS, "high": (i + 1) / BINS, **msgspec.structs.asdict(b)} for i, b in enumerate(self.bins)]
