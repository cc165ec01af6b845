from __future__ import annotations

import pytest

from gvm_stream.config import OverlongSection, PatternSection, VerifierKind, VerifierSection
from gvm_stream.config_verifier import VERIFIER_KINDS
from gvm_stream.verify.answers import answer_text
from gvm_stream.verify.rules import CUT_OFF, VERIFIERS, judge, overlong_penalty
from gvm_stream.verify.verdict import VerdictScored, VerdictUnscorable, VerifyItem

EXACT = VerifierSection(kind="exact", answer_marker="####")


def reward(settings: VerifierSection, answer: str, response: str) -> float:
    verdict = judge(settings, VerifyItem(answer=answer, response=response))
    assert isinstance(verdict, VerdictScored), verdict
    return verdict.reward


def test_every_configurable_verifier_is_in_the_table() -> None:
    assert tuple(VERIFIERS) == VERIFIER_KINDS


# --- where the answer is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "marker", "answer"),
    [
        ("#### 3, no: #### 4 \n", "####", "4"),
        ("so it is 4", "####", None),
        (" 4 \n", "", "4"),
        ("so <answer> 4 </answer> is it", "", "4"),
        ("<think>3</think> 4", "", "4"),
        ("3</think> 4", "", "4"),
        ("<think> #### 3 </think> I am lost", "####", None),
        ("<think> 4", "", ""),
    ],
)
def test_the_answer_follows_the_last_marker_and_never_is_in_the_reasoning(
    response: str, marker: str, answer: str | None
) -> None:
    assert answer_text(response, marker) == answer


@pytest.mark.parametrize("kind", ["exact", "numeric", "math", "gsm8k", "choice", "json"])
def test_a_response_without_the_marker_is_wrong_and_not_unscorable(kind: VerifierKind) -> None:
    settings = VerifierSection(kind=kind, answer_marker="####")
    gold, other = ("B", "C") if kind == "choice" else ("4", "5")
    assert [reward(settings, gold, text) for text in (f"#### {gold}", f"#### {other}", gold)] == [1, 0, 0]


# --- texts -----------------------------------------------------------------------------------------------------------


def test_exact_compares_texts_without_surrounding_blanks() -> None:
    expected = VerdictScored(1.0, "A b", "A b", "equal texts")
    assert judge(EXACT, VerifyItem(answer=" A b ", response="#### A b\n")) == expected
    assert reward(EXACT, "A b", "#### a b") == 0
    assert reward(EXACT, "3", "#### 3.0") == 0


@pytest.mark.parametrize(
    ("pattern", "response", "right"),
    [
        (r"x = (\d+)", "x = 1, then x = 7 and y = 3", 1),
        (r"\d+", "first 1 then 7", 1),
        (r"x = (\d+)", "x = 7, then x = 1", 0),
        (r"x = (\d+)?", "x = 7, then x = ", 0),
        (r"x = (\d+)", "7", 0),
    ],
)
def test_regex_takes_the_first_group_of_the_last_match(pattern: str, response: str, right: float) -> None:
    assert reward(VerifierSection(kind="regex", patterns=PatternSection(answer=pattern)), "7", response) == right


def test_format_must_match_the_whole_response_and_does_not_ask_for_an_answer() -> None:
    settings = VerifierSection(kind="format", patterns=PatternSection(format="<think>.*</think>.*"))
    responses = ("<think>a\nb</think>\n4", "so <think>a</think>4", "<think>a", "")
    assert [reward(settings, "", text) for text in responses] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (VerifierSection(kind="regex"), "verifier.patterns.answer is empty"),
        (VerifierSection(kind="format", patterns=PatternSection(format="(")), "is not a regular expression"),
        (VerifierSection(kind="python"), "must be module:function"),
        (VerifierSection(kind="http"), "must be http:"),
    ],
)
def test_a_verifier_without_its_settings_judges_nothing(settings: VerifierSection, reason: str) -> None:
    verdict = judge(settings, VerifyItem(answer="4", response="4"))
    assert isinstance(verdict, VerdictUnscorable)
    assert reason in verdict.reason


@pytest.mark.parametrize("gold", ["", " ", "N/A", "See solution."])
def test_a_remark_in_the_place_of_a_gold_answer_is_never_right(gold: str) -> None:
    verdict = judge(VerifierSection(kind="exact"), VerifyItem(answer=gold, response=gold))
    assert isinstance(verdict, VerdictUnscorable)
    assert verdict.reason.startswith("unreadable gold: ")


# --- several verifiers -----------------------------------------------------------------------------------------------

BOXED = PatternSection(format=r".*\\boxed\{.*\}.*")
BOTH = VerifierSection(weights={"gsm8k": 1.0, "format": 0.25}, patterns=BOXED)


def test_the_reward_of_several_verifiers_is_their_weighted_sum() -> None:
    assert reward(BOTH, "4", "so \\boxed{4}") == 1.25
    assert reward(BOTH, "4", "so \\boxed{5}") == 0.25
    verdict = judge(BOTH, VerifyItem(answer="4", response="so 4"))
    rule = "gsm8k 1 x 1 (last number); format 0.25 x 0 (patterns.format does not match)"
    assert verdict == VerdictScored(1.0, "4", "4", rule)


def test_one_unscorable_part_makes_the_whole_unscorable() -> None:
    verdict = judge(BOTH, VerifyItem(answer="four", response="\\boxed{4}"))
    assert isinstance(verdict, VerdictUnscorable)
    assert verdict.reason.startswith("gsm8k: unreadable gold: 'four'")
    assert verdict.cause == "unreadable_gold"


def test_a_row_that_names_its_verifier_is_judged_by_that_alone() -> None:
    item = VerifyItem(answer="B", response="\\boxed{B}", kind="choice")
    assert judge(BOTH, item) == VerdictScored(1.0, "B", "B", "letter in the last box")
    unknown = judge(BOTH, VerifyItem(answer="B", response="B", kind="chioce"))
    assert unknown == VerdictUnscorable("there is no verifier 'chioce'")


# --- truncated and overlong responses --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exact", "numeric", "math", "gsm8k", "json"])
def test_a_truncated_response_is_wrong_even_with_the_right_answer_in_it(kind: VerifierKind) -> None:
    item = VerifyItem(answer="4", response="4", truncated=True)
    assert judge(VerifierSection(kind=kind), item) == CUT_OFF
    assert CUT_OFF.reward == 0
    scored = judge(VerifierSection(kind=kind, overlong=OverlongSection(mode="score")), item)
    assert isinstance(scored, VerdictScored)
    assert scored.reward == 1


@pytest.mark.parametrize(
    ("tokens", "truncated", "penalty"),
    [(0, False, 0), (80, False, 0), (85, False, 0.125), (90, False, 0.25), (100, False, 0.5), (100, True, 0.5)],
)
def test_the_overlong_penalty_grows_linearly_over_the_buffer(tokens: int, truncated: bool, penalty: float) -> None:
    overlong = OverlongSection(mode="penalty", buffer_tokens=20, penalty=0.5)
    item = VerifyItem(answer="4", response="4", tokens=tokens, max_tokens=100, truncated=truncated)
    assert overlong_penalty(overlong, item) == penalty
    verdict = judge(VerifierSection(kind="exact", overlong=overlong), item)
    assert isinstance(verdict, VerdictScored)
    assert verdict.reward == 1 - penalty
    assert verdict.rule.endswith(f"overlong: - {penalty:g}" if penalty else "equal texts")


def test_without_a_cap_only_a_truncated_response_is_too_long() -> None:
    overlong = OverlongSection(mode="penalty", penalty=0.5)
    assert overlong_penalty(overlong, VerifyItem(answer="", response="", tokens=10**6)) == 0
    assert overlong_penalty(overlong, VerifyItem(answer="", response="", truncated=True)) == 0.5
