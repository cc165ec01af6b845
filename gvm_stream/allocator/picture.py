"""The broker's state for people: what the run waits for, its status, its metrics, its report. Reads, never decides."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gvm_stream.allocator.budget import AnyBudget, Rollouts, Tokens
from gvm_stream.allocator.online import OnlineAllocator
from gvm_stream.allocator.record import build_report
from gvm_stream.allocator.types import Fate
from gvm_stream.allocator.waits import Reason, Waiting
from gvm_stream.environment import environment
from gvm_stream.metrics import Metrics
from gvm_stream.metrics.table import OUTCOMES, by_acceptance
from gvm_stream.wire.messages import Status

if TYPE_CHECKING:
    from gvm_stream.allocator.broker import Broker


def waits(broker: Broker) -> list[Waiting]:
    """What the run and its processes wait for."""
    work, producers, learners = broker.work.state, broker.peers.of("producer"), broker.peers.of("learner")
    found: list[Waiting] = []

    def run(reason: Reason, what: str, of: str = "") -> None:
        """`of`: what tells it from other waits for the same reason."""
        found.append(Waiting("run", what, f"{reason} {of}", reason))

    if broker.spool_waiting:
        run("disk", f"the disk: {broker.spool_waiting} turns of the allocator are not written")
    if broker.stopping:
        for peer in (*producers, *learners):
            run("goodbye", f"{peer.label} to say goodbye", peer.label)
        return found
    settled, published = work.allocator.settled_steps, broker.weights is not None
    if not learners:
        run("learner", "a learner to join")
    elif not published:
        run("first_weights", "the learner to publish its first weights")
    if not producers:
        run("producer", "a producer to join")
    for peer in broker.peers.all():
        if peer.joined_at is None and peer.role != "observer":
            run("return", f"{peer.label} to say hello again, or its work goes to others", peer.label)
    for peer in producers:
        if 0 <= peer.version < broker.version:
            run("loading", f"{peer.label} to load policy version {broker.version}", peer.label)
        if peer.owed:
            run("owed", f"{peer.label} to return {len(peer.owed)} rollouts that are not its own any more", peer.label)
    current = work.evaluation.current
    if current is not None and published:
        run("evaluation", f"evaluation after batch {current.step}: {current.left} of {current.planned} rollouts")
    if broker.wanted is not None and published:
        run("rollouts", f"rollouts of batch {broker.wanted}: {work.num_running} are running", str(broker.wanted))
    elif learners and published and settled < broker.config.run.steps:
        run("training", f"the learner to train on batch {settled}", str(settled))
    elif learners and published and current is None:
        run("checkpoint", "the learner to save its last checkpoint")
    for peer in (*learners, *producers):
        if peer.waiting_for:
            found.append(Waiting(peer.label, peer.waiting_for, peer.waiting_for))
    return found


def phase(broker: Broker) -> str:
    if broker.stopping:
        return "stopping"
    if broker.weights is None or not broker.peers.of("learner"):
        return "waiting for the learner"
    return "training" if broker.work.state.evaluation.current is None else "evaluating"


def status(broker: Broker, now: float) -> Status:
    state = broker.work.state
    allocator, record = state.allocator, state.record
    ledgers = allocator.ledger, state.evaluation.ledger
    gain = allocator.gain
    return Status(
        run=broker.run,
        phase=phase(broker),
        step=allocator.settled_steps,
        steps=broker.config.run.steps,
        version=broker.version,
        seconds=round(broker.seconds(now), 1),
        rollouts=state.rollouts_trained,
        tokens=allocator.account.table(),
        running=state.num_running,
        scored=allocator.account.rollouts[Fate.PENDING],
        max_lag=broker.config.allocation.max_lag,
        conserved=state.conserved,
        refused=broker.refused + sum(ledger.unknown for ledger in ledgers),
        duplicates=sum(ledger.duplicates for ledger in ledgers),
        expired=sum(ledger.ended["expired"] for ledger in ledgers),
        spool_bytes=broker.spool_bytes,
        spool_waiting=broker.spool_waiting,
        price=_finite(allocator.price),
        gain=gain.gain,
        gain_interval=None if gain.low is None or gain.high is None else (gain.low, gain.high),
        accuracy=tuple((row.step, row.accuracy) for row in record.evaluations),
        last_step=record.steps[-1].stats if record.steps else None,
        peers=broker.peers.status(now, broker.version),
        waits=broker.waits(now),
    )


def report(broker: Broker, now: float) -> dict[str, Any]:
    """The content of report.json, once the run is done. Of a finished one, what is still pending was made for nothing;
    an interrupted one may go on with it."""
    state, stop = broker.work.state, broker.stopping
    allocator = state.allocator
    account, ledger = allocator.account, allocator.ledger
    finished = stop is not None and stop.final
    if finished:
        account.close()
    return build_report(
        state.record,
        outcome="failed" if broker.failure else "finished" if finished else "interrupted",
        reason=broker.failure or (stop.reason if stop else ""),
        steps=broker.config.run.steps,
        seconds=broker.seconds(now),
        tokens=account.table(),
        rollouts={fate.value: n for fate, n in account.rollouts.items() if n},
        engine_tokens_unaccounted=broker.unaccounted_tokens,
        attempts={
            "issued": ledger.issued,
            "running": ledger.num_running,
            "duplicates": ledger.duplicates,
            **ledger.ended,
        },
        conserved=state.conserved,
        final_version=state.newest_version,
        allocation=allocation(allocator),
        producer_shares={"verifier": broker.verifying_s / broker.connected_s if broker.connected_s else None},
        quarantined=allocator.quarantined,
        flaky=[msgspec.to_builtins(prompt) for prompt in state.flaky.report()],
        faults={
            "allocator_restarts": state.record.restarts,
            "learners_lost": broker.lost["learner"],
            "producers_lost": broker.lost["producer"],
            "messages_refused": broker.refused,
        },
        environment=environment(),
        config=msgspec.to_builtins(broker.config),
    )


def allocation(allocator: OnlineAllocator) -> dict[str, Any]:
    """What the allocator knows of its own work."""
    prior = allocator.estimates.prior
    return {
        "policy": allocator.settings.policy,
        "design": allocator.planner.design,
        "gain_over_uniform": msgspec.to_builtins(allocator.gain),
        "price": _finite(allocator.price),
        "prior": [prior.a, prior.b],
        "change_points": allocator.estimates.change_points,
        "retired_prompts": len(allocator.retired),
        "by_acceptance": allocator.by_acceptance.table(),
    }


def export(broker: Broker, metrics: Metrics, now: float, elapsed: float) -> None:
    """Show the state of the run, and sums that it keeps anyway: counting them again would cost every rollout.
    `elapsed`: seconds since the last time."""
    metrics.progress(now - broker.progress_at)
    for reason in {wait.reason for wait in waits(broker) if wait.reason}:
        metrics.count("gvm_run_wait_seconds", elapsed, label=reason)
    state = broker.work.state
    allocator = state.allocator
    for fate, tokens in allocator.account.table().items():
        if fate != "generated":
            metrics.set("gvm_tokens", tokens, label=fate)
    for name, number in allocator.account.rollouts.items():
        metrics.set("gvm_rollouts_by_fate", number, label=name.value)
    ledgers = allocator.ledger, state.evaluation.ledger
    metrics.total("gvm_attempts_issued", sum(ledger.issued for ledger in ledgers))
    metrics.total("gvm_rollouts_duplicate", sum(ledger.duplicates for ledger in ledgers))
    for outcome in OUTCOMES:
        metrics.total("gvm_rollouts", sum(ledger.ended[outcome] for ledger in ledgers), label=outcome)
    metrics.set("gvm_rollouts_running", state.num_running)
    metrics.set("gvm_ledger_conserved", float(state.conserved))
    metrics.set("gvm_producers", len(broker.peers.of("producer")))
    metrics.set("gvm_batches_settled", allocator.settled_steps)
    metrics.set("gvm_batches_planned", broker.config.run.steps)
    metrics.set("gvm_policy_version", broker.version)
    metrics.set("gvm_spool_bytes", broker.spool_bytes)
    metrics.set("gvm_spool_waiting", broker.spool_waiting)
    gain = allocator.gain
    for bound, value in (("estimate", gain.gain), ("low", gain.low), ("high", gain.high)):
        metrics.set("gvm_allocator_gain", math.nan if value is None else value, label=bound)
    metrics.set("gvm_price", allocator.price)
    metrics.set("gvm_gradient_variance_predicted", allocator.variance)
    metrics.set("gvm_prompts_retired", len(allocator.retired))
    metrics.set("gvm_prompts_quarantined", len(allocator.quarantined))
    for limit, value in per_prompt(allocator.settings.budget).items():
        metrics.set("gvm_budget_per_prompt", value, label=limit)
    _export_difficulty(allocator, broker.version, metrics)


def _export_difficulty(allocator: OnlineAllocator, version: int, metrics: Metrics) -> None:
    """How hard the prompts are, and which of them got the rollouts."""
    means = allocator.estimates.posterior(allocator.roster.usable(), version).mean()
    for label, number in by_acceptance(means).items():
        metrics.set("gvm_prompts", number, label=label)
    bins = allocator.by_acceptance.bins
    rates = (np.arange(len(bins)) + 0.5) / len(bins)
    for label, visits in by_acceptance(rates, [found.visits for found in bins]).items():
        metrics.total("gvm_visits", visits, label=label)
    for label, rollouts in by_acceptance(rates, [found.rollouts for found in bins]).items():
        metrics.total("gvm_visit_rollouts", rollouts, label=label)


def per_prompt(budget: AnyBudget) -> dict[str, float]:
    """What limits a visit on average."""
    match budget:
        case Tokens(tokens=tokens):
            return {"tokens": tokens}
        case Rollouts(rollouts=rollouts):
            return {"rollouts": rollouts}
    return {}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
