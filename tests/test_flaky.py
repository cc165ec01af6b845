"""Prompts whose verdicts cannot be trusted."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.verify.flaky import FlakyPrompt, FlakyPrompts


def test_one_text_with_two_rewards_makes_a_prompt_flaky() -> None:
    flaky = FlakyPrompts(0.5)
    for text, reward in ((1, 1.0), (2, 0.0), (1, 1.0), (1, 0.0)):
        flaky.observe("train-1", text, reward)
    assert flaky.report() == (
        FlakyPrompt(
            prompt="train-1",
            reason="the same response got a different reward once",
            scored=4,
            unscorable=0,
            disagreements=1,
        ),
    )


def test_different_texts_and_different_prompts_may_differ() -> None:
    flaky = FlakyPrompts(0.5)
    for prompt, text, reward in (("train-1", 1, 1.0), ("train-1", 2, 0.0), ("train-2", 1, 0.0)):
        flaky.observe(prompt, text, reward)
    assert flaky.report() == ()


def test_an_unscorable_rollout_does_not_disagree_with_a_scored_one_of_the_same_text() -> None:
    flaky = FlakyPrompts(0.5)
    for reward in (1.0, None, 1.0):
        flaky.observe("train-1", 1, reward)
    assert flaky.report() == ()
    flaky.observe("train-1", 1, 0.0)
    (found,) = flaky.report()
    assert (found.disagreements, found.scored, found.unscorable) == (1, 3, 1)


@pytest.mark.parametrize(
    ("rewards", "is_flaky"),
    [
        ([None, None, None], False),  # too few to tell
        ([None, None, None, None], True),
        ([None, None, 0.0, 1.0], True),
        ([None, 0.0, 0.0, 1.0], False),
        ([None, None, 0.0, 1.0, 1.0], False),
    ],
)
def test_half_of_at_least_four_rollouts_unscorable_makes_a_prompt_flaky(
    rewards: list[float | None], is_flaky: bool
) -> None:
    flaky = FlakyPrompts(0.5)
    for i, reward in enumerate(rewards):
        flaky.observe("train-1", i, reward)
    assert [found.prompt for found in flaky.report()] == ["train-1"] * is_flaky


def test_a_share_counts_as_reached_in_decimals() -> None:
    flaky = FlakyPrompts(0.7)
    for i in range(10):
        flaky.observe("train-1", i, None if i < 7 else 1.0)
    assert flaky.report()[0].reason == "7 of 10 rollouts are unscorable"


def test_both_reasons_are_given_and_the_worst_prompt_comes_first() -> None:
    flaky = FlakyPrompts(0.5)
    for prompt, rewards in (("c", [None] * 4), ("b", [None] * 5), ("a", [1.0, 0.0, None, None, None])):
        for reward in rewards:
            flaky.observe(prompt, 7, reward)
    assert [(found.prompt, found.disagreements, found.unscorable) for found in flaky.report()] == [
        ("a", 1, 3),
        ("b", 0, 5),
        ("c", 0, 4),
    ]
    assert flaky.report()[0].reason == ("the same response got a different reward once; 3 of 5 rollouts are unscorable")


def test_only_the_responses_seen_last_are_remembered() -> None:
    flaky = FlakyPrompts(0.5, responses=2)
    for text in (1, 2, 1, 3):  # b is the one not seen for longest
        flaky.observe("train-1", text, 1.0)
    flaky.observe("train-1", 2, 0.0)
    assert flaky.report() == ()
    flaky.observe("train-1", 3, 0.0)
    assert flaky.report()[0].disagreements == 1


def test_the_healthy_prompt_not_heard_of_for_longest_is_forgotten_first() -> None:
    flaky = FlakyPrompts(0.5, prompts=2)
    flaky.observe("bad", 1, 1.0)
    flaky.observe("bad", 1, 0.0)
    flaky.observe("old", 1, 1.0)
    flaky.observe("new", 1, 1.0)  # "old" goes, although "bad" is older
    flaky.observe("old", 1, 0.0)
    assert [found.prompt for found in flaky.report()] == ["bad"]


Observation = tuple[str, int, float | None]


@given(
    st.lists(
        st.tuples(st.sampled_from("pqr"), st.sampled_from([24, 25, 26]), st.sampled_from([0.0, 1.0, None])),
        max_size=60,
    )
)
def test_within_its_bounds_it_counts_what_was_observed(observations: list[Observation]) -> None:
    flaky = FlakyPrompts(0.5)
    rewards: dict[str, dict[int, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    for prompt, text, reward in observations:
        flaky.observe(prompt, text, reward)
        rewards[prompt][text].append(reward)
    for found in flaky.report():
        by_text = [[reward for reward in seen if reward is not None] for seen in rewards[found.prompt].values()]
        everything = [reward for seen in rewards[found.prompt].values() for reward in seen]
        assert found.disagreements == sum(a != b for seen in by_text for a, b in itertools.pairwise(seen))
        assert found.unscorable == everything.count(None)
        assert found.scored + found.unscorable == len(everything)
    reported = {found.prompt for found in flaky.report()}
    contradicted = {p for p, texts in rewards.items() if any({0.0, 1.0} <= set(seen) for seen in texts.values())}
    assert contradicted <= reported
