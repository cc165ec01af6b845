"""What of a response counts: characters a reader would tell apart, and nothing of the reasoning.

Everything here and in the modules that look for answers takes time linear in the length of a response.
"""

from __future__ import annotations

import re
import unicodedata

_TAG = r"(?:think|thinking|thought|thoughts|reason|reasoning|reflection|scratchpad)"
_CLOSING = re.compile(rf"[<\[◁]/{_TAG}[>\]▷]|<\|end_of_thought\|>", re.IGNORECASE)
_OPENING = re.compile(rf"[<\[◁]{_TAG}[>\]▷]|<\|begin_of_thought\|>", re.IGNORECASE)
_ANSWER_OPENING = re.compile(r"<answer>", re.IGNORECASE)
_ANSWER_CLOSING = re.compile(r"</answer>", re.IGNORECASE)

_BOLD = re.compile(r"(?<![\w)\]}])\*\*(?=\S)|(?<=\S)\*\*(?![\w(\[{\\+-])")
"""Two stars with a blank or punctuation on one side; between two operands they are a power."""

_PLAIN_FORM_OF_WIDE = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {
    "\N{IDEOGRAPHIC FULL STOP}": ".\n",  # ends a sentence without a blank after it
    "\N{IDEOGRAPHIC COMMA}": ", ",
    "\N{FULLWIDTH COMMA}": ", ",
    "\N{FULLWIDTH COLON}": ": ",
}


def clean(text: str) -> str:
    """The same text in plain characters.

    Invisible characters go; blanks, full-width forms, letters and digits of mathematical alphabets and decimal digits
    of any script become their ASCII forms. Mathematical symbols (a root, a minus sign) stay for the reader of formulas.
    """
    if text.isascii():
        return _BOLD.sub("", text.replace("\r\n", "\n"))
    plain = {ord(character): _plain(character) for character in set(text) if not character.isascii()}
    return _BOLD.sub("", text.replace("\r\n", "\n").translate(plain))


def _plain(character: str) -> str:
    if character in _PLAIN_FORM_OF_WIDE:
        return _PLAIN_FORM_OF_WIDE[character]
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "Zs":
        return " "
    if category in ("Zl", "Zp"):
        return "\n"
    if category == "Cf" or "VARIATION SELECTOR" in unicodedata.name(character, ""):
        return ""
    if 0x1D400 <= ord(character) <= 0x1D7FF:  # the mathematical alphabets
        return unicodedata.normalize("NFKC", character)
    return character


def after_reasoning(text: str) -> str:
    """What follows the last closing tag (the opening one may be in the prompt), up to a section left open."""
    closings = list(_CLOSING.finditer(text))
    visible = text[closings[-1].end() :] if closings else text
    opening = _OPENING.search(visible)
    return visible[: opening.start()] if opening else visible


def without_tags(text: str) -> str:
    """Reasoning and all, for those who let an answer in it count."""
    return _OPENING.sub("\n", _CLOSING.sub("\n", text))


def answer_part(text: str, marker: str) -> str | None:
    """What the response itself sets apart as its answer, or None.

    `marker` is the configured one: the answer follows the last of them. Without one, `<answer>` tags do the same.
    """
    if marker:
        _, found, answer = text.rpartition(marker)
        return answer if found else None
    openings = list(_ANSWER_OPENING.finditer(text))
    if not openings:
        return None
    answer = text[openings[-1].end() :]
    closing = _ANSWER_CLOSING.search(answer)
    return answer[: closing.start()] if closing else answer
