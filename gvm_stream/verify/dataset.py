"""Look at every row of a data set as a run would, without a tokenizer, and say which ones it could not use and why."""

from __future__ import annotations

from gvm_stream.config import Config
from gvm_stream.config_verifier import used_kinds
from gvm_stream.data.check import Problem, read_gold, read_messages, shown_text
from gvm_stream.data.prompts import BadRow
from gvm_stream.data.sources import RawRow, Split, read_rows

Seen = dict[str, tuple[Split, int, str]]
"""Prompt: split, row and gold answer where it was first."""


def check_rows(config: Config) -> tuple[int, list[BadRow]]:
    """(number of rows, rows that cannot be used). Raises DataError for a source that cannot be read.

    Held-out rows come first, because a training row with the prompt of one of them is refused.
    """
    data = config.data
    splits: list[Split] = ["heldout", "train"] if data.heldout or data.source == "reasoning_gym" else ["train"]
    by_task = "reasoning_gym" in used_kinds(config.verifier)  # such a task may ask one question with two good answers
    rows = 0
    refused = []
    seen: Seen = {}
    for split in splits:
        for number, row in enumerate(read_rows(data, split, entries=by_task), 1):
            rows += 1
            if problem := _problem(config, seen, (split, number), row, by_task=by_task):
                refused.append(BadRow(split=split, row=number, problem=problem.problem, detail=problem.detail))
    return rows, refused


def _problem(config: Config, seen: Seen, place: tuple[Split, int], row: RawRow, *, by_task: bool) -> Problem | None:
    messages = read_messages(row.prompt, chat=config.data.format == "chat")
    if isinstance(messages, Problem):
        return messages
    gold = read_gold(row, config.verifier)
    if isinstance(gold, Problem):
        return gold
    split, first_row, first_answer = seen.setdefault(shown_text(messages), (*place, gold.answer))
    if (split, first_row) == place:
        return None
    if split != place[0]:
        return Problem("heldout_in_train", f"the same prompt as {split} row {first_row}")
    if gold.answer != first_answer and not by_task:
        return Problem("conflict", f"the same prompt as row {first_row}, whose answer is {first_answer[:80]!r}")
    if config.data.duplicates == "keep":
        return None
    return Problem("duplicate", f"the same prompt and answer as row {first_row}")
