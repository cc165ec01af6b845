r"""From a response to the text of its answer, in LaTeX or plain.

Boxes count before sentences, and sentences that announce an answer before the closing sentence. Of several statements
the last counts. Statements side by side, with nothing but commas, "and" or "or" between them, are one answer of several
values, so that a list of guesses is equal to none of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import msgspec

from gvm_stream.config import MathSection
from gvm_stream.verify.math.boxes import Given, boxed_answers
from gvm_stream.verify.math.prose import CUE, clause, closing_answer, stated_answers
from gvm_stream.verify.math.response import after_reasoning, answer_part, clean, without_tags

_BETWEEN = re.compile(
    r"""(?: \s | [$,;&.()*~{}+] | \\[()\[\],;:!\\\ ] | \\q?quad\b
          | (?:\\(?:text|mathrm)\s*\{\s*)? \b(?:and|or|y|et|und|e|ou|oder|o
              |either|also|maybe|perhaps|possibly|equivalently|alternatively
              |the|my|our|correct|la|die|a)\b
          | \b[A-Za-z](?:_\{?\w{1,3}\}?)? \s* = )*""",
    re.VERBOSE | re.IGNORECASE,
)
_LONGEST_BETWEEN = 100
MOST_VALUES = 64
"""More different values side by side are no answer but an enumeration."""
_LABEL = re.compile(r"([A-Za-z](?:_\{?\w{1,3}\}?)?)\s*=\s*$")
_ALTERNATIVE = re.compile(
    r"(?:[\s$.,;(]|\\[)\],;! ]){0,20}(?:\\text\s*\{\s*)?\bor\b(?:\s*\})?,?\s*(?P<same>(?:equivalently|simply)\b,?)?",
    re.IGNORECASE,
)
_ROUNDED = re.compile(r"\s*(?:about|approximately|roughly|\\approx|\N{ALMOST EQUAL TO})", re.IGNORECASE)


class Extraction(msgspec.Struct, frozen=True):
    answers: tuple[str, ...]
    """Values given together, as written, without box and delimiters; none if the response has no answer."""
    rule: str
    """How they were found."""


NOTHING = Extraction((), "no answer")


def extract(response: str, options: MathSection, marker: str) -> Extraction:
    """The answer of a response. `marker`: the answer follows the last of these; empty: look for the usual forms."""
    text = clean(response)
    found = _in_region(after_reasoning(text), options, marker)
    if not found.answers and options.inside_reasoning:
        found = _in_region(without_tags(text), options, marker)
    return found


def gold_answer(gold: str) -> str:
    """The answer in a gold column that may hold a whole solution: that of a response, or everything."""
    text = clean(gold).strip()
    found = _announced(text, MathSection())
    answer = ", ".join(found.answers) if found and found.answers else text
    return answer[2:-2] if answer.startswith("\\[") and answer.endswith("\\]") else answer


def _in_region(text: str, options: MathSection, marker: str) -> Extraction:
    region = answer_part(text, marker)
    if region is None:
        return NOTHING if marker else _in_text(text, options)
    found = _announced(region, options)
    if found:
        return found
    answer, _ = clause(region, 0)
    return Extraction((answer,), "marked answer") if answer else NOTHING


def _in_text(text: str, options: MathSection) -> Extraction:
    found = _announced(text, options)
    if found:
        return found
    answer = closing_answer(text)
    return Extraction((answer,), "closing sentence") if answer else NOTHING


def _announced(text: str, options: MathSection) -> Extraction | None:
    """What boxes or else statements give, and None if there are neither."""
    boxes = boxed_answers(text)
    if boxes is None:
        return Extraction((), "unfinished box")
    if boxes:
        groups = _side_by_side(text, boxes)
        return Extraction(_values(text, groups[0 if options.first_box else -1]), "box")
    stated = stated_answers(text)
    if not stated:
        return None
    return Extraction(_distinct([given.answer for given in _side_by_side(text, stated)[-1]]), "stated answer")


def _side_by_side(text: str, given: Sequence[Given]) -> list[list[Given]]:
    """Neighbours with nothing between them that takes the first back."""
    groups = [[given[0]]]
    for before, after in itertools.pairwise(given):
        between = text[before.end : after.start]
        if len(between) <= _LONGEST_BETWEEN and _BETWEEN.fullmatch(CUE.sub(" ", between)):
            groups[-1].append(after)
        else:
            groups.append([after])
    return groups


def _values(text: str, boxes: Sequence[Given]) -> tuple[str, ...]:
    """What boxes given together hold, with the names of the unknowns, and what is offered beside them."""
    answers = [box.answer for box in boxes]
    labels = [_LABEL.search(text[max(0, box.start - 12) : box.start]) for box in boxes]
    names = [label[1] for label in labels if label]
    if len(set(names)) == len(boxes) > 1:
        answers = [f"{name}={answer}" for name, answer in zip(names, answers, strict=True)]
    alternative = _ALTERNATIVE.match(text, boxes[-1].end)
    if alternative and not _ROUNDED.match(text, alternative.end()):
        other, _ = clause(text, alternative.end())
        answers.append(other.removesuffix("\\$"))  # the formula that the box stands in ends there
    return _distinct(answers)


def _distinct(answers: Sequence[str]) -> tuple[str, ...]:
    distinct = tuple(dict.fromkeys(answer for answer in answers if answer))
    return distinct if len(distinct) <= MOST_VALUES else ()
