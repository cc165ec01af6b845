"""What the types of a message cannot say: the parts of a rollout fit together."""

from __future__ import annotations

import numpy as np

from gvm_stream.allocator.outcome_check import outcome_problem
from gvm_stream.allocator.types import Scored
from gvm_stream.wire.messages import Rollout


def rollout_problem(rollout: Rollout) -> str:
    """Why a rollout cannot be used; empty if it can. A log-prob that is not finite is never papered over."""
    outcome = rollout.outcome
    if problem := outcome_problem(outcome):
        return problem
    if not isinstance(outcome, Scored):
        return ""
    if len(rollout.tokens) != 4 * outcome.tokens or len(rollout.logprobs) != 4 * outcome.tokens:
        return (
            f"{outcome.tokens} tokens announced, {len(rollout.tokens)} bytes of ids and {len(rollout.logprobs)} bytes "
            "of log-probs received, expected four bytes a token"
        )
    # Of NaN every comparison is false; the least and the greatest of them tell of all.
    logprobs = np.frombuffer(rollout.logprobs, "<f4")
    if outcome.tokens and not (np.minimum.reduce(logprobs) > -np.inf and np.maximum.reduce(logprobs) <= 1e-4):
        return "a log-prob is not finite or above 0"
    end = 0
    for version, start, stop in rollout.spans:
        if start != end or stop <= start or version < outcome.oldest_version:
            return f"version spans {rollout.spans} do not follow one another"
        end = stop
    if end != outcome.tokens:
        return f"version spans {rollout.spans} do not cover {outcome.tokens} tokens"
    return ""
