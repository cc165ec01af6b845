"""Configuration of the verifiers; `config.py` has the other parts of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

VerifierKind = Literal[
    "exact", "numeric", "math", "gsm8k", "choice", "regex", "json", "code", "reasoning_gym", "python", "http", "format"
]


class NumericSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tolerance: Annotated[float, Meta(ge=0, description="Largest relative error of a right answer.")] = 1e-6
    significant_digits: Annotated[
        int, Meta(ge=0, description="Right if equal to the gold after rounding to so many significant digits; 0: off.")
    ] = 0


class MathSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    percent_sign_optional: Annotated[bool, Meta(description="45 is right for the gold 45 %.")] = True
    unit_optional: Annotated[bool, Meta(description="A unit in the answer is ignored when the gold has none.")] = True
    gold_precision: Annotated[
        bool, Meta(description="200/3 is right for the gold 66.7: a decimal gold is right to its last digit.")
    ] = True
    first_box: Annotated[bool, Meta(description="Of several different boxes the first counts, not the last.")] = False
    inside_reasoning: Annotated[
        bool, Meta(description="An answer inside a reasoning section counts when none follows it.")
    ] = False


class PatternSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    answer: Annotated[
        str, Meta(description="`regex`: the answer is group 1 (or all) of the last match of this in the response.")
    ] = ""
    format: Annotated[str, Meta(description="`format`: 1 if this matches the whole response, whatever the answer.")] = (
        ""
    )


class CodeSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cpu_s: Annotated[float, Meta(gt=0, description="CPU time of one program under test.")] = 4.0
    wall_s: Annotated[float, Meta(gt=0, description="Wall time of one program under test.")] = 8.0
    memory_mib: Annotated[int, Meta(ge=16, description="Memory of one program under test, in MiB.")] = 512
    output_kib: Annotated[int, Meta(ge=1, description="Output read from one program under test, in KiB.")] = 256


class HttpSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: Annotated[str, Meta(description="Reward service; gets POST with JSON (prompt id, response, answer).")] = ""
    timeout_s: Annotated[float, Meta(gt=0, description="Of one request.")] = 5.0
    retries: Annotated[int, Meta(ge=0, description="Further requests after a failed one, with growing pauses.")] = 3


class OverlongSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["wrong", "score", "penalty"],
        Meta(
            description="A response cut off at the length cap is `wrong` (reward 0), gets its `score`, or, as any "
            "longer than max_tokens - buffer_tokens, a `penalty` that grows linearly to full size at the cap (DAPO)."
        ),
    ] = "wrong"
    buffer_tokens: Annotated[int, Meta(ge=1, description="`penalty`: tokens before the cap where it begins.")] = 64
    penalty: Annotated[float, Meta(ge=0, description="`penalty`: full size.")] = 1.0


class VerifierSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Annotated[VerifierKind, Meta(description="Verifier of rows that name none of their own.")] = "exact"
    weights: Annotated[
        dict[VerifierKind, float],
        Meta(description="Several verifiers: the reward is their weighted sum. Empty: `kind` alone, with weight 1."),
    ] = {}
    answer_marker: Annotated[
        str, Meta(description="The answer is what follows the last of these in a response; empty: the whole response.")
    ] = ""
    function: Annotated[
        str, Meta(description="`python`: module:function, called with (answer, response), returns a reward.")
    ] = ""
    numeric: NumericSection = NumericSection()
    math: MathSection = MathSection()
    patterns: PatternSection = PatternSection()
    code: CodeSection = CodeSection()
    http: HttpSection = HttpSection()
    overlong: OverlongSection = OverlongSection()
    bad_golds: Annotated[
        Literal["drop", "error"],
        Meta(description="Rows whose gold answer the verifier cannot read are left out and reported, or are an error."),
    ] = "drop"
    flaky_share: Annotated[
        float,
        Meta(gt=0, le=1, description="A prompt with at least this share of unscorable rollouts is reported as flaky."),
    ] = 0.5
    quarantine_flaky: Annotated[bool, Meta(description="Flaky prompts are not sampled again.")] = False
    workers: Annotated[int, Meta(ge=1, description="Verifier processes per producer.")] = 1
    timeout_s: Annotated[float, Meta(gt=0, description="A verdict that takes longer is Unscorable.")] = 10.0
    memory_mib: Annotated[int, Meta(ge=64, description="Memory a verifier process may allocate, in MiB.")] = 4096
    recycle_after: Annotated[int, Meta(ge=1, description="Verdicts after which a process is replaced.")] = 100_000


VERIFIER_KINDS: tuple[VerifierKind, ...] = get_args(VerifierKind)

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def used_kinds(verifier: VerifierSection) -> tuple[VerifierKind, ...]:
    """Verifiers of rows that name none of their own."""
    return tuple(verifier.weights) or (verifier.kind,)


def verifier_problem(verifier: VerifierSection, kinds: Iterable[str]) -> str:
    """The first setting without which one of `kinds` cannot work, as a sentence with its key; empty: all are there."""
    for kind in kinds:
        if kind in ("regex", "format"):
            key = "answer" if kind == "regex" else "format"
            if problem := _pattern_problem(f"verifier.patterns.{key}", getattr(verifier.patterns, key), kind):
                return problem
        elif kind == "python" and not _FUNCTION.fullmatch(verifier.function):
            return f'verifier.function = "{verifier.function}" must be module:function for the verifier "python"'
        elif kind == "http" and not re.match(r"https?://[^/\s]", verifier.http.url):
            return (
                f'verifier.http.url = "{verifier.http.url}" must be http://... or https://... for the verifier "http"'
            )
    return ""


def _pattern_problem(key: str, pattern: str, kind: str) -> str:
    if not pattern:
        return f'{key} is empty; the verifier "{kind}" needs a regular expression there'
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f'{key} = "{pattern}" is not a regular expression: {error}'
    return ""
