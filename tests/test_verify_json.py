from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.config import VerifierSection
from gvm_stream.verify.json_answer import last_json
from gvm_stream.verify.rules import judge
from gvm_stream.verify.verdict import VerdictScored, VerdictUnscorable, VerifyItem

JSON = VerifierSection(kind="json")
SCHEMA = json.dumps({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 2}}})

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text().filter("type".__ne__), inner, max_size=3),
    max_leaves=8,
)


def reward(gold: str, response: str) -> float:
    verdict = judge(JSON, VerifyItem(answer=gold, response=response))
    assert isinstance(verdict, VerdictScored), verdict
    return verdict.reward


@given(values.filter(lambda value: not (isinstance(value, dict) and "$schema" in value)))
def test_a_value_equals_itself_in_every_layout(value: object) -> None:
    gold = json.dumps(value)
    for response in (gold, json.dumps(value, indent=2), f"Here it is:\n```json\n{gold}\n```\nI hope it helps."):
        assert reward(gold, response) == 1
    assert reward(gold, json.dumps([value])) == 0


@pytest.mark.parametrize(
    ("gold", "response", "right"),
    [
        ('{"a": 1, "b": 2}', '{"b": 2.0, "a": 1}', 1),
        ("[1, 2]", "[2, 1]", 0),
        ("true", "1", 0),
        ("0.1", "0.10", 1),
        ("1e400", "1e401", 0),
        ('{"a": 1}', '{"a": 1, "b": 2}', 0),
        ('{"type": "circle"}', '{"type": "circle"}', 1),
        ("[1]", "not [2] but [1], which has 1 member", 1),
        ("[1]", "[1], no: [2]", 0),
        ("[1]", 'he said "[2]" and then [1]', 1),
        ("5", "the answer is 5", 0),
        ("5", "```\n5\n```", 1),
        ("null", "", 0),
    ],
)
def test_the_last_json_value_is_compared(gold: str, response: str, right: float) -> None:
    assert reward(gold, response) == right


@pytest.mark.parametrize(
    "text", ['{"a": [1, 2]', "[x [1, 2]]", "[" * 5000 + "1" + "]" * 5000, "```json\n{\n```", "[NaN]"]
)
def test_no_piece_of_broken_json_counts(text: str) -> None:
    assert last_json(text) is None


@pytest.mark.parametrize(
    ("response", "right"), [('{"a": 2}', 1), ('{"a": 1}', 0), ('{"b": 2}', 0), ("[2]", 0), ("2", 0)]
)
def test_a_schema_accepts_what_is_valid_by_it(response: str, right: float) -> None:
    assert reward(SCHEMA, response) == right


def test_the_rule_says_what_is_not_valid() -> None:
    verdict = judge(JSON, VerifyItem(answer=SCHEMA, response='{"a": 1}'))
    assert verdict == VerdictScored(0.0, '{"a": 1}', SCHEMA, "not valid by the schema: 1 is less than the minimum of 2")


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        ("{", "not JSON"),
        ("[NaN]", "NaN is not JSON"),
        ("[" * 5000 + "]" * 5000, "nested too deep"),
        ('{"type": "object", "properties": 3}', "not a JSON Schema"),
        ('{"type": "object", "$ref": "http://127.0.0.1:9/schema"}', "cannot be applied"),
        ('{"type": "string", "$ref": "#/nowhere"}', "cannot be applied"),
    ],
)
def test_a_gold_that_is_neither_value_nor_usable_schema_is_unscorable(gold: str, reason: str) -> None:
    verdict = judge(JSON, VerifyItem(answer=gold, response="{}"))
    assert isinstance(verdict, VerdictUnscorable)
    assert verdict.reason.startswith("unreadable gold: ")
    assert reason in verdict.reason
