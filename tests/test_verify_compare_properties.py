"""What holds for all golds and answers, whatever they are."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.config import MathSection
from gvm_stream.verify.math.compare import compare

OPTIONS = MathSection()


def equal(gold: str, answer: str) -> bool:
    return compare(gold, [answer], OPTIONS).equal


FRACTIONS = st.fractions(max_denominator=999).filter(lambda value: abs(value.numerator) < 10**9)


def renderings(value: Fraction) -> list[str]:
    """Ways to write a fraction that the normaliser knows."""
    sign, above, below = "-" * (value < 0), abs(value.numerator), value.denominator
    forms = [
        f"{sign}{above}/{below}",
        f"{sign}\\frac{{{above}}}{{{below}}}",
        f"\\dfrac{{{sign}{above}}}{{{below}}}",
        f"$ {sign}\\tfrac{{{above}}}{{{below}}} $",
        f"\\left({sign}\\frac{{{2 * above}}}{{{2 * below}}}\\right)",
        f"\\color{{red}}{{{sign}\\cfrac{{{above}}}{{{below}}}}}",
        f"x = {sign}{above} / {below}",
        f"\N{MINUS SIGN}{above}/{below}" if sign else f"+{above}/{below}",
    ]
    if below == 1:
        forms += [
            f"{sign}{above:,}",
            f"{sign}00{above}",
            f"{sign}{above}.0",
            f"\\text{{{sign}{above}}}",
            f"{sign}{above} cm",
        ]
    elif above > below and above % below:
        forms += [f"{sign}{above // below} {above % below}/{below}"]
        forms += [f"{sign}{above // below}\\frac{{{above % below}}}{{{below}}}"]
    return forms


@given(FRACTIONS)
@settings(max_examples=60, deadline=None)
def test_a_number_equals_all_its_renderings(value: Fraction) -> None:
    for form in renderings(value):
        assert equal(f"{value.numerator}/{value.denominator}", form), form


@given(FRACTIONS, st.sampled_from([Fraction(1), Fraction(-1), Fraction(1, 1000), Fraction(1, 10**30)]))
@settings(max_examples=60, deadline=None)
def test_a_number_equals_no_rendering_of_another(value: Fraction, step: Fraction) -> None:
    gold = f"{value.numerator}/{value.denominator}"
    other = value + step
    assert not any(equal(gold, form) for form in renderings(other))
    if value:
        assert not any(equal(gold, form) for form in renderings(-value))


EXPRESSIONS = st.recursive(
    st.sampled_from(["x", "y", "n", "2", "3", "7", "\\pi", "a_1"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}+{pair[1]})"),
        st.tuples(inner, inner).map(lambda pair: f"{{{pair[0]}}}\\cdot{{{pair[1]}}}"),
        st.tuples(inner, inner).map(lambda pair: f"\\frac{{{pair[0]}}}{{{pair[1]}+1}}"),
        inner.map(lambda text: f"\\sqrt{{{text}}}"),
        inner.map(lambda text: f"({text})^2"),
        inner.map(lambda text: f"\\sin({text})"),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS, EXPRESSIONS)
@settings(max_examples=60, deadline=None)
def test_expressions_are_reflexive_and_symmetric_and_a_changed_one_is_another(one: str, other: str) -> None:
    assert equal(one, one.replace("\\frac", "\\dfrac").replace("(", "\\left(").replace(")", "\\right)"))
    assert equal(f"{one}+{other}", f"{other}+{one}")
    assert equal(one, other) == equal(other, one)
    assert not equal(one, f"{one}+1")
    assert not equal(f"{one}+3", f"-({one}+3)")


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=5, unique=True))
@settings(max_examples=60, deadline=None)
def test_sets_have_no_order_and_tuples_do(values: list[int]) -> None:
    turned = values[1:] + values[:1]
    plain, other = ", ".join(map(str, values)), ", ".join(map(str, turned))
    assert equal(f"\\{{{plain}\\}}", f"\\{{{other}\\}}")
    assert equal(plain.replace(", ", ",\\ "), other.replace(", ", " and "))
    assert not equal(f"({plain})", f"({other})")
    assert not equal(plain, ", ".join(map(str, values[1:])))


@given(st.text(alphabet="abcxyz0123456789+-*/^(){}[]|\\_,.=<>%$ √°≤", max_size=30))
@settings(max_examples=300, deadline=None)
def test_garbage_is_judged_and_never_equals_a_number_that_is_not_in_it(text: str) -> None:
    assert not equal("8172635445", text)
