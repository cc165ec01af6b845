from __future__ import annotations

import sys

import pytest

from gvm_stream.config import PatternSection, VerifierSection
from gvm_stream.config_verifier import VERIFIER_KINDS
from gvm_stream.errors import ConfigError
from gvm_stream.verify.golds import LONGEST_MATH_GOLD, gold_problem, require_settings
from gvm_stream.verify.rules import judge
from gvm_stream.verify.verdict import VerdictUnscorable, VerifyItem

ANY = VerifierSection()
PROSE_KINDS = ("exact", "numeric", "math", "gsm8k", "choice", "regex")
REMARKS = (
    "N/A",
    "n/a",
    "None",
    "null",
    "Proof required",
    "see solution",
    "See the solution above.",
    "\\text{proof required}",
    "$\\boxed{\\text{N/A}}$",
    "Answers may vary",
    "TBD",
    "?",
    "...",
)
USABLE = {
    "exact": ("4", "none of these", "[]", "-", "no solution"),
    "numeric": ("4", "-1/2", "1,250", "1e-9"),
    "math": ("\\frac{1}{2}", "x^2+1", "[0,1)", "\\text{no solution}", "\\text{north}"),
    "gsm8k": ("4", "2+2=4\n#### 4", "18 dollars"),
    "choice": ("B", "(B)", "b", "B) Paris"),
    "regex": ("4", "any text"),
    "json": ("null", "4", '{"a": [1]}', '{"type": "object"}'),
    "code": ('{"tests": [{"stdin": "1", "stdout": "2"}]}',),
    "reasoning_gym": ('{"task": "chain_sum", "entry": {"question": "1 + 3?", "answer": "4", "metadata": {}}}',),
    "python": ("None", "anything"),
    "http": ("None", "anything"),
    "format": ("", "None"),
}
UNUSABLE = {
    "numeric": ("four", "4 apples", "1/0", "nan"),
    "math": ("\\frac{1}{", "1+" * LONGEST_MATH_GOLD + "1"),
    "gsm8k": ("four", "between 4 and 5"),
    "choice": ("Paris", "AB", "4"),
    "json": ("{", "four", '{"type": "object", "required": 1}'),
    "code": ("assert True", "{}"),
    "reasoning_gym": ("4", '{"task": "chain_sum", "entry": {}}'),
}


def test_every_verifier_is_checked_here() -> None:
    assert tuple(USABLE) == VERIFIER_KINDS


@pytest.mark.parametrize(("kind", "gold"), [(kind, gold) for kind, golds in USABLE.items() for gold in golds])
def test_a_usable_gold_has_no_problem(kind: str, gold: str) -> None:
    assert gold_problem(ANY, kind, gold) == ""


@pytest.mark.parametrize(("kind", "gold"), [(kind, gold) for kind, golds in UNUSABLE.items() for gold in golds])
def test_what_the_verifier_cannot_read_is_a_problem_and_unscorable(kind: str, gold: str) -> None:
    assert gold_problem(ANY, kind, gold).startswith(f"{kind}: ")
    if len(gold) <= LONGEST_MATH_GOLD:  # a longer one is not tried when data is loaded, but is when it is asked for
        assert isinstance(judge(ANY, VerifyItem(answer=gold, response="\\boxed{4}", kind=kind)), VerdictUnscorable)


@pytest.mark.parametrize("gold", REMARKS)
@pytest.mark.parametrize("kind", PROSE_KINDS)
def test_a_remark_is_no_answer_for_verifiers_that_compare_with_it(kind: str, gold: str) -> None:
    assert gold_problem(ANY, kind, gold) == f"{kind}: {gold!r} says that there is no answer"


@pytest.mark.parametrize("kind", sorted(set(VERIFIER_KINDS) - {"format"}))
def test_nothing_is_no_answer(kind: str) -> None:
    assert gold_problem(ANY, kind, " ") == f"{kind}: the gold answer is empty"


def test_several_verifiers_must_all_read_the_gold() -> None:
    both = VerifierSection(weights={"exact": 1.0, "numeric": 0.5})
    assert gold_problem(both, "", "4") == ""
    assert gold_problem(both, "", "four") == "numeric: 'four' is not a number"


@pytest.mark.parametrize("gold", ["9**9**9", "2^{10^{9}}", "(10^7)!", "{" * 1500 + "1" + "}" * 1500])
def test_reading_a_bomb_ends(gold: str) -> None:
    assert isinstance(gold_problem(ANY, "math", gold), str)


def test_settings_that_a_verifier_needs_are_named() -> None:
    for kind in ("exact", "math", "json"):
        require_settings(ANY, kind)
    require_settings(VerifierSection(patterns=PatternSection(answer="x")), "regex")
    for kind, key in (
        ("regex", "patterns.answer"),
        ("format", "patterns.format"),
        ("python", "function"),
        ("http", "http.url"),
    ):
        with pytest.raises(ConfigError, match=rf"^verifier\.{key}"):
            require_settings(ANY, kind)
    with pytest.raises(ConfigError, match="'no_such_module:f' cannot be imported"):
        require_settings(VerifierSection(function="no_such_module:f"), "python")


def test_a_missing_reasoning_gym_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"gvm-stream\[reasoning-gym\]"):
        require_settings(ANY, "reasoning_gym")
