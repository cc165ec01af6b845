"""Prepared prompts: what the data module hands to the allocator, once, before a run starts."""

from __future__ import annotations

import msgspec

from gvm_stream.allocator.types import PromptId


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    id: PromptId
    """`train-ROW` or `heldout-ROW`, ROW counted from 1 in its source."""
    text: str
    """What the model is asked, as people read it (before the chat template)."""
    tokens: bytes
    """Token ids the engine gets, int32 [P]: template and BOS applied, exactly once."""
    answer: str
    verifier: str = ""
    """Verifier that the row names; empty: the configured one."""


class BadRow(msgspec.Struct, frozen=True, kw_only=True):
    split: str
    row: int
    """Counted from 1."""
    problem: str
    """missing_answer, unreadable_gold, unknown_verifier, empty_prompt, too_long, duplicate, heldout_in_train ..."""
    detail: str


class PromptSet(msgspec.Struct, frozen=True, kw_only=True):
    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    bad_rows: tuple[BadRow, ...]
    end_tokens: tuple[int, ...]
    """Token ids that end a response (generation config and tokenizer)."""
