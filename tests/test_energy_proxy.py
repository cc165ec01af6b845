from __future__ import annotations

import numpy as np
import pytest

from gvm_stream.producers.energy import energy_proxy


def test_certain_tokens_have_no_energy_and_unlikely_ones_have_one_each() -> None:
    assert energy_proxy(np.zeros(5, np.float32)) == 0
    assert energy_proxy(np.array([np.log(0.5), -30.0], np.float32)) == pytest.approx(0.25 + 1, abs=1e-6)
    assert energy_proxy(np.zeros(0, np.float32)) == 0


def test_the_proxy_brackets_the_squared_norm_of_the_logit_gradient() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        pi = rng.dirichlet(np.full(rng.integers(2, 40), rng.uniform(0.05, 3)))
        y = rng.choice(pi.size, p=pi)
        exact = np.square((np.arange(pi.size) == y) - pi).sum()
        proxy = energy_proxy(np.log(pi[y : y + 1]).astype(np.float32))
        assert proxy <= exact * (1 + 1e-5) + 1e-9
        assert exact <= 2 * proxy * (1 + 1e-5) + 1e-9


def test_over_responses_of_a_policy_the_sum_over_tokens_is_the_squared_norm_of_the_whole_gradient() -> None:
    """The terms of different tokens are martingale differences; checked for a softmax policy without context."""
    rng = np.random.default_rng(1)
    pi = np.array([0.6, 0.3, 0.1])
    tokens = rng.choice(3, p=pi, size=(200_000, 6))
    gradients = np.eye(3)[tokens] - pi
    whole = np.square(gradients.sum(axis=1)).sum(axis=1)
    parts = np.square(gradients).sum(axis=2).sum(axis=1)
    error = whole - parts
    assert abs(error.mean()) < 5 * error.std() / np.sqrt(len(error))
