from __future__ import annotations

import math

import pytest

from gvm_stream.allocator import Log
from gvm_stream.allocator.explain import OpenVisit
from tests.allocator_host import allocator, run_steps, scored, sequential, tell, tell_all, train


def test_an_explanation_is_what_the_policy_goes_by() -> None:
    a = allocator(2, policy="neyman", objective=Log(), shadow_uniform=0.0, max_lag=0, steps=None)
    new = a.explain("train-0")
    assert (new.visits, new.acceptance, new.acceptance_interval) == (0, 0.5, (0.0, 1.0))
    assert math.isnan(new.price)
    assert (new.status, new.open_visits) == ("active", ())
    run_steps(a, 10, lambda item: scored(float(item.prompt == "train-0" and item.index == 0), tokens=20, energy=3.0))
    half, hard = a.explain("train-0"), a.explain("train-1")
    assert half.visits == hard.visits == 10
    assert 0.2 < half.acceptance < 0.5
    assert hard.acceptance < 0.1
    assert half.acceptance_interval[0] > 0 == hard.acceptance_interval[0]
    assert half.acceptance_interval[1] > hard.acceptance_interval[1]
    assert half.weight == pytest.approx(1 / half.acceptance)
    assert half.reward_variance > hard.reward_variance
    assert half.tokens == pytest.approx(20)
    assert half.energy_success == pytest.approx(3.0, rel=0.2)
    view = a.planner.view(a.roster.candidates(0, 10, 1, lambda position: False), 10)
    assert [half.variance, hard.variance] == view.variance().tolist()
    assert half.price == a.price


def test_open_visits_are_named_until_their_batch_is_settled() -> None:
    a = allocator(2, max_lag=0)
    items = a.ask(6, 0)
    tell(a, items[0], scored())
    prompt = items[0].prompt
    assert a.explain(prompt).open_visits == (OpenVisit(step=0, rollouts=3, ended=1, shadow=False, closed=False),)
    tell_all(a, items[1:], scored())
    assert a.explain(prompt).open_visits == (OpenVisit(step=0, rollouts=3, ended=3, shadow=False, closed=True),)
    train(a, 1)
    assert a.explain(prompt).open_visits == ()


def test_a_settled_visit_is_not_open_though_cancelled_rollouts_have_not_come_back() -> None:
    a = sequential(rounds_ahead=1)
    first, second, *_ = a.ask(4, 0)
    tell(a, first, scored(0.0))
    tell(a, second, scored(1.0))
    train(a, 1)
    assert a.explain(first.prompt).open_visits == ()


def test_a_quarantined_prompt_says_so() -> None:
    a = allocator(2)
    a.quarantine("train-1")
    assert (a.explain("train-0").status, a.explain("train-1").status) == ("active", "quarantined")
