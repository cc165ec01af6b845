"""From a gold answer and a response to a verdict: which verifiers judge, and what they say together.

A response that gives no answer is wrong. A gold answer that cannot be read, and a verifier that fails, are Unscorable:
they say nothing about the response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from gvm_stream.config import OverlongSection, VerifierSection
from gvm_stream.config_verifier import VerifierKind, verifier_problem
from gvm_stream.verify.answers import NO_MARKER, UnreadableGold, answer_text, exact, regex, response_format, unreadable
from gvm_stream.verify.choice import choice
from gvm_stream.verify.code import verify_code
from gvm_stream.verify.external import http_service, python
from gvm_stream.verify.golds import says_nothing
from gvm_stream.verify.gym import reasoning_gym
from gvm_stream.verify.json_answer import json_answer
from gvm_stream.verify.math import verify_math
from gvm_stream.verify.numeric import gsm8k, numeric
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable, VerifyItem

CUT_OFF = VerdictScored(0.0, rule="cut off at the length cap")


def judge(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """Judge by the verifier the item names, else by the weighted sum of `weights`, else by `kind`.

    May run for ever or run out of memory: call it in a process that can be killed.
    """
    if item.truncated and settings.overlong.mode == "wrong":
        return CUT_OFF
    if item.kind or not settings.weights:
        verdict = judge_by(item.kind or settings.kind, settings, item)
    else:
        verdict = _weighted_sum(settings.weights, settings, item)
    if settings.overlong.mode == "penalty" and isinstance(verdict, VerdictScored):
        return _penalised(verdict, overlong_penalty(settings.overlong, item))
    return verdict


def judge_by(kind: str, settings: VerifierSection, item: VerifyItem) -> Verdict:
    """The verdict of one verifier."""
    verify = VERIFIERS.get(kind)
    if verify is None:
        return VerdictUnscorable(f"there is no verifier {kind!r}")
    if problem := verifier_problem(settings, (kind,)):
        return VerdictUnscorable(problem)
    if problem := says_nothing(kind, item.answer):
        return unreadable(problem)
    try:
        return verify(settings, item)
    except UnreadableGold as error:
        return unreadable(error)
    except Exception as error:  # computer algebra and users' code fail in every way; none makes a response wrong
        return VerdictUnscorable(f"verifier {kind} failed: {type(error).__name__}: {str(error)[:200]}")


def _weighted_sum(weights: Mapping[VerifierKind, float], settings: VerifierSection, item: VerifyItem) -> Verdict:
    """Without all of its parts a sum is none: one Unscorable makes the whole Unscorable."""
    parts: list[tuple[str, float, VerdictScored]] = []
    for kind, weight in weights.items():
        verdict = judge_by(kind, settings, item)
        if isinstance(verdict, VerdictUnscorable):
            return VerdictUnscorable(f"{kind}: {verdict.reason}", verdict.cause)
        parts.append((kind, weight, verdict))
    return VerdictScored(
        sum(weight * part.reward for _, weight, part in parts),
        next((part.extracted for _, _, part in parts if part.extracted), ""),
        next((part.expected for _, _, part in parts if part.expected), ""),
        "; ".join(f"{kind} {weight:g} x {part.reward:g} ({part.rule})" for kind, weight, part in parts),
    )


def overlong_penalty(overlong: OverlongSection, item: VerifyItem) -> float:
    """0 up to max_tokens - buffer_tokens, then linear to `penalty` at the cap: the soft overlong punishment of DAPO,
    arXiv 2503.14476, equation 13."""
    if item.truncated:
        return overlong.penalty
    if not item.max_tokens:
        return 0.0
    over = item.tokens - (item.max_tokens - overlong.buffer_tokens)
    return overlong.penalty * min(max(over / overlong.buffer_tokens, 0.0), 1.0)


def _penalised(verdict: VerdictScored, penalty: float) -> VerdictScored:
    if not penalty:
        return verdict
    rule = f"{verdict.rule}; overlong: - {penalty:g}"
    return msgspec.structs.replace(verdict, reward=verdict.reward - penalty, rule=rule)


def _math(settings: VerifierSection, item: VerifyItem) -> Verdict:
    return verify_math(item.answer, item.response, settings.math, settings.answer_marker)


def _code(settings: VerifierSection, item: VerifyItem) -> Verdict:
    program = answer_text(item.response, settings.answer_marker)
    return NO_MARKER if program is None else verify_code(item.answer, program, settings.code)


VERIFIERS: Mapping[str, Callable[[VerifierSection, VerifyItem], Verdict]] = {
    "exact": exact,
    "numeric": numeric,
    "math": _math,
    "gsm8k": gsm8k,
    "choice": choice,
    "regex": regex,
    "json": json_answer,
    "code": _code,
    "reasoning_gym": reasoning_gym,
    "python": python,
    "http": http_service,
    "format": response_format,
}
