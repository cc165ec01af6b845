"""What is known of every prompt from earlier visits, in one flat table: discounted counts, energies and token cost.

Counts age by *policy versions*, not by visits or wall time: a prompt seen 50 updates ago tells less about today's
policy than one seen just now (the form of CERO, arXiv 2606.05606, which keeps the prior proper). They age at two
speeds, and how well either speed has predicted the visits of a prompt decides how much it has to say about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any

import numpy as np

from gvm_stream.allocator.arrays import Floats, Ints
from gvm_stream.allocator.energy import Energy, EnergyModel
from gvm_stream.allocator.posterior import Posterior
from gvm_stream.allocator.prior import OnlinePrior, log_marginal

SUCCESS_REWARD = 0.5
"""A rollout with at least this reward counts as a success of the acceptance rate."""

LEAST_SURPRISE = 4
"""Scored rollouts that a visit needs to pass for a change point."""
MAX_LOG_ODDS = 10.0
"""Of the two speeds: certain enough, and soon undone once the other one predicts better."""
SHRINK_COST = 2.0
"""Rollouts of mean cost that every prompt starts with."""
SHRINK_ENERGY = 8.0
"""Rollouts with the energy that its prompt and length predict that every class of a prompt starts with."""
GLOBAL_MEMORY = 1024
"""Visits after which one has lost 1/e of its weight in the mean cost over all prompts."""

# First columns of what the table holds: counts of either speed (successes, failures), log-odds of the fast one, latest
# version, visits, evidence (successes, failures), tokens, completed rollouts, and of either class the rollouts with an
# energy, its sum and that of their tokens. Whole numbers are exact in float64: a visit reads and writes a row at once.
FAST, SLOW, LOG_ODDS, VERSION, VISITS, EVIDENCE, TOKENS, COMPLETED, SUCCESS_ENERGY, FAILURE_ENERGY = (
    0, 2, 4, 5, 6, 7, 9, 10, 11, 14,
)  # fmt: skip
UNSEEN = np.zeros(17)
UNSEEN[VERSION] = -1


class Estimates:
    """Estimates for P prompts, addressed by their position 0..P-1. 136 bytes each."""

    def __init__(
        self,
        *,
        memory: tuple[float, float],
        prior: tuple[float, float],
        learn_prior: bool,
        change_point: float,
        max_tokens: int | None,
    ) -> None:
        """`memory`: policy versions after which the fast and slow counts have decayed to 1/e. `change_point`: a visit
        whose log Bayes factor, what was known of the prompt against the prior, is below minus this makes the prompt
        start anew; 0: never. `max_tokens`: length cap of responses."""
        self._memory = memory
        self._learn_prior = learn_prior
        self._change_point = change_point
        self._max_tokens = max_tokens
        self._table: Floats = np.zeros((0, len(UNSEEN)))
        self._size = 0
        self._tokens = 0.0
        """Discounted, over all prompts."""
        self._completed = 0.0
        self._energy = EnergyModel()
        self.prior = OnlinePrior(*prior)
        self.change_points = 0

    def grow(self, count: int) -> None:
        """Room for `count` more prompts; O(1) each in the long run."""
        size = self._size + count
        if size > len(self._table):
            table = np.empty((max(size, len(self._table) * 3 // 2), len(UNSEEN)))
            table[: self._size] = self._table[: self._size]
            self._table = table
        self._table[self._size : size] = UNSEEN
        self._size = size

    def reset(self, prompt: int) -> None:
        """Forget a prompt: its row is used for another one."""
        self._table[prompt] = UNSEEN

    def observe(self, prompt: int, *, successes: int, failures: int, tokens: int, completed: int, version: int) -> None:
        """Count a finished visit at policy `version`: its scored rollouts by class, the `tokens` generated in all of
        them, cancelled ones included, and how many were `completed`, that is ended by themselves or at the length cap.
        """
        (
            fast_s, fast_f, slow_s, slow_f, log_odds, last, visits, seen_s, seen_f, spent, ended, *energies
        ) = self._table[prompt].tolist()  # fmt: skip
        age = max(version - last, 0.0)
        keep_fast, keep_slow = exp(-age / self._memory[0]), exp(-age / self._memory[1])
        fast_s, fast_f, slow_s, slow_f = fast_s * keep_fast, fast_f * keep_fast, slow_s * keep_slow, slow_f * keep_slow
        log_odds *= keep_slow

        a, b = self.prior.a, self.prior.b
        by_fast = log_marginal(a + fast_s, b + fast_f, successes, failures)
        by_slow = log_marginal(a + slow_s, b + slow_f, successes, failures)
        log_odds_now = min(max(log_odds + by_fast - by_slow, -MAX_LOG_ODDS), MAX_LOG_ODDS)
        if self._change_point > 0 and successes + failures >= LEAST_SURPRISE:
            known = by_slow + _softplus(log_odds + by_fast - by_slow) - _softplus(log_odds)
            if known - log_marginal(a, b, successes, failures) < -self._change_point:
                fast_s = fast_f = slow_s = slow_f = log_odds_now = seen_s = seen_f = 0.0
                self.change_points += 1
        if self._learn_prior:
            self.prior.observe(successes, failures, slow_s, slow_f)

        self._table[prompt] = (
            fast_s + successes, fast_f + failures, slow_s + successes, slow_f + failures, log_odds_now,
            max(version, last), visits + 1, seen_s + successes, seen_f + failures,
            spent * keep_slow + tokens, ended * keep_slow + completed, *[keep_slow * energy for energy in energies],
        )  # fmt: skip
        keep = 1 - 1 / GLOBAL_MEMORY
        self._tokens = keep * self._tokens + tokens
        self._completed = keep * self._completed + completed

    def observe_energies(self, prompt: int, visit: Sequence[Energy]) -> None:
        """Count the energies (squared gradient norms, finite, >= 0) of scored rollouts of one visit."""
        row = self._table[prompt, SUCCESS_ENERGY:]
        sums = row.tolist()
        for (success, tokens, _), energy in zip(visit, self._energy.observe(visit), strict=True):
            first = 0 if success else 3
            sums[first] += 1
            sums[first + 1] += energy
            sums[first + 2] += tokens
        row[:] = sums

    def posterior(self, prompts: Ints, version: int) -> Posterior:
        """Of the acceptance rates [len(prompts)] as seen from policy `version`."""
        fast_s, fast_f, slow_s, slow_f, log_odds, last = self._columns(prompts, FAST, 6)
        age = np.maximum(version - last, 0)
        keep_fast, keep_slow = np.exp(-age / self._memory[0]), np.exp(-age / self._memory[1])
        a, b = self.prior.a, self.prior.b
        return Posterior(
            fast_a=a + keep_fast * fast_s,
            fast_b=b + keep_fast * fast_f,
            slow_a=a + keep_slow * slow_s,
            slow_b=b + keep_slow * slow_f,
            fast_weight=1 / (1 + np.exp(-keep_slow * log_odds)),
        )

    def energies(self, prompts: Ints) -> tuple[Floats, Floats]:
        """Mean squared gradient norm of an accepted and of a rejected rollout, [len(prompts)] each, positive.

        The own mean of a class, shrunk to that of the prompt, both classes relative to what their lengths predict,
        which is shrunk to the prediction. While no energy has been observed at all, both are the expected tokens."""
        cost = self.costs(prompts)
        own: Floats = np.full(len(prompts), self._energy.shrinkage)
        seen = own.copy()
        predicted, sums = [], []
        for won, first in ((True, SUCCESS_ENERGY), (False, FAILURE_ENERGY)):
            count, energy, length = self._columns(prompts, first, 3)
            typical = self._energy.line(won).mean((SHRINK_COST * cost + length) / (SHRINK_COST + count))
            seen += count
            own += energy / typical
            predicted.append(typical)
            sums.append((count, energy))
        ratio = own / seen
        success, failure = (
            (SHRINK_ENERGY * ratio * typical + energy) / (SHRINK_ENERGY + count)
            for typical, (count, energy) in zip(predicted, sums, strict=True)
        )
        return success, failure

    @property
    def knows_costs(self) -> bool:
        """True once any rollout was completed."""
        return self._completed > 0

    def costs(self, prompts: Ints) -> Floats:
        """Expected tokens of a rollout [len(prompts)], positive, shrunk to the mean over prompts.

        Tokens over completed rollouts: a cancelled one counts as right-censored (maximum likelihood for exponential
        lengths), one cut off at the cap as complete, for that is what it costs. Before any rollout was completed:
        half of `max_tokens`, or 1."""
        if self._completed > 0:
            mean = max(self._tokens / self._completed, 1.0)
        else:
            mean = self._max_tokens / 2 if self._max_tokens else 1.0
        tokens, completed = self._columns(prompts, TOKENS, 2)
        cost = (SHRINK_COST * mean + tokens) / (SHRINK_COST + completed)
        return np.minimum(cost, self._max_tokens or np.inf)

    def visits(self, prompts: Ints) -> Ints:
        """Counted visits [len(prompts)]."""
        return self._columns(prompts, VISITS, 1)[0].astype(np.int64)

    def last_version(self, prompts: Ints) -> Ints:
        """Policy version of the latest visit [len(prompts)]; -1: never visited."""
        return self._columns(prompts, VERSION, 1)[0].astype(np.int64)

    def evidence(self, prompt: int) -> tuple[int, int]:
        """Raw (successes, failures) since the prompt was added, reset, re-admitted or its rate changed."""
        successes, failures = self._table[prompt, EVIDENCE : EVIDENCE + 2].tolist()
        return int(successes), int(failures)

    def forget_evidence(self, prompt: int) -> None:
        """A re-admitted prompt starts a new confidence sequence."""
        self._table[prompt, EVIDENCE : EVIDENCE + 2] = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "table": self._table[: self._size].astype("<f8").tobytes(),
            "mean_cost": [self._tokens, self._completed],
            "energy": self._energy.state_dict(),
            "prior": self.prior.state_dict(),
            "change_points": self.change_points,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state is not of as many prompts."""
        table = np.frombuffer(state["table"], "<f8").astype(np.float64)
        if table.size != self._size * len(UNSEEN):
            raise ValueError(f"the state holds {table.size / len(UNSEEN):g} prompts, this allocator {self._size}")
        self._table = table.reshape(self._size, len(UNSEEN))
        self._tokens, self._completed = state["mean_cost"]
        self._energy.load_state_dict(state["energy"])
        self.prior.load_state_dict(state["prior"])
        self.change_points = state["change_points"]

    def _columns(self, prompts: Ints, first: int, count: int) -> list[Floats]:
        return list(self._table[prompts, first : first + count].T)


def _softplus(x: float) -> float:
    """log(1 + e^x)."""
    return max(x, 0.0) + log(1 + exp(-abs(x)))
