"""What a visit that is over teaches."""

from __future__ import annotations

from gvm_stream.allocator.confidence import excludes
from gvm_stream.allocator.estimates import SUCCESS_REWARD
from gvm_stream.allocator.planner import Planner
from gvm_stream.allocator.roster import Roster
from gvm_stream.allocator.visit import Visit


def learn(visit: Visit, planner: Planner, roster: Roster, version: int) -> None:
    """Take the outcomes of a visit into the estimates; retire its prompt if it is shown to be dead or solved."""
    known = visit.known(drained=planner.settings.on_close == "drain")
    if not known:
        return
    estimates = planner.estimates
    successes = sum([outcome.reward >= SUCCESS_REWARD for outcome in known])
    estimates.observe(
        visit.prompt,
        successes=successes,
        failures=len(known) - successes,
        tokens=sum([outcome.tokens for outcome in known]),
        completed=len(known),
        version=max([outcome.oldest_version for outcome in known]),
    )
    energies = [(o.reward >= SUCCESS_REWARD, o.tokens, o.energy) for o in known if o.energy is not None]
    if energies:
        estimates.observe_energies(visit.prompt, energies)
    if planner.settings.retire_alpha and visit.prompt not in roster.retired:
        _retire_if_shown(visit.prompt, planner, roster, version)


def _retire_if_shown(prompt: int, planner: Planner, roster: Roster, version: int) -> None:
    s = planner.settings
    successes, failures = planner.estimates.evidence(prompt)
    rate = successes / (successes + failures)
    dead = rate < s.dead_below and excludes(successes, failures, s.dead_below, s.retire_alpha)
    solved = rate > s.solved_above and excludes(successes, failures, s.solved_above, s.retire_alpha)
    if dead or solved:
        roster.retire(prompt, version)
        # When it comes back, the policy is another one and what it shows then is judged by itself.
        planner.estimates.forget_evidence(prompt)
