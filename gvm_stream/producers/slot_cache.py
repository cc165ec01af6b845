"""A preallocated key-value cache whose rows belong to different requests of different lengths.

Row r holds the keys and values of one sequence at positions 0, 1, ...; what lies behind a row's own length is left over
from earlier occupants and hidden by the attention mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache


class SlotCache(Cache):
    """`slots` rows of `length` positions for every layer of a model that uses the standard cache interface.

    Before a forward pass the owner says where its new keys and values go: `expect_prefill` or `expect_decode`.
    """

    def __init__(self, slots: int, length: int) -> None:
        super().__init__(layers=[])
        self._slots, self._length = slots, length
        self._stores: dict[int, tuple[Tensor, Tensor]] = {}
        # Layer -> keys, values [slots, length, heads, head size]. A position of a row is one contiguous run of memory,
        # so writing tokens is an `index_copy_` whatever the rows and lengths.
        self._targets = torch.empty(0, dtype=torch.int64)
        self._view: tuple[int, int] | None = None
        self._past = 0

    def expect_prefill(self, rows: Tensor, width: int) -> None:
        """The next pass computes positions 0 .. width - 1 of `rows` (int64 [B]) and attends to nothing older."""
        positions = torch.arange(width, device=rows.device)
        self._targets = (rows[:, None] * self._length + positions).flatten()
        self._view, self._past = None, 0

    def expect_decode(self, positions: Tensor, width: int) -> None:
        """The next pass computes one token at `positions` (int64 [n]) of rows 0 .. n - 1 and sees `width` positions."""
        rows = torch.arange(len(positions), device=positions.device)
        self._targets = rows * self._length + positions
        self._view, self._past = (len(positions), width), width - 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [B, heads, Q, size]; return all to attend to, [B, heads, width, size]."""
        if layer_idx not in self._stores:
            self._stores[layer_idx] = (self._allocate(key_states), self._allocate(value_states))
        keys, values = self._stores[layer_idx]
        keys.flatten(0, 1).index_copy_(0, self._targets, key_states.transpose(1, 2).flatten(0, 1))
        values.flatten(0, 1).index_copy_(0, self._targets, value_states.transpose(1, 2).flatten(0, 1))
        if self._view is None:
            return key_states, value_states
        rows, width = self._view
        return keys[:rows, :width].transpose(1, 2), values[:rows, :width].transpose(1, 2)

    def copy_rows(self, sources: Tensor, targets: Tensor, width: int) -> None:
        """Copy the first `width` positions of rows `sources` to rows `targets` (int64 [k] each)."""
        for stores in self._stores.values():
            for store in stores:
                store[targets, :width] = store[sources, :width]

    def clear_rows(self, rows: Tensor) -> None:
        """Wipe rows that hold numbers that are not finite: a masked position has weight 0, but 0 times nan is nan."""
        for stores in self._stores.values():
            for store in stores:
                store[rows] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._past + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._length

    def _allocate(self, states: Tensor) -> Tensor:
        _, heads, _, size = states.shape
        return states.new_zeros(self._slots, self._length, heads, size)
