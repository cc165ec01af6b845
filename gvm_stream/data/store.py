"""Prepared prompts as a file, and in words. Imports nothing heavy: the allocator uses it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gvm_stream.data.prompts import BadRow, PromptSet
from gvm_stream.errors import DataError

ROWS_SHOWN = 5


def save_prompt_set(prompt_set: PromptSet, path: Path) -> None:
    """Write as MessagePack, all or nothing: a reader never sees a part of it."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(msgspec.msgpack.encode(prompt_set))
        os.replace(part, path)
    except OSError as error:
        raise DataError(f"prepared prompts cannot be written to {str(path)!r}: {error}") from error


def load_prompt_set(path: Path) -> PromptSet:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=PromptSet)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"prepared prompts cannot be read from {str(path)!r}: {error}") from error


def describe(prompt_set: PromptSet) -> str:
    """How many prompts there are, and how many rows were left out for which problem, with the first row numbers."""
    first = f"{len(prompt_set.train)} training prompts, {len(prompt_set.heldout)} held-out prompts"
    return "\n".join([first, *describe_bad_rows(prompt_set.bad_rows)])


def describe_bad_rows(bad_rows: Sequence[BadRow]) -> list[str]:
    """One line per split and problem."""
    kinds: dict[tuple[str, str], list[BadRow]] = defaultdict(list)
    for bad in bad_rows:
        kinds[bad.split, bad.problem].append(bad)
    lines = []
    for (split, problem), found in kinds.items():
        rows = ", ".join(str(bad.row) for bad in found[:ROWS_SHOWN]) + (", ..." if len(found) > ROWS_SHOWN else "")
        noun = "row" if len(found) == 1 else "rows"
        lines.append(f"{len(found)} {split} {noun} left out, {problem}: {noun} {rows} ({found[0].detail})")
    return lines
