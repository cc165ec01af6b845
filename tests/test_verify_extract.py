from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.config import MathSection
from gvm_stream.verify.math import verify_math
from gvm_stream.verify.math.extract import MOST_VALUES, extract, gold_answer
from gvm_stream.verify.math.response import after_reasoning, clean
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable


class Case(msgspec.Struct):
    id: str
    category: str
    gold: str
    output: str
    expected: bool


CASES = msgspec.json.decode(
    b"[%s]" % b",".join(Path(__file__).with_name("verify_cases.jsonl").read_bytes().splitlines()), type=list[Case]
)
DEFAULT = MathSection()


def answers(response: str, options: MathSection = DEFAULT, marker: str = "") -> list[str]:
    return list(extract(response, options, marker).answers)


def accepted(verdict: Verdict) -> bool:
    return isinstance(verdict, VerdictScored) and verdict.reward == 1.0


def judge(gold: str, response: str, options: MathSection = DEFAULT, marker: str = "") -> bool:
    return accepted(verify_math(gold, response, options, marker))


@pytest.mark.parametrize("case", CASES, ids=[f"{case.id}-{case.category}" for case in CASES])
def test_every_case_of_the_file_gets_its_verdict_by_default(case: Case) -> None:
    verdict = verify_math(case.gold, case.output, DEFAULT, "")
    assert accepted(verdict) == case.expected, verdict


# --- boxes


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"$\boxed{\frac{1}{\sqrt{2}}}$", [r"\frac{1}{\sqrt{2}}"]),
        (r"\boxed{\{2, \{1\}\}}", [r"\{2, \{1\}\}"]),
        (r"\boxed {x}", ["x"]),
        (r"Thus $\boxed 5$.", ["5"]),
        (r"Thus \boxed 42.", ["42"]),
        (r"$\boxed\frac12$", [r"\frac12"]),
        (r"\fbox{7}", ["7"]),
        (r"\boxed{x = \boxed{5}}", ["x = {5}"]),
        (r"a stray { brace, then \boxed{7} and a stray }", ["7"]),
        (r"Write your answer in \boxed{}. It is \boxed{7}", ["7"]),
        (r"\boxedtext{5} the answer is 6", ["6"]),
    ],
)
def test_a_box_holds_the_answer_whatever_is_nested_in_it(response: str, expected: list[str]) -> None:
    assert answers(response) == expected


@pytest.mark.parametrize(
    "response",
    [r"\boxed{", r"\boxed{5", r"\boxed{4}. No, it is \boxed{}", r"\boxed{4} no: \boxed{\frac{1}{2}", r"\boxed{" * 1000],
)
def test_a_box_that_is_unfinished_is_no_answer(response: str) -> None:
    assert extract(response, DEFAULT, "").rule == "unfinished box"
    assert answers(response) == []


@pytest.mark.parametrize(
    ("response", "first", "last"),
    [
        (r"First \boxed{4}. Wait, I forgot a case. Corrected: \boxed{7}.", ["4"], ["7"]),
        (r"\boxed{2} is what I get, but the check fails, so \boxed{3}", ["2"], ["3"]),
        (r"$\boxed{1}$ or $\boxed{2}$. No, neither: $\boxed{3}$", ["1", "2"], ["3"]),
    ],
)
def test_of_boxes_with_work_between_them_the_last_counts_or_by_option_the_first(
    response: str, first: list[str], last: list[str]
) -> None:
    assert answers(response) == last
    assert answers(response, MathSection(first_box=True)) == first


def test_boxes_side_by_side_are_one_answer_of_several_values_and_repetitions_one_value() -> None:
    assert answers(r"The roots are $\boxed{2}$ and $\boxed{3}$.") == ["2", "3"]
    assert answers(r"$\boxed{5}$ $\boxed{6}$; $\boxed{7}$") == ["5", "6", "7"]
    assert answers(r"$x = \boxed{2}$, $y = \boxed{3}$") == ["x=2", "y=3"]
    assert answers(r"\boxed{9}, \boxed{9}") == ["9"]
    assert answers(r"\boxed{9}. I repeat: \boxed{9}") == ["9"]
    assert answers(" ".join(rf"\boxed{{{n}}}" for n in range(MOST_VALUES + 1))) == []


def test_values_side_by_side_are_right_together_and_wrong_alone() -> None:
    assert judge("2, 3", r"The roots are $\boxed{2}$ and $\boxed{3}$.")
    assert judge("x=2, y=3", r"$x = \boxed{2}$, $y = \boxed{3}$")
    assert not judge("3", r"The roots are $\boxed{2}$ and $\boxed{3}$.")
    assert not judge("7", r"$\boxed{5}$ $\boxed{6}$ $\boxed{7}$")
    assert judge("0.5", r"\boxed{\frac12}, or equivalently \boxed{0.5}")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"$\boxed{5}\%$", [r"5\%"]),
        (r"\boxed{5}%", ["5%"]),
        (r"$\boxed{60}^\circ$", [r"60^\circ"]),
        (r"$\boxed{12}\text{ cm}^2$", [r"12\text{ cm}^2"]),
        (r"$\boxed{8}$ square units.", ["8"]),
        (r"$\boxed{8}$ apples remain.", ["8"]),
        (r"$\boxed{8}\text{ where } x > 0$", ["8"]),
        (r"We get \boxed{6}. Check: 6 * 2 = 12.", ["6"]),
    ],
)
def test_a_unit_that_follows_a_box_belongs_to_it_and_nothing_else_does(response: str, expected: list[str]) -> None:
    assert answers(response) == expected


@pytest.mark.parametrize(
    "response",
    [r"It is not \boxed{5}.", r"$x \ne \boxed{5}$", r"The answer isn't $\boxed{5}$.", r"It cannot be \boxed{5}"],
)
def test_a_denied_box_is_not_given(response: str) -> None:
    assert not judge("5", response)


# --- hedging


@pytest.mark.parametrize(
    "response",
    [
        r"$\boxed{5}$ or any other number",
        r"$\boxed{5}$ or maybe 6.",
        r"$\boxed{4} \text{ or } 5$",
        r"\boxed{4} or perhaps \boxed{5}",
        "The answer is 5 or any other number.",
        "The answer is $5$ or $6$.",
        "The answer is either 5 or 7.",
        "The answer is 5 but it could also be 7.",
        "The answer is 5 (or 6).",
        "The answer is 3, 4 or 5.",
        "The final answer is 4. The final answer is 5.",
        "Answer: 3\nAnswer: 4\nAnswer: 5",
        "The answer is not 5.",
        "The answer cannot be 5.",
        "The answer will never equal 5.",
        "We conclude that it could be 5.",
        "The answer is 5 as well as 6",
    ],
)
def test_a_list_of_guesses_is_no_answer(response: str) -> None:
    assert not judge("5", response)


def test_the_same_value_in_two_forms_is_no_list_of_guesses() -> None:
    assert judge("\\sqrt{2}", r"$\boxed{\sqrt2}$ or approximately 1.41")
    assert judge("12", "The answer is 12. The answer is 12.")
    assert judge("12", "Answer: 12 cm\n\n#### 12")


# --- sentences


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("So the answer is B", "B"),
        ("The answer is pi/3.", "pi/3"),
        ("Therefore the answer is 3 1/4.", "3 1/4"),
        ("Check: 2*311 = 622, fine. Final Answer: **58**", "58"),
        ("**Answer:** $1,250", r"\$1,250"),
        ("**Final Answer**\n\n$$5$$", "5"),
        ("Final answer:\n\\[\nx = 5\n\\]", "x = 5"),
        ("The answer is:\n- 5", "5"),
        ("The correct answer would be $42$, because $40+2=42$.", "42"),
        ("The answer is 2+3=5.", "2+3=5"),
        ("The answer is option (C).", "(C)"),
        ("The answer to the first question is that there are 12 ways.", "12 ways"),
        ("The answer is 5 apples.", "5 apples"),
        ("There are 5 of them. The answer is 5 different ways.", "5"),
        ("The answer is $2\\pi$ metres.", "2\\pi metres"),
        ("The answer is 2 million.", "2 million"),
        ("The answer is 1,234,567.", "1,234,567"),
        ("The answer is -.5.", "-.5"),
        ("The answer is $5$ $\\square$", "5"),
        ("Answer: 7 (see above)", "7"),
        ("We add.\n#### 5", "5"),
        ("We add.\n#### -1,250\n", "-1,250"),
        ("The answer is 3. But that forgets zero, so the answer is 4.", "4"),
        ("The answer is New York City.", "New York City"),
        ("La respuesta final es 5.", "5"),
        ("La r\u00e9ponse est $\\frac12$.", "\\frac12"),
        ("Die Antwort lautet 7.", "7"),
        ("A resposta \u00e9 7.", "7"),
        ("\u041e\u0442\u0432\u0435\u0442: 12.", "12"),
        ("\u7b54\u6848\u662f\uff15\u3002", "5"),
        ("\u7b54\u3048\u306f 5 \u3067\u3059\u3002", "5"),
        ("\uc815\ub2f5\uc740 5\uc785\ub2c8\ub2e4.", "5"),
    ],
)
def test_a_sentence_that_announces_an_answer_gives_it(response: str, expected: str) -> None:
    assert answers(response) == [expected]


def test_an_exclamation_mark_ends_a_sentence_and_is_a_factorial_in_a_formula() -> None:
    assert answers("The answer is 5!") == ["5"]
    assert answers("It is even. The answer is 42!!") == ["42"]
    assert answers("The answer is $5!$.") == ["5!"]
    assert answers("The answer is 5! = 120.") == ["5! = 120"]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("The angle is 60\N{DEGREE SIGN}.", "60\N{DEGREE SIGN}"),
        ("The total is 1,234,567.", "1,234,567"),
        ("We add. Therefore she has 5 apples left.", "5"),
        ("Thus the probability is $\\frac{1}{3}$, which is about 0.333.", "\\frac{1}{3}"),
        ("Hence $x = 5$.", "x = 5"),
        ("We conclude that $n = 5$.", "n = 5"),
        ("We add.\n= 5", "5"),
        ("We add.\n\\[ 2 + 3 = 5 \\]", "2 + 3 = 5"),
        ("Total cost = $12", r"\$12"),
        ("The total is 5. I hope this helps!", "5"),
        ("5", "5"),
        ("Tuesday", "Tuesday"),
    ],
)
def test_without_box_and_announcement_the_closing_sentence_counts(response: str, expected: str) -> None:
    assert answers(response) == [expected]


@pytest.mark.parametrize(
    "response",
    [
        "",
        "   \n",
        "Anna starts with 5 apples, then the problem says she buys some more, so let me think about",
        "There are 5 apples in the basket and we need to",
        "So she has",
        "Now Anna has 5",
        "Suppose the total is 5.",
        "Let $x = 5$.",
        "Consider the case\n\\[ n = 5 \\]",
        "Is it 5?",
        "I would rather not answer.",
        "The answer is",
        "#### Step 5: add",
    ],
)
def test_a_number_somewhere_in_the_text_is_no_answer(response: str) -> None:
    assert answers(response) == []
    assert verify_math("5", response, DEFAULT, "") == VerdictScored(0.0, "", "5", "no answer")


# --- sections and markers


def test_only_what_follows_the_last_closing_tag_counts() -> None:
    assert after_reasoning("<think>3</think> hmm </think> 4") == " 4"
    assert after_reasoning("3 </think> 4 <think> 5") == " 4 "
    assert answers(r"I get \boxed{3} ... </think> So the answer is \boxed{4}") == ["4"]
    assert answers(r"[THINK]\boxed{3}[/THINK] 4") == ["4"]
    assert answers(r"<reasoning>\boxed{3}</reasoning>\boxed{4}") == ["4"]


def test_an_answer_in_the_reasoning_counts_only_by_option() -> None:
    response = r"<think>I am sure it is \boxed{8}.</think> I would rather not answer."
    assert answers(response) == answers(r"<think> \boxed{8}") == []
    assert answers(response, MathSection(inside_reasoning=True)) == ["8"]
    assert answers(r"<think> \boxed{8} </think> \boxed{9}", MathSection(inside_reasoning=True)) == ["9"]


def test_a_marker_or_answer_tags_say_where_the_answer_is() -> None:
    assert answers("Answer is 3. ==> 4", marker="==>") == ["4"]
    assert answers(r"\boxed{3} ==> $\boxed{4}$", marker="==>") == ["4"]
    assert answers("==> 3 ==> x = 4\nHope it helps", marker="==>") == ["x = 4"]
    assert answers(r"\boxed{3}", marker="==>") == answers(r"==> \boxed{3", marker="==>") == []
    assert answers(r"\boxed{3} <answer> 4 </answer> 5") == ["4"]


# --- characters


def test_characters_that_look_alike_are_the_same() -> None:
    assert clean("\uff14\uff12\u200b\u00a0\ufeff\u0664\U0001d7d3") == "42 45"
    assert clean("\U0001d465\uff08\uff11\uff09\u3002") == "x(1).\n"
    assert clean("x\u00b2 \u2212 \u221a2 \u00bd") == "x\u00b2 \u2212 \u221a2 \u00bd"
    assert clean("**58** and 9**9 and x**(2)") == "58 and 9**9 and x**(2)"


# --- golds


@pytest.mark.parametrize(
    ("gold", "expected"),
    [
        (r"\[x = 2\]", "x = 2"),
        (r"First \boxed{3} is wrong. The answer is \boxed{\frac{8}{5}}.", r"\frac{8}{5}"),
        ("He has 1000 + 250 = 1,250.\n#### 1,250", "1,250"),
        ("The answer is 7.", "7"),
        (r"The roots are $\boxed{2}$ and $\boxed{3}$.", "2, 3"),
        ("$x=1$ and $y=2$", "$x=1$ and $y=2$"),
        (r"12\text{ red, }5\text{ blue}", r"12\text{ red, }5\text{ blue}"),
        ("  F_n=F_{n-1}+F_{n-2} ", "F_n=F_{n-1}+F_{n-2}"),
    ],
)
def test_the_answer_of_a_gold_column_that_holds_more(gold: str, expected: str) -> None:
    assert gold_answer(gold) == expected


@pytest.mark.parametrize("gold", ["", "  ", "$$"])
def test_a_gold_that_is_no_answer_makes_every_response_unscorable(gold: str) -> None:
    for response in ("", r"\boxed{5}", "no idea", r"\boxed{}"):
        assert isinstance(verify_math(gold, response, DEFAULT, ""), VerdictUnscorable)


# --- verdicts


def test_a_verdict_says_what_was_compared_and_why() -> None:
    verdict = verify_math("The answer is 5.", r"$\boxed{6}$", DEFAULT, "")
    assert isinstance(verdict, VerdictScored)
    assert (verdict.reward, verdict.extracted, verdict.expected) == (0.0, "6", "5")
    assert verdict.rule.startswith("box; ")


GOLDS = ["5", "42", r"\frac{13}{4}", r"\{3,-5\}", "(-\\infty,3)", "x^2-1", r"\text{Tuesday}", r"2\sqrt{3}", "45\\%"]
SNIPPETS = r"""\frac \sqrt \boxed{ \boxed \text{ \left( \right) { } $ $$ \( \) ^ _ + = \cdot \pi & \\ [ ] , . ! x y so
    is or not answer #### ** <think> </think> <answer>"""
LATEX = st.lists(st.sampled_from([*SNIPPETS.split(), "The answer is ", "\n", " "]), max_size=30).map("".join)


@settings(max_examples=150, deadline=None)
@given(response=st.one_of(st.text(st.characters(exclude_categories=["Nd", "No", "Nl", "Lo"]), max_size=60), LATEX))
def test_garbage_is_never_accepted(response: str) -> None:
    assert [gold for gold in GOLDS if judge(gold, response)] == []


@pytest.mark.parametrize(
    "unit",
    [r"\boxed{", "{", "}", "$", r"\(", r"\[", "answer ", "The answer is ", "= 1 + 1 ", "or ", "**", r"\boxed{5} ", "( ",
     "<think>", "####", "\n", r"\text{", "\uff15", "e = "],
)  # fmt: skip
def test_repetition_of_any_kind_is_read_to_its_end(unit: str) -> None:
    """A quadratic rule would take minutes here and run into the limit of the test."""
    text = unit * (200_000 // len(unit))
    for response in (text, "The answer is 5 " + text, r"\boxed{5}" + text):
        extract(response, DEFAULT, "")


@pytest.mark.parametrize("depth", [10, 1500])
def test_nested_brackets_and_boxes_are_read_at_any_depth(depth: int) -> None:
    assert judge("7", "$" + r"\boxed{" + "(" * depth + "7" + ")" * depth + "}$")
    assert judge("7", r"\boxed{" * depth + "7" + "}" * depth)


_JUDGE_ALL = """
import json, sys
from gvm_stream.config import MathSection
from gvm_stream.verify.math import verify_math
for line in open(sys.argv[1]):
    case = json.loads(line)
    print(verify_math(case["gold"], case["output"], MathSection(), ""))
"""


def test_verdicts_depend_on_no_hash_seed_no_order_and_no_thread(tmp_path: Path) -> None:
    shuffled = CASES[::2]
    random.Random(0).shuffle(shuffled)
    expected = [str(verify_math(case.gold, case.output, DEFAULT, "")) for case in shuffled]

    path = tmp_path / "cases.jsonl"
    path.write_text("".join(msgspec.json.encode(case).decode() + "\n" for case in shuffled[::-1]))
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _JUDGE_ALL, str(path)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines() == expected[::-1]

    in_thread: list[str] = []
    thread = threading.Thread(
        target=lambda: in_thread.extend(str(verify_math(case.gold, case.output, DEFAULT, "")) for case in shuffled)
    )
    thread.start()
    thread.join()
    assert in_thread == expected
