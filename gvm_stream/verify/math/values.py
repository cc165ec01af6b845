"""Are two formulas the same number for all values of their symbols? Exact where rational, else by evaluation.

A formula in symbols is evaluated at fixed pseudo-random points with many digits: two different analytic expressions
agree at none of them, except with negligible probability (Schwartz 1980, Zippel 1979, for polynomials). Points have
positive and negative coordinates; where a side is not real, the point only counts against it as a complex number,
so that sqrt(1/k) = 1/sqrt(k), but |x| is not x.
"""

from __future__ import annotations

import zlib
from typing import Any

from mpmath.ctx_mp import MPContext  # type: ignore[import-untyped]

from gvm_stream.verify.math.exact import TooBig, fraction, most_terms, size
from gvm_stream.verify.math.node import Node
from gvm_stream.verify.math.tokens import names

Real = Any
"""A number of mpmath, which has no types."""

DIGITS = 50
"""Digits at a point with symbols; a closed number gets as many more as its integers have."""
MOST_DIGITS = 5_000
_SCALES = ((0.1, 0.9), (1.1, 2.9), (3.0, 11.0), (0.2, 40.0), (-0.9, 0.9), (-3.0, 3.0), (-20.0, 20.0), (-2.0, 7.0))
_LARGEST_EXPONENT = 1_000_000
_LARGEST_ANGLE = 10**9
_LARGEST_FACTORIAL = 10_000
_NEEDS_INTEGERS = names("! binom sum prod gcd lcm")
_FUNCTIONS = {"arg": "arg", "Re": "re", "Im": "im", "sgn": "sign", "abs": "fabs"}
_PERIODIC_OR_STEEP = names("sin cos tan cot sec csc sinh cosh tanh coth sech csch exp")
_ANALYTIC = names(
    "sin cos tan cot sec csc sinh cosh tanh coth sech csch asin acos atan acot asec acsc exp ln arg Re Im sgn "
    "floor ceil abs"
)


class Undefined(ValueError):
    """A formula without a value at this point."""


def symbols(node: Node) -> frozenset[str]:
    """Names of the symbols and words in a formula, without those that an index binds."""
    if node.head in ("sym", "text"):
        return frozenset() if node.text in _CONSTANTS else frozenset((node.text,))
    found = frozenset().union(*map(symbols, node.args))
    if node.head in ("call", "mark", "base"):
        found |= {node.text}
    return found - {node.args[0].text} if node.head in ("sum", "prod") else found


_CONSTANTS = frozenset(("e", "i", "\\pi"))


def same_value(one: Node, other: Node) -> bool:
    """Equal as far as 50 digits and more can tell; what is too big to compute is equal only if written alike."""
    if one == other:
        return True
    try:
        left, right = fraction(one), fraction(other)
        if left is not None and right is not None:
            return left == right
        if symbols(one) or symbols(other):
            return _same_function(one, other)
        return _same_number(one, other)
    except TooBig:
        return False


def number(node: Node, digits: int = DIGITS) -> Real | None:
    """A closed formula as a real number of mpmath; None if it has symbols, no value or is not real."""
    if symbols(node):
        return None
    point = _Point(digits)
    try:
        return point.real(point.value(node))
    except (Undefined, TooBig, ZeroDivisionError):
        return None


def constant_ratio(one: Node, other: Node) -> int:
    """Sign of the constant c with one = c * other; 0 if there is none, 2 if c is not real."""
    ratios = []
    for point in _points(_digits(one, other), integers=_integers_only(one, other)):
        try:
            above, below = point.value(one), point.value(other)
            if not point.is_zero(above) or not point.is_zero(below):
                ratios.append(above / below)
        except (Undefined, ZeroDivisionError):
            continue
        except TooBig:
            return 0
    if len(ratios) < 3 or not ratios[0] or any(abs(ratio / ratios[0] - 1) > 1e-25 for ratio in ratios):
        return 0
    first = ratios[0]
    if abs(getattr(first, "imag", 0)) > 1e-25 * abs(first):
        return 2
    return 1 if first.real > 0 else -1


def _same_number(one: Node, other: Node) -> bool:
    digits = _digits(one, other)
    coarse, fine = (_sides(one, other, precision) for precision in (digits, 2 * digits))
    if coarse is None or fine is None:
        return False
    if all(_vanishes(rough, exact, digits) for rough, exact in zip(coarse, fine, strict=True)):
        return True
    return _near(coarse, digits // 2) and _near(fine, digits * 3 // 2)


def _sides(one: Node, other: Node, digits: int) -> tuple[Real, Real] | None:
    point = _Point(digits)
    try:
        return point.value(one), point.value(other)
    except (Undefined, ZeroDivisionError):
        return None


def _vanishes(rough: Real, exact: Real, digits: int) -> bool:
    """A computed zero shrinks with the precision; a small number stays."""
    return bool(abs(exact) * 10 ** (digits // 2) <= abs(rough) or (rough == 0 and abs(exact) * 10**digits <= 1))


def _near(sides: tuple[Real, Real], digits: int) -> bool:
    left, right = sides
    return bool(abs(left - right) * 10**digits <= max(abs(left), abs(right)))


def _same_function(one: Node, other: Node) -> bool:
    real = complex_ = 0
    digits = _digits(one, other)
    for point in _points(digits, integers=_integers_only(one, other)):
        try:
            left, right = point.value(one), point.value(other)
        except (Undefined, ZeroDivisionError):
            continue
        alike = point.close(left, right)
        if point.real(left) is not None and point.real(right) is not None:
            if not alike:
                return False
            real += 1
        else:
            complex_ += 1 if alike else -10
    return real >= 2 or (complex_ > 0 and real + complex_ >= 3)


def _integers_only(one: Node, other: Node) -> bool:
    """Some operation is meant for whole numbers, such as n! or (-1)^n."""
    return any(_for_integers(node) for node in (one, other))


def _for_integers(node: Node) -> bool:
    if (node.text if node.head == "function" else node.head) in _NEEDS_INTEGERS:
        return True
    if node.head == "^" and node.args[0].head == "neg" and symbols(node.args[1]) and not symbols(node.args[0]):
        return True
    return any(map(_for_integers, node.args))


def _digits(one: Node, other: Node) -> int:
    digits = DIGITS + size(one) + size(other)
    if digits > MOST_DIGITS:
        raise TooBig(f"{digits} digits")
    return digits


def _points(digits: int, *, integers: bool) -> list[_Point]:
    context = MPContext()  # making one takes longer than using it
    return [_Point(digits, context, place, integers=integers) for place in range(len(_SCALES))]


class _Point:
    """Values for all symbols, drawn from their names so that nothing depends on an order."""

    def __init__(
        self, digits: int, context: MPContext | None = None, place: int = 0, *, integers: bool = False
    ) -> None:
        self._mp = context or MPContext()  # never mpmath.mp: its precision belongs to the whole process
        self._mp.dps = digits
        self._digits = digits
        self._known: dict[str, Real] = {}
        self._place = place
        self._integers = integers

    def ten_to(self, exponent: int) -> Real:
        return self._mp.mpf(10) ** exponent

    def real(self, value: Real) -> Real | None:
        if abs(value.imag) > abs(value) * self.ten_to(-self._digits // 2):
            return None
        return value.real

    def close(self, left: Real, right: Real) -> bool:
        return bool(abs(left - right) <= max(abs(left), abs(right)) * self.ten_to(-self._digits // 2)) or (
            self.is_zero(left) and self.is_zero(right)
        )

    def is_zero(self, value: Real) -> bool:
        return bool(abs(value) <= self.ten_to(-self._digits * 3 // 4))

    def value(self, node: Node) -> Real:
        """Raises Undefined, ZeroDivisionError or TooBig."""
        value = self._value(node)
        if not self._mp.isfinite(value):
            raise Undefined(node.head)
        return value

    def _value(self, node: Node) -> Real:
        mp = self._mp
        if node.head == "num":
            exact = fraction(node)
            if exact is None:
                raise Undefined(node.text)
            return mp.mpf(exact.numerator) / exact.denominator
        if node.head == "sym":
            return self._symbol(node.text)
        if node.head in ("sum", "prod"):
            return self._series(node)
        if node.head in ("+", "*", "/", "neg", "^", "root", "degree", "abs", "!", "binom", "floor", "ceil"):
            return self._operation(node.head, [self.value(argument) for argument in node.args])
        if node.head == "function":
            return self._function(node.text, [self.value(argument) for argument in node.args])
        return self._opaque(node)

    def _symbol(self, name: str) -> Real:
        if name in self._known:
            return self._known[name]
        constant = {"e": self._mp.e, "i": self._mp.j, "\\pi": self._mp.pi}.get(name)
        if constant is not None:
            return +constant if name != "i" else constant
        return self._draw(name)

    def _draw(self, name: str) -> Real:
        bits = zlib.crc32(f"{name}:{self._place}".encode()) * 2**32 + zlib.crc32(f"{self._place}:{name}".encode())
        low, high = _SCALES[self._place]
        if self._integers:
            return self._mp.mpf(1 + bits % (4, 7, 12, 20, 30, 9, 40, 15)[self._place])
        return self._mp.mpf(low) + self._mp.mpf(high - low) * bits / 2**64

    def _operation(self, head: str, values: list[Real]) -> Real:
        mp, first, last = self._mp, values[0], values[-1]
        match head:
            case "+":
                return mp.fsum(values)
            case "*":
                return first * last
            case "/":
                return first / last
            case "neg":
                return -first
            case "^":
                return self._power(first, last)
            case "root":
                return self._root(first, last)
            case "degree":
                return first * mp.pi / 180
            case "abs":
                return abs(first)
            case "floor" | "ceil":
                return mp.floor(first) if head == "floor" else mp.ceil(first)
        if max(abs(value) for value in values) > _LARGEST_FACTORIAL:
            raise TooBig(head)
        try:
            return mp.factorial(first) if head == "!" else mp.binomial(first, last)
        except ValueError as error:  # poles of the gamma function
            raise Undefined(head) from error

    def _power(self, base: Real, exponent: Real) -> Real:
        if abs(exponent) > _LARGEST_EXPONENT or (base and abs(self._mp.mag(base)) > _LARGEST_EXPONENT):
            raise TooBig("power")
        return base**exponent

    def _root(self, radicand: Real, index: Real) -> Real:
        if index == 3 and self.real(radicand) is not None and radicand.real < 0:
            return -self._mp.cbrt(-radicand.real)
        return self._power(radicand, 1 / index)

    def _function(self, name: str, values: list[Real]) -> Real:
        mp, first = self._mp, values[0]
        if name in _PERIODIC_OR_STEEP and abs(first) > _LARGEST_ANGLE:
            raise TooBig(name)
        try:
            if name.startswith("log") or name == "lg":
                return mp.log(first, 10 if name == "lg" else values[1]) if name != "log 0" else mp.log(first)
            if name in ("max", "min"):
                return self._extreme(name, values)
            if name in ("gcd", "lcm") and all(mp.isint(value) for value in values):
                exact = fraction(
                    Node("function", tuple(Node("num", text=str(int(value.real))) for value in values), name)
                )
                return mp.mpf(exact.numerator if exact is not None else 0)
            if name in _ANALYTIC and len(values) == 1:
                return getattr(mp, _FUNCTIONS.get(name, name))(first)
        except ValueError as error:  # outside the domain
            raise Undefined(name) from error
        return self._unknown(name, values)

    def _extreme(self, name: str, values: list[Real]) -> Real:
        if any(self.real(value) is None for value in values):
            raise Undefined(name)
        return max(value.real for value in values) if name == "max" else min(value.real for value in values)

    def _opaque(self, node: Node) -> Real:
        """An operation without known rules: some number that its name and the values of its operands decide."""
        values = [self.value(argument) for argument in node.args]
        if node.head in ("cdot", "cup", "cap"):  # symmetric
            values.sort(key=lambda value: (value.real, value.imag))
        return self._unknown(f"{node.head} {node.text}", values)

    def _unknown(self, name: str, values: list[Real]) -> Real:
        return self._draw(f"{name}({','.join(self._mp.nstr(value, 15) for value in values)})")

    def _series(self, node: Node) -> Real:
        index, lower, upper, term = node.args
        first, last = self.value(lower), self.value(upper)
        if not (self._mp.isint(first) and self._mp.isint(last)) or last - first > most_terms(node):
            raise TooBig(node.head)
        outer = self._known.get(index.text)
        total = self._mp.mpf(node.head == "prod")
        for place in range(int(first.real), int(last.real) + 1):
            self._known[index.text] = self._mp.mpf(place)
            total = total + self.value(term) if node.head == "sum" else total * self.value(term)
        del self._known[index.text]
        if outer is not None:
            self._known[index.text] = outer
        return total
