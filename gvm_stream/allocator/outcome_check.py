"""What makes an outcome unusable."""

from __future__ import annotations

import math

from gvm_stream.allocator.types import Outcome, Scored, Unscorable

NUMBERS = (float, int)
"""What the saved state can hold; a bool, or a scalar of numpy or torch, it cannot."""
JUDGED = (Scored, Unscorable)  # a tuple: a union would be built anew with every outcome


def outcome_problem(outcome: Outcome, rewards: tuple[float, float] | None = None) -> str:
    """Why an outcome cannot be taken, `rewards` being the declared range; empty if it can."""
    if type(outcome.tokens) is not int:
        return f"tokens = {_typed(outcome.tokens)}, expected an int"
    if outcome.tokens < 0:
        return f"{outcome.tokens} tokens, expected 0 or more"
    if isinstance(outcome, JUDGED) and not outcome.seconds >= 0:
        return f"{outcome.seconds} seconds, expected 0 or more"
    if not isinstance(outcome, Scored):
        return ""
    if type(outcome.reward) not in NUMBERS:
        return f"reward {_typed(outcome.reward)}, expected a float"
    if not math.isfinite(outcome.reward):
        return f"reward {outcome.reward} is not a finite number"
    if rewards is not None and not rewards[0] <= outcome.reward <= rewards[1]:
        return f"reward {outcome.reward:g}, expected {rewards[0]:g} to {rewards[1]:g}"
    if outcome.energy is not None and energy_problem(outcome.energy):
        return energy_problem(outcome.energy)
    if outcome.newest_version is not None and outcome.newest_version < outcome.oldest_version:
        return f"newest version {outcome.newest_version} is older than the oldest, {outcome.oldest_version}"
    return ""


def energy_problem(energy: float) -> str:
    """Why this cannot be a squared gradient norm; empty if it can."""
    if type(energy) not in NUMBERS:
        return f"energy {_typed(energy)}, expected a float"
    return "" if math.isfinite(energy) and energy >= 0 else f"energy {energy}, expected a finite number of at least 0"


def _typed(value: object) -> str:
    return f"{value} of type {type(value).__name__}"
