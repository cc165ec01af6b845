"""Closed rational expressions as exact fractions, within a bound on their size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from gvm_stream.verify.math.node import Node
from gvm_stream.verify.math.numbers import decimal
from gvm_stream.verify.math.tokens import names

MOST_BITS = 50_000
"""Size of a numerator or denominator that is computed."""
LARGEST_FACTORIAL = 4_000
LARGEST_BINOMIAL = 10_000
MOST_TERMS = 1_000
"""Terms that are written out, of a sum or product and all those inside it together."""


class TooBig(ValueError):
    """A computation that could take for ever; such formulas are equal only if written the same way."""


def fraction(node: Node, known: Mapping[str, Fraction] | None = None) -> Fraction | None:
    """The exact value; None if it is not rational, not closed or not defined. Raises TooBig.

    `known`: values of the indices of sums.
    """
    known = known or {}
    if node.head == "num":
        return decimal(node.text).value
    if node.head == "sym":
        return known.get(node.text)
    if node.head in ("sum", "prod"):
        return _series(node, known)
    operation = node.text if node.head == "function" else node.head
    if operation not in _RATIONAL:
        return None
    values = [fraction(argument, known) for argument in node.args]
    exact = [value for value in values if value is not None]
    return _apply(operation, exact) if len(exact) == len(values) else None


_RATIONAL = names("+ * / neg ^ ! abs binom floor ceil gcd lcm max min root cdot times")


def _apply(operation: str, values: list[Fraction]) -> Fraction | None:
    first, last = values[0], values[-1]
    match operation:
        case "+":
            return sum(values, Fraction(0))
        case "*" | "cdot" | "times":
            return bounded(first * last)
        case "/":
            return bounded(first / last) if last else None
        case "neg":
            return -first
        case "abs":
            return abs(first)
        case "^":
            return _power(first, last)
        case "root":
            return _root(first, last)
        case "max" | "min":
            return max(values) if operation == "max" else min(values)
        case "floor":
            return Fraction(math.floor(first))
        case "ceil":
            return Fraction(math.ceil(first))
    return _integers(operation, values)


def _integers(operation: str, values: list[Fraction]) -> Fraction | None:
    if any(value.denominator != 1 for value in values):
        return None
    whole = [value.numerator for value in values]
    if operation == "gcd":
        return Fraction(math.gcd(*whole))
    if operation == "lcm":
        return bounded(Fraction(math.lcm(*whole)))
    if max(whole) > (LARGEST_FACTORIAL if operation == "!" else LARGEST_BINOMIAL):
        raise TooBig(f"{operation} of {max(whole).bit_length()} bits")
    if min(whole) < 0:
        return None
    return Fraction(math.factorial(whole[0]) if operation == "!" else math.comb(*whole))


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        root = _root(base, Fraction(exponent.denominator)) if exponent.denominator < 100 and base >= 0 else None
        return None if root is None else _power(root, Fraction(exponent.numerator))
    if base in (0, 1, -1):
        if base == 0:
            return Fraction(0) if exponent > 0 else Fraction(1) if exponent == 0 else None
        return base if exponent.numerator % 2 else Fraction(1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent.numerator) * bits > MOST_BITS:
        raise TooBig(f"a power with an exponent of {exponent.numerator.bit_length()} bits")
    return base**exponent.numerator


def _root(radicand: Fraction, index: Fraction) -> Fraction | None:
    """Only square roots of squares; other roots are left to the numeric comparison."""
    if index != 2 or radicand < 0:
        return None
    above, below = math.isqrt(radicand.numerator), math.isqrt(radicand.denominator)
    found = Fraction(above, below)
    return found if found * found == radicand else None


def _series(node: Node, known: Mapping[str, Fraction]) -> Fraction | None:
    index, lower, upper, term = node.args
    first, last = fraction(lower, known), fraction(upper, known)
    if first is None or last is None or first.denominator != 1 or last.denominator != 1:
        return None
    if last - first > most_terms(node):
        raise TooBig(f"{node.head} of more than {MOST_TERMS} terms")
    total = Fraction(node.head == "prod")
    for place in range(first.numerator, last.numerator + 1):
        value = fraction(term, {**known, index.text: Fraction(place)})
        if value is None:
            return None
        total = bounded(total + value if node.head == "sum" else total * value)
    return total


def most_terms(series: Node) -> int:
    """Terms of one series so that all those nested in it stay below MOST_TERMS."""
    return int(MOST_TERMS ** (1 / _nesting(series)))


def _nesting(node: Node) -> int:
    return sum(map(_nesting, node.args)) + (node.head in ("sum", "prod"))


def bounded(value: Fraction) -> Fraction:
    """The value, or TooBig."""
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    if bits > MOST_BITS:
        raise TooBig(f"a number of {bits} bits")
    return value


def size(node: Node) -> int:
    """Decimal digits that tell numbers apart: those of the integers and exact powers in a formula. Raises TooBig."""
    if node.head in ("^", "!", "binom", "num"):
        value = fraction(node)
        if value is not None:
            return (value.numerator.bit_length() + value.denominator.bit_length()) * 3 // 10
        exponent = fraction(node.args[-1])
        if node.head == "^" and exponent is not None:  # e^-1000 has its first digit 434 places after the point
            return size(node.args[0]) + min(math.ceil(abs(exponent)), MOST_BITS)
    return sum(map(size, node.args))
