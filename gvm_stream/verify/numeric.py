"""Numbers, compared exactly: the verifiers `numeric` and `gsm8k`."""

from __future__ import annotations

import re
from fractions import Fraction

from gvm_stream.config import NumericSection, VerifierSection
from gvm_stream.verify.answers import NO_MARKER, UnreadableGold, answer_text
from gvm_stream.verify.math.boxes import boxed_answers
from gvm_stream.verify.math.response import after_reasoning, clean
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerifyItem

_NUMBER = re.compile(
    r"""(?P<sign>[-+]?)
        (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)   # thousands separators all or not at all
        (?:\.(?P<decimals>[0-9]*))?
        (?:[eE](?P<exponent>[-+]?[0-9]{1,3}))?""",
    re.VERBOSE,
)
_LONGEST_NUMBER = 1000

_RUN = re.compile(
    r"""(?: (?<![\w)\]}]) [-+\N{MINUS SIGN}] )?      # after an operand it is subtraction
        (?<![A-Za-z0-9_]) \.? [0-9] (?: [0-9.,/:^] | [eE][-+]?(?=[0-9]) )*""",
    re.VERBOSE,
)
"""All that is written together with a number. A clock time or a power is one run and no number, never its last part."""
_TYPESETTING = re.compile(
    r"""\{,\} | \\[,!;] | \\(?=%)
      | \\?[$\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}]
      | \\text\s*\{[^{}]*\} (?:\^\{?[0-9]\}?)?""",
    re.VERBOSE,
)
_SPACING = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!])(?=[0-9])|\\[()]")
_FRACTION = re.compile(r"(?P<sign>[-+\N{MINUS SIGN}]?)\s*\\[dt]?frac\s*\{(?P<above>[^{}/]+)\}\s*\{(?P<below>[^{}/]+)\}")
_POWER_OF_TEN = re.compile(
    r"""(?P<factor>[-+\N{MINUS SIGN}]?[0-9.,\s]+) (?:\\times|\\cdot|[*\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}])
        \s* 10 \s* (?:\^|\*\*) \s* \{? \s* (?P<exponent>[-+\N{MINUS SIGN}]?[0-9]{1,3}) \s* \}?""",
    re.VERBOSE,
)
_HEADING = re.compile(r"(?![^\w\n]*[0-9]|.*\banswer\b.*[0-9])|[0-9]+[.):]\s+[A-Za-z]", re.IGNORECASE)
"""`#### Step 2` and `#### 2. Add up` are headings; `#### 18` and `#### Answer: 18` are answers."""
_OR = re.compile(r"[\s*]*\b(?:or|and)\b[\s*]*")


def numeric(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """The answer is a number, alone or in a box, and near enough to the gold answer."""
    right = read_number(item.answer)
    answer = answer_text(item.response, settings.answer_marker)
    if answer is None:
        return NO_MARKER
    got = parse_typeset(answer)
    if got is None and (boxes := boxed_answers(answer)):
        answer = boxes[-1].answer
        got = parse_typeset(answer)
    if got is None:
        return VerdictScored(0.0, answer, str(right), "the answer is not a number")
    rule = near(right, got, settings.numeric)
    return VerdictScored(float(bool(rule)), answer, str(right), rule or "different numbers")


def near(right: Fraction, got: Fraction, options: NumericSection) -> str:
    """The rule by which `got` counts as `right`, or nothing. |got - right| <= tolerance * |right|, computed exactly."""
    if got == right:
        return "equal numbers"
    if abs(got - right) <= Fraction(options.tolerance) * abs(right):
        return f"relative error at most {options.tolerance:g}"
    digits = options.significant_digits
    if digits and round_to_significant(got, digits) == round_to_significant(right, digits):
        return f"equal to {digits} significant digits"
    return ""


def round_to_significant(value: Fraction, digits: int) -> Fraction:
    """Halves away from zero."""
    if not value:
        return value
    size = abs(value)
    exponent = (size.numerator.bit_length() - size.denominator.bit_length()) * 30103 // 100000 - 1  # at most log10
    while size >= Fraction(10) ** (exponent + 1):
        exponent += 1
    unit = Fraction(10) ** (exponent + 1 - digits)
    rounded = (size / unit + Fraction(1, 2)) // 1 * unit
    return rounded if value > 0 else -rounded


def read_number(gold: str) -> Fraction:
    """A gold answer for `numeric`."""
    value = parse_typeset(gold)
    if value is None:
        raise UnreadableGold(f"{gold[:60]!r} is not a number")
    return value


def parse_typeset(text: str) -> Fraction | None:
    """A number as `parse_number` reads it, or its LaTeX: `\\frac{1}{2}`, `1{,}250`, `3.2\\times 10^{5}`."""
    text = _SPACING.sub("", clean(text)).strip("$ \t\n")
    if match := _FRACTION.fullmatch(text):
        text = f"{match['sign']}{match['above']}/{match['below']}"
    elif match := _POWER_OF_TEN.fullmatch(text):
        text = f"{match['factor'].strip()}e{match['exponent']}".replace("\N{MINUS SIGN}", "-")
    return parse_number(text)


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


def gsm8k(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """The number after the last `####` (or configured marker), else in the last box, else the last one there is."""
    right = read_gsm8k_gold(item.answer)
    visible = after_reasoning(clean(item.response))
    marked = answer_text(visible, settings.answer_marker)
    if marked is None:
        return NO_MARKER
    place, answer, got = _gsm8k_answer(marked, marked=bool(settings.answer_marker))
    if got is None:
        return VerdictScored(0.0, answer, str(right), f"{place}: not one number")
    return VerdictScored(float(got == right), answer, str(right), place)


def _gsm8k_answer(text: str, *, marked: bool) -> tuple[str, str, Fraction | None]:
    """(where it is, as written, value)."""
    lines = [line for line in re.findall(r"####[ \t]*([^\n]*)", text) if not _HEADING.match(line)]
    if marked or lines:
        answer = lines[-1] if lines else text.partition("\n")[0]
        return "after the marker", answer, only_number(answer)
    boxes = boxed_answers(text)
    if boxes or boxes is None:
        answer = boxes[-1].answer if boxes else ""
        return "in the last box", answer, only_number(answer)
    return "last number", *_last_number(text)


def read_gsm8k_gold(gold: str) -> Fraction:
    """The number after the last `####` of a worked solution, or a gold answer that holds one number."""
    value = only_number(gold.rpartition("####")[2])
    if value is None:
        raise UnreadableGold(f"{gold[-60:]!r} does not hold one number, after #### or alone")
    return value


def only_number(text: str) -> Fraction | None:
    """The one number in a text, with currency, unit or words around it; None if there are several, or a formula."""
    plain = _TYPESETTING.sub("", clean(text))
    runs = _RUN.findall(plain)
    return _parse_run(runs[0]) if len(runs) == 1 and "\\" not in plain else None


def _last_number(text: str) -> tuple[str, Fraction | None]:
    """(as written, value). Two different numbers joined by "or" are a hedge and no answer."""
    plain = _TYPESETTING.sub("", text)
    runs = list(_RUN.finditer(plain))
    if not runs:
        return "", None
    written = runs[-1][0]
    value = _parse_run(written)
    if len(runs) > 1 and _OR.fullmatch(plain, runs[-2].end(), runs[-1].start()) and _parse_run(runs[-2][0]) != value:
        return plain[runs[-2].start() : runs[-1].end()], None
    return written, value


def _parse_run(run: str) -> Fraction | None:
    return parse_number(run.rstrip(".,:/^"))
