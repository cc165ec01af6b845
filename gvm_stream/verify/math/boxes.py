r"""Answers in boxes: `\boxed{...}` with any nesting, `\boxed 5` and `\fbox{...}`, found in one pass."""

from __future__ import annotations

import re

import msgspec

from gvm_stream.verify.math.normalise import normalise
from gvm_stream.verify.math.units import split_unit

_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*|\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED = re.compile(r"[^\s${}]+")
_UNIT_AFTER = re.compile(
    r"""(?:\s|\\[,;:!\ ]|~){0,4}
        (?: (?:\$|\\\))?\s{0,4} (?:\\?%|\^\s*\{?\s*\\circ\s*\}?|\N{DEGREE SIGN})
          | \\(?:text|mathrm|mbox|textrm)\{[^{}]{1,30}\} (?:\^\{?-?[0-9]\}?)? )""",
    re.VERBOSE,
)
_NOT = re.compile(
    r"""(?: (?:\b(?:can)?not|n't) (?:\s+(?:be|equal|equal\ to))? | \\neq? | \N{NOT EQUAL TO} )
        [\s$]* (?:\\[(\[])? \s*$""",
    re.VERBOSE,
)


class Given(msgspec.Struct, frozen=True):
    """An answer that a response gives, and where: `text[start:end]` is the whole statement of it."""

    start: int
    end: int
    answer: str


def boxed_answers(text: str) -> list[Given] | None:
    """The outermost boxes in their order, empty and denied ones left out.

    None: the last box is unfinished, that is never closed, or empty after others that are not.
    """
    boxes = _closed_boxes(text)
    if boxes is None or (boxes and not boxes[-1][2].strip() and any(content.strip() for _, _, content in boxes)):
        return None
    given = []
    for start, end, content in boxes:
        answer = _BOX.sub("", content).strip()
        if answer and not _NOT.search(text[max(0, start - 24) : start]):
            unit = _UNIT_AFTER.match(text, end)
            if unit and has_unit(f"1 {unit[0]}"):
                answer, end = answer + unit[0].replace("$", "").replace("\\)", ""), unit.end()
            given.append(Given(start, end, answer))
    return given


def has_unit(text: str) -> bool:
    """Whether a text is an amount with a unit or percent sign."""
    plain = normalise(text)
    return plain.endswith("%") or bool(split_unit(plain)[1])


def _closed_boxes(text: str) -> list[tuple[int, int, str]] | None:
    closed: list[tuple[int, int, str]] = []
    open_braces: list[int | None] = []  # where the box of a brace starts; None: a brace of something else
    last_start, pending, skip_to = -1, -1, 0
    for token in _TOKEN.finditer(text):
        if token.start() < skip_to:
            continue
        if token[0][0] == "\\":
            if len(token[0]) == 2:  # an escaped character
                continue
            last_start = token.start()
            if text.startswith("{", token.end()):
                pending = last_start
            elif bare := _UNBRACED.match(text, token.end()):
                closed.append((last_start, bare.end(), bare[0].rstrip(".,;:!?")))
                skip_to = bare.end()
        elif token[0] == "{":
            open_braces.append(pending if pending >= 0 else None)
            pending = -1
        elif open_braces and (start := open_braces.pop()) is not None:
            content = text.index("{", start) + 1
            while closed and closed[-1][0] > start:  # boxes in this one
                closed.pop()
            closed.append((start, token.end(), text[content : token.start()]))
    if last_start >= 0 and not any(start <= last_start < end for start, end, _ in closed):
        return None
    return closed
