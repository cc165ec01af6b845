"""What the types of a message cannot say: the parts of a rollout fit together."""

from __future__ import annotations

import msgspec
import numpy as np

from gvm_stream.allocator.outcome_check import outcome_problem
from gvm_stream.allocator.types import Scored
from gvm_stream.wire.messages import Rollout
from gvm_stream.wire.payload import Payload, unpack


def open_rollout(rollout: Rollout) -> tuple[Payload | None, str]:
    """The payload of a scored rollout, and why the rollout cannot be used; empty if it can."""
    outcome = rollout.outcome
    if problem := outcome_problem(outcome):
        return None, problem
    if type(outcome) is not Scored:
        return None, ""
    try:
        payload = unpack(rollout.payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        return None, f"its payload of {len(rollout.payload)} bytes cannot be read: {error}"
    return payload, _payload_problem(payload, outcome)


def _payload_problem(payload: Payload, outcome: Scored) -> str:
    """A log-prob that is not finite is never papered over."""
    tokens = outcome.tokens
    if len(payload.tokens) != 4 * tokens or len(payload.logprobs) != 4 * tokens:
        return (
            f"{tokens} tokens announced, {len(payload.tokens)} bytes of ids and {len(payload.logprobs)} bytes "
            "of log-probs received, expected four bytes a token"
        )
    # Of NaN every comparison is false; the least and the greatest of them tell of all.
    logprobs = np.frombuffer(payload.logprobs, "<f4")
    if tokens and not (np.minimum.reduce(logprobs) > -np.inf and np.maximum.reduce(logprobs) <= 1e-4):
        return "a log-prob is not finite or above 0"
    if payload.truncated is not outcome.truncated:
        return f"truncated = {outcome.truncated}, and {payload.truncated} in its payload"
    end = 0
    for version, start, stop in payload.spans:
        if start != end or stop <= start or version < outcome.oldest_version:
            return f"version spans {payload.spans} do not follow one another"
        end = stop
    return "" if end == tokens else f"version spans {payload.spans} do not cover {tokens} tokens"
