"""Mathematical answers: what a response gives as its answer, and whether that equals the gold answer."""

from __future__ import annotations

from collections.abc import Sequence

from gvm_stream.config import MathSection
from gvm_stream.verify.math.compare import Comparison, UnreadableGold, compare, readable_gold
from gvm_stream.verify.math.extract import extract, gold_answer
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable


def verify_math(gold: str, response: str, options: MathSection, marker: str) -> Verdict:
    """Reward 1 if the answer of the response equals the gold answer, else 0; Unscorable if the gold is no answer.

    `marker`: the answer follows the last of these in the response; empty: the usual forms are looked for. Uses neither
    signals nor clocks, so it may run in any thread; a computation bomb may take long, so run it where it can be killed.
    """
    expected = gold_answer(gold)
    found = extract(response, options, marker)
    try:
        if not found.answers:
            problem = readable_gold(expected)
            return (
                VerdictUnscorable(f"unreadable gold: {problem}", "unreadable_gold")
                if problem
                else VerdictScored(0.0, "", expected, found.rule)
            )
        result = compare(expected, found.answers, options)
        if not result.equal and len(found.answers) > 1:
            result = _each(expected, found.answers, options) or result
    except UnreadableGold as error:
        return VerdictUnscorable(f"unreadable gold: {error}", "unreadable_gold")
    return VerdictScored(float(result.equal), result.extracted, result.expected, f"{found.rule}; {result.rule}")


def _each(expected: str, answers: Sequence[str], options: MathSection) -> Comparison | None:
    """The same value in several forms, side by side, is right if each of them is."""
    results = [compare(expected, [answer], options) for answer in answers]
    return results[-1] if all(result.equal for result in results) else None
