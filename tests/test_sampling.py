from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.producers.sampling import sample_tokens


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 2**32),
)
def test_tokens_are_drawn_with_their_probability(logits: list[float], temperature: float, seed: int) -> None:
    n = 20_000
    rows = torch.tensor(logits).expand(n, -1)
    tokens, logprobs = sample_tokens(rows, torch.full((n,), temperature), torch.Generator().manual_seed(seed))
    probabilities = np.exp(np.array(logits) / temperature)
    probabilities /= probabilities.sum()
    np.testing.assert_allclose(logprobs.numpy(), np.log(probabilities)[tokens.numpy()], atol=1e-5)
    shares = np.bincount(tokens.numpy(), minlength=len(logits)) / n
    # Five standard errors of a share; the second term is the continuity correction of rare tokens.
    assert (np.abs(shares - probabilities) < 5 * np.sqrt(probabilities * (1 - probabilities) / n) + 5 / n).all()


def test_equal_logits_have_the_logprob_of_a_fair_die() -> None:
    _, logprobs = sample_tokens(torch.zeros(3, 6), torch.tensor([0.5, 1.0, 1.5]), torch.Generator().manual_seed(0))
    np.testing.assert_allclose(logprobs.numpy(), -math.log(6), rtol=1e-6)


def test_a_forbidden_token_is_never_drawn_and_an_undefined_row_has_no_logprob() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]] * 500 + [[0.0, math.nan, 0.0], [-math.inf] * 3, [0.0, math.inf, 0.0]])
    tokens, logprobs = sample_tokens(logits, torch.ones(503), torch.Generator().manual_seed(0))
    assert set(tokens[:500].tolist()) == {0, 2}
    assert logprobs[500:].isnan().all()
