from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator.energy import MAX_RATIO, MEMORY, SHRINKAGE_RANGE, EnergyModel

classes = pytest.mark.parametrize("success", [True, False])


def predicted(model: EnergyModel, success: bool, tokens: float) -> float:
    return float(model.line(success).mean(np.array([tokens]))[0])


def teach(model: EnergyModel, success: bool, count: int, level: float, slope: float, sigma: float, seed: int) -> None:
    """Energies of mean level * tokens^slope, log-normal about it."""
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.normal(6, 0.6, count)).astype(int)
    energies = level * tokens**slope * np.exp(rng.normal(-(sigma**2) / 2, sigma, count))
    for length, energy in zip(tokens.tolist(), energies.tolist(), strict=True):
        model.observe([(success, length, energy)])


@classes
def test_before_anything_is_observed_energy_is_the_number_of_tokens(success: bool) -> None:
    assert predicted(EnergyModel(), success, 700.0) == pytest.approx(700)


@pytest.mark.parametrize("slope", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("level", [1e-4, 0.2, 1e4])
def test_it_predicts_the_mean_of_skewed_energies_by_length_whatever_their_unit(level: float, slope: float) -> None:
    model = EnergyModel()
    teach(model, True, 3 * MEMORY, level, slope, sigma=0.8, seed=0)  # the mean is 1.38 times the median
    for tokens in (200, 400, 800):
        assert predicted(model, True, tokens) == pytest.approx(level * tokens**slope, rel=0.1)


@pytest.mark.parametrize(("slope", "bounded"), [(-2.0, 0.0), (4.0, 2.0)])
def test_energy_is_taken_to_grow_with_length_but_not_faster_than_its_square(slope: float, bounded: float) -> None:
    model = EnergyModel()
    teach(model, True, 1000, 1.0, slope, sigma=0.1, seed=8)
    assert predicted(model, True, 800) / predicted(model, True, 400) == pytest.approx(2**bounded)


def test_each_class_has_a_line_of_its_own_once_it_has_been_seen() -> None:
    model = EnergyModel()
    teach(model, True, 1000, 1.0, 1.0, sigma=0.5, seed=0)
    assert predicted(model, False, 400) == pytest.approx(400, rel=0.1)
    teach(model, False, 1000, 10.0, 1.0, sigma=0.5, seed=1)
    assert predicted(model, True, 400) == pytest.approx(400, rel=0.1)
    assert predicted(model, False, 400) == pytest.approx(4000, rel=0.1)


def test_one_rollout_of_a_class_does_not_outweigh_all_of_the_other_one() -> None:
    model = EnergyModel()
    teach(model, True, 1000, 1.0, 1.0, sigma=0.5, seed=0)
    model.observe([(False, 400, 20 * 400.0)])
    assert 400 < predicted(model, False, 400) < 6 * 400


def test_responses_with_no_energy_lower_the_mean_by_their_share_only() -> None:
    model = EnergyModel()
    rng = np.random.default_rng(2)
    for i in range(2 * MEMORY):
        tokens = int(rng.integers(100, 1000))
        model.observe([(True, tokens, 0.0 if i % 10 == 0 else 2.0 * tokens)])
    assert predicted(model, True, 400) == pytest.approx(0.9 * 2 * 400, rel=0.05)


def test_the_line_follows_a_policy_whose_energies_fall() -> None:
    model = EnergyModel()
    teach(model, False, 2 * MEMORY, 1.0, 1.0, sigma=0.3, seed=3)
    teach(model, False, 6 * MEMORY, 0.1, 1.0, sigma=0.3, seed=4)
    assert predicted(model, False, 400) == pytest.approx(40, rel=0.1)


def test_an_energy_counts_as_at_most_30_times_what_was_expected_and_at_least_a_thirtieth() -> None:
    model = EnergyModel()
    teach(model, True, MEMORY, 1.0, 1.0, sigma=0.1, seed=7)
    assert model.observe([(True, 400, 1e9)])[0] == pytest.approx(MAX_RATIO * 400, rel=0.05)
    assert model.observe([(True, 400, 0.0)])[0] == pytest.approx(400 / MAX_RATIO, rel=0.05)
    assert model.observe([(True, 400, 3 * 400.0)])[0] == pytest.approx(3 * 400)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 10**6), st.just(0.0) | st.floats(1e-30, 1e30)), min_size=1, max_size=30
    )
)
@settings(max_examples=100)
def test_predictions_are_positive_and_finite_whatever_is_observed(rollouts: list[tuple[bool, int, float]]) -> None:
    model = EnergyModel()
    for success, tokens, energy in rollouts:
        assert 0 < model.observe([(success, tokens, energy)])[0] < np.inf
    for success in (True, False):
        for tokens in (1, 10**6):
            assert 0 < predicted(model, success, tokens) < np.inf


def test_one_that_was_saved_goes_on_as_if_nothing_had_happened() -> None:
    model, loaded = EnergyModel(), EnergyModel()
    teach(model, True, 10, 1.0, 1.0, sigma=0.5, seed=5)
    teach(model, False, 10, 2.0, 1.0, sigma=0.5, seed=6)
    loaded.load_state_dict(model.state_dict())
    assert loaded.observe([(True, 300, 99.0)]) == model.observe([(True, 300, 99.0)])
    assert loaded.state_dict() == model.state_dict()


def spread(model: EnergyModel, between: float, within: float, seed: int) -> None:
    """Visits of 8 rollouts to prompts whose energies differ; standard deviations of their logarithms."""
    rng = np.random.default_rng(seed)
    for _ in range(600):
        level = 300 * np.exp(between * rng.standard_normal())
        energies = level * np.exp(within * rng.standard_normal(8))
        model.observe([(i % 2 == 0, 300, float(energy)) for i, energy in enumerate(energies)])


def test_the_more_prompts_differ_and_the_less_their_rollouts_do_the_less_a_prompt_is_shrunk() -> None:
    """Log-normal: the variance within is (e^w^2 - 1) E[level^2], that between Var(level)."""
    shrinkage = {}
    for between, within in ((1.0, 0.3), (1.0, 0.8), (0.3, 0.8)):
        model = EnergyModel()
        spread(model, between, within, seed=9)
        shrinkage[between, within] = model.shrinkage
    assert shrinkage[1.0, 0.3] < shrinkage[1.0, 0.8] < shrinkage[0.3, 0.8]
    expected = (np.exp(0.8**2) - 1) * np.exp(0.3**2) / (np.exp(0.3**2) - 1)
    assert shrinkage[0.3, 0.8] == pytest.approx(expected, rel=0.4)


def test_where_prompts_do_not_differ_they_are_shrunk_as_far_as_it_goes() -> None:
    model = EnergyModel()
    spread(model, 0.0, 0.5, seed=10)
    assert model.shrinkage == SHRINKAGE_RANGE[1]
