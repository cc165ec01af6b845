"""Gold answers that no response could be judged by, found when data is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec

from gvm_stream.config import VerifierSection
from gvm_stream.config_verifier import used_kinds, verifier_problem
from gvm_stream.errors import ConfigError
from gvm_stream.verify import code
from gvm_stream.verify.answers import UnreadableGold
from gvm_stream.verify.choice import read_choice_gold
from gvm_stream.verify.external import load_function
from gvm_stream.verify.gym import read_gym_gold
from gvm_stream.verify.json_answer import read_json_gold
from gvm_stream.verify.math.compare import readable_gold as readable_math_gold
from gvm_stream.verify.math.extract import gold_answer
from gvm_stream.verify.numeric import read_gsm8k_gold, read_number

LONGEST_MATH_GOLD = 4000
"""Characters; reading a formula may take more than linear time."""

_PROSE_KINDS = frozenset({"exact", "numeric", "math", "gsm8k", "choice", "regex"})
_READERS: dict[str, Callable[[str], object]] = {
    "numeric": read_number,
    "gsm8k": read_gsm8k_gold,
    "choice": read_choice_gold,
    "json": read_json_gold,
    "reasoning_gym": read_gym_gold,
}
_NO_ANSWER = re.compile(
    r"""(?: n\s*[/.]\s*a\.? | none | null | nil | nan | unknown | tb[ad] | todo
      | \?+ | -{2,} | \.{2,} | \N{HORIZONTAL ELLIPSIS} | \N{EM DASH}
      | (?:there\ is\ )?no\ (?:final\ |single\ |unique\ )?answer(?:\ (?:given|provided|available))?
      | not\ (?:applicable|available|given|provided|known|found)
      | (?:a\ |the\ )?(?:proof|answer|solution)\ (?:is\ |was\ )?
            (?:required|needed|omitted|missing|not\ (?:given|provided)|left\ (?:to|for)\ the\ reader)
      | (?:a\ |the\ )?proof | (?:this\ is\ a\ )?proof\ (?:problem|question) | open[ -]?ended
      | (?:please\ )?(?:see|refer\ to|cf\.?)\ (?:the\ )?
            (?:full\ |attached\ )?(?:solution|explanation|proof|answer|above|below|text|figure|diagram|attachment)s?
            (?:\ (?:above|below|attached))?
      | (?:the\ )?(?:answers?|results?|solutions?)\ (?:may|will|can|could)\ (?:vary|differ|be\ different)
        )\.?""",
    re.VERBOSE | re.IGNORECASE,
)
_TYPESETTING = re.compile(r"\\(?:text|mathrm|mbox|textbf|boxed)(?![A-Za-z])|[${}]")


def gold_problem(settings: VerifierSection, kind: str, gold: str) -> str:
    """Why the verifier `kind` (empty: the configured ones) cannot use a gold answer; empty if it can."""
    for used in (kind,) if kind else used_kinds(settings):
        if problem := _problem(used, gold):
            return f"{used}: {problem}"
    return ""


def _problem(kind: str, gold: str) -> str:
    if problem := says_nothing(kind, gold):
        return problem
    if kind == "code":
        return code.readable_gold(gold)
    if kind == "math":
        if len(gold) > LONGEST_MATH_GOLD:
            return f"a formula of {len(gold)} characters, more than {LONGEST_MATH_GOLD}"
        return readable_math_gold(gold_answer(gold))
    try:
        if kind in _READERS:
            _READERS[kind](gold)
    except UnreadableGold as error:
        return str(error)
    return ""


def says_nothing(kind: str, gold: str) -> str:
    """What is wrong with a gold answer that is empty, or a remark in its place: N/A, "proof required", "see solution".

    Gold answers that only a program reads (JSON, tests, a user's function) may say what they like.
    """
    if kind != "format" and not gold.strip():
        return "the gold answer is empty"
    text = _TYPESETTING.sub("", gold).strip(" \t\n()[]\"'*_")
    if kind in _PROSE_KINDS and _NO_ANSWER.fullmatch(" ".join(text.split())):
        return f"{gold.strip()[:60]!r} says that there is no answer"
    return ""


def require_settings(settings: VerifierSection, kind: str) -> None:
    """ConfigError if `kind` lacks what it cannot work without: a setting, the user's function, an optional package."""
    if problem := verifier_problem(settings, (kind,)):
        raise ConfigError(problem)
    if kind == "python":
        load_function(settings.function)
    elif kind == "reasoning_gym" and find_spec("reasoning_gym") is None:
        raise ConfigError('the verifier "reasoning_gym" needs an optional package; install gvm-stream[reasoning-gym]')
