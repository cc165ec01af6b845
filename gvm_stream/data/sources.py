"""Where prompts come from. Every source yields what its rows hold, once, in order, unchecked."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NamedTuple

from gvm_stream.config import DataSection, ReasoningGymSection
from gvm_stream.errors import ConfigError, DataError

Split = Literal["train", "heldout"]
Row = Mapping[str, object]


class RawRow(NamedTuple):
    prompt: object
    answer: object
    verifier: object = None


ROWS_TO_FIND_COLUMNS = 100
"""JSON rows may lack a column; one that none of the first rows has is a wrong name."""


def read_rows(data: DataSection, split: Split, *, entries: bool = False) -> Iterator[RawRow]:
    """The rows of a split. What cannot be read at all is a DataError.

    `entries`: the answer of a reasoning-gym item is the whole item as JSON, for the verifier of that name.
    """
    if data.source == "reasoning_gym":
        yield from _reasoning_gym_rows(data.reasoning_gym, split, entries=entries)
        return
    path = data.train if split == "train" else data.heldout
    name = data.train_split if split == "train" else data.heldout_split
    where = f"data.{split} = {path!r}"
    columns: dict[str, None] = {}
    for count, row in enumerate(_dataset_rows(data, path, name, where), 1):
        columns.update(dict.fromkeys(row))
        if count == ROWS_TO_FIND_COLUMNS:
            _require_columns(data, columns, where)
        verifier = row.get(data.verifier_column) if data.verifier_column else None
        yield RawRow(row.get(data.prompt_column), row.get(data.answer_column), verifier)
    if columns:
        _require_columns(data, columns, where)


def nearest(name: str, names: Collection[str]) -> str:
    """`; did you mean ...?` with the names most like this one, or nothing."""
    close = get_close_matches(name, names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _require_columns(data: DataSection, columns: Mapping[str, object], where: str) -> None:
    named = {key: getattr(data, key) for key in ("prompt_column", "answer_column", "verifier_column")}
    for key, column in named.items():
        if column and column not in columns:
            raise DataError(
                f"{where} has no column {column!r}, which data.{key} names; its columns are "
                f"{', '.join(columns)}{nearest(column, columns)}"
            )


def _dataset_rows(data: DataSection, path: str, split: str, where: str) -> Iterator[Row]:
    """Stream rows through the `datasets` library, which so leaves nothing in its cache."""
    from datasets import load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    folder = Path(path)
    with tempfile.TemporaryDirectory(prefix="gvm-stream-") as cache:
        try:
            if data.source == "jsonl":
                lines = load_dataset("text", data_files=path, split="train", streaming=True, cache_dir=cache)
                yield from _json_objects(lines, where)
            elif data.source == "parquet":
                yield from load_dataset("parquet", data_files=path, split="train", streaming=True, cache_dir=cache)
            elif (folder / "dataset_dict.json").is_file():
                saved = load_from_disk(path)
                if split not in saved:
                    raise DataError(f"{where} has no split {split!r}; its splits are {', '.join(saved)}")
                yield from saved[split]
            elif (folder / "state.json").is_file():
                yield from load_from_disk(path)
            else:
                yield from load_dataset(path, data.name or None, split=split, streaming=True, cache_dir=cache)
        except FileNotFoundError as error:
            raise DataError(f'{where} does not exist, or holds no data for data.source = "{data.source}"') from error
        except (OSError, ValueError, DatasetsError) as error:
            raise DataError(f'{where} cannot be read with data.source = "{data.source}": {error}') from error


def _json_objects(lines: Iterator[Mapping[str, str]], where: str) -> Iterator[Row]:
    """Parse JSON Lines row by row. The `datasets` JSON reader infers column types, which makes timestamps of texts
    that look like dates, floats of integers, and an error of a whole file over one lone surrogate."""
    for number, line in enumerate(lines, 1):
        if not line["text"].strip():
            continue
        try:
            row = json.loads(line["text"].removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}, line {number}: not a JSON object ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}, line {number}: not a JSON object but {line['text'][:40]!r}")
        yield row


def _reasoning_gym_rows(section: ReasoningGymSection, split: Split, *, entries: bool) -> Iterator[RawRow]:
    """Item i of a task is made with seed + i, so the held-out items use the seeds after the training ones."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(
            'data.source = "reasoning_gym" needs an optional package; install gvm-stream[reasoning-gym]'
        ) from error
    where = f"data.reasoning_gym.task = {section.task!r}"
    if section.task not in DATASETS:
        raise DataError(f"{where} is not a task of reasoning-gym{nearest(section.task, DATASETS)}")
    size, seed = section.size, section.seed
    if split == "heldout":
        size, seed = section.heldout_size, section.seed + section.size
    try:
        items = reasoning_gym.create_dataset(section.task, size=size, seed=seed, **section.options)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{where} does not take data.reasoning_gym.options = {section.options}: {error}") from error
    for index in range(size):
        item = items[index]
        yield RawRow(item["question"], _entry_json(section, item) if entries else item["answer"])


def _entry_json(section: ReasoningGymSection, item: Mapping[str, object]) -> str:
    """What the verifier `reasoning_gym` reads."""
    gold = {"task": section.task, "options": section.options, "entry": item}
    try:
        return json.dumps(gold, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"data.reasoning_gym.task = {section.task!r} makes items that are no JSON ({error}), so the verifier "
            "reasoning_gym cannot be used for it"
        ) from error
