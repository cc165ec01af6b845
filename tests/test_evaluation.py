from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator import Cancelled, Failed, Fate, Reception, Scored, Unscorable, WorkItem
from gvm_stream.allocator.account import TokenAccount
from gvm_stream.allocator.evaluation import EvalRound, Evaluation
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


def tell_all(e: Evaluation, items: list[WorkItem], *outcomes: Outcome) -> list[EvalRound]:
    """The rounds that these complete."""
    finished = []
    for item, outcome in zip(items, outcomes, strict=True):
        reception, completed = e.tell(item.work, item.attempt, outcome)
        assert reception is Reception.ACCEPTED
        finished += [] if completed is None else [completed]
    return finished


def test_a_round_samples_every_prompt_and_reports_mean_and_standard_error() -> None:
    e = evaluation((0, 3, 2))
    items = e.ask(3, 3)
    items += e.ask(9, 7)
    assert [item.prompt for item in items] == ["heldout-1", "heldout-1", "heldout-2", "heldout-2"]
    assert [(item.work, item.min_version, item.step) for item in items] == [(-n, 3, 0) for n in (1, 2, 3, 4)]
    assert tell_all(e, items[:3], scored(1.0), scored(0.0), scored(0.0)) == []
    (result,) = tell_all(e, items[3:], scored(0.0))
    assert (result.step, result.version, result.accuracy) == (0, 3, 0.25)
    assert result.standard_error == pytest.approx(math.sqrt(0.25 * 0.75 / 4))
    assert e.current is None


def test_rewards_outside_zero_to_one_have_a_standard_error_too() -> None:
    e = evaluation((0, 0, 1))
    (result,) = tell_all(e, e.ask(2, 0), scored(3.0), scored(1.0))
    assert (result.accuracy, result.standard_error) == (2.0, 1 / math.sqrt(2))


def test_a_sampler_with_an_older_policy_gets_nothing() -> None:
    e = evaluation((0, 3, 1))
    assert e.ask(9, 2) == []
    assert len(e.ask(9, 3)) == 2


def test_rounds_follow_one_another() -> None:
    e = evaluation((0, 0, 1), (4, 4, 1))
    first = e.ask(9, 9)
    assert e.ask(9, 9) == []  # the second waits for the results of the first
    finished = tell_all(e, first, scored(0.0), scored(1.0))
    assert e.ask(9, 3) == []
    second = e.ask(9, 4)
    assert [item.step for item in second] == [4, 4]
    finished += tell_all(e, second, scored(1.0), scored(1.0))
    assert [(r.step, r.accuracy) for r in finished] == [(0, 0.5), (4, 1.0)]


def test_failures_are_tried_again_and_what_cannot_be_scored_does_not_count_as_wrong() -> None:
    e = evaluation((0, 0, 2), max_attempts=2)
    items = e.ask(9, 0)
    tell_all(e, items, Expired(reason="dead", tokens=1), Failed(reason="error", tokens=2), scored(1.0), scored(1.0))
    again = e.ask(9, 0)
    assert [(item.work, item.attempt) for item in again] == [(-1, 1), (-2, 1)]
    (result,) = tell_all(e, again, Failed(reason="error", tokens=4), Unscorable(reason="?", tokens=8, seconds=1.0))
    assert (result.accuracy, len(result.rewards), result.planned) == (1.0, 2, 4)
    spent = {fate: n for fate, n in e._account.tokens.items() if n}
    assert spent == {Fate.FAILED: 7, Fate.EVALUATION: 10, Fate.UNSCORABLE: 8}


def test_a_late_result_is_not_used_but_its_tokens_are_counted() -> None:
    e = evaluation((0, 0, 1))
    first, second = e.ask(9, 0)
    e.tell(first.work, 0, Expired(reason="silent", tokens=3))
    (again,) = e.ask(9, 0)
    assert e.tell(first.work, 0, scored(1.0, tokens=9)) == (Reception.DUPLICATE, None)
    assert e.tell(first.work, 0, scored(1.0, tokens=9)) == (Reception.DUPLICATE, None)
    assert e.tell(-77, 0, scored(1.0)) == (Reception.UNKNOWN, None)
    (result,) = tell_all(e, [again, second], scored(0.0), scored(0.0))
    assert result.rewards == [0.0, 0.0]
    assert e._account.tokens == {Fate.FAILED: 9, Fate.EVALUATION: 10}
    assert e.ledger.conserved()


def test_a_round_without_a_single_score_has_no_accuracy() -> None:
    e = evaluation((0, 0, 1), max_attempts=1)
    (result,) = tell_all(e, e.ask(9, 0), Failed(reason="error"), Failed(reason="error"))
    assert math.isnan(result.accuracy)
    assert math.isnan(result.standard_error)


def test_cancelled_work_is_not_tried_again() -> None:
    e = evaluation((0, 0, 1), max_attempts=5)
    (result,) = tell_all(e, e.ask(9, 0), scored(1.0), Cancelled(reason="stop", tokens=2))
    assert (result.rewards, e.ask(9, 0)) == ([1.0], [])
    assert e._account.tokens == {Fate.EVALUATION: 5, Fate.CANCELLED: 2}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.sampled_from("sfcx")), max_size=40))
def test_a_question_is_answered_as_work_would_be_given_and_a_saved_round_goes_on(
    events: list[tuple[int, int, str]],
) -> None:
    e = evaluation((0, 0, 2), (1, 1, 1), (2, 2, 0))
    outcomes: dict[str, Outcome] = {
        "s": scored(1.0),
        "f": Failed(reason="error", tokens=1),
        "c": Cancelled(reason="stop"),
        "x": Expired(reason="silent"),
    }
    for slots, version, kind in events:
        loaded = evaluation()
        loaded.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(e.state_dict())))
        assert loaded.state_dict() == e.state_dict()
        before, could = e.state_dict(), e.can_issue(version)
        items = e.ask(slots, version)
        assert items == loaded.ask(slots, version)
        if slots:
            assert could == bool(items)
        if not items:
            assert e.state_dict() == before
        for item in e.ledger.running()[:2]:
            e.tell(item.work, item.attempt, outcomes[kind])
        assert e.ledger.conserved()
