from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator.prior import LEAST, MEMORY, MOST, OnlinePrior, log_marginal

parameters = st.floats(0.1, 20)
rollouts = st.integers(0, 40)


@given(parameters, parameters, st.lists(st.booleans(), max_size=40))
def test_log_marginal_is_the_likelihood_of_the_outcomes_one_after_another(
    a: float, b: float, outcomes: list[bool]
) -> None:
    total, s, f = 0.0, 0, 0
    for success in outcomes:
        total += math.log((a + s if success else b + f) / (a + b + s + f))
        s, f = s + success, f + (not success)
    assert log_marginal(a, b, s, f) == pytest.approx(total, rel=1e-9, abs=1e-9)


@given(parameters, parameters, rollouts, rollouts, st.floats(0, 30), st.floats(0, 30))
def test_the_first_step_follows_the_likelihood_given_what_was_known(
    a: float, b: float, s: int, f: int, known_s: float, known_f: float
) -> None:
    def likelihood(log_a: float, log_b: float) -> float:
        return log_marginal(math.exp(log_a) + known_s, math.exp(log_b) + known_f, s, f)

    prior = OnlinePrior(a, b)
    prior.observe(s, f, known_s, known_f)
    log_a, log_b, h = math.log(a), math.log(b), 1e-4
    grad_a = (likelihood(log_a + h, log_b) - likelihood(log_a - h, log_b)) / (2 * h)
    grad_b = (likelihood(log_a, log_b + h) - likelihood(log_a, log_b - h)) / (2 * h)
    information = 1 + grad_a**2 + grad_b**2  # of the start, and of this visit
    assert math.log(prior.a / a) == pytest.approx(grad_a / information, abs=1e-5)
    assert math.log(prior.b / b) == pytest.approx(grad_b / information, abs=1e-5)


@pytest.mark.parametrize("truth", [(0.5, 0.8), (2.0, 5.0), (0.2, 0.2)])
def test_it_finds_the_prior_though_visits_and_rollouts_go_where_the_outcomes_have_been_uncertain(
    truth: tuple[float, float],
) -> None:
    rng = np.random.default_rng(0)
    rates = rng.beta(*truth, 512).tolist()
    successes, failures = [0] * 512, [0] * 512
    prior, visits_alone = OnlinePrior(0.5, 0.5), OnlinePrior(0.5, 0.5)
    for visit in range(6):
        for i, p in enumerate(rates):
            a, b = 0.5 + successes[i], 0.5 + failures[i]
            variance = a * b / ((a + b) * (a + b + 1))
            if visit > 0 and variance < 0.05:
                continue
            n = 2 + round(60 * variance) if visit > 0 else 8
            s = int(rng.binomial(n, p))
            prior.observe(s, n - s, successes[i], failures[i])
            visits_alone.observe(s, n - s)
            successes[i] += s
            failures[i] += n - s
    best = maximum_likelihood(successes, failures)
    assert distance(prior, truth) < 0.5
    assert distance(prior, best) < 0.2
    assert distance(visits_alone, best) > 0.3


def test_it_follows_the_prompts_of_a_stream_to_another_prior() -> None:
    rng = np.random.default_rng(1)
    prior = OnlinePrior(0.5, 0.5)
    for truth in ((0.5, 0.8), (2.0, 5.0)):
        for s in rng.binomial(8, rng.beta(*truth, 4 * MEMORY)).tolist():
            prior.observe(s, 8 - s)
        assert distance(prior, truth) < 0.25


def test_few_prompts_do_not_throw_it_off() -> None:
    prior = OnlinePrior(2.0, 3.0)
    for _ in range(4):
        prior.observe(0, 16)
    assert 0.5 < prior.a < 2.0
    assert 3.0 < prior.b < 8.0


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.lists(st.tuples(rollouts, rollouts, st.floats(0, 1e4)), max_size=50))
@settings(max_examples=50)
def test_it_stays_a_proper_prior_whatever_happens(a: float, b: float, visits: list[tuple[int, int, float]]) -> None:
    prior = OnlinePrior(a, b)
    for s, f, known in visits:
        prior.observe(s, f, known, 0.0)
        assert LEAST <= prior.a <= MOST
        assert LEAST <= prior.b <= MOST


def test_one_that_was_saved_goes_on_as_if_nothing_had_happened() -> None:
    prior, loaded = OnlinePrior(1.0, 2.0), OnlinePrior(1.0, 2.0)
    prior.observe(3, 5)
    loaded.load_state_dict(prior.state_dict())
    prior.observe(1, 7, 3, 5)
    loaded.observe(1, 7, 3, 5)
    assert (loaded.a, loaded.b) == (prior.a, prior.b)
    assert loaded.state_dict() == prior.state_dict()


def distance(prior: OnlinePrior, other: tuple[float, float]) -> float:
    return max(abs(math.log(prior.a / other[0])), abs(math.log(prior.b / other[1])))


def maximum_likelihood(successes: list[int], failures: list[int]) -> tuple[float, float]:
    """(a, b) of all prompts at once, by a pattern search on their logarithms."""

    def likelihood(a: float, b: float) -> float:
        return sum(log_marginal(a, b, s, f) for s, f in zip(successes, failures, strict=True))

    a, b, step = 1.0, 1.0, 1.0
    while step > 0.01:
        moves = [(a * math.exp(step * i), b * math.exp(step * j)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        best = max(moves, key=lambda move: likelihood(*move))
        if best == (a, b):
            step /= 2
        a, b = best
    return a, b
