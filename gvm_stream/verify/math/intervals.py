"""Sets of real numbers: intervals, unions, differences and inequalities in one variable.

A set is its membership test and the points where membership can change. Two sets are equal if their members agree at
all of these points and between them; no normal form is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec

from gvm_stream.verify.math.node import Node
from gvm_stream.verify.math.values import Real, number, symbols

DIGITS = 100
_CLOSE = 1e-60


class RealSet(msgspec.Struct, frozen=True):
    edges: tuple[Any, ...]
    """Finite points where membership can change."""
    contains: Callable[[Real], bool]
    name: str = ""
    """Variable of an inequality; empty for intervals."""
    plain: bool = False
    """Written as (a, b) or [a, b], which may be meant as a pair."""


def same_set(one: RealSet, other: RealSet) -> bool:
    """Equal as sets of reals; inequalities must be about the same variable."""
    if one.name and other.name and one.name != other.name:
        return False
    return all(one.contains(point) == other.contains(point) for point in _probes([*one.edges, *other.edges]))


def _probes(edges: list[Real]) -> list[Real]:
    edges.sort()
    if not edges:
        return [number(Node("num", text="0"), DIGITS)]
    between = [(left + right) / 2 for left, right in itertools.pairwise(edges) if not _close(left, right)]
    return [edges[0] - 1, *edges, *between, edges[-1] + 1]


def real_set(node: Node) -> RealSet | None:
    """The set a statement describes; None if it describes none or has symbols in its bounds."""
    match node.head:
        case "sequence" if len(node.args) == 2:
            return _interval(*node.args, node.text)
        case "cup" | "cap" | "setminus":
            return _combined(node.head, [_member_set(argument) for argument in node.args])
        case "list":
            # `x < 1 or x > 3` unites; a list of conditions holds together
            return _combined("cup" if node.text == "or" else "cap", list(map(real_set, node.args)))
        case "relation":
            return _relation(node)
        case "builder":
            return real_set(node.args[1]) if node.args[0].head in ("sym", "relation") else None
        case "sym" if node.text == "\\emptyset":
            return RealSet((), lambda point: False)
        case "mark" if node.text == "mathbb" and node.args[0].text == "R":
            return RealSet((), lambda point: True)
    return None


def _member_set(node: Node) -> RealSet | None:
    if node.head != "set":
        return real_set(node)
    values = [number(member, DIGITS) for member in node.args]
    if any(value is None for value in values):
        return None
    return RealSet(tuple(values), lambda point: any(_close(point, value) for value in values))


def _interval(low: Node, high: Node, brackets: str) -> RealSet | None:
    lower, upper = _bound(low), _bound(high)
    if lower is None or upper is None or not lower < upper:  # (3, 1) and (2, 2) are pairs
        return None
    closed_low, closed_high = brackets[0] == "[", brackets[1] == "]"

    def contains(point: Real) -> bool:
        above = closed_low if _close(point, lower) else point > lower
        below = closed_high if _close(point, upper) else point < upper
        return bool(above and below)

    finite = tuple(bound for bound, node in ((lower, low), (upper, high)) if not infinite(node))
    return RealSet(finite, contains, plain=len(finite) == 2 and closed_low == closed_high)


def infinite(node: Node) -> int:
    """1 for infinity, -1 for minus infinity, otherwise 0."""
    if node.head == "neg":
        return -infinite(node.args[0])
    return int(node.head == "sym" and node.text == "\\infty")


def _bound(node: Node) -> Real | None:
    if sign := infinite(node):
        return sign * math.inf
    return number(node, DIGITS)


def _combined(operation: str, sets: list[RealSet | None]) -> RealSet | None:
    known = [one for one in sets if one is not None]
    names = {one.name for one in known if one.name}
    if len(known) < len(sets) or len(names) > 1:
        return None
    tests = [one.contains for one in known]

    def contains(point: Real) -> bool:
        if operation == "cup":
            return any(test(point) for test in tests)
        if operation == "cap":
            return all(test(point) for test in tests)
        return tests[0](point) and not tests[1](point)

    edges = tuple(edge for one in known for edge in one.edges)
    return RealSet(edges, contains, name="".join(names))


def _relation(node: Node) -> RealSet | None:
    """A chain of linear inequalities in one variable, or `x in S`."""
    operators = node.text.split()
    if operators in (["in"], ["="]) and node.args[1].head in ("cup", "cap", "setminus", "sequence", "mark"):
        inside = real_set(node.args[1])
        # x in (1, 2) can mean only an interval, S = (1, 2) a pair as well
        return inside and RealSet(inside.edges, inside.contains, plain=inside.plain and operators == ["="])
    names = symbols(node) - {"\\infty"}
    if len(names) != 1 or not set(operators) <= {"<", ">", "<=", ">=", "!="}:
        return None
    (name,) = names
    parts = [
        _linear(left, right, operator, name)
        for left, right, operator in zip(node.args, node.args[1:], operators, strict=False)
        if not (infinite(left) or infinite(right))
    ]
    combined = _combined("cap", list(parts))
    return combined and RealSet(combined.edges, combined.contains, name=name)


def _linear(left: Node, right: Node, operator: str, name: str) -> RealSet | None:
    """slope * x + offset `operator` 0, from the values at four points."""
    difference = Node("+", (left, Node("neg", (right,))))
    places = (number(_substituted(difference, name, place), DIGITS) for place in ("0", "1", "5", "11"))
    values: list[Real] = [value for value in places if value is not None]
    if len(values) < 4:
        return None
    slope, offset = values[1] - values[0], values[0]
    if abs(slope) <= _CLOSE * max(1, abs(offset)):
        return None
    if not (_close(values[2], offset + 5 * slope) and _close(values[3], offset + 11 * slope)):
        return None
    edge = -offset / slope

    def contains(point: Real) -> bool:
        if _close(point, edge):
            return operator in ("<=", ">=")
        return operator == "!=" or bool((slope * (point - edge) > 0) == (operator in (">", ">=")))

    return RealSet((edge,), contains)


def _substituted(node: Node, name: str, value: str) -> Node:
    if node.head == "sym" and node.text == name:
        return Node("num", text=value)
    return Node(node.head, tuple(_substituted(argument, name, value) for argument in node.args), node.text)


def _close(one: Real, other: Real) -> bool:
    if one == other:
        return True
    scale = max(abs(one), abs(other), 1e-300)
    return bool(scale < math.inf and abs(one - other) <= _CLOSE * scale)
