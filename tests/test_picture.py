"""What the allocator shows of the run beside its status: waits added up, how visits end, what held producers up."""

from __future__ import annotations

from typing import get_args

import pytest

from gvm_stream.allocator.waits import Reason
from gvm_stream.wire import messages as m
from tests.scripted_peers import Learner, Producer, Stage, config, ready, weights


def waited(stage: Stage) -> dict[str, float]:
    value_of = stage.metrics.registry.get_sample_value
    seconds = {reason: value_of("gvm_run_wait_seconds_total", {"reason": reason}) for reason in get_args(Reason)}
    return {reason: s for reason, s in seconds.items() if s}


def test_what_the_run_waits_for_is_added_up_by_reason() -> None:
    stage = Stage(config(steps=1))
    stage.wait(3)
    assert waited(stage) == {"learner": 3, "producer": 3}
    learner = Learner(stage)
    stage.wait(2)
    assert waited(stage) == {"learner": 3, "producer": 5, "evaluation": 2, "rollouts": 2}
    producers = [Producer(stage, name) for name in ("left", "right")]
    stage.deliver()
    for producer in producers:
        producer.silent = True
    learner.say(m.Published(weights=weights(1), step=0))
    stage.wait(1)
    assert waited(stage)["loading"] == 1, "two that load are waited for once"


def test_every_visit_that_ends_says_how() -> None:
    stage, _, _ = ready(config(steps=2), p=4)
    stage.play()
    stage.broker.tick(stage.now)
    value_of = stage.metrics.registry.get_sample_value
    assert value_of("gvm_exits_total", {"reason": "all_ended"}) == 4
    assert value_of("gvm_visits_total", {"acceptance": "0.3-0.7"}) == 4
    assert (value_of("gvm_gradient_variance_predicted") or 0) >= 0


@pytest.mark.parametrize(("waiting", "share"), [({}, 0.0), ({"p": "verdicts"}, 0.25), ({"p": "work"}, 0.0)])
def test_the_share_of_producers_time_spent_on_verdicts_is_in_the_report(waiting: dict[str, str], share: float) -> None:
    stage, _, _ = ready(config(steps=1), p=4, q=4)
    stage.deliver()
    stage.wait(4)
    stage.wait(4, **waiting)
    assert stage.report()["producer_shares"] == {"verifier": pytest.approx(share, abs=0.07)}
