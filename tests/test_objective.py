from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gvm_stream.config import LearnerSection
from gvm_stream.learner.advantages import rloo
from gvm_stream.learner.objective import MAX_LOG_RATIO, coefficients, token_terms


def evaluate(
    settings: LearnerSection, logprobs: list[float], behaviour: list[float], advantages: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """(term, its derivative by the token's own log-prob, clamped) of every token."""
    logp = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    terms = token_terms(
        settings, logp, torch.tensor(behaviour, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)
    )
    (gradient,) = torch.autograd.grad(terms.losses.sum(), logp)
    return terms.losses.detach(), gradient, terms.clamped


def test_policy_gradient_weighs_tokens_by_the_truncated_ratio() -> None:
    settings = LearnerSection(loss="pg", importance_cap=1.2)
    losses, gradient, _ = evaluate(settings, [-1, -2, -3], [-1.5, -2, -2], [2, 2, -1])
    weights = [1.2, 1.0, math.exp(-1)]  # the first ratio, exp(0.5), is over the cap
    np.testing.assert_allclose(losses, [-weights[0] * 2 * -1, -weights[1] * 2 * -2, -weights[2] * -1 * -3])
    np.testing.assert_allclose(gradient, [-weights[0] * 2, -weights[1] * 2, weights[2]])


def test_importance_cap_zero_means_no_weights() -> None:
    settings = LearnerSection(loss="pg", importance_cap=0)
    _, gradient, _ = evaluate(settings, [-1, -9], [-1.5, -1], [2, -1])
    assert gradient.tolist() == [-2, 1]


def test_clipped_ratio_stops_rewarding_beyond_the_clip_and_only_there() -> None:
    settings = LearnerSection(loss="ppo_clip", clip_low=0.2, clip_high=0.28)
    ratios = np.array([1.1, 1.5, 0.5, 1.1, 1.5, 0.5])
    advantages = [2.0, 2.0, 2.0, -2.0, -2.0, -2.0]
    losses, gradient, _ = evaluate(settings, np.log(ratios).tolist(), [0.0] * 6, advantages)
    np.testing.assert_allclose(losses, [-2.2, -2.56, -1.0, 2.2, 3.0, 1.6])
    np.testing.assert_allclose(gradient, [-2.2, 0, -1.0, 2.2, 3.0, 0], atol=1e-12)


@pytest.mark.parametrize("loss", ["pg", "ppo_clip"])
def test_extreme_ratios_stay_finite_and_are_counted(loss: str) -> None:
    settings = LearnerSection(loss="pg" if loss == "pg" else "ppo_clip")
    for advantage in (-1.0, 0.0, 1.0):
        logp = torch.tensor([-0.1, -95.0, -1.0], requires_grad=True)  # float32, in which exp(90) is infinite
        terms = token_terms(settings, logp, torch.tensor([-90.1, -0.1, -1.0]), torch.tensor(advantage))
        terms.losses.sum().backward()  # type: ignore[no-untyped-call]
        assert logp.grad is not None
        assert torch.isfinite(terms.losses).all()
        assert torch.isfinite(logp.grad).all()
        assert terms.clamped.tolist() == [True, True, False]
        assert terms.ratio.max() <= math.exp(MAX_LOG_RATIO) * 1.0001


@pytest.mark.parametrize("loss", ["pg", "ppo_clip"])
def test_a_log_prob_that_is_not_a_number_is_not_clamped_away(loss: str) -> None:
    settings = LearnerSection(loss="pg" if loss == "pg" else "ppo_clip")
    losses, _, _ = evaluate(settings, [math.nan], [-1.0], [1.0])
    assert losses.isnan().all()


def test_coefficients_of_sequence_aggregates_by_hand() -> None:
    weights, lengths = [1.0, 3.0], [[2, 4], [5]]
    assert coefficients("seq_sum", weights, lengths) == ((1 / 8, 1 / 8), (3 / 4,))
    assert coefficients("seq_mean", weights, lengths) == ((1 / 16, 1 / 32), (3 / 20,))


def test_token_mean_divides_by_all_tokens_of_the_batch() -> None:
    assert coefficients("token_mean", [1.0, 1.0], [[2, 4], [5]]) == ((1 / 11, 1 / 11), (1 / 11,))
    assert coefficients("token_mean", [1.0, 3.0], [[2, 4], [5]]) == ((1 / 21, 1 / 21), (3 / 21,))


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10), st.lists(st.integers(1, 50), min_size=1, max_size=6)), min_size=1, max_size=6
    )
)
def test_the_weight_of_a_prompt_never_depends_on_its_number_of_rollouts(groups: list[tuple[float, list[int]]]) -> None:
    weights, lengths = [w for w, _ in groups], [row for _, row in groups]
    shares = np.array(weights) / sum(weights)
    by_rollout = [sum(row) for row in coefficients("seq_sum", weights, lengths)]
    np.testing.assert_allclose(by_rollout, shares)
    mean = coefficients("seq_mean", weights, lengths)
    by_token = [sum(c * t for c, t in zip(row, ts, strict=True)) for row, ts in zip(mean, lengths, strict=True)]
    np.testing.assert_allclose(by_token, shares)


def test_rloo_with_uneven_groups_estimates_the_policy_gradient_without_bias() -> None:
    """One-token responses of a 5-action softmax: the gradient of J = sum_a pi_a r_a is pi_a (r_a - J)."""
    rng = np.random.default_rng(20)
    theta = np.array([0.3, -0.5, 1.0, 0.0, -1.0])
    reward = np.array([1.0, 0.0, 0.0, 1.0, 0.3])
    pi = np.exp(theta) / np.exp(theta).sum()
    truth = pi * (reward - pi @ reward)

    groups = [rng.choice(5, size=2 + i % 5, p=pi) for i in range(6000)]
    actions = torch.from_numpy(np.concatenate(groups))
    advantages = torch.from_numpy(np.concatenate([rloo(reward[g]) for g in groups]))
    shares = coefficients("seq_sum", [1.0] * len(groups), [[1] * len(g) for g in groups])
    logits = torch.tensor(theta, requires_grad=True)
    logp = torch.log_softmax(logits, 0)[actions]
    terms = token_terms(LearnerSection(), logp, logp.detach(), advantages)
    (gradient,) = torch.autograd.grad((terms.losses * torch.tensor([c for row in shares for c in row])).sum(), logits)

    per_group = [rloo(reward[g]) @ (np.eye(5)[g] - pi) / len(g) for g in groups]
    standard_error = np.std(per_group, axis=0) / math.sqrt(len(groups))
    assert (standard_error < np.abs(truth).max() / 20).all()  # sharp enough to see the 1 - 1/n of a plain mean baseline
    assert (np.abs(-gradient.numpy() - truth) < 4 * standard_error).all()
