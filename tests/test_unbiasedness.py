"""The estimators have the mean they promise: Monte Carlo with a softmax policy whose gradient of p is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gvm_stream.allocator import coefficients, stopping
from gvm_stream.allocator.arrays import Floats, Ints
from gvm_stream.allocator.stopping import PosteriorRule, Rule, StoppingRule, implied_objective

BALANCED = Rule(8, 4, 2, 2)
NEYMAN = PosteriorRule(4, 8, 0.7, 1.9, 4e-4)

VISITS = 10_000

Estimator = Callable[[Floats, StoppingRule], Floats]
"""(rewards in launch order, rule that ended the visit) -> coefficients."""


class Bandit:
    """A softmax policy on 40 responses, 12 of them right, which have a share p of its probability."""

    def __init__(self, p: float) -> None:
        self.rng = np.random.default_rng(7)
        self.right = np.arange(40) < 12
        weights = np.exp(self.rng.normal(size=40))
        weights[self.right] *= p / weights[self.right].sum()
        weights[~self.right] *= (1 - p) / weights[~self.right].sum()
        self.chances: Floats = weights
        self.gradient: Floats = weights * (self.right - p)
        """Of p with respect to the logits [40]."""

    def sample(self, count: int) -> Ints:
        """Responses [VISITS, count]."""
        return self.rng.choice(40, size=(VISITS, count), p=self.chances)

    def visits(self, rule: StoppingRule) -> list[Ints]:
        """Responses of every visit in launch order, until the rule stops it."""
        responses = self.sample(rule.round_size * rule.max_rounds)
        successes = self.right[responses].cumsum(axis=1).tolist()

        def end(won: list[int]) -> int:
            ns = range(rule.round_size, len(won) + 1, rule.round_size)
            return next(n for n in ns if rule.stops((won[n - 1], n - won[n - 1])))

        return [y[: end(won)] for y, won in zip(responses, successes, strict=True)]

    def estimates(self, responses: list[Ints], estimator: Estimator, rule: StoppingRule) -> Floats:
        """Gradient estimate of every visit [VISITS, 40]."""
        c = np.concatenate([estimator(self.right[y].astype(np.float64), rule) for y in responses])
        visit = np.repeat(np.arange(VISITS), [len(y) for y in responses])
        cell = visit * 40 + np.concatenate(responses)
        total = np.bincount(visit, weights=c, minlength=VISITS)
        taken = np.bincount(cell, weights=c, minlength=VISITS * 40)
        return taken.reshape(VISITS, 40) - total[:, None] * self.chances  # grad log pi(y) = e_y - chances

    def along_gradient(self, estimates: Floats) -> tuple[float, float]:
        """Mean length of the estimates along the gradient, in units of its own, and the standard error."""
        lengths = estimates @ self.gradient / (self.gradient @ self.gradient)
        return float(lengths.mean()), float(lengths.std() / VISITS**0.5)

    def has_mean(self, estimates: Floats, factor: float = 1.0) -> bool:
        """True if the mean is factor x gradient within 5 standard errors, by coordinate and along the gradient."""
        error = np.abs(estimates.mean(axis=0) - factor * self.gradient)
        length, standard_error = self.along_gradient(estimates)
        within = error < 5 * estimates.std(axis=0) / VISITS**0.5
        return bool(within.all()) and abs(length - factor) < 5 * standard_error


def rloo(rewards: Floats, rule: StoppingRule) -> Floats:
    return coefficients.rloo(rewards)


def raft(rewards: Floats, rule: StoppingRule) -> Floats:
    return coefficients.raft(rewards)


def released(rewards: Floats, rule: StoppingRule) -> Floats:
    return coefficients.pool_baseline(rewards, keep=4)


def down_sampled(rewards: Floats, rule: StoppingRule) -> Floats:
    return coefficients.down_sample(coefficients.class_conditional(rewards, rule), rewards, keep=4)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
@pytest.mark.parametrize(
    ("rule", "estimator"),
    [
        (Rule(8), rloo),
        (BALANCED, coefficients.class_conditional),
        (BALANCED, down_sampled),
        (NEYMAN, coefficients.class_conditional),
        (NEYMAN, down_sampled),
    ],
)
def test_the_mean_estimate_is_the_gradient_of_p(rule: StoppingRule, estimator: Estimator, p: float) -> None:
    bandit = Bandit(p)
    assert bandit.has_mean(bandit.estimates(bandit.visits(rule), estimator, rule))


def test_raft_estimates_the_gradient_of_log_p_but_for_visits_without_a_success() -> None:
    p = 0.1
    bandit = Bandit(p)
    estimates = bandit.estimates(bandit.visits(Rule(8)), raft, Rule(8))
    assert bandit.has_mean(estimates, (1 - (1 - p) ** 8) / p)


@pytest.mark.parametrize(
    ("estimator", "weights", "factor"),
    [(rloo, stopping.leave_one_out, 1.286), (released, stopping.pool_baseline(4), 3.95)],
)
def test_other_estimators_scale_the_gradient_by_their_implied_objective(
    estimator: Estimator, weights: stopping.Weights, factor: float
) -> None:
    assert implied_objective(BALANCED, 0.1, weights) == pytest.approx(factor, abs=0.005)
    bandit = Bandit(0.1)
    estimates = bandit.estimates(bandit.visits(BALANCED), estimator, BALANCED)
    assert bandit.has_mean(estimates, implied_objective(BALANCED, 0.1, weights))
    length, standard_error = bandit.along_gradient(estimates)
    assert length - 1 > 10 * standard_error


def test_the_first_launched_of_more_rollouts_are_a_fair_sample_and_the_first_finished_are_not() -> None:
    bandit = Bandit(0.3)
    tokens = bandit.rng.permutation(40) + 20 * ~bandit.right  # wrong responses tend to be longer
    launched = bandit.sample(16)
    finished = np.take_along_axis(launched, np.argsort(tokens[launched], axis=1), axis=1)

    assert bandit.has_mean(bandit.estimates(list(launched[:, :8]), rloo, Rule(8)))

    estimates = bandit.estimates(list(finished[:, :8]), rloo, Rule(8))
    length, standard_error = bandit.along_gradient(estimates)
    mean = estimates.mean(axis=0)
    cosine = mean @ bandit.gradient / np.linalg.norm(mean) / np.linalg.norm(bandit.gradient)
    assert length - 1 > 50 * standard_error
    assert length == pytest.approx(1.29, abs=0.03)
    assert cosine == pytest.approx(0.85, abs=0.03)  # it points elsewhere: no weight of the prompt undoes that


@pytest.mark.parametrize("p", [0.02, 0.05, 0.1, 0.3, 0.5, 0.9])
def test_by_enumeration_the_weight_of_every_prompt_is_1(p: float) -> None:
    assert implied_objective(Rule(8), p) == pytest.approx(1, rel=1e-12)
    for rule in (BALANCED, NEYMAN):
        assert implied_objective(rule, p, stopping.class_conditional) == pytest.approx(1, rel=1e-12)
