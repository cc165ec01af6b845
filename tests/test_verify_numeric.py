from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.config import NumericSection, VerifierSection
from gvm_stream.verify.numeric import parse_number, parse_typeset, round_to_significant
from gvm_stream.verify.rules import judge
from gvm_stream.verify.verdict import VerdictScored, VerdictUnscorable, VerifyItem

STRICT = VerifierSection(kind="numeric", numeric=NumericSection(tolerance=0))
GSM8K = VerifierSection(kind="gsm8k")


def reward(settings: VerifierSection, answer: str, response: str) -> float:
    verdict = judge(settings, VerifyItem(answer=answer, response=response))
    assert isinstance(verdict, VerdictScored), verdict
    return verdict.reward


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", Fraction(42)),
        ("+42", Fraction(42)),
        ("-0.50", Fraction(-1, 2)),
        ("\N{MINUS SIGN}7", Fraction(-7)),
        (".5", Fraction(1, 2)),
        ("42.", Fraction(42)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1.5e3", Fraction(1500)),
        ("3/4", Fraction(3, 4)),
        ("-1.5 / 0.5", Fraction(-3)),
        ("1,23", None),
        ("1,2345", None),
        ("12,34,567", None),
        ("1/0", None),
        ("1/2/3", None),
        ("-", None),
        (".", None),
        ("", None),
        ("4 apples", None),
        ("nan", None),
        ("inf", None),
        ("\N{ARABIC-INDIC DIGIT THREE}", None),
        ("1e999999999", None),
        ("9" * 5000, None),
    ],
)
def test_numbers_are_read_exactly_or_not_at_all(text: str, value: Fraction | None) -> None:
    assert parse_number(text) == value


def test_numeric_tolerance_is_relative_to_the_gold_answer() -> None:
    settings = VerifierSection(kind="numeric", numeric=NumericSection(tolerance=0.25))
    assert [reward(settings, "-8", text) for text in ("-10", "-6", "-10.1", "-5.9", "8")] == [1, 1, 0, 0, 0]
    assert [reward(settings, "0", text) for text in ("0.0", "1e-9")] == [1, 0]
    assert reward(STRICT, "0.1", "1/10") == 1


def test_significant_digits_compare_rounded_numbers() -> None:
    settings = VerifierSection(kind="numeric", numeric=NumericSection(tolerance=0, significant_digits=3))
    assert [reward(settings, "3.14159", text) for text in ("3.14", "3.144", "3.135", "3.145", "3.1")] == [1, 1, 1, 0, 0]
    assert [reward(settings, "1e-30", text) for text in ("1.001e-30", "1.01e-30", "0")] == [1, 0, 0]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [("9.99", "10"), ("0.0999", "0.1"), ("12345", "12000"), ("-2.25", "-2.3"), ("1", "1"), ("0", "0"), ("10", "10")],
)
def test_rounding_to_two_significant_digits(value: str, rounded: str) -> None:
    assert round_to_significant(Fraction(value), 2) == Fraction(rounded)


@given(st.fractions().filter(bool), st.integers(1, 8))
def test_rounding_is_idempotent_and_within_half_a_unit(value: Fraction, digits: int) -> None:
    rounded = round_to_significant(value, digits)
    assert round_to_significant(rounded, digits) == rounded
    assert abs(rounded - value) <= abs(value) * Fraction(10) ** (1 - digits) / 2


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**6))
def test_a_number_equals_itself_in_every_spelling(whole: int, below: int) -> None:
    assert reward(STRICT, str(whole), f"{whole:,}.000") == 1
    assert reward(STRICT, f"{whole}/{below}", f"{whole * 3}/{below * 3}") == 1
    assert reward(STRICT, str(whole), str(whole + 1)) == 0


@pytest.mark.parametrize(
    ("response", "right"), [("so \\boxed{4}", 1), ("**4**", 1), ("4 apples", 0), ("four", 0), ("\\boxed{5} 4", 0)]
)
def test_numeric_wants_a_number_alone_or_in_a_box(response: str, right: float) -> None:
    assert reward(STRICT, "4", response) == right


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$\\frac{1}{2}$", Fraction(1, 2)),
        ("-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("3.2\\times 10^{5}", Fraction(320000)),
        ("\N{MINUS SIGN}1.5 \N{MULTIPLICATION SIGN} 10^-3", Fraction(-3, 2000)),
        ("2 * 10**3", Fraction(2000)),
        ("1{,}250", Fraction(1250)),
        ("3\\frac{1}{2}", None),
        ("1/2 \\times 10^3", None),
        ("\\frac{1}{2}x", None),
        ("6\\pi", None),
    ],
)
def test_numbers_in_latex_are_the_same_numbers(text: str, value: Fraction | None) -> None:
    assert parse_typeset(text) == value


@pytest.mark.parametrize(("kind", "gold"), [("numeric", "four"), ("gsm8k", "four"), ("gsm8k", "4 or 5")])
def test_an_unreadable_gold_is_unscorable(kind: str, gold: str) -> None:
    verdict = judge(VerifierSection(kind="exact"), VerifyItem(answer=gold, response="4", kind=kind))
    assert isinstance(verdict, VerdictUnscorable)
    assert verdict.reason.startswith(f"unreadable gold: '{gold}'")


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("3 + 4 = 7 so\n#### 1,250", "#### 1250"),
        ("1250", "It costs $1,250.00."),
        ("$1,250", "\\boxed{1{,}250}"),
        ("18 dollars", "#### 18 dollars\nI am sure."),
        ("18", "\\boxed{18\\text{ cm}^2}"),
        ("-5", "a loss of -$5"),
        ("-5", "it is \N{MINUS SIGN}5"),
        ("0.5", "1/2"),
        ("18", "**18%**"),
        ("6", "6 or 6.0"),
        ("18", "#### Step 2\nAdd up.\n#### 18"),
        ("18", "#### 2. Add up\nThat makes 18."),
        ("18", "#### Final Answer: 18"),
        ("18", "#### Final Answer\n\\boxed{18}"),
    ],
)
def test_gsm8k_reads_numbers_as_people_write_them(gold: str, response: str) -> None:
    assert reward(GSM8K, gold, response) == 1


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("6", "#### 5 or 6"),
        ("6", "5 or 6"),
        ("6", "\\boxed{6\\pi}"),
        ("12", "We get \\boxed{6}. Check: 6 * 2 = 12."),
        ("12", "#### 6\nas 6 * 2 = 12"),
        ("30", "at 12:30"),
        ("2", "1/2"),
        ("2", "10^2"),
        ("2", "no idea about H2"),
        ("5", "<think>5</think> I am lost"),
        ("250", "1,250"),
        ("2", "#### 18\n#### Step 2: check"),
    ],
)
def test_gsm8k_takes_no_part_of_something_else_for_a_number(gold: str, response: str) -> None:
    assert reward(GSM8K, gold, response) == 0
