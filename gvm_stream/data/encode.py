"""Prompts to token ids: the template and the BOS token exactly once, whatever the prompt says."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import msgspec

from gvm_stream.config import DataSection
from gvm_stream.data.check import Message, Problem
from gvm_stream.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Encode prompts in one format.

    Special-token text inside a prompt (an end marker, say) becomes plain text, never a control token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataSection) -> None:
        if data.format == "chat" and not tokenizer.chat_template:
            raise ConfigError(
                f'data.format = "chat" needs a chat template, which the tokenizer of {tokenizer.name_or_path!r} '
                'does not have; use data.format = "raw"'
            )
        self._tokenizer = tokenizer
        self._chat = data.format == "chat"
        self._system = data.system
        added = tokenizer.added_tokens_decoder.values()
        self._special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)} - {""}

    def encode(self, messages: Sequence[Message]) -> list[int] | Problem:
        """Token ids [P] of a prompt. A row that brings its own system message keeps it instead of `data.system`."""
        if not self._chat:
            return self._ids(messages[0]["content"], plain=True, bos=True)
        if self._system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            rendered = self._render(messages)
            if any(token in message["content"] for token in self._special for message in messages):
                return self._encode_around(rendered, messages)
        except jinja2.TemplateError as error:
            return Problem("template_refused", f"the chat template says: {error}")
        return self._ids(rendered)

    def _encode_around(self, rendered: str, messages: Sequence[Message]) -> list[int] | Problem:
        """Encode the template's own text with, and the messages' text without, control tokens.

        Templates are programs and may change what they are given, so the pieces count only if they add up.
        """
        marks = [uuid.uuid4().hex for _ in messages]
        rest = self._render([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
        pieces: list[tuple[str, bool]] = []
        for message, mark in zip(messages, marks, strict=True):
            template, _, rest = rest.partition(mark)
            pieces += [(template, False), (message["content"], True)]
        pieces.append((rest, False))
        ids = [token for text, plain in pieces if text for token in self._ids(text, plain=plain)]
        if "".join(text for text, _ in pieces) == rendered == self._tokenizer.decode(ids):
            return ids
        found = next(token for token in self._special for message in messages if token in message["content"])
        return Problem("special_token_text", f"the prompt holds {found!r}, a control token for this chat template")

    def _render(self, messages: Sequence[Message]) -> str:
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        assert isinstance(text, str)
        return text

    def _ids(self, text: str, *, plain: bool = False, bos: bool = False) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=bos, split_special_tokens=plain)
        return msgspec.convert(encoded["input_ids"], list[int])


def end_token_ids(tokenizer: PreTrainedTokenizerBase, model_path: str) -> tuple[int, ...]:
    """Token ids that end a response: those of generation_config.json and the tokenizer's end token."""
    from transformers import GenerationConfig

    folder = Path(model_path)
    ids: list[int] = []
    if (folder / "generation_config.json").is_file() or not folder.is_dir():
        try:
            configured = GenerationConfig.from_pretrained(model_path).eos_token_id
        except OSError as error:
            if folder.is_dir():
                raise ModelError(f"generation_config.json in {model_path!r} cannot be read: {error}") from error
            configured = None  # a hub model need not have one
        ids += [configured] if isinstance(configured, int) else configured or []
    if isinstance(tokenizer.eos_token_id, int):
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))
