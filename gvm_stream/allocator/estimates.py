"""What is known of every prompt from earlier visits, in flat arrays: discounted Beta counts and token cost.

Counts age by *policy versions*, not by visits or wall time: a prompt seen 50 updates ago tells less about today's
policy than one seen just now (the form of CERO, arXiv 2606.05606, which keeps the prior proper).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SUCCESS_REWARD = 0.5
"""A rollout with at least this reward counts as a success of the acceptance rate."""


class Estimates:
    """Estimates for P prompts, addressed by their position 0..P-1."""

    def __init__(self, prior: tuple[float, float], memory_versions: float) -> None:
        self._prior = prior
        self._memory = memory_versions
        self.successes: Floats = np.zeros(0)
        """Discounted successes [P], prior excluded, as of `version`."""
        self.failures: Floats = np.zeros(0)
        self.version: Ints = np.zeros(0, np.int64)
        """Policy version of the last visit [P]; -1: never visited."""
        self.visits: Ints = np.zeros(0, np.int64)
        self.tokens: Floats = np.zeros(0)
        """Discounted tokens of the counted rollouts [P]; over `successes + failures` it is their mean length."""

    def grow(self, count: int) -> None:
        """Room for `count` more prompts."""
        zeros = np.zeros(count)
        self.successes = np.concatenate([self.successes, zeros])
        self.failures = np.concatenate([self.failures, zeros])
        self.tokens = np.concatenate([self.tokens, zeros])
        self.visits = np.concatenate([self.visits, np.zeros(count, np.int64)])
        self.version = np.concatenate([self.version, np.full(count, -1, np.int64)])

    def observe(self, prompt: int, rewards: Floats, tokens: int, version: int) -> None:
        """Count one finished visit: `rewards` [n] and their summed response `tokens`, sampled at policy `version`."""
        keep = self._decay(np.array([prompt]), version)[0]
        wins = int(np.sum(rewards >= SUCCESS_REWARD))
        self.successes[prompt] = keep * self.successes[prompt] + wins
        self.failures[prompt] = keep * self.failures[prompt] + len(rewards) - wins
        self.tokens[prompt] = keep * self.tokens[prompt] + tokens
        self.version[prompt] = max(version, int(self.version[prompt]))
        self.visits[prompt] += 1

    def posterior(self, prompts: Ints, version: int) -> tuple[Floats, Floats]:
        """Beta posterior (a, b) of the acceptance rates [len(prompts)] as seen from policy `version`."""
        keep = self._decay(prompts, version)
        return (
            self._prior[0] + keep * self.successes[prompts],
            self._prior[1] + keep * self.failures[prompts],
        )

    def reward_variance(self, prompts: Ints, version: int) -> Floats:
        """Posterior mean E[p(1-p)] = ab / ((a+b)(a+b+1)) [len(prompts)].

        The plug-in p(1-p) would be 0 for ever after one-sided counts, and allocating by it does worse than uniform.
        """
        a, b = self.posterior(prompts, version)
        return a * b / ((a + b) * (a + b + 1))

    def mean_tokens(self, prompts: Ints) -> Floats:
        """Expected response tokens per rollout; the mean over seen prompts where a prompt is new, 1 before anything."""
        seen = self.successes + self.failures
        total = float(seen.sum())
        default = float(self.tokens.sum()) / total if total > 0 else 1.0
        n = seen[prompts]
        return np.where(n > 0, self.tokens[prompts] / np.maximum(n, 1e-12), default)

    def _decay(self, prompts: Ints, version: int) -> Floats:
        age = np.maximum(version - self.version[prompts], 0)
        return np.exp(-age / self._memory)

    def state_dict(self) -> dict[str, Any]:
        return {
            "successes": self.successes.tolist(),
            "failures": self.failures.tolist(),
            "version": self.version.tolist(),
            "visits": self.visits.tolist(),
            "tokens": self.tokens.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["visits"]) != len(self.visits):
            raise ValueError(f"the state holds {len(state['visits'])} prompts, this allocator {len(self.visits)}")
        self.successes = np.array(state["successes"], np.float64)
        self.failures = np.array(state["failures"], np.float64)
        self.tokens = np.array(state["tokens"], np.float64)
        self.version = np.array(state["version"], np.int64)
        self.visits = np.array(state["visits"], np.int64)
