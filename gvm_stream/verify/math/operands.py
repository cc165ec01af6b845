"""Operands of a formula: numbers, symbols, brackets, functions, sets, matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gvm_stream.verify.math.node import Node
from gvm_stream.verify.math.tokens import END, FUNCTIONS, Token, Unreadable, names

_FUNCTION_LETTERS = frozenset("fghFGHO")
_MARKS = names(
    "overline vec hat tilde widehat widetilde overrightarrow overleftarrow overarc dot ddot mathbb mathcal mathscr "
    "mathfrak angle triangle odot nabla star"
)
_LETTER_COMMANDS = names(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega Gamma "
    "Delta Theta Lambda Xi Pi Sigma Phi Psi Omega pi infty emptyset ell hbar ldots dollar checkmark"
)
_IF = frozenset(("if", "for", "when", "where"))
_ENVIRONMENTS = {
    **{"pmatrix": "matrix", "bmatrix": "matrix", "Bmatrix": "matrix", "matrix": "matrix", "smallmatrix": "matrix"},
    **{"array": "matrix", "vmatrix": "det", "cases": "cases", "aligned": "list", "align": "list", "gathered": "list"},
}


class OperandReader(ABC):
    """A place in a list of tokens, and what can stand there as an operand."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._bar_closes = False

    @abstractmethod
    def _statements(self) -> Node:
        """One statement or a list of several."""

    @abstractmethod
    def _statement(self) -> Node:
        """An expression or a relation of several."""

    @abstractmethod
    def _sum(self) -> Node: ...

    @abstractmethod
    def _product(self) -> Node: ...

    @abstractmethod
    def _factor(self) -> Node: ...

    @abstractmethod
    def _power(self) -> Node: ...

    # -- tokens

    def _next(self, ahead: int = 0) -> Token:
        return self._tokens[self._at + ahead] if self._at + ahead < len(self._tokens) else END

    def _is(self, kind: str, *texts: str) -> bool:
        token = self._next()
        return token.kind == kind and token.text in texts

    def _take(self) -> Token:
        token = self._next()
        self._at += 1
        return token

    def _took(self, kind: str, *texts: str) -> str:
        """The next token's text if it is one of these; then it is consumed."""
        return self._take().text if self._is(kind, *texts) else ""

    def _expect(self, kind: str, *texts: str) -> str:
        if not self._is(kind, *texts):
            raise Unreadable(f"{self._next().text!r} stands where one of {texts} was expected")
        return self._take().text

    def _operand(self) -> Node:
        token = self._take()
        if token.kind == "num":
            return self._number(token)
        if token.kind == "let":
            return self._symbol(token.text)
        if token.kind == "text":
            return self._subscripted(token.text, "text")
        if token.kind == "cmd":
            return self._command(token.text)
        if token.kind == "op" and token.text in "([":
            return self._bracketed(token.text, ")]")
        if token.kind == "op" and token.text == "{":
            node = self._inside_braces()
            return node
        if token.kind == "op" and token.text == "|":
            return Node("abs", (self._until_bar("op", "|"),))
        raise Unreadable(f"{token.text!r} begins no operand")

    def _until_bar(self, kind: str, text: str) -> Node:
        outer, self._bar_closes = self._bar_closes, True
        inside = self._sum()
        self._expect(kind, text)
        self._bar_closes = outer
        return inside

    def _number(self, token: Token) -> Node:
        if self._took("op", "_"):
            return Node("base", (self._argument(),), token.text)
        return Node("num", text=token.text)

    def _symbol(self, name: str) -> Node:
        node = self._subscripted(name, "sym")
        if self._is("op", "(") and (name in _FUNCTION_LETTERS or self._defines(name)):
            self._take()
            return Node("call", self._bracketed_items(")"), node.text)
        return node

    def _defines(self, name: str) -> bool:
        """`y(t) =`: a name with plain arguments on the left of an equation."""
        ahead = 1
        while self._next(ahead).kind in ("let", "num") or self._next(ahead).text == ",":
            if self._next(ahead).text == name:
                return False
            ahead += 1
        return ahead > 1 and self._next(ahead).text == ")" and self._next(ahead + 1).text == "="

    def _subscripted(self, name: str, head: str) -> Node:
        while self._took("op", "'"):
            name += "'"
        if self._took("op", "_"):
            start = self._at
            self._argument()
            name += "_" + "".join(token.text for token in self._tokens[start : self._at] if token.text not in "{}")
        return Node(head, text=name)

    def _bracketed(self, opening: str, closings: str) -> Node:
        """(x), [x] and {x} are x; (a, b] is a `sequence` with its brackets."""
        outer, self._bar_closes = self._bar_closes, False
        items = [self._statement()]
        while self._took("op", ",", ";"):
            items.append(self._statement())
        closing = self._expect("op", *closings)
        self._bar_closes = outer
        if len(items) > 1:
            return Node("sequence", tuple(items), opening + closing)
        if (opening, closing) in (("(", ")"), ("[", "]"), ("{", "}")):
            return items[0]
        raise Unreadable(f"{opening} is closed by {closing}")

    def _inside_braces(self) -> Node:
        return self._bracketed("{", "}")

    def _bracketed_items(self, closing: str) -> tuple[Node, ...]:
        outer, self._bar_closes = self._bar_closes, False
        items = [self._statement()]
        while self._took("op", ",", ";"):
            items.append(self._statement())
        self._expect("op", closing)
        self._bar_closes = outer
        return tuple(items)

    def _argument(self, *, digit: bool = False) -> Node:
        """What a command applies to: {...}, or the next token (of a number only one digit for \\frac)."""
        if self._took("op", "{"):
            return self._inside_braces()
        token = self._next()
        if digit and token.kind == "num" and token.text.isdigit() and len(token.text) > 1:
            self._tokens[self._at : self._at + 1] = [token._replace(text=digit_) for digit_ in token.text]
        if self._took("op", "-"):
            return Node("neg", (self._argument(),))
        return self._operand()

    def _command(self, name: str) -> Node:
        if name in _LETTER_COMMANDS:
            return self._subscripted("\\" + name, "sym")
        if name in ("frac", "binom"):
            return Node("/" if name == "frac" else name, (self._argument(digit=True), self._argument(digit=True)))
        if name == "sqrt":
            return self._root()
        if name in FUNCTIONS:
            return self._function(name)
        if name == "{":
            return self._set()
        if name == "langle":
            return Node("sequence", self._angle_items(), "()")
        if name in ("lfloor", "lceil"):
            closing = "r" + name[1:]
            return Node(name[1:], (self._until_bar("cmd", closing),))
        if name in ("sum", "prod"):
            return self._series(name)
        if name == "begin":
            return self._environment()
        if name in _MARKS:
            return self._marked(name)
        raise Unreadable(f"\\{name} has no meaning here")

    def _starts_factor(self) -> bool:
        token = self._next()
        if token.kind == "num":
            if self._tokens[self._at - 1].kind == "num":
                raise Unreadable("two numbers stand side by side")
            return True
        if token.kind == "op":
            return token.text in "([{" or (token.text == "|" and not self._bar_closes)
        return token.kind in ("let", "text") or (token.kind == "cmd" and _starts_operand(token.text))

    def _marked(self, name: str) -> Node:
        start = self._at
        node = self._argument()
        letters = [token.text for token in self._tokens[start : self._at] if token.kind == "let"]
        if "arrow" in name and len(letters) > 1:  # the vector from A to B is not the one from B to A
            return Node("mark", (Node("sym", text="".join(letters)),), name)
        return Node("mark", (node,), name)

    def _root(self) -> Node:
        index = Node("num", text="2")
        if self._took("op", "["):
            index = self._sum()
            self._expect("op", "]")
        return Node("root", (self._argument(), index))

    def _function(self, name: str) -> Node:
        parameter: tuple[Node, ...] = ()
        power: Node | None = None
        if self._took("op", "_"):
            parameter = (self._argument(),)
        if self._took("op", "^"):
            power = self._argument()
            if power == Node("neg", (Node("num", text="1"),)):
                name, power = "a" + name, None
        if self._took("op", "("):
            args = self._bracketed_items(")")
        elif self._took("op", "{"):
            args = (self._inside_braces(),)
        elif name in ("max", "min", "gcd", "lcm") and self._is("cmd", "{"):
            args = self._operand().args
        else:
            args = (self._bare_argument(),)
        applied = Node("function", (*args, *parameter), f"log {len(parameter)}" if name == "log" else name)
        return applied if power is None else Node("^", (applied, power))

    def _bare_argument(self) -> Node:
        """\\sin 2x: factors up to the next sign or function."""
        node = self._factor()
        while self._starts_factor() and self._next().text not in FUNCTIONS and self._next().text != "(":
            node = Node("*", (node, self._power()))
        if self._took("op", "/"):
            node = Node("/", (node, self._factor()))
        return node

    def _set(self) -> Node:
        outer, self._bar_closes = self._bar_closes, True
        if self._took("cmd", "}"):
            self._bar_closes = outer
            return Node("sym", text="\\emptyset")
        items = [self._statement()]
        if self._took("op", "|", ":"):
            self._bar_closes = False
            condition = self._statements()
            items = [Node("builder", (items[0], condition))]
        while self._took("op", ",", ";"):
            items.append(self._statement())
        self._expect("cmd", "}")
        self._bar_closes = outer
        return items[0] if items[0].head == "builder" else Node("set", tuple(items))

    def _angle_items(self) -> tuple[Node, ...]:
        items = [self._statement()]
        while self._took("op", ","):
            items.append(self._statement())
        self._expect("cmd", "rangle")
        return tuple(items)

    def _series(self, name: str) -> Node:
        """\\sum_{k=a}^{b} term."""
        self._expect("op", "_")
        lower = self._argument()
        self._expect("op", "^")
        upper = self._argument()
        if lower.head != "relation" or lower.text != "=" or lower.args[0].head != "sym":
            raise Unreadable(f"the index of \\{name} is not of the form k = a")
        return Node(name, (lower.args[0], lower.args[1], upper, self._product()))

    def _environment(self) -> Node:
        name = self._environment_name()
        head = _ENVIRONMENTS.get(name)
        if head is None:
            raise Unreadable(f"\\begin{{{name}}} has no meaning here")
        if name == "array":
            self._argument()
        rows: list[Node] = []
        while not self._took("cmd", "end"):
            cells = [self._cell()]
            while self._took("op", "&"):
                cells.append(self._cell())
            rows.append(Node("row", tuple(cells)))
            self._took("cmd", "\\")
        self._environment_name()
        return _environment(head, rows)

    def _environment_name(self) -> str:
        self._expect("op", "{")
        name = ""
        while not self._took("op", "}"):
            if self._next() is END:
                raise Unreadable("an environment has no end")
            name += self._take().text
        return name

    def _cell(self) -> Node:
        if self._next().kind == "text" and self._next().text in _IF:
            self._take()
        if self._is("op", "&") or self._is("cmd", "\\", "end"):
            return Node("text")
        node = self._statement()
        self._took("op", ",")
        return node


def _environment(head: str, rows: list[Node]) -> Node:
    if head in ("matrix", "det"):
        return Node(head, tuple(rows))
    if head == "cases" and all(len(row.args) == 2 for row in rows):
        return Node("cases", tuple(rows))
    if any(len(row.args) > 1 for row in rows):
        raise Unreadable("the rows of a system have several columns")
    statements = tuple(row.args[0] for row in rows)
    return statements[0] if len(statements) == 1 else Node("list", statements, ",")


def _starts_operand(name: str) -> bool:
    return (
        name in _LETTER_COMMANDS
        or name in FUNCTIONS
        or name in _MARKS
        or name in ("frac", "binom", "sqrt", "{", "langle", "lfloor", "lceil", "sum", "prod", "begin")
    )
