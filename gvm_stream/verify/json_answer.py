"""JSON answers: equal to a JSON value, or valid by a JSON Schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NoReturn

import msgspec
from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from gvm_stream.config import VerifierSection
from gvm_stream.verify.answers import NO_MARKER, UnreadableGold, answer_text, unreadable
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerifyItem

Schema = dict[str, Any]

_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}
_FENCE = re.compile(r"^[ \t]*```[\w-]*[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_BRACKET = re.compile(r'[\[\]{}]|"(?:[^"\\]|\\.)*"')


class JsonGold(msgspec.Struct, frozen=True):
    value: object
    schema: Schema | None = None
    """Set if the gold answer is a schema and not a value to equal."""


def json_answer(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """The last JSON value of the response equals the gold value (numbers exactly), or is valid by the gold schema."""
    gold = read_json_gold(item.answer)
    answer = answer_text(item.response, settings.answer_marker)
    if answer is None:
        return NO_MARKER
    text = last_json(answer)
    try:
        value = None if text is None else _decode(text, exact=gold.schema is None)
        if text is None:
            return VerdictScored(0.0, expected=item.answer, rule="no JSON value in the response")
        if gold.schema is not None:
            wrong = _first_error(gold.schema, value)
            return VerdictScored(float(not wrong), text, item.answer, wrong or "valid by the schema")
        same = _same(value, gold.value)
    except RecursionError:
        return VerdictScored(0.0, text or "", item.answer, "JSON nested too deep")
    except (Unresolvable, re.error) as error:
        return unreadable(f"the schema cannot be applied: {error}")
    return VerdictScored(float(same), text, item.answer, "equal JSON" if same else "different JSON")


def read_json_gold(gold: str) -> JsonGold:
    """A JSON Schema is an object with `$schema`, or whose `type` is a type of JSON; all else is a value."""
    try:
        value = _decode(gold, exact=True)
        if not _is_schema(value):
            return JsonGold(value)
        schema: Schema = msgspec.convert(_decode(gold, exact=False), Schema)
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except RecursionError:
        raise UnreadableGold("JSON nested too deep") from None
    except ValueError as error:
        raise UnreadableGold(f"not JSON: {error}") from error
    except SchemaError as error:
        raise UnreadableGold(f"not a JSON Schema: {error.message[:200]}") from error
    return JsonGold(value, schema)


def _is_schema(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    types = value.get("type")
    names = types if isinstance(types, list) else [types]
    return "$schema" in value or (bool(names) and all(isinstance(name, str) and name in _TYPES for name in names))


def last_json(text: str) -> str | None:
    """The last JSON value of a text: the whole of it, a fenced block, or an object or array in the prose.

    Nothing inside brackets that are no JSON as a whole counts, and no number or word of the prose.
    """
    if _is_json(text):
        return text.strip()
    fenced = [(match.end(1), match[1].strip()) for match in _FENCE.finditer(text) if _is_json(match[1])]
    bare = [(end, text[start:end]) for start, end in _bracketed(text) if _is_json(text[start:end])]
    return max(fenced + bare, default=(0, None))[1]


def _bracketed(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of the outermost brackets; one that is never closed ends the search. Linear in the text."""
    depth = start = position = 0
    while match := _BRACKET.search(text, position):
        position = match.end()
        if match[0] in "[{":
            start = start if depth else match.start()
            depth += 1
        elif match[0] in "]}" and depth:
            depth -= 1
            if not depth:
                yield start, match.end()
        elif match[0][0] == '"' and not depth:
            position = match.start() + 1  # a quotation mark of the prose; only brackets can hold JSON texts


def _is_json(text: str) -> bool:
    try:
        _decode(text, exact=True)
    except (ValueError, RecursionError):
        return False
    return True


def _decode(text: str, *, exact: bool) -> object:
    """`exact`: decimals as they are written, for comparison; the schema library wants floats."""
    return json.loads(text, parse_float=Decimal if exact else None, parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _same(left: object, right: object) -> bool:
    """Equality of JSON: 1 is 1.0 and not true; the order of members does not count."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _first_error(schema: Schema, value: Any) -> str:  # noqa: ANN401
    """What is wrong with `value`, or nothing. References to other documents are not fetched."""
    validator = validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())
    errors = list(validator.iter_errors(value))  # all, so that a dead reference always shows
    return f"not valid by the schema: {errors[0].message[:200]}" if errors else ""
