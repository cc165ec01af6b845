"""Runs that continue from a saved state, and learners that do not go with it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from gvm_stream.errors import StreamError
from gvm_stream.wire import messages as m
from tests.scripted_peers import Learner, Producer, Stage, config, ready


def resumed(
    state: dict[str, Any] | None, *checkpoints: int, steps: int = 4, every: int = 0
) -> tuple[Stage, Learner, Producer]:
    asked: list[tuple[int, ...]] = []

    def load_state(found: tuple[int, ...]) -> dict[str, Any] | None:
        asked.append(found)
        return state

    stage = Stage(config(steps=steps, every=every), load_state)
    producer = Producer(stage, "p")
    learner = Learner(stage, version=50, checkpoints=checkpoints)
    stage.deliver()
    assert asked == [checkpoints]
    return stage, learner, producer


def saved(step: int, *, steps: int = 4) -> tuple[Stage, dict[str, Any]]:
    """A run and the state that it saved after a batch, as it is read from a file."""
    stage, _, _ = ready(config(steps=steps), p=4)
    stage.play(lambda: any(number == step for number, _ in stage.broker.saves))
    return stage, msgspec.msgpack.decode(msgspec.msgpack.encode(dict(stage.broker.saves)[step]))


def test_a_resumed_run_continues_where_its_state_was_saved() -> None:
    before, state = saved(2)
    visited = [group.prompt for batch in _learner(before).batches for group in batch.groups]
    stage, learner, _ = resumed(state, 1, 2)
    assert learner.last(m.Welcome).next_step == 2
    stage.play()
    assert [batch.step for batch in learner.batches] == [2, 3]
    visited += [group.prompt for batch in learner.batches for group in batch.groups]
    assert max(Counter(visited).values()) == 1
    report = stage.report()
    assert (report["heldout_before"], report["heldout_after"], report["steps"]) == (0.25, 0.5, 4)
    assert [row["step"] for row in report["history"]["steps"]] == [0, 1, 2, 3]
    assert report["seconds"] > stage.now - 100


def _learner(stage: Stage) -> Learner:
    return next(peer for peer in stage.peers.values() if isinstance(peer, Learner))


def test_a_run_cut_off_in_its_final_evaluation_repeats_it() -> None:
    _, state = saved(2, steps=2)
    stage, learner, _ = resumed(state, 2, steps=2)
    assert not learner.all(m.Stop)
    stage.play()
    assert learner.last(m.Stop).final
    assert (stage.report()["heldout_before"], stage.report()["heldout_after"]) == (0.25, 0.5)


def test_an_evaluation_that_was_recorded_is_not_repeated() -> None:
    _, state = saved(2)
    (first,) = state["record"]["evaluations"]
    stage, _, _ = resumed(state, 2, every=2)
    stage.play()
    assert [row["step"] for row in stage.report()["history"]["evaluations"]] == [0, 2, 4]
    state["record"]["evaluations"] = [first, {**first, "step": 2, "accuracy": 0.75}]
    stage, _, _ = resumed(state, 2, every=2)
    stage.play()
    assert [(row["step"], row["accuracy"]) for row in stage.report()["history"]["evaluations"]] == [
        (0, 0.25),
        (2, 0.75),
        (4, 0.5),
    ]


def test_a_resumed_run_without_a_state_begins_at_the_beginning() -> None:
    stage, learner, _ = resumed(None, steps=1)
    stage.play()
    assert [batch.step for batch in learner.batches] == [0]
    assert stage.report()["outcome"] == "finished"


def test_a_state_that_does_not_fit_refuses_the_learner() -> None:
    _, state = saved(1)
    state["allocator"]["roster"]["ids"].append("train-41")
    _, learner, _ = resumed(state, 1)
    assert "the saved state does not fit this run: it holds 41 prompts" in learner.last(m.Refused).reason


def test_a_state_that_cannot_be_loaded_refuses_the_learner() -> None:
    def load_state(checkpoints: tuple[int, ...]) -> dict[str, Any] | None:
        raise StreamError(f"nothing fits {list(checkpoints)}")

    stage = Stage(config(), load_state)
    learner = Learner(stage, checkpoints=(7,))
    stage.deliver()
    assert learner.last(m.Refused).reason == "nothing fits [7]"


def test_a_learner_that_lost_the_current_checkpoint_is_refused() -> None:
    stage, _ = saved(1)
    again = Learner(stage, epoch=2, checkpoints=(0,))
    stage.deliver()
    assert "stands after batch 1, for which the learner has no checkpoint" in again.last(m.Refused).reason
