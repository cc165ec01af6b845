"""From a visit that has ended to the group that a learner trains on."""

from __future__ import annotations

import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.coefficients import class_conditional, down_sample, raft, rloo
from gvm_stream.allocator.estimates import SUCCESS_REWARD
from gvm_stream.allocator.planner import Planner
from gvm_stream.allocator.stopping import StoppingRule
from gvm_stream.allocator.types import ClosedGroup, Exit, Member, PromptId, Scored
from gvm_stream.allocator.visit import Visit


def close_visit(
    visit: Visit, prompt: PromptId, planner: Planner, exit: Exit, reason: str, cancel: tuple[tuple[int, int], ...]
) -> ClosedGroup:
    """The group of a visit that is over; without members if nothing was scored."""
    counted = visit.counted()
    scored = [outcome for _, _, outcome in counted]
    successes = sum([outcome.reward >= SUCCESS_REWARD for outcome in scored])
    oldest = [outcome.oldest_version for outcome in scored]
    newest = [o.oldest_version if o.newest_version is None else o.newest_version for o in scored]
    coefficients = _coefficients(visit, scored, planner) if scored else []
    members = tuple(
        Member(
            work=work,
            index=index,
            reward=outcome.reward,
            tokens=outcome.tokens,
            oldest_version=outcome.oldest_version,
            coefficient=coefficient,
        )
        for (index, work, outcome), coefficient in zip(counted, coefficients, strict=True)
    )
    return ClosedGroup(
        group=visit.number,
        prompt=prompt,
        step=visit.step,
        planned=visit.target - visit.missing,
        weight=visit.weight,
        prior=visit.prior,
        members=members,
        successes=successes,
        failures=len(counted) - successes,
        versions=(min(oldest), max(newest)) if counted else None,
        tokens=visit.tokens,
        shadow=visit.shadow,
        exit=exit,
        reason=reason,
        cancel=cancel,
        unused=visit.unused(),
    )


def _coefficients(visit: Visit, scored: list[Scored], planner: Planner) -> list[float]:
    rewards = np.array([outcome.reward for outcome in scored])
    chosen: Floats | None = None
    if planner.design == "reference" and not visit.shadow:
        chosen = planner.policy.coefficients(visit.outcomes(visit.pilot))
    if chosen is None:
        chosen = _of_design(rewards, visit.rule, planner)
    if planner.settings.keep is not None:
        chosen = down_sample(chosen, rewards, planner.settings.keep)
    coefficients: list[float] = chosen.tolist()
    return coefficients


def _of_design(rewards: Floats, rule: StoppingRule | None, planner: Planner) -> Floats:
    if planner.settings.coefficient == "raft":
        return raft(rewards)
    return rloo(rewards) if rule is None else class_conditional(rewards, rule)
