from __future__ import annotations

import math

import pytest

from gvm_stream.allocator import Cancelled, Failed, Fate, Reception, Scored, Unscorable, WorkItem
from gvm_stream.allocator.account import TokenAccount
from gvm_stream.allocator.evaluation import Evaluation
from gvm_stream.allocator.types import Expired, Outcome

PROMPTS = ["heldout-1", "heldout-2"]


def evaluation(*rounds: tuple[int, int, int], max_attempts: int = 2) -> Evaluation:
    """Rounds are (step, version, samples)."""
    made = Evaluation(PROMPTS, TokenAccount(), max_attempts)
    for step, version, samples in rounds:
        made.schedule(step, version, samples)
    return made


def scored(reward: float, tokens: int = 5) -> Scored:
    return Scored(reward=reward, tokens=tokens, seconds=1.0, oldest_version=0)


def tell_all(e: Evaluation, items: list[WorkItem], *outcomes: Outcome) -> None:
    for item, outcome in zip(items, outcomes, strict=True):
        assert e.tell(item.work, item.attempt, outcome) is Reception.ACCEPTED


def test_a_round_samples_every_prompt_and_reports_mean_and_standard_error() -> None:
    e = evaluation((0, 3, 2))
    items = e.ask(3, 3)
    items += e.ask(9, 7)
    assert [item.prompt for item in items] == ["heldout-1", "heldout-1", "heldout-2", "heldout-2"]
    assert [(item.work, item.min_version, item.step) for item in items] == [(-n, 3, 0) for n in (1, 2, 3, 4)]
    tell_all(e, items[:3], scored(1.0), scored(0.0), scored(0.0))
    assert e.finished == []
    tell_all(e, items[3:], scored(0.0))
    (result,) = e.finished
    assert (result.step, result.version, result.accuracy) == (0, 3, 0.25)
    assert result.standard_error == pytest.approx(math.sqrt(0.25 * 0.75 / 4))
    assert e.current is None


def test_rewards_outside_zero_to_one_have_a_standard_error_too() -> None:
    e = evaluation((0, 0, 1))
    tell_all(e, e.ask(2, 0), scored(3.0), scored(1.0))
    assert (e.finished[0].accuracy, e.finished[0].standard_error) == (2.0, 1 / math.sqrt(2))


def test_a_sampler_with_an_older_policy_gets_nothing() -> None:
    e = evaluation((0, 3, 1))
    assert e.ask(9, 2) == []
    assert len(e.ask(9, 3)) == 2


def test_rounds_follow_one_another() -> None:
    e = evaluation((0, 0, 1), (4, 4, 1))
    first = e.ask(9, 9)
    assert e.ask(9, 9) == []  # the second waits for the results of the first
    tell_all(e, first, scored(0.0), scored(1.0))
    assert e.ask(9, 3) == []
    second = e.ask(9, 4)
    assert [item.step for item in second] == [4, 4]
    tell_all(e, second, scored(1.0), scored(1.0))
    assert [(r.step, r.accuracy) for r in e.finished] == [(0, 0.5), (4, 1.0)]


def test_failures_are_tried_again_and_what_cannot_be_scored_does_not_count_as_wrong() -> None:
    e = evaluation((0, 0, 2), max_attempts=2)
    items = e.ask(9, 0)
    tell_all(e, items, Expired(reason="dead", tokens=1), Failed(reason="error", tokens=2), scored(1.0), scored(1.0))
    again = e.ask(9, 0)
    assert [(item.work, item.attempt) for item in again] == [(-1, 1), (-2, 1)]
    tell_all(e, again, Failed(reason="error", tokens=4), Unscorable(reason="?", tokens=8, seconds=1.0))
    (result,) = e.finished
    assert (result.accuracy, len(result.rewards), result.planned) == (1.0, 2, 4)
    spent = {fate: n for fate, n in e._account.tokens.items() if n}
    assert spent == {Fate.FAILED: 7, Fate.EVALUATION: 10, Fate.UNSCORABLE: 8}


def test_a_late_result_is_not_used_but_its_tokens_are_counted() -> None:
    e = evaluation((0, 0, 1))
    first, second = e.ask(9, 0)
    e.tell(first.work, 0, Expired(reason="silent", tokens=3))
    (again,) = e.ask(9, 0)
    assert e.tell(first.work, 0, scored(1.0, tokens=9)) is Reception.DUPLICATE
    assert e.tell(first.work, 0, scored(1.0, tokens=9)) is Reception.DUPLICATE
    assert e.tell(-77, 0, scored(1.0)) is Reception.UNKNOWN
    tell_all(e, [again, second], scored(0.0), scored(0.0))
    assert e.finished[0].rewards == [0.0, 0.0]
    assert e._account.tokens == {Fate.FAILED: 9, Fate.EVALUATION: 10}
    assert e.ledger.conserved()


def test_a_round_without_a_single_score_has_no_accuracy() -> None:
    e = evaluation((0, 0, 1), max_attempts=1)
    tell_all(e, e.ask(9, 0), Failed(reason="error"), Failed(reason="error"))
    assert math.isnan(e.finished[0].accuracy)
    assert math.isnan(e.finished[0].standard_error)


def test_a_withdrawn_round_is_not_reported_and_not_continued() -> None:
    e = evaluation((0, 0, 1), (1, 0, 1))
    items = e.ask(9, 0)
    assert e.withdraw() == items
    tell_all(e, items, scored(1.0), Cancelled(reason="stop", tokens=2))
    assert e.finished == []
    assert e._account.tokens == {Fate.EVALUATION: 5, Fate.CANCELLED: 2}
    e.schedule(2, 0, 1)
    assert e.ask(9, 9) == []


def test_after_a_withdrawal_nothing_is_tried_again() -> None:
    e = evaluation((0, 0, 1), max_attempts=5)
    items = e.ask(1, 0)
    e.withdraw()
    tell_all(e, items, Failed(reason="producer leaves"))
    assert e.ask(9, 0) == []
    assert (e.ledger.num_running, e.ledger.conserved()) == (0, True)
