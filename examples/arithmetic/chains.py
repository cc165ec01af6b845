"""Chain arithmetic: a task whose prompts differ widely in difficulty and whose answers are checked exactly.

A prompt is a chain of 1 to 6 operations such as `7+5*3-9=`, evaluated strictly from left to right with every running
total in 0..99. A response writes one step per line, then `####` and the result. Everything here is plain Python and
deterministic given a `random.Random`.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Literal

MARKER = "####"
MAX_TOTAL = 99
LEVELS = range(1, 7)
PRODUCT_RATE = 0.15
SLIP_RATE = 0.6
HELDOUT_MODULUS = 16

Split = Literal["train", "heldout"]
Operator = Literal["+", "-", "*"]
Row = dict[str, str | int]


@dataclass(frozen=True)
class Step:
    """One operation on the running total; `operand` is a digit."""

    operator: Operator
    operand: int

    def apply(self, total: int) -> int:
        match self.operator:
            case "+":
                return total + self.operand
            case "-":
                return total - self.operand
            case "*":
                return total * self.operand

    def is_hard(self, total: int) -> bool:
        """True for a product, a carry or a borrow (the tens change)."""
        return self.operator == "*" or self.apply(total) // 10 != total // 10

    def slip(self, total: int) -> int:
        """The usual wrong result of a hard step: carry dropped, borrow missed, or one multiple short."""
        return self.apply(total) + {"+": -10, "-": 10, "*": -self.operand}[self.operator]

    def __str__(self) -> str:
        return f"{self.operator}{self.operand}"


@dataclass(frozen=True)
class Chain:
    """A start in 1..9 and the steps that follow it."""

    start: int
    steps: tuple[Step, ...]

    @property
    def level(self) -> int:
        """Number of operations, 1..6."""
        return len(self.steps)

    @property
    def prompt(self) -> str:
        return f"{self.start}{''.join(map(str, self.steps))}="

    @property
    def totals(self) -> tuple[int, ...]:
        """The start and the running total after each step, [level + 1]."""
        totals = [self.start]
        for step in self.steps:
            totals.append(step.apply(totals[-1]))
        return tuple(totals)

    @property
    def answer(self) -> str:
        return str(self.totals[-1])

    @property
    def split(self) -> Split:
        """Held out by a hash of the prompt, so that no generator can leak a held-out prompt into training."""
        return "heldout" if zlib.crc32(self.prompt.encode()) % HELDOUT_MODULUS == 0 else "train"

    @property
    def row(self) -> Row:
        """The chain as a row of a prompt file."""
        return {"prompt": self.prompt, "answer": self.answer, "level": self.level}


def draw_chain(rng: random.Random) -> Chain:
    """A random chain; level k has weight 1/k."""
    (level,) = rng.choices(LEVELS, weights=[1 / k for k in LEVELS])
    start = total = rng.randint(1, 9)
    steps = []
    for _ in range(level):
        step = _draw_step(total, rng)
        total = step.apply(total)
        steps.append(step)
    return Chain(start, tuple(steps))


def _draw_step(total: int, rng: random.Random) -> Step:
    wants_product = rng.random() < PRODUCT_RATE
    largest_factor = min(9, MAX_TOTAL // total) if total else 0
    if wants_product and largest_factor >= 2:
        return Step("*", rng.randint(2, largest_factor))
    sums = [Step("+", digit) for digit in range(1, 10) if total + digit <= MAX_TOTAL]
    differences = [Step("-", digit) for digit in range(1, 10) if total - digit >= 0]
    return rng.choice(sums + differences)


def draw_from(split: Split, rng: random.Random) -> Chain:
    """A random chain of one split."""
    while True:
        chain = draw_chain(rng)
        if chain.split == split:
            return chain


def draw_unique(split: Split, count: int, rng: random.Random) -> list[Chain]:
    """`count` different chains of one split, in random order.

    Short chains are few and run out, so the first draws are easier than the last: hence the shuffle.
    """
    chains: dict[str, Chain] = {}
    while len(chains) < count:
        chain = draw_from(split, rng)
        chains[chain.prompt] = chain
    drawn = list(chains.values())
    rng.shuffle(drawn)
    return drawn


def correct_demonstration(chain: Chain) -> str:
    """A response that earns the reward: every step right."""
    return careless_demonstration(chain, random.Random(0), slip_rate=0.0)


def careless_demonstration(chain: Chain, rng: random.Random, slip_rate: float = SLIP_RATE) -> str:
    """A response in which each hard step is wrong with probability `slip_rate` and later steps follow the wrong total.

    A wrong total can leave 0..99; the steps after it are written all the same.
    """
    total = chain.start
    lines = []
    for step in chain.steps:
        slips = step.is_hard(total) and rng.random() < slip_rate
        result = step.slip(total) if slips else step.apply(total)
        lines.append(f"{total}{step}={result}")
        total = result
    return "\n".join([*lines, f"{MARKER}{total}"])


def is_right(response: str, answer: str) -> bool:
    """True if the text after the last marker is the answer."""
    _, marker, given = response.rpartition(MARKER)
    return bool(marker) and given == answer
