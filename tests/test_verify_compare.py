"""Equivalence of a gold and an answer: two further examples of every rule, and properties of all of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gvm_stream.config import MathSection
from gvm_stream.verify.math.compare import UnreadableGold, compare, readable_gold

OPTIONS = MathSection()

EQUAL = [
    # numbers
    (r"\frac{1}{2^{60}}", "2^{-60}"),
    ("10^{40}", "1" + "0" * 40),
    (r"\sqrt{7}", "2.6457513110645907"),
    (r"\frac13", "0.333333333333333"),
    ("0.667", r"\frac{2}{3}"),
    ("3.14", r"\pi"),
    ("0.1\\overline{6}", "1/6"),
    ("1000000", r"1\,000\,000"),
    ("12,345", "12345"),
    ("10,000\\pi", "10000\\pi"),
    ("0.3", "0.30000000000000004"),
    ("1.5\\times10^{3}", "1.5e3"),
    ("6\\times 10^{23}", "6e23"),
    ("2.50", "5/2"),
    ("5", "05"),
    ("0", "-0.00"),
    # percent, units, money, degrees
    ("30\\%", "0.3"),
    ("12.5\\%", "12.5"),
    ("36", r"36\text{ square units}"),
    ("60", "60 miles per hour"),
    ("9.8", r"9.8\ \mathrm{m/s^2}"),
    ("12 \\text{ cm}", "12 centimeters"),
    ("1500", r"\$1,500"),
    ("20", "£20"),
    ("90^\\circ", "90 degrees"),
    ("90^\\circ", r"\frac{\pi}{2}"),
    # mixed numbers, fractions, roots
    ("\\frac{9}{4}", "2 1/4"),
    ("-\\frac{9}{4}", r"-2\tfrac14"),
    ("\\frac{2}{3}", r"\frac{2}3"),
    ("\\frac{a+1}{2}", "(a+1)/2"),
    ("3\\sqrt{2}", "3sqrt(2)"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"\sqrt{\frac{a}{b}}", r"\frac{\sqrt{a}}{\sqrt{b}}"),
    # constants, complex numbers
    ("2e", r"2\mathrm{e}"),
    ("e^2", r"\exp(2)"),
    ("\\frac{1}{1+i}", r"\frac{1-i}{2}"),
    ("e^{i\\pi}", "-1"),
    # several values, names
    ("\\pm 3", "-3, 3"),
    ("x=\\pm 3", r"x=3 \text{ or } x=-3"),
    ("x=2,3", "2 and 3"),
    ("x=1,y=2", "y=2,x=1"),
    ("x=1,y=2", "(1,2)"),
    ("(x,y)=(1,2)", "(1,2)"),
    ("y=2x+1", "2x+1"),
    ("f(x)=x+1", "f(x)=1+x"),
    ("6", "2*3=6"),
    ("6", "6=x"),
    (r"\sqrt3", r"\sqrt3\approx1.732"),
    # equations, inequalities, sets
    ("y=2x+1", "2x-y+1=0"),
    ("x^2+y^2=4", "2x^2+2y^2=8"),
    ("1<x<3", "(1,3)"),
    ("[2,\\infty)", "x \\geq 2"),
    ("x>2", "-x<-2"),
    ("x<1 \\text{ or } x>3", r"(-\infty,1)\cup(3,\infty)"),
    (r"\mathbb{R}\setminus\{0\}", "x\\ne 0"),
    (r"[1,2]\cup[2,3]", "[1,3]"),
    (r"\{x\mid x>2\}", "x>2"),
    (r"\{1,2\}", r"\{2,1,1\}"),
    (r"\emptyset", r"\{\}"),
    ("A\\cup B", "B\\cup A"),
    # vectors, matrices, ratios, bases, congruences
    ("(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{bmatrix}1&0\\0&1\end{bmatrix}", r"\left[\begin{array}{cc}1&0\\0&1\end{array}\right]"),
    ("1:2:3", "2:4:6"),
    ("121_3", "121_{3}"),
    ("x\\equiv 5 \\pmod{7}", "x \\equiv 12 (mod 7)"),
    ("5", r"5 \pmod 7"),
    (r"\left\{\begin{array}{l}a=1\\b=2\end{array}\right.", "a=1, b=2"),
    (r"\begin{aligned}a&=1\\b&=2\end{aligned}", "b=2, a=1"),
    # words, options, times
    (r"\text{Friday}", "friday"),
    (r"\text{no solution}", "No solution"),
    ("C", "(C) 42"),
    ("(C)", "C"),
    ("9:15", "9:15 am"),
    # algebra and notation
    (r"\cos 72^\circ", r"\frac{\sqrt5-1}{4}"),
    (r"\sin 2x", r"2\sin x\cos x"),
    (r"\log_2 8", "3"),
    (r"\arctan(2)", r"\tan^{-1}(2)"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    (r"\sum_{k=1}^n k^2", r"\frac{n(n+1)(2n+1)}{6}"),
    (r"\prod_{k=1}^{n} k", "n!"),
    ("(-1)^n", r"\cos(n\pi)"),
    (r"\gcd(a,b)", r"\gcd(b,a)"),
    (r"\lfloor x\rfloor+1", r"\lfloor x+1\rfloor"),
    (r"\vec{a}\cdot\vec{b}", r"\vec{b}\cdot\vec{a}"),
    ("a_n=3a_{n-1}+2", "a_n = 2 + 3 a_{n-1}"),
    ("x^2+C", "x^2+K"),
    ("O(n log n)", r"O(n\log n)"),
    ("3 red, 4 blue", "4 blue, 3 red"),
    (r"\int x^2+1\,dx", r"\int 1+x^2\,dx"),
    # spelling
    ("¾", "0.75"),
    ("3½", "3.5"),
    ("x²", "x^2"),
    ("2\N{MULTIPLICATION SIGN}3", "6"),
    ("7", r"\textcolor{red}{7}"),
    ("7", r"{\bf 7}"),
    ("7", r"\text{The final answer is } 7"),
    ("$\\frac{7}{2}$", "3.5"),
    ("So we get \\boxed{7}.", "7"),
    ("#### 1,250", "1250"),
]
DIFFERENT = [
    (r"\frac{1}{7^{90}}", "7^{-91}"),
    (r"\frac{1}{200!}", r"\frac{1}{199!}"),
    ("2^{1000000000}", "2^{1000000001}"),
    (r"\sqrt{2}+\frac{1}{3^{80}}", r"\sqrt{2}+\frac{1}{3^{81}}"),
    ("e^{-1000}", "e^{-1001}"),
    ("e^{-1000}", "0"),
    (r"\sqrt{7}", "2.6457"),
    (r"\frac{1}{3}", "0.33"),
    ("0.5", "0.54"),
    ("34.0", "34.04"),
    ("1000000", "1,000,00"),
    ("30\\%", "3"),
    ("45", "0.45"),
    ("20\\%, 30\\%", "20\\%, 31\\%"),
    ("12\\text{ cm}", r"12\text{ m}"),
    ("12", "12m"),
    ("12", "12 thousand"),
    ("3x", "3"),
    ("\\$20", "€20"),
    ("9", "7 4/2"),
    ("1 1/2", "11/2"),
    ("\\frac{1}{2}", "2 1/2"),
    ("3", "3\\sqrt(2)"),
    ("\\frac{a+1}{2}", "a+1/2"),
    ("1+i", "1-i"),
    ("1000000000000", "1000000000000.5"),
    (r"\{\emptyset\}", r"\emptyset"),
    ("5", "5 hundredths"),
    ("3", "\\pm 3"),
    ("2", "2,3"),
    ("x=1,y=2", "2,1"),
    ("x=5", "2x=10"),
    ("f(x)=x+1", "g(x)=x+1"),
    ("6", "2*4=6"),
    ("2", "4 \\approx 2"),
    ("x+y=1", "x=x"),
    ("x+y=1", "0=0"),
    ("x+y<2", "-x-y<-2"),
    ("x>2", "t>2"),
    ("x>2", "[2,\\infty)"),
    ("[0,1)", "[0,1]"),
    (r"(1,2)\cup(2,3)", "(1,3)"),
    (r"\emptyset", "0"),
    ("(2,345)", "2345"),
    ("(2,3)", "[2,3]"),
    ("(1,2,3)", r"\langle 1,3,2\rangle"),
    ("2:3", "3:2"),
    ("9:15", "3:05"),
    ("9:15 pm", "9:15 am"),
    ("121_3", "121_4"),
    ("1011_2", "11"),
    ("x_{12}", "x_1x_2"),
    (r"x\equiv 5 \pmod{7}", r"x\equiv 5\pmod{8}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&5\end{bmatrix}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("stressed", "desserts"),
    ("C", "B: C"),
    ("A", "B) A is right"),
    (r"\text{June 3}", "July 3"),
    ("3 red, 4 blue", "4 red, 3 blue"),
    ("|x|", "x"),
    (r"\lceil x\rceil", r"\lfloor x\rfloor"),
    (r"\overline{AB}", "AB"),
    (r"\mathbb{N}", r"\mathbb{Z}"),
    (r"\gcd(a,b)", r"\text{lcm}(a,b)"),
    ("g(1)", "g(2)"),
    (r"\vec{a}\times\vec{b}", r"\vec{b}\times\vec{a}"),
    (r"\overrightarrow{AB}", r"\overrightarrow{BA}"),
    (r"\begin{cases}x&x>0\\-x&x\le0\end{cases}", r"\begin{cases}x&x>0\\x&x\le0\end{cases}"),
    (r"\begin{cases}a=1\\b=2\end{cases}", "a=1"),
    ("a_n = 3a_{n-1}", "a_n = 2a_{n-1}"),
    ("O(n)", "O(n^2)"),
    ("2^{n}+1", "2^{n+1}"),
    ("A+a", "2a"),
    ("\\infty", "-\\infty"),
    (r"\int_0^1 f(x)\,dx", r"\int_1^0 f(x)\,dx"),
    ("x^2+C", "x^2"),
    ("5", "5 or 6"),
    ("5", "1/0"),
    ("0", "0/0"),
    ("5", ""),
]
BOMBS = [
    "9**9**9**9",
    "(10^9)!",
    "99999!",
    "2^{2^{2^{2^{2^{2}}}}}",
    r"\sum_{k=1}^{100000000} \frac{1}{k}",
    r"\binom{10^9}{5\cdot10^8}",
    r"\sum_{i=1}^{900}\sum_{j=1}^{900}\sum_{k=1}^{900} \frac{1}{i+j+k}",
    r"\sum_{k=1}^{900} \frac{1}{k^{200}}",
    "5 " + "m " * 5000 + "x",
    r"\sin(10^{10^{5}})",
    "1" + "+1" * 3000,
    "2*" * 1500 + "2",
    "-" * 3000 + "5",
    "(" * 3000,
    "|" * 600 + "5" + "|" * 600,
    r"\frac{1}{" * 400 + "2" + "}" * 400,
    r"\boxed{" * 3000,
    "9" * 20_000,
    "x" + "^x" * 300,
]


def equal(gold: str, *answers: str, options: MathSection = OPTIONS) -> bool:
    return compare(gold, answers, options).equal


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
@pytest.mark.filterwarnings("ignore:.*antlr.*:DeprecationWarning")
def test_what_says_the_same_is_right(gold: str, answer: str) -> None:
    assert equal(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_what_says_something_else_is_wrong(gold: str, answer: str) -> None:
    assert not equal(gold, answer)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_computation_that_never_ends_is_not_begun(bomb: str) -> None:
    assert not equal("7", bomb)  # without the bounds none of these ends before the time limit of the tests


def test_what_is_too_big_to_compute_equals_itself() -> None:
    assert equal("9^{9^9}", "9^{9^{9}}")
    assert equal("10^{10^{10}}+1", "1 \\cdot 10^{10^{10}}+1") is False  # not computed, so only its spelling counts


def test_brackets_that_do_nothing_may_be_as_deep_as_they_like() -> None:
    assert equal("7", "(" * 1500 + "7" + ")" * 1500)


@pytest.mark.parametrize(
    ("gold", "answer", "option"),
    [
        ("45\\%", "45", "percent_sign_optional"),
        ("45", "45 \\%", "percent_sign_optional"),
        ("12", "12 cm", "unit_optional"),
        ("12", r"12\text{ m}^2", "unit_optional"),
        ("66.7", r"\frac{200}{3}", "gold_precision"),
        ("1.732", r"\sqrt{3}", "gold_precision"),
    ],
)
def test_a_contentious_rule_can_be_switched_off(gold: str, answer: str, option: str) -> None:
    assert equal(gold, answer)
    assert not equal(gold, answer, options=MathSection(**{option: False}))


def test_several_answers_are_one_list() -> None:
    assert equal("1, 2", "2", "1")
    assert not equal("2", "1", "2")


def test_a_comparison_says_what_was_compared_and_by_which_rule() -> None:
    result = compare("$\\dfrac{1}{2}$", ["\\boxed{0.5}"], OPTIONS)
    assert (result.equal, result.expected, result.extracted) == (True, "\\frac{1}{2}", "0.5")
    assert result.rule == "plain numbers"


@pytest.mark.parametrize("gold", ["", "  ", "$$", "\\boxed{}", "?!", "\\frac{1}{2", "{x"])
def test_a_gold_that_no_answer_can_equal_is_named(gold: str) -> None:
    problem = readable_gold(gold)
    assert problem
    with pytest.raises(UnreadableGold, match="gold answer"):
        compare(gold, ["5"], OPTIONS)


def test_a_readable_gold_has_no_problem() -> None:
    assert readable_gold(r"a \rightarrow b") == readable_gold("<") == ""
    assert [readable_gold(gold) for gold, _ in EQUAL] == [""] * len(EQUAL)


def test_a_verdict_does_not_depend_on_the_hash_seed() -> None:
    script = (
        "from tests.test_verify_compare import *\n"
        "results = [compare(g, [a], OPTIONS) for g, a in [*EQUAL, *DIFFERENT] if 'int' not in g]\n"
        "print([(r.equal, r.rule) for r in results])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
