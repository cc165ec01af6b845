"""Do two formulas say the same? One rule for each kind of statement."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from gvm_stream.config import MathSection
from gvm_stream.verify.math.claims import Claim, as_decimal, claims, same_claims
from gvm_stream.verify.math.exact import TooBig, fraction
from gvm_stream.verify.math.intervals import infinite, real_set, same_set
from gvm_stream.verify.math.node import Node
from gvm_stream.verify.math.numbers import FULL_DIGITS, same_plain
from gvm_stream.verify.math.values import constant_ratio, number, same_value, symbols

_CONSTANTS_OF_INTEGRATION = ("C", "c", "K", "k")
_MIRRORED = {"<": ">", "<=": ">=", "=": "=", "!=": "!="}


class Meaning:
    """Comparison of a gold and an answer under one set of options."""

    def __init__(self, options: MathSection) -> None:
        self._options = options

    def same(self, gold: Node, answer: Node) -> tuple[bool, str]:
        """(equal, name of the rule that decided)."""
        if gold == answer:
            return True, "same formula"
        for name, rule in _STATEMENTS:
            verdict = rule(self, gold, answer)
            if verdict is not None:
                return verdict, name
        return self.same_part(gold, answer), "value"

    def same_part(self, gold: Node, answer: Node) -> bool:
        """Parts of statements: the coordinates of a pair, the entries of a matrix, one of several values."""
        if gold == answer:
            return True
        for _, rule in _PARTS:
            verdict = rule(self, gold, answer)
            if verdict is not None:
                return verdict
        return self._same_number(gold, answer)

    def _same_number(self, gold: Node, answer: Node) -> bool:
        if infinite(gold) or infinite(answer):
            return infinite(gold) == infinite(answer)
        if same_value(gold, answer):
            return True
        return self._stands_for(gold, answer)

    def _stands_for(self, gold: Node, answer: Node) -> bool:
        """A decimal that is the other number to its own or to double precision."""
        if symbols(gold) or symbols(answer):
            return False
        try:
            right, got = as_decimal(gold), as_decimal(answer)
            if right is not None and got is not None:
                return same_plain(right, got, gold_precision=self._options.gold_precision)
            exact = number(answer if right is not None else gold)
        except TooBig:
            return False
        if exact is None:
            return False
        if right is not None:
            if right.decimals is None or not self._options.gold_precision or not right.rounded or right.significant < 2:
                return False
            return bool(abs(exact * 10**right.decimals - _scaled(right.value, right.decimals)) * 2 <= 1)
        if got is None or got.decimals is None or got.significant < FULL_DIGITS:
            return False
        return bool(abs(exact * 10**got.decimals / _scaled(got.value, got.decimals) - 1) <= 1e-12)

    # -- statements: None if the rule does not apply

    def _modular(self, gold: Node, answer: Node) -> bool | None:
        """n = 7 (mod 12): same modulus, same residue. A bare gold is the residue as written."""
        if gold.head != "mod":
            if answer.head != "mod":
                return None
            return gold.head not in ("relation", "list") and self.same_part(gold, _residue(answer))
        if answer.head != "mod" or not same_value(gold.args[1], answer.args[1]):
            return False
        one, other, modulus = fraction(_residue(gold)), fraction(_residue(answer)), fraction(gold.args[1])
        if one is None or other is None or not modulus:
            return same_value(_residue(gold), _residue(answer))
        return (one - other) % modulus == 0

    def _ratio(self, gold: Node, answer: Node) -> bool | None:
        """3:4 and 6:8: proportional."""
        if gold.head != "ratio" or answer.head != "ratio":
            return False if "ratio" in (gold.head, answer.head) else None
        if len(gold.args) != len(answer.args):
            return False
        return all(
            same_value(Node("*", (gold.args[0], other)), Node("*", (answer.args[0], one)))
            for one, other in zip(gold.args, answer.args, strict=True)
        )

    def _sets(self, gold: Node, answer: Node) -> bool | None:
        """Intervals, unions and inequalities as sets of reals."""
        one, other = real_set(gold), real_set(answer)
        if one is None or other is None or (one.plain and other.plain):
            return None
        return same_set(one, other)

    def _claims(self, gold: Node, answer: Node) -> bool | None:
        """Values, with and without names."""
        asked, given = claims(gold), claims(answer)
        if asked is None:
            return None
        equations = gold.head == answer.head == "relation" and not _determined(asked)
        if given is None:
            return None if equations else False
        single = len(asked) == 1 and len(given) > 1 and asked[0].value.head == "sequence"
        if single and all(claim.name is not None for claim in given):  # x = 1, y = 2 for the pair (1, 2)
            given = (Claim(asked[0].name, Node("sequence", tuple(claim.value for claim in given), "()")),)
        elif len(given) == 1 and len(asked) > 1 and given[0].value.head == "sequence" and given[0].name is None:
            if not all(claim.name is not None for claim in asked):
                return False
            asked = (Claim(None, Node("sequence", tuple(claim.value for claim in asked), "()")),)
        if same_claims(asked, given, self.same_part):
            return True
        return None if equations else False

    def _equation(self, gold: Node, answer: Node) -> bool | None:
        """Relations that differ by a factor: an equation by any but 0, an inequality by a positive one."""
        if gold.head != "relation" or answer.head != "relation":
            return False if "relation" in (gold.head, answer.head) else None
        left, right = _oriented(gold), _oriented(answer)
        if left is None or right is None or left[0] != right[0]:
            return False
        ratio = constant_ratio(left[1], right[1])
        return ratio == 1 if left[0] in ("<", "<=") else ratio != 0

    def _system(self, gold: Node, answer: Node) -> bool | None:
        """Several statements, in any order."""
        if gold.head != "list" or answer.head != "list":
            return False if "list" in (gold.head, answer.head) else None
        if len(gold.args) != len(answer.args):
            return False
        return all(any(self.same(one, other)[0] for other in answer.args) for one in gold.args) and all(
            any(self.same(one, other)[0] for one in gold.args) for other in answer.args
        )

    # -- parts

    def _collection(self, gold: Node, answer: Node) -> bool | None:
        """Pairs, vectors and matrices entry by entry; a column is the vector of its entries."""
        left, right = gold, answer
        if gold.head != answer.head:
            left, right = _vector(gold), _vector(answer)
        if left.head not in _COLLECTIONS and right.head not in _COLLECTIONS:
            return None
        if (left.head, left.text, len(left.args)) != (right.head, right.text, len(right.args)):
            return False
        if left.head == "set":
            one, other = ([Claim(None, member) for member in side.args] for side in (left, right))
            return same_claims(tuple(one), tuple(other), self.same_part)
        pairs = zip(left.args, right.args, strict=True)
        return all(self.same(one, other)[0] for one, other in pairs)

    def _integration_constant(self, gold: Node, answer: Node) -> bool | None:
        """... + C: the letter of the constant does not matter."""
        left, right = _without_constant(gold), _without_constant(answer)
        if left is None or right is None:
            return None
        return self._same_number(left, right)


_COLLECTIONS = ("sequence", "matrix", "row", "cases", "set", "base")
Rule = Callable[[Meaning, Node, Node], bool | None]
# in the order in which they are asked; the first that does not say None decides
_STATEMENTS: tuple[tuple[str, Rule], ...] = (
    ("congruence", Meaning._modular),
    ("ratio", Meaning._ratio),
    ("set of reals", Meaning._sets),
    ("claimed values", Meaning._claims),
    ("system", Meaning._system),
    ("equation up to a factor", Meaning._equation),
)
_PARTS: tuple[tuple[str, Rule], ...] = (
    ("set of reals", Meaning._sets),
    ("entries", Meaning._collection),
    ("constant of integration", Meaning._integration_constant),
)


def _determined(asked: tuple[Claim, ...]) -> bool:
    """`x = 5` says what x is; an equation with the same solution, such as 2x = 10, is no answer to that."""
    return all(claim.name is not None and claim.name.head == "sym" and not symbols(claim.value) for claim in asked)


def _scaled(value: Fraction, decimals: int) -> int:
    return int(value * 10**decimals) if decimals >= 0 else 0


def _residue(node: Node) -> Node:
    """The right-hand side of a congruence."""
    inside = node.args[0]
    return inside.args[-1] if inside.head == "relation" else inside


def _oriented(relation: Node) -> tuple[str, Node] | None:
    """(operator, f) of `f operator 0`, with the operator one of =, !=, < and <=."""
    if len(relation.args) != 2:
        return None
    operator, (left, right) = relation.text, relation.args
    if operator in (">", ">="):
        left, right, operator = right, left, "<" if operator == ">" else "<="
    if operator not in _MIRRORED:
        return None
    return operator, Node("+", (left, Node("neg", (right,))))


def _vector(node: Node) -> Node:
    """A matrix of one column or one row as a sequence."""
    if node.head != "matrix":
        return node
    if all(len(row.args) == 1 for row in node.args) and len(node.args) > 1:
        return Node("sequence", tuple(row.args[0] for row in node.args), "()")
    if len(node.args) == 1 and len(node.args[0].args) > 1:
        return Node("sequence", node.args[0].args, "()")
    return node


def _without_constant(node: Node) -> Node | None:
    if node.head != "+" or node.args[-1].head != "sym" or node.args[-1].text not in _CONSTANTS_OF_INTEGRATION:
        return None
    return Node("+", node.args[:-1])
