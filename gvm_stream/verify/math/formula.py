"""A formula as a tree. The grammar is strict: what it does not cover is Unreadable, so that nothing is ever dropped."""

from __future__ import annotations

from gvm_stream.verify.math.node import Node
from gvm_stream.verify.math.operands import OperandReader
from gvm_stream.verify.math.tokens import END, Token, Unreadable, tokenise

DEEPEST = 60
"""Brackets and operators inside one another that are read."""

RELATIONS = {
    **{"=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "approx": "~"},
    **{"equiv": "equiv", "in": "in", "cong": "equiv"},
}
MOST_FACTORS = 200
"""Factors of one product that are read; the tree of a longer one would be too deep."""


def read(text: str) -> Node:
    """The tree of a normalised text: one statement, or a `list` of several. Raises Unreadable."""
    try:
        return _Reader(tokenise(text)).all()
    except RecursionError as error:
        raise Unreadable("a formula is nested too deep") from error


class _Reader(OperandReader):
    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self._depth = 0

    def all(self) -> Node:
        node = self._statements()
        if self._next() is not END:
            raise Unreadable(f"{self._next().text!r} stands where nothing was expected")
        return node

    # -- statements

    def _statements(self) -> Node:
        items, joints = [self._statement()], set()
        while joint := self._took("op", ",", ";", "or") or self._took("cmd", "\\", "lor", "land", "quad"):
            if self._is("op", ",", "or"):  # ", and"
                joint = self._take().text
            if self._next() is END or self._is("cmd", "end"):
                break
            joints.add("or" if joint in ("or", "lor") else "and" if joint == "land" else ",")
            items.append(self._statement())
        return items[0] if len(items) == 1 else Node("list", tuple(items), "or" if "or" in joints else ",")

    def _statement(self) -> Node:
        node = self._ratio()
        operators, members = [], [node]
        while (token := self._next()).text in RELATIONS and token.kind in ("op", "cmd"):
            self._take()
            operators.append(RELATIONS[token.text])
            members.append(self._ratio())
        if operators:
            node = Node("relation", tuple(members), " ".join(operators))
        if self._took("cmd", "pmod", "mod", "bmod"):
            node = Node("mod", (node, self._argument()))
        return node

    def _ratio(self) -> Node:
        parts = [self._sets()]
        while not self._bar_closes and self._took("op", ":"):
            parts.append(self._sets())
        return parts[0] if len(parts) == 1 else Node("ratio", tuple(parts))

    def _sets(self) -> Node:
        node = self._sum()
        while name := self._took("cmd", "cup", "cap", "setminus"):
            node = Node(name, (node, self._sum()))
        return node

    # -- expressions

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > DEEPEST:
            raise Unreadable(f"nested deeper than {DEEPEST}")
        terms = [self._signed()]
        while True:
            if self._took("op", "+"):
                terms.append(self._signed())
            elif self._took("op", "-"):
                terms.append(Node("neg", (self._signed(),)))
            elif sign := self._took("cmd", "pm", "mp"):
                terms.append(Node(sign, (self._signed(),)))
            else:
                break
        self._depth -= 1
        return terms[0] if len(terms) == 1 else Node("+", tuple(terms))

    def _signed(self) -> Node:
        if self._took("op", "+"):
            return self._signed()
        if self._took("op", "-"):
            return Node("neg", (self._signed(),))
        if sign := self._took("cmd", "pm", "mp"):
            return Node(sign, (self._signed(),))
        return self._product()

    def _product(self) -> Node:
        node = self._mixed() or self._power()
        for _ in range(MOST_FACTORS):
            if self._took("op", "*") or self._took("cmd", "times", "cdot"):
                operator = self._tokens[self._at - 1].text
                right = self._factor()
                if _is_vector(node) and _is_vector(right) and operator != "*":
                    node = Node(operator, (node, right))
                else:
                    node = Node("*", (node, right))
            elif self._took("op", "/"):
                node = Node("/", (node, self._factor()))
            elif self._starts_factor():
                node = Node("*", (node, self._power()))
            else:
                return node
        raise Unreadable(f"a product of more than {MOST_FACTORS} factors")

    def _factor(self) -> Node:
        if self._took("op", "-"):
            return Node("neg", (self._factor(),))
        return self._power()

    def _mixed(self) -> Node | None:
        """3 1/4 or 3\\frac{1}{4}: a whole number and a proper fraction."""
        whole = self._next()
        if whole.kind != "num" or not whole.text.isdigit():
            return None
        if self._next(1).kind == "num" and self._next(2).text == "/" and self._next(3).kind == "num":
            above, below, width = self._next(1).text, self._next(3).text, 4
            start = None
        elif self._next(1)[:2] == ("cmd", "frac"):
            start, self._at = self._at, self._at + 2
            upper, lower = self._argument(digit=True), self._argument(digit=True)
            width, self._at, after = 0, start, self._at
            if upper.head != "num" or lower.head != "num":
                return None
            above, below = upper.text, lower.text
        else:
            return None
        if not (above.isdigit() and below.isdigit() and 0 < int(above) < int(below)):
            raise Unreadable(f"{whole.text} {above}/{below} is no mixed number")
        self._at = self._at + width if start is None else after
        return Node("+", (Node("num", text=whole.text), Node("/", (Node("num", text=above), Node("num", text=below)))))

    def _power(self) -> Node:
        base = self._operand()
        while True:
            if self._took("op", "^"):
                if self._took("cmd", "circ") or self._took_braced_circle():
                    base = Node("degree", (base,))
                else:
                    base = Node("^", (base, self._argument()))
            elif self._took("op", "!"):
                base = Node("!", (base,))
            elif self._took("op", "%"):
                base = Node("/", (base, Node("num", text="100")))
            else:
                return base

    def _took_braced_circle(self) -> bool:
        if self._is("op", "{") and self._next(1).text == "circ" and self._next(2).text == "}":
            self._at += 3
            return True
        return False


def _is_vector(node: Node) -> bool:
    return node.head == "mark" or (node.head in ("*", "cdot", "times") and all(map(_is_vector, node.args)))
