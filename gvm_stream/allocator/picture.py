"""The broker's state for people: what the run waits for, its status, its metrics, its report. Reads, never decides."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from gvm_stream.allocator.online import OnlineAllocator
from gvm_stream.allocator.record import build_report
from gvm_stream.metrics import Metrics
from gvm_stream.wire.messages import Status

if TYPE_CHECKING:
    from gvm_stream.allocator.broker import Broker


def waits(broker: Broker) -> list[str]:
    """What the run waits for, in words."""
    work, producers, learners = broker.work, broker.peers.of("producer"), broker.peers.of("learner")
    if broker.stopping:
        return [f"{peer.label} to say goodbye" for peer in (*producers, *learners)]
    found = []
    if not learners:
        found.append("a learner to join")
    elif broker.weights is None:
        found.append("the learner to publish its first weights")
    if not producers:
        found.append("a producer to join")
    for peer in producers:
        if 0 <= peer.version < broker.version:
            found.append(f"{peer.label} to load policy version {broker.version}")
        if peer.owed:
            found.append(f"{peer.label} to return {len(peer.owed)} rollouts that made no progress")
    current = work.evaluation.current
    if current is not None and broker.weights is not None:
        found.append(f"evaluation after batch {current.step}: {current.left} of {current.planned} rollouts")
    if broker.wanted is not None and broker.weights is not None:
        found.append(f"rollouts of batch {broker.wanted}: {work.num_running} are running")
    elif learners and broker.weights is not None:
        found.append(f"the learner to train on batch {work.allocator.settled_steps}")
    return found


def status(broker: Broker, now: float) -> Status:
    phase = "waiting for the learner"
    if broker.stopping:
        phase = "stopping"
    elif broker.weights is not None:
        phase = "training" if broker.work.evaluation.current is None else "evaluating"
    return Status(
        phase=phase,
        step=broker.work.allocator.settled_steps,
        steps=broker.config.run.steps,
        version=broker.version,
        rollouts=broker.work.rollouts_trained,
        tokens=broker.work.allocator.account.table(),
        accuracy=tuple((row.step, row.accuracy) for row in broker.record.evaluations),
        last_step=broker.record.steps[-1].stats if broker.record.steps else None,
        peers=broker.peers.status(now),
        waits=tuple(waits(broker)),
    )


def report(broker: Broker, now: float) -> dict[str, Any]:
    """The content of report.json, once the run is done: what is still pending then was made for nothing."""
    allocator, stop = broker.work.allocator, broker.stopping
    account, ledger = allocator.account, allocator.ledger
    account.close()
    return build_report(
        broker.record,
        outcome="failed" if broker.failure else "finished" if stop and stop.final else "interrupted",
        reason=broker.failure or (stop.reason if stop else ""),
        steps=broker.config.run.steps,
        seconds=broker.seconds(now),
        tokens=account.table(),
        rollouts={fate.value: n for fate, n in account.rollouts.items() if n},
        engine_tokens_unaccounted=broker.unaccounted_tokens,
        attempts={"issued": ledger.issued, "running": ledger.num_running, **ledger.ended},
        conserved=broker.work.conserved,
        final_version=broker.version,
        allocation=allocation(allocator),
        quarantined=allocator.quarantined,
        flaky=[msgspec.to_builtins(prompt) for prompt in broker.work.flaky.report()],
        config=msgspec.to_builtins(broker.config),
    )


def allocation(allocator: OnlineAllocator) -> dict[str, Any]:
    """What the allocator knows of its own work."""
    prior = allocator.estimates.prior
    return {
        "policy": allocator.settings.policy,
        "design": allocator.planner.design,
        "gain_over_uniform": msgspec.to_builtins(allocator.gain),
        "price": None if math.isnan(allocator.price) else allocator.price,
        "prior": [prior.a, prior.b],
        "change_points": allocator.estimates.change_points,
        "retired_prompts": len(allocator.retired),
    }


def export(broker: Broker, metrics: Metrics) -> None:
    """Set the gauges that show the state of the run."""
    work = broker.work
    for fate, tokens in work.allocator.account.table().items():
        if fate != "generated":
            metrics.set("gvm_tokens", tokens, label=fate)
    metrics.set("gvm_rollouts_running", work.num_running)
    metrics.set("gvm_ledger_conserved", float(work.conserved))
    metrics.set("gvm_producers", len(broker.peers.of("producer")))
    metrics.set("gvm_batches_settled", work.allocator.settled_steps)
    metrics.set("gvm_policy_version", broker.version)
    gain = work.allocator.gain
    for bound, value in (("estimate", gain.gain), ("low", gain.low), ("high", gain.high)):
        metrics.set("gvm_allocator_gain", math.nan if value is None else value, label=bound)
    metrics.set("gvm_price", work.allocator.price)
    metrics.set("gvm_prompts_retired", len(work.allocator.retired))
