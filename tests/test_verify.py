from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.config import NumericSection, VerifierSection
from gvm_stream.verify import pool as pool_module
from gvm_stream.verify.pool import CHUNK, CRASHED, TIMEOUT, VerifierPool, judge_in_worker
from gvm_stream.verify.rules import UNREADABLE_GOLD, extract, judge, parse_number
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable, VerifyItem

EXACT = VerifierSection(kind="exact", answer_marker="####")
NUMERIC = VerifierSection(kind="numeric", answer_marker="####")
MATH = VerifierSection(kind="math")
BOMB = VerifyItem(answer="7", response="The answer is 9**9**9")


def reward(settings: VerifierSection, answer: str, response: str, *, truncated: bool = False) -> float:
    verdict = judge(settings, VerifyItem(answer=answer, response=response, truncated=truncated))
    assert isinstance(verdict, VerdictScored), verdict
    return verdict.reward


def test_the_answer_is_what_follows_the_last_marker() -> None:
    assert extract("#### 3, no: #### 4 \n", "####") == "4"
    assert extract("so it is 4", "####") is None
    assert extract(" 4 \n", "") == "4"


def test_a_response_without_the_marker_is_wrong_and_not_unscorable() -> None:
    assert judge(EXACT, VerifyItem(answer="4", response="4")) == VerdictScored(0.0, "")


@pytest.mark.parametrize("kind", ["exact", "numeric", "math"])
def test_a_truncated_response_is_wrong_even_with_the_right_answer_in_it(kind: str) -> None:
    settings = VerifierSection(kind=kind)  # type: ignore[arg-type]
    assert reward(settings, "4", "4") == 1
    assert reward(settings, "4", "4", truncated=True) == 0


def test_exact_compares_texts_without_surrounding_blanks() -> None:
    assert judge(EXACT, VerifyItem(answer=" A b ", response="#### A b\n")) == VerdictScored(1.0, "A b")
    assert reward(EXACT, "A b", "#### a b") == 0
    assert reward(EXACT, "3", "#### 3.0") == 0


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
    assert reward(VerifierSection(kind="numeric", numeric=NumericSection(tolerance=0)), "0.1", "1/10") == 1


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**6))
def test_a_number_equals_itself_in_every_spelling(whole: int, below: int) -> None:
    strict = VerifierSection(kind="numeric", numeric=NumericSection(tolerance=0))
    assert reward(strict, str(whole), f"{whole:,}.000") == 1
    assert reward(strict, f"{whole}/{below}", f"{whole * 3}/{below * 3}") == 1
    assert reward(strict, str(whole), str(whole + 1)) == 0


def test_an_unreadable_response_is_wrong_and_an_unreadable_gold_is_unscorable() -> None:
    assert reward(NUMERIC, "4", "#### four") == 0
    assert judge(NUMERIC, VerifyItem(answer="four", response="#### 4")) == UNREADABLE_GOLD
    assert reward(MATH, "4", "I do not know") == 0
    assert judge(MATH, VerifyItem(answer="\\frac{1}{", response="\\boxed{1}")) == UNREADABLE_GOLD
    assert judge(MATH, VerifyItem(answer="", response="\\boxed{1}")) == UNREADABLE_GOLD


@pytest.mark.parametrize(
    ("gold", "response", "right"),
    [
        ("1/2", "so \\boxed{\\frac{2}{4}}", 1),
        ("\\frac{1}{2}", "The answer is 0.5", 1),
        ("$x=3$", "\\boxed{3}", 1),
        ("\\boxed{5}", "$5$", 1),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", 1),
        ("[0,1)", "\\boxed{[0,1]}", 0),
        ("10^{60}+1", "\\boxed{10^{60}}", 0),
        ("1,234", "\\boxed{1234}", 1),
    ],
)
def test_math_compares_values_not_spellings(gold: str, response: str, right: float) -> None:
    assert reward(MATH, gold, response) == right


def test_math_reads_bare_latex_behind_a_marker() -> None:
    assert reward(VerifierSection(kind="math", answer_marker="####"), "0.5", "#### \\frac{1}{2}") == 1


def test_an_exception_of_the_library_is_unscorable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise NotImplementedError("no such integral")

    monkeypatch.setattr("math_verify.verify", fail)
    assert judge(MATH, VerifyItem(answer="4", response="$4$")) == VerdictUnscorable(
        "verifier failed: NotImplementedError: no such integral"
    )


async def test_verdicts_come_in_the_order_of_the_items_whatever_the_chunks() -> None:
    items = [VerifyItem(answer="1", response=f"#### {n % 3}") for n in range(3 * CHUNK + 5)]
    async with VerifierPool(VerifierSection(kind="exact", answer_marker="####", workers=2)) as pool:
        verdicts = await pool.verify(items)
        assert await pool.verify([]) == []
    assert verdicts == [VerdictScored(float(n % 3 == 1), str(n % 3)) for n in range(len(items))]


async def test_a_computation_without_end_costs_only_its_own_verdict() -> None:
    healthy, right = VerifyItem(answer="1/2", response="$0.50$"), VerdictScored(1.0, "0.50")
    async with VerifierPool(VerifierSection(kind="math", timeout_s=1.0)) as pool:
        assert await pool.verify([healthy, BOMB, healthy]) == [right, TIMEOUT, right]
        assert await pool.verify([healthy]) == [right]


async def test_a_cancelled_verification_stops_at_once() -> None:
    async with VerifierPool(VerifierSection(kind="math", timeout_s=1e6)) as pool:
        with trio.move_on_after(0.2) as scope:
            await pool.verify([BOMB])
        assert scope.cancelled_caught
        assert await pool.verify([VerifyItem(answer="4", response="$4$")]) == [VerdictScored(1.0, "4")]


def judge_or_die(settings: VerifierSection, items: Sequence[VerifyItem]) -> list[Verdict]:
    """The worker's function in a worker that is killed over `kill`, and over `kill once` until its flag is up."""
    for item in items:
        if item.response == "kill" or (item.response == "kill once" and not Path(item.answer).exists()):
            Path(item.answer).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return judge_in_worker(settings, items)


async def test_a_killed_worker_costs_only_the_item_it_dies_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool_module, "judge_in_worker", judge_or_die)
    flag = str(tmp_path / "killed")
    right, killer = VerifyItem(answer="4", response="4"), VerifyItem(answer=flag, response="kill")
    async with VerifierPool(VerifierSection(kind="exact", timeout_s=60.0)) as pool:
        assert await pool.verify([right, killer, right]) == [VerdictScored(1.0, "4"), CRASHED, VerdictScored(1.0, "4")]


async def test_a_worker_killed_once_by_someone_else_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pool_module, "judge_in_worker", judge_or_die)
    flag = str(tmp_path / "killed")
    async with VerifierPool(VerifierSection(kind="exact", timeout_s=60.0)) as pool:
        verdicts = await pool.verify([VerifyItem(answer=flag, response="kill once")])
    assert verdicts == [VerdictScored(0.0, "kill once")]


async def test_memory_of_a_worker_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "judge_in_worker", judge_with_much_memory)
    async with VerifierPool(VerifierSection(kind="exact", timeout_s=60.0)) as pool:
        assert await pool.verify([VerifyItem(answer="", response="")]) == [VerdictUnscorable("MemoryError")]


def judge_with_much_memory(settings: VerifierSection, items: Sequence[VerifyItem]) -> list[Verdict]:
    judge_in_worker(settings, ())
    try:
        return [VerdictUnscorable(str(len(bytearray(pool_module.MEMORY_BYTES)))) for _ in items]
    except MemoryError:
        return [VerdictUnscorable("MemoryError")]
