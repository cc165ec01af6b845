"""The rules: gold answer and response to a verdict.

The answer is what follows the last `answer_marker` of a response, without surrounding blanks; with no marker
configured it is the whole response. A response without the marker, or cut off at the length cap, is wrong whatever it
holds: a model that does not come to an answer has not given one. A gold answer that cannot be read is Unscorable.
"""

from __future__ import annotations

import re
from fractions import Fraction

from gvm_stream.config import VerifierSection
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable, VerifyItem

UNREADABLE_GOLD = VerdictUnscorable("unreadable gold")

_NUMBER = re.compile(
    r"""(?P<sign>[-+]?)
        (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)   # thousands separators all or not at all
        (?:\.(?P<decimals>[0-9]*))?
        (?:[eE](?P<exponent>[-+]?[0-9]{1,3}))?""",
    re.VERBOSE,
)
_LONGEST_NUMBER = 1000
_MATH_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def judge(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """Apply the configured rule. May run for ever or run out of memory (`math`): call it in a process to be killed."""
    if item.truncated:
        return VerdictScored(0.0)
    extracted = extract(item.response, settings.answer_marker)
    if extracted is None:
        return VerdictScored(0.0)
    try:
        if settings.kind == "exact":
            return exact(item.answer, extracted)
        if settings.kind == "numeric":
            return numeric(item.answer, extracted, settings.numeric.tolerance)
        return math(item.answer, extracted, anchored=bool(settings.answer_marker))
    except Exception as error:  # computer algebra fails in every way there is; none of them makes a response wrong
        return VerdictUnscorable(f"verifier failed: {type(error).__name__}: {str(error)[:200]}")


def extract(response: str, marker: str) -> str | None:
    """The answer in a response, or None if it has no marker."""
    if not marker:
        return response.strip()
    _, found, answer = response.rpartition(marker)
    return answer.strip() if found else None


def exact(gold: str, extracted: str) -> Verdict:
    """Equal texts."""
    return VerdictScored(float(extracted == gold.strip()), extracted)


def numeric(gold: str, extracted: str, tolerance: float) -> Verdict:
    """Numbers with |answer - gold| <= tolerance * |gold|, computed exactly."""
    right, got = parse_number(gold), parse_number(extracted)
    if right is None:
        return UNREADABLE_GOLD
    equal = got is not None and abs(got - right) <= Fraction(tolerance) * abs(right)
    return VerdictScored(float(equal), extracted)


def parse_number(text: str) -> Fraction | None:
    """An integer, a decimal (thousands separators, exponent) or a fraction of two of them; anything else is None."""
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    if len(text) > _LONGEST_NUMBER:
        return None
    above, slash, below = text.partition("/")
    numerator, denominator = _parse_decimal(above), _parse_decimal(below) if slash else Fraction(1)
    return numerator / denominator if numerator is not None and denominator else None


def _parse_decimal(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or not (match["whole"] or match["decimals"]):
        return None
    decimals = match["decimals"] or ""
    digits = int(match["sign"] + match["whole"].replace(",", "") + decimals)
    return digits * Fraction(10) ** (int(match["exponent"] or 0) - len(decimals))


def math(gold: str, extracted: str, *, anchored: bool) -> Verdict:
    """Equal by math-verify. `anchored`: the extracted text is an answer, not a response with one somewhere in it.

    The library's own time limits are off: they need signals and the main thread. Its exceptions are the caller's.
    """
    from math_verify import parse, verify

    def read(text: str) -> list[object]:
        return list(parse(text, parsing_timeout=None, raise_on_error=True))

    right = read(_as_formula(gold))
    if not any(not isinstance(expression, str) for expression in right):  # a text is what it could not parse
        return UNREADABLE_GOLD
    got = read(_as_formula(extracted) if anchored else extracted)
    equal = verify(right, got, timeout_seconds=None, raise_on_error=True)
    return VerdictScored(float(equal), str(got[-1]) if got else "")


def _as_formula(text: str) -> str:
    """A bare answer in the delimiters that the library looks for."""
    return text if any(delimiter in text for delimiter in _MATH_DELIMITERS) else f"${text}$"
