"""Conformance cases: gold answer, response and the verdict that people agree on, one JSON object a line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gvm_stream.errors import DataError
from gvm_stream.verify.verdict import Verdict, VerdictScored


class Case(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    gold: str
    output: str
    """Response of a model."""
    expected: bool
    """Should it be accepted?"""
    policy: bool = False
    """A matter of taste: people could decide it the other way."""
    category: str = ""


class Judged(msgspec.Struct, frozen=True):
    case: Case
    verdict: Verdict

    @property
    def accepted(self) -> bool:
        """A reward of at least one half. No verdict is no acceptance."""
        return isinstance(self.verdict, VerdictScored) and self.verdict.reward >= 0.5

    @property
    def right(self) -> bool:
        return self.accepted == self.case.expected

    @property
    def unscorable(self) -> bool:
        return not isinstance(self.verdict, VerdictScored)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """total = right + wrong_accepts + wrong_rejects. An unscorable case is not accepted: it is right where it should
    not be, a wrong reject where it should, and counted in `unscorable` both times."""

    total: int
    right: int
    wrong_accepts: int
    wrong_rejects: int
    unscorable: int
    wrong_ids: list[str]


class Report(Counts, frozen=True, kw_only=True):
    non_policy: Counts
    """The same without the matters of taste."""


def read_cases(path: Path) -> list[Case]:
    """Raises DataError, with the line of a case that is none."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise DataError(f"case file {str(path)!r} cannot be read: {error.strerror}") from error
    cases = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            cases.append(msgspec.json.decode(line, type=Case))
        except (msgspec.DecodeError, RecursionError) as error:
            raise DataError(
                f"{str(path)!r}, line {number}: {error}; expected an object with id, gold and output (texts) and "
                "expected (true or false)"
            ) from error
    if not cases:
        raise DataError(f"case file {str(path)!r} holds no case")
    return cases


def count(judged: Sequence[Judged]) -> Counts:
    def number(property_holds: Callable[[Judged], bool]) -> int:
        return sum(map(property_holds, judged))

    return Counts(
        total=len(judged),
        right=number(lambda one: one.right),
        wrong_accepts=number(lambda one: one.accepted and not one.case.expected),
        wrong_rejects=number(lambda one: not one.accepted and one.case.expected),
        unscorable=number(lambda one: one.unscorable),
        wrong_ids=[one.case.id for one in judged if not one.right],
    )


def report(judged: Sequence[Judged]) -> Report:
    counts = count(judged)
    return Report(**msgspec.structs.asdict(counts), non_policy=count([one for one in judged if not one.case.policy]))
