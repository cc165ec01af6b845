from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator.confidence import interval
from gvm_stream.allocator.estimates import Estimates
from gvm_stream.allocator.posterior import Posterior
from gvm_stream.allocator.prior import OnlinePrior, log_marginal

FIRST = np.array([0])


def estimates(
    prompts: int = 1,
    *,
    prior: tuple[float, float] = (0.5, 0.5),
    learn_prior: bool = False,
    change_point: float = 0.0,
    max_tokens: int | None = None,
) -> Estimates:
    made = Estimates(
        memory=(10.0, 100.0),
        prior=prior,
        learn_prior=learn_prior,
        change_point=change_point,
        max_tokens=max_tokens,
    )
    made.grow(prompts)
    return made


def visit(e: Estimates, prompt: int, s: int, f: int, version: int = 0, tokens: int = 100) -> None:
    """`tokens` for every rollout."""
    e.observe(prompt, successes=s, failures=f, tokens=tokens * (s + f), completed=s + f, version=version)


def counts(e: Estimates, version: int, prompt: int = 0) -> list[float]:
    """Parameters (a, b) of the fast Beta, then those of the slow one."""
    p = e.posterior(np.array([prompt]), version)
    return [float(parameter[0]) for parameter in (p.fast_a, p.fast_b, p.slow_a, p.slow_b)]


def fast_weight(e: Estimates, version: int) -> float:
    return float(e.posterior(FIRST, version).fast_weight[0])


# Counts


def test_an_unseen_prompt_has_the_prior() -> None:
    e = estimates(2, prior=(2.0, 3.0))
    assert counts(e, 7) == counts(e, 7, prompt=1) == [2.0, 3.0, 2.0, 3.0]
    assert fast_weight(e, 7) == 0.5
    assert (e.visits(FIRST).tolist(), e.last_version(FIRST).tolist()) == ([0], [-1])


def test_counts_age_by_policy_versions_at_two_speeds() -> None:
    e = estimates()
    visit(e, 0, 2, 1, version=3)
    fast, slow = math.exp(-5 / 10), math.exp(-5 / 100)
    expected = [0.5 + 2 * fast, 0.5 + fast, 0.5 + 2 * slow, 0.5 + slow]
    assert counts(e, 8) == pytest.approx(expected)
    visit(e, 0, 1, 1, version=8)
    assert counts(e, 8) == pytest.approx([parameter + 1 for parameter in expected])
    assert (e.visits(FIRST).tolist(), e.last_version(FIRST).tolist()) == ([2], [8])


def test_a_late_visit_by_an_older_policy_ages_nothing() -> None:
    e = estimates()
    visit(e, 0, 1, 0, version=9)
    visit(e, 0, 0, 1, version=4)
    assert counts(e, 9) == [1.5, 1.5, 1.5, 1.5]
    assert e.last_version(FIRST).tolist() == [9]


def test_what_was_learned_long_ago_drifts_back_to_the_prior() -> None:
    e = estimates()
    visit(e, 0, 0, 8)
    means = [float(e.posterior(FIRST, version).mean()[0]) for version in range(0, 3000, 100)]
    assert means == sorted(means)
    assert (means[0], means[-1]) == pytest.approx((0.5 / 9, 0.5))


@given(st.integers(1, 500), st.booleans(), st.floats(0.1, 5))
def test_one_sided_counts_never_end_a_prompt(n: int, success: bool, prior: float) -> None:
    e = estimates(prior=(prior, prior))
    visit(e, 0, n * success, n * (not success))
    variance = float(e.posterior(FIRST, 0).reward_variance()[0])
    assert variance == pytest.approx(prior * (n + prior) / ((n + 2 * prior) * (n + 2 * prior + 1)))
    assert 0 < variance < 0.25


# Which speed to believe


def test_the_speeds_are_weighted_by_how_well_they_have_predicted_the_visits() -> None:
    e = estimates()
    visit(e, 0, 6, 2, version=0)  # nothing to predict it by: both have the prior
    assert fast_weight(e, 0) == 0.5
    fast_a, fast_b, slow_a, slow_b = counts(e, 10)
    visit(e, 0, 1, 7, version=10)
    log_odds = log_marginal(fast_a, fast_b, 1, 7) - log_marginal(slow_a, slow_b, 1, 7)
    assert fast_weight(e, 10) == pytest.approx(1 / (1 + math.exp(-log_odds)))
    assert fast_weight(e, 110) == pytest.approx(1 / (1 + math.exp(-log_odds / math.e)))
    fast_a, fast_b, slow_a, slow_b = counts(e, 110)
    visit(e, 0, 4, 4, version=110)
    log_odds = log_odds / math.e + log_marginal(fast_a, fast_b, 4, 4) - log_marginal(slow_a, slow_b, 4, 4)
    assert fast_weight(e, 110) == pytest.approx(1 / (1 + math.exp(-log_odds)))


def test_a_rate_that_stays_is_left_to_the_slow_memory_and_one_that_moves_to_the_fast_one() -> None:
    rng = np.random.default_rng(0)
    still, moving = estimates(), estimates()
    for version in range(0, 800, 4):
        s = int(rng.binomial(8, 0.3))
        visit(still, 0, s, 8 - s, version)
        s = int(rng.binomial(8, 0.5 + 0.45 * math.sin(version / 25)))
        visit(moving, 0, s, 8 - s, version)
    assert fast_weight(still, 800) < 0.2
    assert fast_weight(moving, 800) > 0.95


# Change points


def test_a_visit_that_the_prior_explains_better_makes_the_prompt_start_anew() -> None:
    e = estimates(change_point=3.0)
    for version in range(4):
        visit(e, 0, 0, 8, version)
    assert (e.change_points, e.evidence(0)) == (0, (0, 32))
    visit(e, 0, 7, 1, version=4)
    assert (e.change_points, e.evidence(0)) == (1, (7, 1))
    assert counts(e, 4) == [7.5, 1.5, 7.5, 1.5]
    assert fast_weight(e, 4) == 0.5
    assert e.visits(FIRST).tolist() == [5]


@pytest.mark.parametrize(("slack", "change_points"), [(-1e-6, 1), (1e-6, 0)])
def test_the_surprise_is_the_log_bayes_factor_of_both_speeds_together_against_the_prior(
    slack: float, change_points: int
) -> None:
    known = estimates()
    for version, s in ((0, 4), (10, 2), (20, 1)):
        visit(known, 0, s, 8 - s, version)
    fast_a, fast_b, slow_a, slow_b = counts(known, 25)
    weight = fast_weight(known, 25)
    likelihood = weight * math.exp(log_marginal(fast_a, fast_b, 8, 0))
    likelihood += (1 - weight) * math.exp(log_marginal(slow_a, slow_b, 8, 0))
    surprise = log_marginal(0.5, 0.5, 8, 0) - math.log(likelihood)
    assert surprise > 3

    e = estimates(change_point=surprise + slack)
    for version, s in ((0, 4), (10, 2), (20, 1), (25, 8)):
        visit(e, 0, s, 8 - s, version)
    assert e.change_points == change_points


@pytest.mark.parametrize(("change_point", "n"), [(0.0, 8), (3.0, 3), (100.0, 8)])
def test_no_change_point_is_seen_if_switched_off_or_on_few_rollouts_or_little_surprise(
    change_point: float, n: int
) -> None:
    e = estimates(change_point=change_point)
    visit(e, 0, 0, 200)
    visit(e, 0, n, 0)
    assert (e.change_points, e.evidence(0)) == (0, (n, 200))


def test_rates_that_stay_seldom_pass_for_a_change() -> None:
    rng = np.random.default_rng(1)
    e = estimates(200, change_point=3.0)
    rates = rng.beta(0.5, 0.8, 200)
    for version in range(20):
        for prompt, s in enumerate(rng.binomial(8, rates).tolist()):
            visit(e, prompt, s, 8 - s, version)
    assert e.change_points < 20 * 200 * 0.005


def test_what_is_known_of_energies_and_cost_survives_a_change_point() -> None:
    e = estimates(2, change_point=3.0)
    visit(e, 0, 0, 100, tokens=900)
    visit(e, 1, 0, 100, tokens=100)
    e.observe_energies(0, [(True, 900, 9000.0)])
    visit(e, 0, 8, 0, tokens=900)
    assert e.change_points == 1
    assert e.costs(FIRST)[0] > 800
    assert e.energies(FIRST)[0][0] > 800


# The prior


def test_the_prior_is_learned_from_visits_and_changes_what_is_believed_of_every_prompt() -> None:
    rng = np.random.default_rng(2)
    learning, fixed = estimates(513, learn_prior=True), estimates(513)
    rates = rng.beta(2, 5, 512)
    for version in range(3):
        for prompt, s in enumerate(rng.binomial(8, rates).tolist()):
            visit(learning, prompt, s, 8 - s, version)
            visit(fixed, prompt, s, 8 - s, version)
    unseen = np.array([512])
    assert float(learning.posterior(unseen, 3).mean()[0]) == pytest.approx(2 / 7, abs=0.05)
    assert 4 < learning.prior.a + learning.prior.b < 12
    assert (fixed.prior.a, fixed.prior.b) == (0.5, 0.5)


def test_the_prior_learns_from_a_visit_given_the_slow_counts_before_it() -> None:
    e, prior = estimates(learn_prior=True), OnlinePrior(0.5, 0.5)
    visit(e, 0, 3, 5, version=0)
    prior.observe(3, 5)
    visit(e, 0, 2, 6, version=50)
    keep = math.exp(-50 / 100)
    prior.observe(2, 6, 3 * keep, 5 * keep)
    assert (e.prior.a, e.prior.b) == (prior.a, prior.b)


# Evidence


def test_evidence_is_raw_and_starts_anew_on_request() -> None:
    e = estimates()
    visit(e, 0, 1, 7, version=0)
    visit(e, 0, 0, 8, version=1000)
    assert e.evidence(0) == (1, 15)
    e.forget_evidence(0)
    assert e.evidence(0) == (0, 0)
    assert interval(*e.evidence(0), alpha=0.05) == (0, 1)
    assert counts(e, 1000)[1] > 8


# Cost


def test_cost_is_tokens_per_rollout_shrunk_to_the_mean_of_all() -> None:
    e = estimates(3)
    visit(e, 0, 1, 1, tokens=30)
    visit(e, 1, 4, 4, tokens=150)
    mean = (2 * 30 * (1 - 1 / 1024) + 8 * 150) / (2 * (1 - 1 / 1024) + 8)
    expected = [(2 * mean + 60) / 4, (2 * mean + 1200) / 10, mean]
    assert e.costs(np.array([0, 1, 2])).tolist() == pytest.approx(expected)


def test_cost_before_anything_is_half_the_cap_or_1() -> None:
    assert estimates(2).costs(np.array([0, 1])).tolist() == [1, 1]
    assert estimates(max_tokens=4096).costs(FIRST).tolist() == [2048]


def test_old_lengths_are_forgotten_with_the_slow_memory() -> None:
    e = estimates()
    visit(e, 0, 500, 500, version=0, tokens=100)
    visit(e, 0, 500, 500, version=1000, tokens=300)  # ten memories later
    assert float(e.costs(FIRST)[0]) == pytest.approx(300, rel=0.01)


def test_cancelled_rollouts_count_for_the_tokens_they_were_seen_to_last() -> None:
    """Exponential lengths of mean 400, cancelled at 100: the mean of the completed ones would be about 47."""
    rng = np.random.default_rng(3)
    lengths = np.ceil(rng.exponential(400, (500, 16)))
    e = estimates()
    for row in lengths:
        done = int((row <= 100).sum())
        e.observe(0, successes=done, failures=0, tokens=int(np.minimum(row, 100).sum()), completed=done, version=0)
    assert float(e.costs(FIRST)[0]) == pytest.approx(400, rel=0.15)


def test_cost_never_exceeds_the_cap() -> None:
    e = estimates(max_tokens=1000)
    e.observe(0, successes=0, failures=1, tokens=8000, completed=1, version=0)
    assert e.costs(FIRST).tolist() == [1000]


# Energies


def test_before_any_energy_is_observed_both_classes_have_the_expected_tokens() -> None:
    e = estimates(2)
    visit(e, 0, 4, 4, tokens=200)
    accepted, rejected = e.energies(np.array([0, 1]))
    assert accepted.tolist() == rejected.tolist() == pytest.approx(e.costs(np.array([0, 1])).tolist())


def test_a_prompt_with_stronger_gradients_than_its_length_explains_is_told_apart() -> None:
    rng = np.random.default_rng(4)
    e = estimates(40)
    factor = np.where(np.arange(40) < 20, 1.0, 4.0)
    for _ in range(64):
        for prompt in range(40):
            visit(e, prompt, 1, 1, tokens=500)
            noise = rng.lognormal(-0.125, 0.5, 2)
            e.observe_energies(prompt, [(True, 400, float(3 * 400 * factor[prompt] * noise[0]))])
            e.observe_energies(prompt, [(False, 600, float(600 * noise[1]))])
    accepted, rejected = e.energies(np.arange(40))
    assert accepted / (1200 * factor) == pytest.approx(np.ones(40), abs=0.45)  # 64 rollouts of relative sd .53
    assert rejected == pytest.approx(np.full(40, 600.0), rel=0.45)


def test_the_energies_of_a_few_rollouts_are_shrunk_to_what_their_lengths_predict() -> None:
    e = estimates(100)
    for prompt in range(100):
        visit(e, prompt, 1, 1, tokens=500)
        e.observe_energies(prompt, [(True, 500, 500.0)])
    e.observe_energies(0, [(True, 500, 10 * 500.0)])
    usual, strong = e.energies(np.array([1, 0]))[0].tolist()
    assert usual == pytest.approx(500, rel=0.1)
    ratio = (2 + 1 + 10) / (2 + 2)  # the prompt's, shrunk to 1 by two rollouts
    assert strong == pytest.approx(500 * (8 * ratio + 1 + 10) / (8 + 2), rel=0.1)


def test_old_energies_are_forgotten_with_the_slow_memory() -> None:
    e = estimates(2)
    for prompt, energy in ((0, 2000.0), (1, 500.0)):
        visit(e, prompt, 50, 50, tokens=500)
        for _ in range(100):
            e.observe_energies(prompt, [(True, 500, energy)])
    before = e.energies(np.array([0, 1]))[0]
    for prompt in (0, 1):
        visit(e, prompt, 50, 50, tokens=500, version=1000)  # ten memories later
    after = e.energies(np.array([0, 1]))[0]
    assert before[0] / before[1] > 3.5
    assert after[0] / after[1] < 1.02


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10**5), st.floats(0, 1e12)), max_size=20), st.integers(0, 8))
def test_energies_and_costs_are_positive_and_finite_whatever_happens(
    rollouts: list[tuple[bool, int, float]], completed: int
) -> None:
    e = estimates(2)
    e.observe(0, successes=completed, failures=0, tokens=50 * completed, completed=completed, version=0)
    for success, tokens, energy in rollouts:
        e.observe_energies(0, [(success, tokens, energy)])
    for values in (*e.energies(np.array([0, 1])), e.costs(np.array([0, 1]))):
        assert bool(np.all((values > 0) & np.isfinite(values)))


# Rows


def test_new_prompts_leave_the_old_ones_as_they_were() -> None:
    e = estimates()
    visit(e, 0, 1, 0, version=2)
    for _ in range(100):
        e.grow(1)
    assert counts(e, 2) == [1.5, 0.5, 1.5, 0.5]
    assert counts(e, 2, prompt=100) == [0.5, 0.5, 0.5, 0.5]
    assert e.visits(np.arange(101)).tolist() == [1] + [0] * 100
    assert e.last_version(np.arange(101)).tolist() == [2] + [-1] * 100


def test_a_row_that_is_used_again_knows_nothing_of_its_former_prompt() -> None:
    e, untouched = estimates(2), estimates(2)
    visit(e, 0, 3, 5, version=9)
    e.observe_energies(0, [(True, 100, 1e4)])
    e.reset(0)
    assert row(e, 0) == row(untouched, 0)
    assert row(e, 0) == row(e, 1)


def row(e: Estimates, prompt: int) -> list[bytes]:
    p: Posterior = e.posterior(np.array([prompt]), 9)
    arrays = (p.fast_a, p.slow_a, p.fast_b, p.slow_b, p.fast_weight, e.visits(np.array([prompt])))
    return [array.tobytes() for array in arrays] + [bytes(e.evidence(prompt))]


# Saving


def busy() -> Estimates:
    e = estimates(3, learn_prior=True, change_point=3.0)
    rng = np.random.default_rng(5)
    for version in range(40):
        s = int(rng.binomial(8, 0.2 if version < 20 else 0.9))
        visit(e, version % 2, s, 8 - s, version)
        e.observe_energies(version % 2, [(version % 3 == 0, 100 + version, 30.0 + version)])
    assert e.change_points > 0
    return e


def test_saved_and_loaded_estimates_go_on_to_the_same_bits() -> None:
    e, loaded = busy(), estimates(3, learn_prior=True, change_point=3.0)
    loaded.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(e.state_dict())))
    assert loaded.state_dict() == e.state_dict()
    for each in (e, loaded):
        visit(each, 1, 3, 5, version=60)
        each.observe_energies(2, [(False, 77, 7.0)])
        each.grow(5)
    assert loaded.state_dict() == e.state_dict()
    everyone = np.arange(8)
    assert loaded.posterior(everyone, 70).mean().tobytes() == e.posterior(everyone, 70).mean().tobytes()
    assert loaded.energies(everyone)[1].tobytes() == e.energies(everyone)[1].tobytes()


def test_a_prompt_takes_at_most_250_bytes() -> None:
    assert len(estimates(1000).state_dict()["table"]) <= 250 * 1000


def test_the_state_of_other_prompts_is_refused() -> None:
    e = busy()
    before = e.state_dict()
    with pytest.raises(ValueError, match="the state holds 4 prompts, this allocator 3"):
        e.load_state_dict(estimates(4).state_dict())
    with pytest.raises(ValueError, match="allocator 3"):
        e.load_state_dict(before | {"table": bytes(16)})
    assert e.state_dict() == before
