"""Checks of one row: what its prompt and its gold answer are, or why the row cannot be used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from gvm_stream.config import VerifierSection
from gvm_stream.config_verifier import VERIFIER_KINDS, used_kinds
from gvm_stream.data.sources import RawRow, nearest
from gvm_stream.verify.golds import gold_problem, require_settings

Message = dict[str, str]
"""One chat message: `role` and `content`."""


class Problem(msgspec.Struct, frozen=True):
    """Why a row is left out: the `problem` and `detail` of its `BadRow`."""

    problem: str
    detail: str


def read_messages(value: object, *, chat: bool) -> tuple[Message, ...] | Problem:
    """The prompt as chat messages; a text is one user message. Lists of messages need `chat`."""
    messages: tuple[Message, ...]
    if value is None or isinstance(value, str):
        messages = ({"role": "user", "content": "" if value is None else value},)
    elif not isinstance(value, Sequence) or isinstance(value, bytes):
        return Problem("not_text", f"the prompt is of type {type(value).__name__}, not a text or a list of messages")
    elif not chat:
        return Problem("not_text", 'a prompt that is a list of messages needs data.format = "chat"')
    else:
        found = [_read_message(item) for item in value]
        refused = [item for item in found if isinstance(item, Problem)]
        if refused:
            return refused[0]
        messages = tuple(item for item in found if not isinstance(item, Problem))
    for message in messages:
        if problem := _encoding_problem(message["content"], "the prompt"):
            return problem
    if not messages or not messages[-1]["content"].strip():
        return Problem("empty_prompt", "the prompt is missing, empty or blank")
    return messages


def _read_message(item: object) -> Message | Problem:
    if isinstance(item, Mapping):
        role, content = item.get("role"), item.get("content")
        if (
            isinstance(role, str) and role.isidentifier() and isinstance(content, str)
        ):  # roles go into the template as is
            return {"role": role, "content": content}
    return Problem("not_text", "a message of the prompt is not an object with a role (one word) and a content (text)")


def shown_text(messages: Sequence[Message]) -> str:
    """The prompt as people read it. It also says whether two prompts are the same."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def read_answer(value: object) -> str | Problem:
    """The gold answer as a text without surrounding blanks; whole floats lose their `.0`."""
    if value is None or isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return Problem("missing_answer", f"the answer is {value!r}")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if not isinstance(value, str):
        return Problem("not_text", f"the answer is of type {type(value).__name__}, not a text or a number")
    if not value.strip():
        return Problem("missing_answer", "the answer is empty or blank")
    return _encoding_problem(value, "the answer") or value.strip()


class Gold(msgspec.Struct, frozen=True):
    answer: str
    verifier: str
    """Verifier that the row names; empty: the configured one."""


def read_gold(row: RawRow, verifier: VerifierSection) -> Gold | Problem:
    """The gold answer of a row and who reads it. ConfigError if the row's verifier needs settings that are not set."""
    kind = "" if row.verifier is None else str(row.verifier).strip()
    if kind and kind not in VERIFIER_KINDS:
        return Problem("unknown_verifier", f"there is no verifier {kind[:40]!r}{nearest(kind, VERIFIER_KINDS)}")
    answer = read_answer(row.answer)
    if isinstance(answer, Problem):
        return answer
    for used in (kind,) if kind else used_kinds(verifier):
        require_settings(verifier, used)
    if problem := gold_problem(verifier, kind, answer):
        return Problem("unreadable_gold", problem)
    return Gold(answer, kind)


def _encoding_problem(text: str, what: str) -> Problem | None:
    """Half of a surrogate pair is the one thing a `str` can hold that UTF-8, and so the wire, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Problem("not_text", f"{what} has a lone surrogate at character {error.start + 1}")
    return None
