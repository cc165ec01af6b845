"""Where the answer in a response is, and the verifiers that compare texts."""

from __future__ import annotations

import re

from gvm_stream.config import VerifierSection
from gvm_stream.verify.math.response import after_reasoning, answer_part
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable, VerifyItem

NO_MARKER = VerdictScored(0.0, rule="no answer marker in the response")


class UnreadableGold(ValueError):
    """The gold answer is no answer for this verifier; the message says why."""


def answer_text(response: str, marker: str) -> str | None:
    """What stands for the answer, without surrounding blanks; None: the marker is missing.

    Reasoning sections do not count. The answer follows the last `marker`; with no marker configured it is what
    `<answer>` tags enclose, and without those all of the response.
    """
    visible = after_reasoning(response)
    part = answer_part(visible, marker)
    if part is not None:
        return part.strip()
    return None if marker else visible.strip()


def exact(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """Equal texts, without surrounding blanks."""
    gold, answer = item.answer.strip(), answer_text(item.response, settings.answer_marker)
    if answer is None:
        return NO_MARKER
    return VerdictScored(float(answer == gold), answer, gold, "equal texts" if answer == gold else "different texts")


def regex(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """Group 1 (or all) of the last match of `patterns.answer` in the response equals the gold answer."""
    last = max(re.finditer(settings.patterns.answer, item.response), key=re.Match.start, default=None)
    gold = item.answer.strip()
    if last is None:
        return VerdictScored(0.0, expected=gold, rule="patterns.answer matches nothing")
    answer = (last[1] or "" if last.re.groups else last[0]).strip()
    return VerdictScored(float(answer == gold), answer, gold, "last match of patterns.answer")


def response_format(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """`patterns.format` matches the whole response; `.` matches line ends too. Says nothing about the answer."""
    matches = re.fullmatch(settings.patterns.format, item.response, re.DOTALL) is not None
    return VerdictScored(float(matches), rule=f"patterns.format {'matches' if matches else 'does not match'}")


def unreadable(reason: object) -> VerdictUnscorable:
    return VerdictUnscorable(f"unreadable gold: {reason}", "unreadable_gold")
