"""Answers that are no formula: option letters, words, clock times."""

from __future__ import annotations

import re

from gvm_stream.verify.math.tokens import is_name, is_word

_OPTION = re.compile(r"\(\s*([A-J])\s*\)(?!\s*[-+*/^_(])(?:\s*[:.]?\s*\S.*)?|([A-J])(?:\s*[).:](?:\s+\S.*)?|\s*:\S.*)?")
_CLOCK = re.compile(r"0?(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*([ap]\.?m\.?)?", re.IGNORECASE)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '\-,.]+[^\W\d_]+)*")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


def option(text: str) -> str:
    """The letter of `(B)`, `B`, `B.`, `E: none of these`; empty if the text is no option."""
    match = _OPTION.fullmatch(opened(text))
    return (match[1] or match[2]) if match is not None else ""


def clock(text: str) -> tuple[str, ...] | None:
    """Hours, minutes, seconds and half of the day of a time such as `10:30` or `7:05 pm`."""
    match = _CLOCK.fullmatch(opened(text))
    if match is None or int(match[1]) > 24:
        return None
    return str(int(match[1])), match[2], match[3] or "", (match[4] or "").lower().replace(".", "")


def words(text: str) -> tuple[str, ...] | None:
    """The words, in lower case, of a text that is nothing else; None for a formula (`xy` is a product, `No` a word)."""
    wrapped = "\\text{" in text
    text = opened(text)
    if _WORDS.fullmatch(text) is None:
        return None
    found = re.findall(r"[^\W\d_]+", text)
    if any(map(is_name, found)) or (not wrapped and not any(is_word(word) or not word.isascii() for word in found)):
        return None
    return tuple(word.lower() for word in found if word.lower() not in ("the", "a", "an") or len(found) == 1)


def opened(text: str) -> str:
    """The text without the wrappers of words."""
    return " ".join(_TEXT.sub(r" \1 ", text).split())
