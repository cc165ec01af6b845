"""Look at every row once, before a run starts: usable rows become prompts, the others are reported.

`python -m gvm_stream.data.prepare CONFIG_JSON OUT` does it in a process of its own, so that the allocator need not
import a tokenizer library.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from gvm_stream.config import Config, DataSection, VerifierSection
from gvm_stream.config_verifier import used_kinds
from gvm_stream.data.check import Problem, read_gold, read_messages, shown_text
from gvm_stream.data.encode import PromptEncoder, end_token_ids
from gvm_stream.data.prompts import BadRow, Prompt, PromptSet
from gvm_stream.data.sources import RawRow, Split, read_rows
from gvm_stream.data.store import ROWS_SHOWN, describe_bad_rows, save_prompt_set
from gvm_stream.errors import ConfigError, DataError, GvmStreamError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ANY_TEXT = VerifierSection(kind="exact")
"""Reads any gold answer but a remark in its place."""


def prepare_prompts(
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_tokens: tuple[int, ...],
    verifier: VerifierSection = ANY_TEXT,
) -> PromptSet:
    """Read, check and encode both splits. Rows whose gold answer `verifier` cannot read are left out.

    Without a held-out source, a prompt is held out by a hash of its text, so in any order and beside any other rows.
    """
    encoder = PromptEncoder(tokenizer, data)
    own_heldout = bool(data.heldout) or data.source == "reasoning_gym"
    bad_rows: list[BadRow] = []
    heldout = [prompt for _, prompt in _usable(data, verifier, "heldout", encoder, bad_rows)] if own_heldout else []
    asked = {prompt.text: prompt.id for prompt in heldout}
    train: list[Prompt] = []
    for row, prompt in _usable(data, verifier, "train", encoder, bad_rows):
        if prompt.text in asked:
            detail = f"the same prompt as {asked[prompt.text]}"
            bad_rows.append(BadRow(split="train", row=row, problem="heldout_in_train", detail=detail))
        elif not own_heldout and is_held_out(prompt.text, data.heldout_share):
            heldout.append(msgspec.structs.replace(prompt, id=f"heldout-{row}"))
        else:
            train.append(prompt)
    for name, prompts in (("training", train), ("held-out", heldout)):
        if not prompts:
            raise DataError(_none_usable(name, data, own_heldout, bad_rows))
    return PromptSet(train=tuple(train), heldout=tuple(heldout), bad_rows=tuple(bad_rows), end_tokens=tuple(end_tokens))


def is_held_out(text: str, share: float) -> bool:
    return zlib.crc32(text.encode()) < share * 2**32


def _usable(
    data: DataSection, verifier: VerifierSection, split: Split, encoder: PromptEncoder, bad_rows: list[BadRow]
) -> Iterator[tuple[int, Prompt]]:
    """(row, prompt) of the rows that can be used; the others go to `bad_rows`."""
    first: dict[str, tuple[int, str]] = {}
    contradictions: list[str] = []
    duplicates: list[str] = []
    unreadable: list[BadRow] = []
    by_task = "reasoning_gym" in used_kinds(verifier)  # a task may make one question with two good answers
    for row, raw in enumerate(read_rows(data, split, entries=by_task), 1):
        prompt = _prompt(data, verifier, encoder, f"{split}-{row}", raw)
        if isinstance(prompt, Prompt):
            first_row, first_answer = first.setdefault(prompt.text, (row, prompt.answer))
            if first_answer != prompt.answer and not by_task:
                contradictions.append(f"{first_row} and {row}")
                continue
            if first_row == row or data.duplicates == "keep":
                yield row, prompt
                continue
            duplicates.append(f"{first_row} and {row}")
            prompt = Problem("duplicate", f"the same prompt and answer as row {first_row}")
        bad_rows.append(BadRow(split=split, row=row, problem=prompt.problem, detail=prompt.detail))
        if prompt.problem == "unreadable_gold":
            unreadable.append(bad_rows[-1])
    if unreadable and verifier.bad_golds == "error":
        raise DataError(f'data.{split}: verifier.bad_golds = "error", and {"; ".join(describe_bad_rows(unreadable))}')
    if contradictions:
        raise DataError(f"data.{split}: the same prompt has different answers in {_pairs(contradictions)}")
    if duplicates and data.duplicates == "error":
        raise DataError(f'data.{split}: data.duplicates = "error", and the same row is in {_pairs(duplicates)}')


def _pairs(pairs: Sequence[str]) -> str:
    more = f" and {len(pairs) - ROWS_SHOWN} more pairs" if len(pairs) > ROWS_SHOWN else ""
    return "rows " + ", ".join(pairs[:ROWS_SHOWN]) + more


def _prompt(
    data: DataSection, verifier: VerifierSection, encoder: PromptEncoder, name: str, row: RawRow
) -> Prompt | Problem:
    messages = read_messages(row.prompt, chat=data.format == "chat")
    if isinstance(messages, Problem):
        return messages
    gold = read_gold(row, verifier)
    if isinstance(gold, Problem):
        return gold
    ids = encoder.encode(messages)
    if isinstance(ids, Problem):
        return ids
    if len(ids) > data.max_prompt_tokens:
        return Problem("too_long", f"{len(ids)} tokens, data.max_prompt_tokens = {data.max_prompt_tokens}")
    tokens = np.array(ids, dtype="<i4").tobytes()
    return Prompt(id=name, text=shown_text(messages), tokens=tokens, answer=gold.answer, verifier=gold.verifier)


def _none_usable(name: str, data: DataSection, own_heldout: bool, bad_rows: Sequence[BadRow]) -> str:
    source = data.reasoning_gym.task if data.source == "reasoning_gym" else data.train
    if name == "held-out" and own_heldout:
        source = data.heldout or source
    elif name == "held-out":
        name = f"held-out (data.heldout_share = {data.heldout_share:g})"
    reasons = "; ".join(describe_bad_rows(bad_rows)) or "no row was refused, so there are too few rows"
    return f"{source!r} has no usable {name} row: {reasons}"


def main(arguments: Sequence[str]) -> int:
    """Prepare the prompts of a run; the exit status is that of the error, which goes to stderr as one sentence."""
    for variable in ("DATASETS_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
        os.environ.setdefault(variable, "critical")
    try:
        if len(arguments) != 2:
            raise ConfigError(f"gvm_stream.data.prepare takes CONFIG_JSON and OUT, got {len(arguments)} arguments")
        config_path, out = arguments
        config = _read_config(Path(config_path))
        tokenizer = load_tokenizer(config.model.path)
        end_tokens = end_token_ids(tokenizer, config.model.path)
        prompt_set = prepare_prompts(config.data, tokenizer, end_tokens=end_tokens, verifier=config.verifier)
        save_prompt_set(prompt_set, Path(out))
    except GvmStreamError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    return 0


def _read_config(path: Path) -> Config:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Config)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"configuration {str(path)!r} cannot be read: {error}") from error


def load_tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"model.path = {model_path!r}: no tokenizer can be loaded from there: {reason}") from error
    return tokenizer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
