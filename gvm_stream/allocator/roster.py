"""The prompts: their identities, the order they are visited in, and who is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np

from gvm_stream.allocator.arrays import Ints
from gvm_stream.allocator.types import PromptId


class Roster:
    """Prompts by position 0..P-1. Epochs visit each usable prompt once, in an order drawn from (seed, epoch)."""

    def __init__(self, seed: int, grow: Callable[[int], None], reset: Callable[[int], None]) -> None:
        """`grow(count)` makes room for so many more positions elsewhere, `reset(position)` clears one for reuse."""
        self._seed, self._grow, self._reset = seed, grow, reset
        self.ids: list[PromptId] = []
        self.position: dict[PromptId, int] = {}
        self.quarantined: set[int] = set()
        self.retired: dict[int, int] = {}
        """Position -> policy version at which it was retired, oldest first."""
        self._epoch = 0
        self._order: Ints = np.zeros(0, np.int64)
        self._cursor = 0
        self._source: Iterator[PromptId] | None = None
        self._window = 0
        self._drawn = 0
        """Prompts taken from the source."""
        self._window_order: dict[int, None] = {}
        """Positions that hold prompts of the source, oldest first."""

    def add(self, prompts: Iterable[PromptId]) -> None:
        fresh = list(prompts)
        self._check_new(fresh)
        self.position.update(zip(fresh, range(len(self.ids), len(self.ids) + len(fresh)), strict=True))
        self.ids += fresh
        self._grow(len(fresh))

    def draw_from(self, source: Iterable[PromptId], window: int) -> None:
        """Visit the prompts of `source` before the next epoch begins, and hold the newest `window` of them, or as many
        as are busy."""
        if window < 1:
            raise ValueError(f"window = {window} must be at least 1")
        self._source, self._window = islice(source, self._drawn, None), window

    def next(
        self, count: int, version: int, readmit_after: int, busy: Callable[[int], bool], exclude: frozenset[int]
    ) -> list[int]:
        """Up to `count` prompts to visit, none twice, none of `exclude`; new ones of the source first. Raises
        ValueError for a prompt of the source that is there already or is not a text."""
        chosen = self._from_source(count, busy)
        self._readmit(version, readmit_after)
        taken = {*exclude, *chosen}
        most = min(count, len(chosen) + self.num_usable - sum(map(self._is_usable, taken)))
        while len(chosen) < most:
            if self._cursor == len(self._order):
                self._begin_epoch(taken)
            position = int(self._order[self._cursor])
            self._cursor += 1
            if self._is_usable(position) and position not in taken:
                chosen.append(position)
                taken.add(position)
        return chosen

    def candidates(self, count: int, version: int, readmit_after: int, busy: Callable[[int], bool]) -> Ints:
        """Positions of all prompts that may be visited, `count` new ones of the source among them. Raises ValueError
        like `next`."""
        self._from_source(count, busy)
        self._readmit(version, readmit_after)
        return self.usable()

    def usable(self) -> Ints:
        """Positions of the prompts that are neither quarantined nor retired."""
        usable = np.ones(len(self.ids), np.bool_)
        usable[[*self.quarantined, *self.retired]] = False
        return np.flatnonzero(usable)

    @property
    def exhausted(self) -> bool:
        """True when every prompt is quarantined and no more come."""
        return self._source is None and len(self.quarantined) == len(self.ids)

    def quarantine(self, position: int) -> None:
        self.quarantined.add(position)
        self.retired.pop(position, None)

    def retire(self, position: int, version: int) -> None:
        if position not in self.quarantined:
            self.retired[position] = version

    @property
    def num_usable(self) -> int:
        return len(self.ids) - len(self.quarantined) - len(self.retired)

    def _is_usable(self, position: int) -> bool:
        return position not in self.quarantined and position not in self.retired

    def _readmit(self, version: int, after: int) -> None:
        while self.retired:
            position, since = next(iter(self.retired.items()))
            # When everybody is retired there is nothing else to do.
            if version - since < after and self.num_usable:
                break
            del self.retired[position]

    def _begin_epoch(self, taken: set[int]) -> None:
        order = np.random.default_rng((self._seed, self._epoch)).permutation(len(self.ids))
        if taken:
            # A step may straddle two epochs: what it already has comes later in the new one.
            later = np.isin(order, np.fromiter(taken, np.int64))
            order = np.concatenate([order[~later], order[later]])
        self._order, self._cursor = order, 0
        self._epoch += 1

    def _check_new(self, prompts: list[PromptId]) -> None:
        seen: set[PromptId] = set()
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise ValueError(f"prompt {prompt!r} of type {type(prompt).__name__}, expected a text")
            if prompt in self.position or prompt in seen:
                raise ValueError(f"prompt {prompt!r} is there already")
            seen.add(prompt)

    def _from_source(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        if self._source is None:
            return []
        fresh = list(islice(self._source, count))
        try:
            self._check_new(fresh)
        except ValueError:
            self._source = chain(fresh, self._source)
            raise
        if len(fresh) < count:
            self._source = None
        self._drawn += len(fresh)
        # The oldest prompts of the source that are not busy make room, once the window is full.
        free = iter(list(islice((position for position in self._window_order if not busy(position)), len(fresh))))
        return [
            self._seat(prompt, next(free, None) if len(self._window_order) >= self._window else None)
            for prompt in fresh
        ]

    def _seat(self, prompt: PromptId, position: int | None) -> int:
        """Put a prompt of the source into this position, or a new one."""
        if position is None:
            self.add([prompt])
            position = len(self.ids) - 1
        else:
            del self._window_order[position]
            del self.position[self.ids[position]]
            self.quarantined.discard(position)
            self.retired.pop(position, None)
            self.ids[position] = prompt
            self.position[prompt] = position
            self._reset(position)
        self._window_order[position] = None
        return position

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "ids": list(self.ids),
            "quarantined": sorted(self.quarantined),
            "retired": list(self.retired.items()),
            "epoch": self._epoch,
            "order": self._order.astype("<i8").tobytes(),
            "cursor": self._cursor,
            "drawn": self._drawn,
            "window_order": list(self._window_order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Prompts added before must be the saved ones, in the same order, or none."""
        ids = list(state["ids"])
        if self.ids and self.ids != ids:
            raise ValueError(f"it holds {len(ids)} prompts, other ones than the {len(self.ids)} of this allocator")
        self._grow(len(ids) - len(self.ids))
        self.ids = ids
        self.position = {prompt: i for i, prompt in enumerate(ids)}
        self.quarantined = set(state["quarantined"])
        self.retired = dict(state["retired"])
        self._epoch, self._cursor, self._drawn = state["epoch"], state["cursor"], state["drawn"]
        self._order = np.frombuffer(state["order"], "<i8").astype(np.int64)
        self._window_order = dict.fromkeys(state["window_order"])
