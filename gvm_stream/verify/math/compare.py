"""The rules by which an answer equals a gold, in their order: cheap and certain ones first.

Whatever the grammar cannot read is compared as it is written, never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from gvm_stream.config import MathSection
from gvm_stream.verify.math.exact import TooBig
from gvm_stream.verify.math.formula import read
from gvm_stream.verify.math.library import same_by_library
from gvm_stream.verify.math.meaning import Meaning
from gvm_stream.verify.math.normalise import gold_text, normalise, squeezed
from gvm_stream.verify.math.numbers import plain, same_plain
from gvm_stream.verify.math.tokens import Unreadable
from gvm_stream.verify.math.units import split_unit
from gvm_stream.verify.math.words import clock, option, words

_PLACEHOLDER = re.compile(r"[-?!.,;:_\s]+")
_BRACKETS = (
    (("{", re.compile(r"(?<!\\)\{")), ("}", re.compile(r"(?<!\\)\}"))),
    (("\\left", re.compile(r"\\left(?![a-z])")), ("\\right", re.compile(r"\\right(?![a-z])"))),
)


class UnreadableGold(ValueError):
    """A gold answer that no answer could equal."""


class Comparison(msgspec.Struct, frozen=True):
    equal: bool
    expected: str
    """The gold, normalised."""
    extracted: str
    """The answer, normalised."""
    rule: str
    """The rule that decided."""


Verdict = tuple[bool, str]
"""Equal, and the rule that says so."""


def compare(gold: str, answers: Sequence[str], options: MathSection) -> Comparison:
    """Judge the texts of an answer, several of them as one list. Raises UnreadableGold."""
    problem = readable_gold(gold)
    if problem:
        raise UnreadableGold(problem)
    expected = normalise(gold_text(gold))
    extracted = ", ".join(filter(None, map(normalise, answers)))
    equal, rule = _judge(expected, extracted, options)
    return Comparison(equal, expected, extracted, rule)


def readable_gold(gold: str) -> str:
    """What is wrong with a gold answer, in words; empty if it can be compared."""
    text = normalise(gold_text(gold))
    if not text:
        return "the gold answer is empty"
    if _PLACEHOLDER.fullmatch(text):
        return f"the gold answer {text[:60]!r} is punctuation only"
    for pair in _BRACKETS:
        (many, more), (few, fewer) = sorted(((len(sign.findall(gold)), name) for name, sign in pair), reverse=True)
        if many != few:
            return f"the gold answer {text[:60]!r} has {more} without {fewer}"
    return ""


def _judge(gold: str, answer: str, options: MathSection) -> Verdict:
    for name, rule in RULES:
        verdict = rule(gold, answer, options)
        if verdict is not None:
            return verdict if isinstance(verdict, tuple) else (verdict, name)
    return False, "different texts"


def _no_answer(_: str, answer: str, __: MathSection) -> bool | None:
    return None if answer else False


def _same_text(gold: str, answer: str, _: MathSection) -> bool | None:
    return True if squeezed(gold) == squeezed(answer) else None


def _plain_numbers(gold: str, answer: str, options: MathSection) -> bool | None:
    right, got = plain(gold), plain(answer)
    if right is None or got is None:
        return None
    return same_plain(right, got, gold_precision=options.gold_precision)


def _option(gold: str, answer: str, _: MathSection) -> bool | None:
    """An option's letter, with or without brackets and the option's text."""
    right, got = option(gold), option(answer)
    return right == got if right and got else None


def _clock(gold: str, answer: str, _: MathSection) -> bool | None:
    """10:30 is a time of day: read literally, not as a ratio."""
    right, got = clock(gold), clock(answer)
    if right is None or got is None:
        return None if right is None else False
    return right[:3] == got[:3] and (right[3] == got[3] or "" in (right[3], got[3]))


def _words(gold: str, answer: str, _: MathSection) -> bool | None:
    """Words are the same letters in the same order, whatever their case."""
    right = words(gold)
    return None if right is None else right == words(answer)


def _percent(gold: str, answer: str, options: MathSection) -> Verdict | None:
    """45 % is 0.45, and 45 if the sign is optional."""
    if ("%" in gold) == ("%" in answer):
        return None
    value = _formula(gold, answer, options)
    if value is not None and value[0]:
        return True, "percent as a number"
    number = plain(gold)
    if not options.percent_sign_optional or (number is not None and abs(number.value) < 1):
        return False, "percent"
    return _judge(gold.replace("%", ""), answer.replace("%", ""), options)[0], "percent sign optional"


def _unit(gold: str, answer: str, options: MathSection) -> Verdict | None:
    """A unit must be the gold's; if only one side has one it may be left out."""
    (amount, unit), (got, got_unit) = split_unit(gold), split_unit(answer)
    if not unit and not got_unit:
        return None
    if unit and got_unit:
        return _judge(amount, got, options)[0] and unit == got_unit, "amount and unit"
    equal = options.unit_optional and _judge(amount, got, options)[0]
    return (True, "amount, unit optional") if equal else None


def _formula(gold: str, answer: str, options: MathSection) -> Verdict | None:
    """What both say as formulas."""
    try:
        return Meaning(options).same(read(gold), read(answer))
    except (Unreadable, TooBig, RecursionError):
        return None


def _calculus(gold: str, answer: str, _: MathSection) -> bool | None:
    return same_by_library(gold, answer)


Rule = Callable[[str, str, MathSection], bool | Verdict | None]
# in the order in which they are asked; the first that does not say None decides
RULES: tuple[tuple[str, Rule], ...] = (
    ("no answer", _no_answer),
    ("same text", _same_text),
    ("plain numbers", _plain_numbers),
    ("option letter", _option),
    ("clock time", _clock),
    ("words", _words),
    ("percent", _percent),
    ("unit", _unit),
    ("formula", _formula),
    ("math-verify", _calculus),
)
