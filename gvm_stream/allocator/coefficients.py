"""What every rollout of a prompt is worth: coefficients c_j with gradient estimate sum_j c_j grad log pi(y_j).

Rewards and coefficients are [n], the rollouts of one visit in *launch* order. The order matters where some are left
out: the first finished are the short ones, and short responses are not right as often as long ones. A success is a
reward of at least 0.5.
"""

from __future__ import annotations

import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.estimates import SUCCESS_REWARD
from gvm_stream.allocator.stopping import StoppingRule, balanced

SAME_REWARD = 1e-9
"""Rewards closer than this share of their magnitude are equal: the float mean of equal numbers need not be theirs."""


def rloo(rewards: Floats) -> Floats:
    """(r_j - mean of the others) / n; 0 where the rewards do not differ. Its mean is the gradient of the expected
    reward if n was known beforehand. Source: RLOO, arXiv 2402.14740."""
    r: list[float] = rewards.tolist()  # visits are small: plain numbers are faster than arrays
    n = len(r)
    if n < 2 or max(r) - min(r) <= SAME_REWARD * max(map(abs, r)):
        return np.zeros(n)
    mean = sum(r) / n
    return np.array([(x - mean) / (n - 1) for x in r])


def raft(rewards: Floats) -> Floats:
    """1/s on each of s successes; 0 where there is none, so the mean is 1 - (1-p)^n times the gradient of log p.
    Source: GVM, arXiv 2505.02391, after RAFT, arXiv 2304.06767."""
    won = rewards >= SUCCESS_REWARD
    return won / max(int(won.sum()), 1)


def class_conditional(rewards: Floats, rule: StoppingRule) -> Floats:
    """+q/s on each of s successes, -q/f on each of f failures, q = `rule.q_hat((s, f))`; 0 where a class is empty.
    Its mean is the gradient of p under every `StoppingRule`. Raises what `q_hat` raises."""
    won = rewards >= SUCCESS_REWARD
    s = int(won.sum())
    f = len(won) - s
    q = rule.q_hat((s, f))
    return np.where(won, q / max(s, 1), -q / max(f, 1))


def pool_baseline(rewards: Floats, keep: int) -> Floats:
    """(r_j - mean of the whole pool) / keep on the first `balanced(keep, ...)` of each class, 0 on the others.
    `stopping.implied_objective` tells what that does to the objective. Source: the released code of Reinforce-Ada,
    arXiv 2510.04996."""
    advantages: Floats = rewards - rewards.mean()
    return np.where(_class_weights(rewards, keep) > 0, advantages / keep, 0.0)


def down_sample(coefficients: Floats, rewards: Floats, keep: int) -> Floats:
    """Coefficients with the same mean of which only `keep` differ from 0: those of the first `balanced(keep, ...)` of
    each class, times class size / number kept (Horvitz and Thompson, JASA 1952). Raises ValueError if `keep` < 2, which
    would leave out a class."""
    if keep < 2:
        raise ValueError(f"keep = {keep} must be at least 2, one rollout of each class")
    return coefficients * _class_weights(rewards, keep)


def _class_weights(rewards: Floats, keep: int) -> Floats:
    """Class size / number kept on the kept rollouts, 0 on the others."""
    won = rewards >= SUCCESS_REWARD
    s = int(won.sum())
    f = len(won) - s
    kept_s, kept_f = balanced(keep, (s, f))
    on_successes = (won.cumsum() <= kept_s) * (s / max(kept_s, 1))
    on_failures = ((~won).cumsum() <= kept_f) * (f / max(kept_f, 1))
    return np.where(won, on_successes, on_failures)
