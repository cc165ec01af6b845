"""How many orders a producer asks for: what its engine has shown that it can keep running."""

from __future__ import annotations

import math

from gvm_stream.producers.engine import EngineLoad

GROWTH = 1 / 16
"""Of the configured slots, added at every look while nothing was put back."""
PREFETCH_SHARE = 0.125
"""Orders asked for beyond the engine's slots, as a share of them: a slot that gets free is filled at once, not after a
verdict and a round trip."""


class Credits:
    """Additive increase, and down to what runs when the engine has put requests back for want of memory: long responses
    need more of the key-value cache than short ones, and what is put back is computed twice."""

    def __init__(self, slots: int) -> None:
        self._most, self._slots, self._preemptions = slots, slots, 0

    @property
    def orders(self) -> int:
        """To have in hand at once."""
        return self._slots + math.ceil(self._slots * PREFETCH_SHARE)

    def look(self, load: EngineLoad) -> bool:
        """Take note of the engine's load; whether `orders` is another number now."""
        before = self._slots
        if load.preemptions > self._preemptions:
            self._slots = max(1, min(self._slots, load.running))
        else:
            self._slots = min(self._most, self._slots + math.ceil(self._most * GROWTH))
        self._preemptions = load.preemptions
        return self._slots != before
