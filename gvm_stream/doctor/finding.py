"""What a check says."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    result: Literal["ok", "warn", "fail"]
    """`fail`: the run would end with an error, or not begin; `warn`: it may, or is slower than it could be."""
    found: str
    advice: str = ""
    """What to do about it."""


def gib(size: float) -> str:
    """Bytes, for people."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
