"""Plain numbers as exact fractions, and when a decimal stands for another number.

Most answers are plain numbers: they are compared here, without a grammar or an algebra.
"""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

_PLAIN = re.compile(
    r"""(?P<sign>[-+]?)\s*
    (?:(?P<whole>\d+)\s*(?:\\frac\{(?P<a>\d+)\}\{(?P<b>\d+)\}|\s(?P<c>\d+)/(?P<d>\d+))   # mixed
      |\\frac\{(?P<minus>-?)(?P<e>\d+)\}\{(?P<f>\d+)\} | (?P<g>\d+)\s*/\s*(?P<h>\d+)
      |(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?:\ \d{3})+|\d+\.?\d*|\.\d+)
       (?:[eE](?P<exponent>[-+]?\d{1,4}))?)""",
    re.VERBOSE,
)
LONGEST = 4000
"""Digits of a number that is read; Python itself refuses more than 4300."""
FULL_PRECISION = Fraction(1, 10**12)
"""Relative error of a decimal that counts as the number itself, if it has `FULL_DIGITS` significant digits."""
FULL_DIGITS = 12


class Plain(msgspec.Struct, frozen=True):
    """A number as written: its value, decimals after the point (None: no decimal), significant digits."""

    value: Fraction
    decimals: int | None = None
    significant: int = 0

    @property
    def rounded(self) -> bool:
        """It may be rounded: a decimal whose last digit is not 0, so neither 34.0 nor 15.50."""
        return self.decimals is not None and self.decimals > 0 and (self.value * 10**self.decimals) % 10 != 0


def plain(text: str) -> Plain | None:
    """An integer, decimal, fraction or mixed number in figures; None if it is anything else."""
    if len(text) > LONGEST:
        return None
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    sign = -1 if (match["sign"] == "-") != (match["minus"] == "-") else 1
    if match["number"] is not None:
        return _decimal(sign, match["number"], int(match["exponent"] or 0))
    above, below = (
        match["a"] or match["c"] or match["e"] or match["g"],
        match["b"] or match["d"] or match["f"] or match["h"],
    )
    whole = match["whole"]
    if int(below) == 0 or (whole is not None and not 0 < int(above) < int(below)):  # 6 7/2 is no mixed number
        return None
    return Plain(sign * (int(whole or 0) + Fraction(int(above), int(below))))


def decimal(text: str) -> Plain:
    """A number token: digits with an optional point and exponent, or `p/q`."""
    if "/" in text:
        return Plain(Fraction(text))
    digits, _, exponent = text.lower().partition("e")
    return _decimal(1, digits, int(exponent or 0))


def _decimal(sign: int, digits: str, exponent: int) -> Plain:
    digits = digits.replace(",", "").replace(" ", "")
    whole, point, after = digits.partition(".")
    value = sign * int(whole + after or "0") * Fraction(10) ** (exponent - len(after))
    return Plain(value, len(after) - exponent if point and after else None, len((whole + after).lstrip("0")))


def same_plain(gold: Plain, answer: Plain, *, gold_precision: bool) -> bool:
    """Equal exactly, or one is a decimal that stands for the other."""
    if gold.value == answer.value:
        return True
    if answer.decimals is not None and stands_for_full(answer, gold.value):
        return True
    # a decimal answer must be exact for a gold of few digits: 0.54 is not 0.5
    return gold_precision and (answer.decimals is None or gold.significant >= 3) and rounds_to(gold, answer.value)


def stands_for_full(decimal: Plain, exact: Fraction) -> bool:
    """The decimal is `exact` to double precision."""
    if decimal.significant < FULL_DIGITS or decimal.decimals is None or decimal.decimals <= 0:
        return False
    error = abs(decimal.value - exact)
    if 10**FULL_DIGITS % exact.denominator == 0:  # 0.3 could be written exactly: only 0.30000000000000004 is the same
        return decimal.significant > FULL_DIGITS + 3 and error <= FULL_PRECISION * abs(exact) / 1000
    return error <= FULL_PRECISION * abs(exact)


def rounds_to(gold: Plain, exact: Fraction) -> bool:
    """`exact` rounded to the decimals of `gold` is `gold`; integers and single digits round to nothing."""
    if not gold.rounded or gold.decimals is None or gold.significant < 2:
        return False
    return abs(gold.value - exact) * 2 * 10**gold.decimals <= 1 and gold.value * exact > 0
