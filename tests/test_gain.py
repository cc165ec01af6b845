from __future__ import annotations

import math

import numpy as np
import pytest

from gvm_stream.allocator.gain import LEAST_VISITS, Gain, GainMeter
from tests.allocator_host import allocator, run_steps, scored, tell_all, train


def measured(seed: int, *, visits: int, error: float = 1.0, tokens: float = 1.0, share: float = 0.3) -> Gain:
    """Visits with skewed errors and tokens, correlated; those that are not uniform have these factors on them."""
    rng = np.random.default_rng(seed)
    meter = GainMeter()
    size = rng.lognormal(sigma=0.7, size=visits)
    x = size * rng.lognormal(sigma=0.8, size=visits) * (rng.random(visits) < 0.7)
    t = 100 * size * rng.lognormal(sigma=0.3, size=visits)
    shadow = rng.random(visits) < share
    for row in zip(shadow.tolist(), x.tolist(), t.tolist(), strict=True):
        meter.observe(row[0], row[1] * (1 if row[0] else error), row[2] * (1 if row[0] else tokens))
    return meter.estimate()


def covers(gain: Gain, truth: float) -> bool:
    assert gain.low is not None
    assert gain.high is not None
    return gain.low <= truth <= gain.high


@pytest.mark.parametrize(("error", "tokens"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.25, 2.0)])
def test_the_interval_covers_the_true_gain(error: float, tokens: float) -> None:
    runs = [measured(seed, visits=400, error=error, tokens=tokens) for seed in range(300)]
    truth = 1 / (error * tokens)
    # 95 % are meant: 90 % is 4 standard deviations below.
    assert np.mean([covers(run, truth) for run in runs]) >= 0.9
    assert np.mean([math.log(run.gain or 0) for run in runs]) == pytest.approx(math.log(truth), abs=0.05)


def test_more_visits_make_the_interval_narrower_as_their_root() -> None:
    widths = [
        np.mean([math.log((run.high or 0) / (run.low or 1)) for run in (measured(s, visits=n) for s in range(20))])
        for n in (400, 1600)
    ]
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.15)


def test_nothing_is_said_before_both_kinds_have_been_visited_often_enough() -> None:
    meter = GainMeter()
    for shadow in (False, True):
        for _ in range(LEAST_VISITS):
            estimate = meter.estimate()
            assert (estimate.gain, estimate.low, estimate.high) == (None, None, None)
            meter.observe(shadow, 1.0, 2.0)
    assert meter.estimate() == Gain(1.0, 1.0, 1.0, LEAST_VISITS, LEAST_VISITS)


def test_nothing_is_said_while_no_visit_has_had_a_signal() -> None:
    meter = GainMeter()
    for i in range(40):
        meter.observe(i % 2 == 0, 0.0, 2.0)
    assert meter.estimate() == Gain(None, None, None, 20, 20)


def test_a_batch_is_measured_by_coefficients_energies_and_all_its_tokens() -> None:
    a = allocator(policy="neyman", shadow_uniform=0.0, max_lag=0)
    items = a.ask(99, 0)
    for item in items:
        energy = 7.0 if item.index == 0 else None
        a.tell(item.work, 0, scored(float(item.index > 0), tokens=5, energy=energy))
    a.observe_energy(items[1].work, 11.0)
    groups = a.batch(0) or ()
    run_steps(a, 1)
    energies = {items[1].work: 11.0}
    error = [
        sum(m.coefficient**2 * (7.0 if m.index == 0 else energies.get(m.work, 5.0)) for m in group.members)
        for group in groups
    ]
    arm = a._visits.gain.allocated
    assert (arm.visits, arm.t) == (2, 30)
    assert arm.x == pytest.approx(sum(error))


def test_what_a_place_in_the_batch_took_counts_with_the_prompts_that_were_left_out() -> None:
    a = allocator(policy="dapo", shadow_uniform=0.0, max_lag=0, prompts_per_step=1)
    last: list[str] = []

    def third_prompt_has_signal(prompt: str, index: int) -> float:
        if prompt not in last:
            last.append(prompt)
        return float(len(last) < 3 or index > 0)

    run_steps(a, 1, lambda item: scored(third_prompt_has_signal(item.prompt, item.index)))
    assert len(last) == 3
    assert a._visits.gain.allocated.t == 90


def test_a_dropped_visit_is_not_measured() -> None:
    a = allocator(policy="neyman", shadow_uniform=0.0, max_lag=0)
    a.ask(99, 0)
    a.drop(0, "too late")
    tell_all(a, [item for item in a.ledger.running() if item.group == 1], scored())
    train(a, 1)
    assert a.gain.allocated_visits == 1
