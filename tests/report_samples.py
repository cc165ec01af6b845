"""Reports of runs, made by the function that makes the real ones."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gvm_stream.allocator.record import EvalRow, Record, StepRow, build_report
from gvm_stream.config import Config, DataSection, ModelSection
from gvm_stream.environment import environment
from tests.status_samples import NOISE, STATS

CONFIG = Config(model=ModelSection(path="model"), data=DataSection(train="train.jsonl"))
TOKENS = {
    "pending": 0, "trained": 80_000, "zero_signal": 100_000, "stale": 3000, "cancelled": 2000, "failed": 500,
    "unscorable": 500, "evaluation": 60_000,
}  # fmt: skip
GAIN = {"gain": 1.32, "low": 1.1, "high": 1.58, "uniform_visits": 47, "allocated_visits": 913}
ALLOCATION: dict[str, Any] = {
    "policy": "neyman",
    "design": "planned",
    "gain_over_uniform": GAIN,
    "price": 5.7e-5,
    "prior": [0.31, 0.43],
    "change_points": 2,
    "retired_prompts": 0,
    "by_acceptance": [
        {
            "low": i / 10,
            "high": (i + 1) / 10,
            "visits": 90,
            "rollouts": 90 * n,
            "tokens": 900 * n,
            "accepted": 9 * i * n,
        }
        for i, n in enumerate((3, 6, 9, 12, 13, 13, 12, 9, 6, 0))
    ],
}


def step_row(step: int, **stats: Any) -> StepRow:  # noqa: ANN401
    noise = NOISE if step % 10 == 0 else None
    seen = msgspec.structs.replace(STATS, reward_mean=0.3 + 0.005 * (step % 50), noise=noise, **stats)
    return StepRow(step, step + 1, True, 5.0 + step, 8000 * (step + 1), 256 * (step + 1), seen)


def eval_row(step: int, accuracy: float, error: float = 0.014) -> EvalRow:
    return EvalRow(step, step, accuracy, error, 1200, 5.0 + step, 8000 * (step + 1), 2000 * (step + 1))


def record(steps: int = 30) -> Record:
    evaluations = [eval_row(step, 0.333 + 0.004 * step) for step in range(0, steps + 1, 10)]
    return Record(steps=[step_row(step) for step in range(steps)], evaluations=evaluations)


def report(history: Record | None = None, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """As read from report.json. `changes` are to what `build_report` is given."""
    history = record() if history is None else history
    plain: dict[str, Any] = {
        "outcome": "finished",
        "reason": "all batches are done",
        "steps": 30,
        "seconds": 220.0,
        "tokens": {**TOKENS, "generated": sum(TOKENS.values())},
        "rollouts": {"trained": 3600, "evaluation": 3000},
        "engine_tokens_unaccounted": 0,
        "attempts": {"issued": 7936, "running": 0, "duplicates": 0, "scored": 7680, "expired": 256},
        "conserved": True,
        "final_version": 30,
        "allocation": ALLOCATION,
        "producer_shares": {"verifier": 0.03},
        "quarantined": [],
        "flaky": [],
        "faults": {"allocator_restarts": 1, "learners_lost": 0, "producers_lost": 2, "messages_refused": 0},
        "environment": environment(),
        "config": msgspec.to_builtins(CONFIG),
    }
    built = build_report(history, **(plain | changes))
    read: dict[str, Any] = json.loads(msgspec.json.encode(built))
    return read
