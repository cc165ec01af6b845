"""The tree of a formula."""

from __future__ import annotations

import msgspec


class Node(msgspec.Struct, frozen=True):
    """An operator and its operands, or a leaf (`num`, `sym`, `text`) with its text."""

    head: str
    args: tuple[Node, ...] = ()
    text: str = ""
