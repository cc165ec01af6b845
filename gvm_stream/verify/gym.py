"""Items of reasoning-gym, judged by their own task."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping

import msgspec

from gvm_stream.config import VerifierSection
from gvm_stream.verify.answers import NO_MARKER, UnreadableGold, answer_text, unreadable
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerifyItem

Entry = dict[str, object]

NONSENSE = "\N{REPLACEMENT CHARACTER} no answer \N{REPLACEMENT CHARACTER}"


class GymGold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    task: str
    entry: Entry
    """The item as the task made it."""
    options: dict[str, object] = {}
    """Configuration of the task that made it."""


def reasoning_gym(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """Right only if the task gives the answer its full score of 1.

    Tasks fail on junk in ways of their own: where the entry is in order, an answer its task cannot read is wrong.
    """
    try:
        score, entry = read_gym_gold(item.answer)
    except UnreadableGold as error:
        return unreadable(error)
    expected = str(entry["answer"])
    answer = answer_text(item.response, settings.answer_marker)
    if answer is None:
        return NO_MARKER
    if not answer:
        return VerdictScored(0.0, expected=expected, rule="empty answer")
    points = _points(score, answer, entry)
    if isinstance(points, str):
        return VerdictScored(0.0, answer, expected, f"the task cannot read the answer: {points}")
    if points == 1 and answer != expected and _points(score, NONSENSE, entry) == 1:
        return VerdictScored(0.0, answer, expected, "the task accepts any text, and this is not its own answer")
    return VerdictScored(float(points == 1), answer, expected, f"score {points:g} by the task")


@functools.lru_cache(maxsize=256)
def read_gym_gold(gold: str) -> tuple[Callable[[str, Entry], float], Entry]:
    """(scoring function, entry). In order are entries whose own answer gets the score 1, if they have one."""
    try:
        read = msgspec.json.decode(gold, type=GymGold)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnreadableGold(f'not JSON with "task" and "entry": {error}') from error
    if missing := {"question", "answer", "metadata"} - read.entry.keys():
        raise UnreadableGold(f"the entry has no {' and no '.join(sorted(missing))}")
    score = _scoring(read.task, json.dumps(read.options, sort_keys=True))
    own = read.entry["answer"]
    if own is None:  # any good answer will do; the least a task must do is to judge some text
        points = _points(score, NONSENSE, read.entry)
        if isinstance(points, str):
            raise UnreadableGold(f"the task {read.task} cannot judge the entry: {points}")
        return score, read.entry
    for entry in (read.entry, _with_tuples(read.entry)):
        points = _points(score, str(own), entry)
        if points == 1:
            return score, entry
    raise UnreadableGold(f"the task {read.task} gives the entry's own answer the score {points}, not 1")


@functools.lru_cache(maxsize=64)
def _scoring(task: str, options: str) -> Callable[[str, Entry], float]:
    """`score_answer` of a task, imported at first use: the package is optional."""
    import reasoning_gym as package
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise UnreadableGold(f"{task!r} is not a task of reasoning-gym")
    try:
        score: Callable[[str, Entry], float] = package.create_dataset(task, **json.loads(options)).score_answer
    except (TypeError, ValueError, AssertionError) as error:
        raise UnreadableGold(f"the task {task} does not take the options {options}: {error}") from error
    return score


def _points(score: Callable[[str, Entry], float], answer: str, entry: Entry) -> float | str:
    """The score, or what went wrong."""
    try:
        return float(score(answer, copy.deepcopy(entry)))  # a task may use its entry up
    except Exception as error:  # a hundred tasks by as many authors; the caller says whose fault it is
        return f"{type(error).__name__}: {str(error)[:100]}"


def _with_tuples(value: object) -> Entry:
    """JSON made lists of the tuples that some tasks compare with."""
    assert isinstance(value, dict)
    return {key: _tuples(member) for key, member in value.items()}


def _tuples(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _tuples(member) for key, member in value.items()}
    return tuple(_tuples(member) for member in value) if isinstance(value, list) else value
