"""The simulator's world and its figures against closed forms, with groups made by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.policies import Coefficient
from gvm_stream.allocator.types import ClosedGroup, Member
from gvm_stream.simulate.drive import Step
from gvm_stream.simulate.measure import BINS, Measured, measure, oracle_over_uniform
from gvm_stream.simulate.world import World, WorldSettings

ROLLOUTS = 6


def rloo(rewards: Floats) -> Floats:
    return np.asarray((rewards - rewards.mean()) / (len(rewards) - 1))


def raft(rewards: Floats) -> Floats:
    return np.asarray(rewards / max(1, rewards.sum()))


ESTIMATORS: dict[Coefficient, Callable[[Floats], Floats]] = {"rloo": rloo, "raft": raft}


def uniform_steps(world: World, steps: int, rollouts: int = ROLLOUTS, weight: float = 1.0) -> list[Step]:
    """Batches of the same number of rollouts for every prompt."""
    estimate = ESTIMATORS[world.settings.coefficient]
    made = []
    for number in range(steps):
        groups: list[ClosedGroup] = []
        correct: dict[int, bool] = {}
        for i in range(world.settings.prompts):
            drawn = [world.rollout(i, number) for _ in range(rollouts)]
            coefficients = estimate(np.array([float(one.accepted) for one in drawn]))
            first = i * rollouts
            correct |= {first + j: one.correct for j, one in enumerate(drawn)}
            members = tuple(
                Member(
                    work=first + j,
                    index=j,
                    reward=float(one.accepted),
                    tokens=one.tokens,
                    oldest_version=number,
                    coefficient=float(c),
                )
                for j, (one, c) in enumerate(zip(drawn, coefficients, strict=True))
            )
            groups.append(group(i, members, weight))
        made.append(Step(number, number, tuple(groups), correct, (number + 1) * 100 * world.settings.prompts))
    return made


def group(prompt: int, members: tuple[Member, ...], weight: float) -> ClosedGroup:
    return ClosedGroup(
        group=prompt,
        prompt=str(prompt),
        step=0,
        planned=len(members),
        weight=weight,
        prior=(1.0, 1.0),
        members=members,
        successes=0,
        failures=0,
        versions=(0, 0),
        tokens=0,
        shadow=False,
        exit="all_ended",
        reason="",
    )


def world_of(coefficient: Coefficient, **settings: float) -> World:
    return World(WorldSettings(prompts=40, coefficient=coefficient, **settings), seed=3)  # type: ignore[arg-type]


def assert_mean(samples: Floats, expected: float) -> None:
    """The mean of independent samples is as expected, to 5 standard errors."""
    error = samples.std(ddof=1) / len(samples) ** 0.5
    assert abs(samples.mean() - expected) < 5 * error
    assert error < 0.2 * abs(expected)  # or the test would say nothing


def errors_by_step(measured: Measured) -> Floats:
    return np.asarray((measured.noise + measured.deviation**2).mean(1))


def test_the_measured_error_of_leave_one_out_is_the_variance_of_its_u_statistic() -> None:
    """Kernel (r1 - r2)(score1 - score2)/2, hence 2 (2 (n - 2) zeta1 + zeta2) / (n (n - 1)) (Hoeffding 1948)."""
    world = world_of("rloo", signal=0.6)
    p, energy = world.truth(0).acceptance, world.energy
    q, delta2, n = p * (1 - p), 0.6 * energy, ROLLOUTS
    zeta1 = (q * energy - q**2 * delta2) / 4
    zeta2 = q * (energy + q * delta2) - q**2 * delta2
    exact = 2 * (2 * (n - 2) * zeta1 + zeta2) / (n * (n - 1))
    assert_mean(errors_by_step(measure(world, uniform_steps(world, 300))), exact.mean())


def test_the_measured_error_of_raft_is_its_risk_with_few_rollouts() -> None:
    """sigma+^2 E[1/k; k >= 1] + ||mu+||^2 (1-p)^n with k accepted of n."""
    world = world_of("raft")
    p, n = world.truth(0).acceptance, ROLLOUTS
    chances = np.array([binomial(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)])
    exact = world.energy * (0.7 * sum(chances[k] / k for k in range(1, n + 1)) + 0.3 * chances[0])
    assert_mean(errors_by_step(measure(world, uniform_steps(world, 300))), exact.mean())


def binomial(n: int, k: int) -> float:
    return float(np.prod([(n - i) / (i + 1) for i in range(k)]))


def test_the_bias_of_raft_is_what_prompts_without_an_accepted_rollout_leave_out() -> None:
    world = world_of("raft")
    exact = 0.3 * world.energy * (1 - world.truth(0).acceptance) ** (2 * ROLLOUTS)
    pieces = [measure(world, uniform_steps(world, 4)).bias_squared for _ in range(60)]
    assert_mean(np.array(pieces), exact.mean())


def test_leave_one_out_has_no_bias() -> None:
    world = world_of("rloo")
    biases = np.array([measure(world, uniform_steps(world, 4)).bias_squared for _ in range(60)])
    assert abs(biases.mean()) < 5 * biases.std(ddof=1) / len(biases) ** 0.5
    scale = (world.truth(0).target ** 2).mean()
    assert biases.std(ddof=1) / len(biases) ** 0.5 < 0.1 * scale


def test_a_policy_that_reweights_prompts_is_charged_for_it() -> None:
    world = world_of("rloo")
    pieces = [measure(world, uniform_steps(world, 4, weight=3.0)).bias_squared for _ in range(60)]
    assert_mean(np.array(pieces), 4 * (world.truth(0).target ** 2).mean())


def test_a_wrong_response_that_the_verifier_took_counts_as_wrong() -> None:
    """With a share e of verdicts flipped leave-one-out estimates (1 - 2e) grad p."""
    world = world_of("rloo", verifier_noise=0.4)
    pieces = [measure(world, uniform_steps(world, 4)).bias_squared for _ in range(60)]
    assert_mean(np.array(pieces), 0.8**2 * (world.truth(0).target ** 2).mean())


def test_a_prompt_without_a_visit_counts_as_an_estimate_of_0() -> None:
    world = world_of("raft")
    nothing = Step(0, 0, (), {}, 4000)
    measured = measure(world, [nothing, nothing])
    target2 = (world.truth(0).target ** 2).mean()
    assert measured.error == pytest.approx(target2)
    assert measured.bias_squared == pytest.approx(target2)
    assert measured.bound == pytest.approx(world.truth(0).variance.mean())
    assert not measured.resolved.any()


def test_averaging_steps_reduces_noise_but_not_bias() -> None:
    world = world_of("raft")
    measured = measure(world, uniform_steps(world, 200))
    so_far = measured.error_so_far()
    assert so_far[0] == pytest.approx(errors_by_step(measured)[0])
    bias2 = measured.bias_squared
    assert so_far[-1] == pytest.approx(bias2 + (measured.error - bias2) / 200)
    assert measured.tokens == pytest.approx(100)


def test_a_single_step_does_not_tell_its_bias() -> None:
    world = world_of("raft")
    assert np.isnan(measure(world, uniform_steps(world, 1)).bias_squared)


def test_the_oracle_without_limits_is_the_square_root_rule() -> None:
    world = world_of("raft", cost_sd=0.7, length_bias=0.5)
    truth = world.truth(0)
    exact = np.sqrt(truth.variance * truth.cost).mean() ** 2 / (truth.variance.mean() * truth.cost.mean())
    assert oracle_over_uniform(world, 1e6, 1, 10**9) == pytest.approx(exact, rel=1e-9)


@given(st.sampled_from(["rloo", "raft"]), st.integers(2, 5), st.integers(6, 40))
def test_the_oracle_is_no_worse_than_uniform(coefficient: Coefficient, least: int, most: int) -> None:
    world = world_of(coefficient)
    gain = oracle_over_uniform(world, (least + most) / 2, least, most)
    assert 0 < gain < 1
    assert oracle_over_uniform(world, (least + most) / 2, 1 + world.offset, 100) <= gain + 1e-9


def test_the_bound_of_raft_may_be_taken_without_damping() -> None:
    damped, plain = world_of("raft").truth(0), world_of("raft", damping=0.0).truth(0)
    energy = world_of("raft").energy
    assert np.allclose(plain.variance, energy / plain.acceptance)
    assert np.allclose(damped.variance, energy / (damped.acceptance + 1e-3 / damped.acceptance))


def test_resolved_shares_are_kept_apart_by_difficulty() -> None:
    world = world_of("raft")
    measured = measure(world, uniform_steps(world, 200))
    shares = measured.resolved_by_difficulty()
    p = world.truth(0).acceptance
    for low, high, share in zip(BINS[:-1], BINS[1:], shares, strict=True):
        of = (p >= low) & (p < high)
        chance = 1 - (1 - p[of]) ** ROLLOUTS
        assert abs(share - chance.mean()) < 5 * (chance * (1 - chance)).sum() ** 0.5 / of.sum() / 200**0.5 + 1e-12


# --- the world ---


@pytest.mark.parametrize("coefficient", ["rloo", "raft"])
def test_scores_have_mean_0_where_energies_allow_it(coefficient: Coefficient) -> None:
    truth = world_of(coefficient).truth(0)
    p = truth.acceptance
    mean = p * truth.mean_success + (1 - p) * truth.mean_failure
    allowed = p <= (1 if coefficient == "rloo" else 0.5)
    assert np.allclose(mean[allowed], 0)
    assert min(truth.noise_success.min(), truth.noise_failure.min()) > 0


def test_rollouts_have_the_acceptance_length_and_energy_of_their_prompt() -> None:
    world = world_of("rloo", cost_sd=0.5, length_bias=0.5, verifier_noise=0.1)
    p, cost = world.truth(0).acceptance[7], world.truth(0).cost[7]
    drawn = [world.rollout(7, 0) for _ in range(20_000)]
    assert_mean(np.array([float(one.correct) for one in drawn]), p)
    assert_mean(np.array([float(one.accepted) for one in drawn]), 0.8 * p + 0.1)
    assert_mean(np.array([float(one.tokens) for one in drawn]), cost)
    assert_mean(np.array([one.energy for one in drawn]), world.energy[7])


def test_flaky_prompts_are_judged_by_a_coin() -> None:
    world = world_of("rloo", flaky=0.999)
    assert_mean(np.array([float(world.rollout(0, 0).accepted) for _ in range(2000)]), 0.5)


def test_attempts_that_crash_have_got_half_way_on_average() -> None:
    world = world_of("rloo", crashes=0.5, unscorable=0.2)
    drawn = [world.rollout(0, 0) for _ in range(20_000)]
    for fault, chance in (("failed", 0.25), ("expired", 0.25), ("unscorable", 0.2)):
        assert_mean(np.array([float(one.fault == fault) for one in drawn]), chance)
    assert_mean(np.array([one.made / one.tokens for one in drawn if one.fault == "failed"]), 0.5)


def test_acceptance_rates_drift_the_same_way_whatever_is_drawn() -> None:
    one, other = world_of("rloo", drift=0.1), world_of("rloo", drift=0.1)
    one.rollout(0, 5)
    assert np.array_equal(one.truth(9).acceptance, other.truth(9).acceptance)
    moved = np.log(one.truth(100).acceptance / (1 - one.truth(100).acceptance))
    moved -= np.log(one.truth(0).acceptance / (1 - one.truth(0).acceptance))
    assert 0.5 < moved.std() < 1.5


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"prompts": 0}, "prompts = 0"),
        ({"acceptance": (0.0, 1.0)}, "acceptance"),
        ({"drift": -1.0}, "drift = -1.0"),
        ({"signal": 1.0}, "signal = 1.0"),
        ({"crashes": 0.5, "unscorable": 0.5}, "leave no rollout"),
    ],
)
def test_impossible_worlds_are_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        WorldSettings(**settings)  # type: ignore[arg-type]
