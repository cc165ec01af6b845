"""What an answer claims: values, some of them by name. `x = 2 or x = 3` claims two values of x, `2, 3` two values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import msgspec

from gvm_stream.verify.math.exact import fraction
from gvm_stream.verify.math.node import Node
from gvm_stream.verify.math.numbers import Plain, decimal
from gvm_stream.verify.math.values import number, same_value, symbols

_EMPTY = Node("sym", text="\\emptyset")
Same = Callable[[Node, Node], bool]


class Claim(msgspec.Struct, frozen=True):
    name: Node | None
    """What the value is said to be of; None: the value asked for."""
    value: Node


def claims(node: Node) -> tuple[Claim, ...] | None:
    """All values that a statement claims; None if it claims none, as an equation, an inequality or a false chain."""
    found: list[Claim] = []
    for item in node.args if node.head == "list" else (node,):
        got = tuple(_claims_of(item))
        if not got:
            return None
        name = found[-1].name if found else None
        if name is not None and item.head != "relation":  # k = 3, 5, 9
            got = tuple(Claim(name, claim.value) if claim.name is None else claim for claim in got)
        found += got
    return tuple(found)


def _claims_of(item: Node) -> Iterator[Claim]:
    names: tuple[Node | None, ...] = (None,)
    if item.head == "relation":
        assigned = _assigned(item)
        if assigned is None:
            return
        names, item = assigned
        if item.head == "sequence" and names[0] is not None and names[0].head == "sequence":  # (x, y) = (1, 2)
            if len(names[0].args) == len(item.args):
                yield from (Claim(one, value) for one, value in zip(names[0].args, item.args, strict=True))
            return
    for name in names:
        for member in item.args if item.head == "set" and _EMPTY not in item.args else (item,):
            for value in signs(member):
                yield Claim(name, value)


def _assigned(relation: Node) -> tuple[tuple[Node | None, ...], Node] | None:
    """(names, value) of a chain of equalities: `x = 2 + 3 = 5`, `a = b = 2`, `3/4 ~ 0.75`; None if untrue."""
    operators, members = relation.text.split(), list(relation.args)
    if set(operators) == {"in"} and len(members) == 2 and members[1].head == "set":
        return ((members[0],), members[1]) if is_name(members[0]) else None
    if not set(operators) <= {"=", "~"}:
        return None
    if is_name(members[-1]) and not symbols(members[0]):  # 5 = x
        members.reverse()
        operators.reverse()
    names: list[Node] = []
    while len(members) > 1 and is_name(members[0]) and not symbols(members[0]) <= symbols(members[1]):
        names.append(members.pop(0))
        operators.pop(0)
    if not names and symbols(members[0]) and len(members) == 2:
        return None
    for left, right, operator in zip(members, members[1:], operators, strict=False):
        if not (same_value(left, right) or (operator == "~" and approximates(left, right))):
            return None
    return tuple(names) or (None,), members[0] if operators else members[-1]


def is_name(node: Node) -> bool:
    """A quantity rather than a number: x, f(x), AB, x + y; but not 5, not 2x."""
    if node.head == "num" or node.head in ("relation", "set", "list"):
        return False
    if node.head in ("call", "mark", "text", "sym"):
        return node.head != "sym" or bool(symbols(node))
    return bool(symbols(node)) and all(map(is_name, node.args))


def approximates(exact: Node, rounded: Node) -> bool:
    """`rounded` is a decimal that `exact` rounds or cuts to."""
    written = as_decimal(rounded)
    value = number(exact)
    if written is None or value is None or written.decimals is None:
        return False
    return bool(abs(value - number(rounded)) * 10**written.decimals <= 1)


def as_decimal(node: Node) -> Plain | None:
    """A number as it is written: a decimal with its sign, or an exact value."""
    if node.head == "neg":
        inside = as_decimal(node.args[0])
        return inside and Plain(-inside.value, inside.decimals, inside.significant)
    if node.head == "num":
        return decimal(node.text)
    if node.head == "/" and node.args[1] == Node("num", text="100") and node.args[0].head in ("num", "neg"):
        percent = as_decimal(node.args[0])
        if percent is None or percent.decimals is None:
            return percent and Plain(percent.value / 100)
        return Plain(percent.value / 100, percent.decimals + 2, percent.significant)
    value: Fraction | None = fraction(node)
    return None if value is None else Plain(value)


def signs(node: Node) -> tuple[Node, ...]:
    """Both values of a formula with plus-minus signs (upper signs, lower signs); else the formula alone."""
    if not _has_signs(node):
        return (node,)
    return _signed(node, upper=True), _signed(node, upper=False)


def _has_signs(node: Node) -> bool:
    return node.head in ("pm", "mp") or any(map(_has_signs, node.args))


def _signed(node: Node, *, upper: bool) -> Node:
    args = tuple(_signed(argument, upper=upper) for argument in node.args)
    if node.head in ("pm", "mp"):
        return args[0] if (node.head == "pm") == upper else Node("neg", args)
    return Node(node.head, args, node.text)


def same_claims(gold: tuple[Claim, ...], answer: tuple[Claim, ...], same: Same) -> bool:
    """Every value of the gold is claimed, by its name if both give one, and nothing else is."""
    by_name = len({claim.name for claim in gold}) > 1, len({claim.name for claim in answer}) > 1
    unnamed = all(claim.name is None for claim in gold), all(claim.name is None for claim in answer)
    if (by_name[0] and unnamed[1]) or (by_name[1] and unnamed[0]):
        values = zip(gold, answer, strict=False)  # x = 1, y = 2 against 1, 2: in this order
        return len(gold) == len(answer) and all(same(one.value, other.value) for one, other in values)

    def match(one: Claim, other: Claim) -> bool:
        alike = one.name is None or other.name is None or same_value(one.name, other.name)
        return alike and same(one.value, other.value)

    return all(any(match(one, other) for other in answer) for one in gold) and all(
        any(match(one, other) for one in gold) for other in answer
    )
