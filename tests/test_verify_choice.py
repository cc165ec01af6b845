from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.config import VerifierSection
from gvm_stream.verify.answers import UnreadableGold
from gvm_stream.verify.choice import find_choice, read_choice_gold
from gvm_stream.verify.rules import judge
from gvm_stream.verify.verdict import VerdictScored, VerifyItem

RENDERINGS = (
    "{}",
    "({})",
    "[{}]",
    "{}.",
    "{})",
    "**{}**",
    "**({})**",
    "{}) Paris",
    "({}) Paris",
    "\\boxed{{{}}}",
    "$\\boxed{{\\text{{({})}}}}$",
    "the answer is {}",
    "The answer is **{}) Paris**.",
    "**Answer:** {}",
    "Final answer: $\\textbf{{({})}}$",
    "The correct option is {}.",
    "Option {} is correct.",
    "I choose ({})",
    "Answer:\n\n{}",
    "So it must be ({}).",
    "Rome is in Italy, so {}.",
    "Paris is in France.\n\n{}",
    "A) Rome\nB) Oslo\n\nThe answer is {}",
)


@given(
    st.sampled_from(string.ascii_uppercase[:10]), st.sampled_from(RENDERINGS), st.sampled_from(("{}", "({})", "{}."))
)
def test_a_letter_is_found_in_every_rendering(letter: str, rendering: str, gold: str) -> None:
    item = VerifyItem(answer=gold.format(letter), response=rendering.format(letter))
    verdict = judge(VerifierSection(kind="choice"), item)
    assert isinstance(verdict, VerdictScored)
    assert (verdict.reward, verdict.extracted, verdict.expected) == (1, letter, letter)
    other = judge(VerifierSection(kind="choice"), VerifyItem(answer="K", response=rendering.format(letter)))
    assert isinstance(other, VerdictScored)
    assert other.reward == 0


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: A. Wait, that is wrong. Answer: B", "B"),
        ("The answer is A, not B.", "A"),
        ("Answer is B, C is wrong", "B"),
        ("The answer is A because all others fail", "A"),
        ("answer: b", "B"),
        ("B. The correct answer is C.", "C"),
        ("\\boxed{D: the letter E is missing}", "D"),
        ("\\boxed{A}, no: \\boxed{C}", "C"),
        ("A) too small\nB) too large\n\nB", "B"),
        ("B) Paris\nIt is the capital of France.", "B"),
    ],
)
def test_the_last_word_of_a_response_counts(response: str, letter: str) -> None:
    assert find_choice(response)[0] == letter


@pytest.mark.parametrize(
    "response",
    [
        "",
        "Apple",
        "AB",
        "So vitamin C helps.",
        "So, vitamin C.",
        "So A is wrong.",
        "A dog is an animal",
        "The answer is a dog",
        "The answer is A dog",
        "Answer: Apple",
        "Answer: I think so",
        "C-",
        "A's",
        "C++",
        "The answer is A or B",
        "The answer is (A) and (B)",
        "\\boxed{A, B}",
        "\\boxed{AB}",
        "\\boxed{A",
        "A/B",
        "A) too small\nB) too large",
        "Between (A) and (B).",
        "The answer isn't B",
        "I would not choose B",
    ],
)
def test_words_hedges_and_denials_are_no_answer(response: str) -> None:
    assert find_choice(response)[0] == ""


@pytest.mark.parametrize("gold", ["Paris", "AB", "A or B", "42", ""])
def test_a_gold_answer_without_one_letter_is_unreadable(gold: str) -> None:
    with pytest.raises(UnreadableGold, match="names no option letter"):
        read_choice_gold(gold)
