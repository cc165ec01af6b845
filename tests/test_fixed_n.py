"""Equal groups: what a trainer with a fixed group size gets, and that it trains on the same objective."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gvm_stream.allocator import Log, Own, Rollouts, Settings, Tokens
from gvm_stream.allocator.arrays import Floats, Ints
from gvm_stream.allocator.fixed_n import FixedGroups

PLANNED = ("uniform", "gvm", "neyman", "rollout_gdro", "knapsack", "vade")


BASE = Settings(prompts_per_step=6, shadow_uniform=0.0, max_lag=0)
UNIFORM = replace(BASE, policy="uniform")


def fixed(n: int = 4, settings: Settings = BASE, *, mean: int = 2, prompts: int = 12, seed: int = 0) -> FixedGroups:
    """On average `mean` groups a prompt, at most 6."""
    budget = Rollouts(rollouts=n * mean)
    made = replace(settings, budget=budget, min_rollouts=n, max_rollouts=n * 6)
    return FixedGroups(made, n, [f"prompt-{i}" for i in range(prompts)], seed=seed)


def rate(prompt: str) -> float:
    return (int(prompt.split("-")[1]) % 6) / 5


def outcomes(groups: FixedGroups, prompts: list[str], rng: np.random.Generator) -> tuple[Floats, Ints]:
    shape = (len(prompts), groups.n)
    rewards = (rng.random(shape) < np.array([rate(prompt) for prompt in prompts])[:, None]).astype(np.float64)
    return rewards, rng.integers(1, 50, shape)


def run(groups: FixedGroups, steps: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        groups.finish(*outcomes(groups, groups.step(), rng))


def copy(groups: FixedGroups) -> FixedGroups:
    """A new one with the state of this one."""
    allocator = groups.allocator
    other = FixedGroups(allocator.settings, groups.n, allocator.roster.ids, seed=0)
    other.allocator.load_state_dict(allocator.state_dict())
    other.allocator.redo_unsettled()
    return other


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PLANNED), st.integers(2, 5), st.integers(1, 3), st.sampled_from([0.0, 0.5]), st.integers(0, 1000)
)
def test_every_step_has_as_many_groups_and_every_prompt_a_multiple_of_n(
    policy: str, n: int, mean: int, shadow: float, seed: int
) -> None:
    groups = fixed(n, replace(BASE, policy=policy, shadow_uniform=shadow), mean=mean, seed=seed)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        prompts = groups.step()
        times = Counter(prompts)
        assert len(prompts) == groups.groups_per_step == 6 * mean
        assert len(times) == 6
        assert max(times.values()) <= 6
        assert [prompt for prompt, _ in itertools.groupby(prompts)] == list(times)  # side by side
        rewards, tokens = outcomes(groups, prompts, rng)
        groups.finish(rewards, tokens)
    assert groups.allocator.account.generated > 0
    assert groups.allocator.ledger.conserved()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["neyman", "gvm", "knapsack"]),
    st.integers(2, 5),
    st.integers(0, 1000),
    st.sampled_from([Own(), Log()]),
)
def test_the_number_of_groups_never_weights_a_prompt(policy: str, n: int, seed: int, objective: Own | Log) -> None:
    groups = fixed(n, replace(BASE, policy=policy, objective=objective), seed=seed)
    run(groups, 4, seed)
    prompts = groups.step()
    weight = {prompt: groups.allocator.explain(prompt).weight for prompt in prompts}
    weights = groups.finish(*outcomes(groups, prompts, np.random.default_rng(seed))).weights
    assert weights.mean() == pytest.approx(np.mean(list(weight.values())))
    for prompt in set(prompts):
        of_prompt = weights[[other == prompt for other in prompts]]
        assert np.ptp(of_prompt) == 0
        assert of_prompt.sum() == pytest.approx(2 * weight[prompt])  # 2 groups a prompt on average


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_either_way_of_training_has_the_gradient_of_the_mean_reward(p: float) -> None:
    """By enumeration. The policy answers right with probability p, so grad log pi is 1 - p or -p by its logit and the
    gradient of the mean reward is p(1-p); one prompt has three groups of two, the other one. All other rewards are 0.
    """
    start = fixed(2, replace(BASE, prompts_per_step=2), prompts=2)
    for _ in range(20):
        prompts = start.step()
        mixed = np.array([prompt == "prompt-0" for prompt in prompts])[:, None]
        start.finish(np.where(mixed, np.array([0.0, 1.0]), 1.0), np.full((4, 2), 10))
    times = Counter(copy(start).step())
    assert sorted(times.values()) == [1, 3]
    for prompt, k in times.items():
        by_advantages = by_weights = 0.0
        for answers in itertools.product((0.0, 1.0), repeat=2 * k):
            groups = copy(start)
            mine = [other == prompt for other in groups.step()]
            rewards = np.zeros((4, 2))
            rewards[mine] = np.reshape(answers, (k, 2))
            finished = groups.finish(rewards, np.full((4, 2), 10))
            chance = np.prod(np.where(np.array(answers) > 0, p, 1 - p))
            score = rewards - p
            of_groups = ((rewards - rewards[:, ::-1]) * score).mean(axis=1)  # leave-one-out within each group
            by_advantages += chance * (finished.advantages * score)[mine].sum() / rewards.size * 2
            by_weights += chance * (finished.weights * of_groups)[mine].sum() / len(rewards) * 2
        assert by_advantages == pytest.approx(p * (1 - p), rel=1e-12)
        assert by_weights == pytest.approx(p * (1 - p), rel=1e-12)


def test_prompts_with_more_to_learn_get_more_groups() -> None:
    groups = fixed(prompts=6)
    run(groups, 30)
    times = Counter(groups.step())
    assert times["prompt-0"] == times["prompt-5"] == 1  # never and always right
    assert times["prompt-2"] + times["prompt-3"] > 4


def test_a_rollout_without_a_verdict_is_worth_nothing_and_teaches_nothing() -> None:
    groups = fixed(settings=UNIFORM, prompts=6)
    prompts = groups.step()
    rewards = np.tile([0.0, 1.0, 1.0, np.nan], (12, 1))
    rewards[:2] = np.nan
    advantages, weights = groups.finish(rewards, np.full((12, 4), 10))
    assert np.array_equal(advantages[2:] != 0, ~np.isnan(rewards[2:]))
    assert not advantages[:2].any()
    assert weights.tolist() == [0.0] * 2 + [1.0] * 10
    assert groups.allocator.explain(prompts[0]).visits == 0


def test_sampling_may_be_max_lag_steps_ahead_and_finishes_in_order() -> None:
    groups = fixed(settings=replace(UNIFORM, max_lag=1))
    first, second = groups.step(), groups.step()
    assert set(first).isdisjoint(second)
    with pytest.raises(ValueError, match="2 steps are unfinished, max_lag = 1"):
        groups.step()
    rewards = np.tile([0.0, 0.0, 0.0, 1.0], (12, 1))
    groups.finish(rewards, np.full((12, 4), 10))
    assert {groups.allocator.explain(prompt).visits for prompt in first} == {1}
    assert {groups.allocator.explain(prompt).visits for prompt in second} == {0}
    assert len(groups.step()) == 12


def test_it_ends_after_the_last_step() -> None:
    groups = fixed(settings=replace(BASE, steps=2))
    run(groups, 2)
    assert groups.step() == []
    with pytest.raises(ValueError, match="no step to finish"):
        groups.finish(np.zeros((12, 4)), np.zeros((12, 4), np.int64))


def test_a_loaded_state_begins_with_the_step_that_was_not_finished() -> None:
    groups = fixed()
    run(groups, 3)
    prompts = groups.step()
    assert copy(groups).step() == prompts


@pytest.mark.parametrize(
    ("rewards", "tokens", "message"),
    [
        (np.zeros((12, 3)), np.zeros((12, 4), np.int64), r"rewards are \(12, 3\) and tokens \(12, 4\), expected"),
        (np.full((12, 4), np.inf), np.zeros((12, 4), np.int64), "finite number from -inf to inf"),
        (np.zeros((12, 4)), np.full((12, 4), -1), "tokens must be an integer of at least 0"),
        (np.zeros((12, 4)), cast("Ints", np.ones((12, 4))), "tokens must be an integer of at least 0"),
    ],
)
def test_bad_outcomes_change_nothing(rewards: Floats, tokens: Ints, message: str) -> None:
    groups = fixed()
    groups.step()
    before = msgspec.msgpack.encode(groups.allocator.state_dict())
    with pytest.raises(ValueError, match=message):
        groups.finish(rewards, tokens)
    assert msgspec.msgpack.encode(groups.allocator.state_dict()) == before
    groups.finish(np.zeros((12, 4)), np.zeros((12, 4), np.int64))


@pytest.mark.parametrize(
    ("n", "settings", "message"),
    [
        (0, Settings(), "a group of 0 rollouts"),
        (3, Settings(min_rollouts=3), "budget.rollouts = 8 must be a multiple of the group size 3"),
        (4, Settings(), "min_rollouts = 2 must be a multiple of the group size 4"),
        (2, Settings(budget=Tokens(rollouts=8, tokens=100)), "need a budget in rollouts"),
        (2, Settings(prompts_per_step=13), "12 prompts are fewer than prompts_per_step = 13"),
        (2, replace(BASE, design="sequential"), "changes its plan within a step"),
        (2, replace(BASE, policy="dapo"), "policy 'dapo' changes its plan within a step"),
    ],
)
def test_settings_that_make_no_equal_groups_are_refused(n: int, settings: Settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FixedGroups(settings, n, [f"prompt-{i}" for i in range(12)], seed=0)


def test_too_few_prompts_to_visit_are_reported() -> None:
    groups = fixed(prompts=6)
    groups.allocator.quarantine("prompt-3")
    with pytest.raises(ValueError, match="only 5 of 6 prompts can be visited"):
        groups.step()
