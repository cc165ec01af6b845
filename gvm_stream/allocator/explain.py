"""Why a prompt gets what it gets, for people."""

from __future__ import annotations

import msgspec
import numpy as np

from gvm_stream.allocator.confidence import interval
from gvm_stream.allocator.planner import Planner
from gvm_stream.allocator.roster import Roster
from gvm_stream.allocator.types import PromptId
from gvm_stream.allocator.visits import Visits


class OpenVisit(msgspec.Struct, frozen=True, kw_only=True):
    """A visit to the prompt that is not settled."""

    step: int
    rollouts: int
    """Decided on so far."""
    ended: int
    shadow: bool
    closed: bool


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a prompt, from earlier visits, and what follows from it."""

    prompt: PromptId
    visits: int
    acceptance: float
    """Posterior mean of its acceptance rate."""
    acceptance_interval: tuple[float, float]
    """95 % confidence sequence from the evidence since the prompt was (re)admitted."""
    reward_variance: float
    """Posterior mean of p(1-p)."""
    energy_success: float
    energy_failure: float
    """Expected squared gradient norm of an accepted and of a rejected rollout."""
    tokens: float
    """Expected cost of a rollout."""
    weight: float
    """In the objective."""
    variance: float
    """w^2 E[V] per rollout: n rollouts leave this over n (RAFT) or n - 1 (RLOO)."""
    price: float
    """Decrease of variance per token below which no rollout was granted; NaN if there was no price."""
    status: str
    """active, retired or quarantined."""
    open_visits: tuple[OpenVisit, ...]


def explain(prompt: PromptId, planner: Planner, roster: Roster, visits: Visits) -> Explanation:
    """Raises KeyError for an unknown prompt."""
    position = roster.position[prompt]
    view = planner.view(np.array([position]), visits.version)
    status = "quarantined" if position in roster.quarantined else "retired" if position in roster.retired else "active"
    return Explanation(
        prompt=prompt,
        visits=int(view.visits[0]),
        acceptance=float(view.posterior.mean()[0]),
        acceptance_interval=interval(*planner.estimates.evidence(position), 0.05),
        reward_variance=float(view.posterior.reward_variance()[0]),
        energy_success=float(view.energy_success[0]),
        energy_failure=float(view.energy_failure[0]),
        tokens=float(view.cost[0]),
        weight=float(view.weight[0]),
        variance=float(view.variance()[0]),
        price=planner.price,
        status=status,
        open_visits=tuple(
            OpenVisit(
                step=visit.step,
                rollouts=visit.target,
                ended=visit.ended,
                shadow=visit.shadow,
                closed=visit.closed,
            )
            for visit in visits.visits.values()
            if visit.prompt == position and not visit.settled
        ),
    )
