"""Beta prior of the acceptance rates of prompts, fitted to the visits as they come (empirical Bayes)."""

from __future__ import annotations

from math import exp, lgamma

LEAST, MOST = 0.05, 50.0
"""Bounds of both parameters."""
MEMORY = 4096
"""Visits after which one has lost 1/e of its weight: the policy learns, so the population of rates moves."""


def log_marginal(a: float, b: float, successes: int, failures: int) -> float:
    """Logarithm of the chance of one sequence with these counts when p ~ Beta(a, b): log B(a+s, b+f) - log B(a, b)."""
    return (
        (lgamma(a + successes) - lgamma(a))
        + (lgamma(b + failures) - lgamma(b))
        - (lgamma(a + b + successes + failures) - lgamma(a + b))
    )


class OnlinePrior:
    """Beta(a, b) by recursive maximum likelihood: a natural-gradient step per visit, with the running empirical Fisher
    information of (log a, log b).

    The step follows the likelihood of a visit *given what was known of its prompt before*. These conditional
    likelihoods multiply to the joint beta-binomial likelihood of the prompt, and their scores are martingale
    differences, so it makes no difference how the numbers of rollouts, or the prompts to revisit, were chosen from
    earlier outcomes. Moments of visits, or likelihoods of visits each taken alone, would be biased by that choice.
    """

    def __init__(self, a: float, b: float) -> None:
        self.a = a
        self.b = b
        self._information = (0.0, 0.0, 0.0)
        """Of log a, of log b, and off the diagonal."""

    def observe(self, successes: int, failures: int, known_successes: float = 0.0, known_failures: float = 0.0) -> None:
        """Learn from a visit to a prompt of which (discounted) counts were known before it. O(rollouts)."""
        a, b = self.a, self.b
        of_all = _digamma_rise(a + b + known_successes + known_failures, successes + failures)
        grad_a = a * (_digamma_rise(a + known_successes, successes) - of_all)
        grad_b = b * (_digamma_rise(b + known_failures, failures) - of_all)
        keep = 1 - 1 / MEMORY
        aa, bb, ab = self._information
        aa, bb, ab = keep * aa + grad_a * grad_a, keep * bb + grad_b * grad_b, keep * ab + grad_a * grad_b
        self._information = (aa, bb, ab)
        # The start counts as if log a and log b were known with standard deviation 1: as much as some ten prompts tell.
        determinant = (1 + aa) * (1 + bb) - ab * ab
        self.a = _bounded(a * exp(((1 + bb) * grad_a - ab * grad_b) / determinant))
        self.b = _bounded(b * exp(((1 + aa) * grad_b - ab * grad_a) / determinant))

    def state_dict(self) -> dict[str, list[float]]:
        return {"parameters": [self.a, self.b], "information": list(self._information)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.a, self.b = state["parameters"]
        aa, bb, ab = state["information"]
        self._information = (aa, bb, ab)


def _digamma_rise(x: float, n: int) -> float:
    """digamma(x + n) - digamma(x), by its recurrence: exact, and as cheap as the n rollouts it stands for."""
    return sum([1 / (x + j) for j in range(n)])


def _bounded(parameter: float) -> float:
    return min(max(parameter, LEAST), MOST)
