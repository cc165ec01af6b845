"""The outcome of a case file for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from gvm_stream.verify.cases import Judged, count, report
from gvm_stream.verify.verdict import VerdictUnscorable

SHOWN = 60
"""Characters shown of each text of a wrong case."""


def show(judged: Sequence[Judged], *, by_category: bool) -> None:
    """Print the confusion table, the wrong cases with what was compared by which rule, and the counts."""
    counts = report(judged)
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_confusion_table(judged))
    if by_category:
        console.print(_category_table(judged))
    for one in judged:
        if not one.right:
            console.out(_wrong_line(one), highlight=False)
    for name, of in (("all cases", counts), ("without policy cases", counts.non_policy)):
        console.print(
            f"{name}: {of.right} of {of.total} right, {of.wrong_accepts} wrong accepts, "
            f"{of.wrong_rejects} wrong rejects, {of.unscorable} unscorable",
            soft_wrap=True,
        )


def _confusion_table(judged: Sequence[Judged]) -> Table:
    table = Table("should be", "accepted", "rejected", "unscorable", title="verdicts")
    for expected, name in ((True, "accepted"), (False, "rejected")):
        rows = [one for one in judged if one.case.expected == expected]
        unscorable = sum(one.unscorable for one in rows)
        accepted = sum(one.accepted for one in rows)
        table.add_row(name, *map(str, (accepted, len(rows) - accepted - unscorable, unscorable)))
    return table


def _category_table(judged: Sequence[Judged]) -> Table:
    table = Table("category", "cases", "right", "wrong accepts", "wrong rejects", "unscorable")
    for category in sorted({one.case.category for one in judged}):
        counts = count([one for one in judged if one.case.category == category])
        numbers = (counts.total, counts.right, counts.wrong_accepts, counts.wrong_rejects, counts.unscorable)
        table.add_row(category or "-", *map(str, numbers))
    return table


def _wrong_line(one: Judged) -> str:
    case, verdict = one.case, one.verdict
    policy = " (policy)" if case.policy else ""
    if isinstance(verdict, VerdictUnscorable):
        return (
            f"{case.id}{policy} should be {'accepted' if case.expected else 'rejected'}, unscorable: {verdict.reason}"
        )
    said = "accepted" if one.accepted else "rejected"
    return (
        f"{case.id}{policy} is {said}: gold {_short(case.gold)}, extracted {_short(verdict.extracted)}, "
        f"compared with {_short(verdict.expected)}, rule {verdict.rule or '-'}"
    )


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 4]} ...'"
