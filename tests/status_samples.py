"""Pictures of a run, as an allocator would send them."""

from __future__ import annotations

from typing import Any

from gvm_stream.wire.messages import NoiseStats, PeerStatus, Status, StepStats, Wait

NOISE = NoiseStats(variance=0.005, standard_error=0.0014, signal=0.00043, tokens=5771, allocated=30.7, shadow=19.2)
STATS = StepStats(
    loss=-0.0064,
    grad_norm=0.0733,
    reward_mean=0.412,
    zero_signal_groups=12,
    groups=32,
    mean_lag=0.83,
    max_lag=1,
    mismatch=0.0117,
    effective_sample_size=0.998,
    seconds=0.2,
    padding_share=0.07,
    wait_seconds=0.6,
    noise=NOISE,
)


def peer(role: str, name: str, **changes: Any) -> PeerStatus:  # noqa: ANN401
    plain: dict[str, Any] = {
        "role": role,
        "name": name,
        "version": 34 if role == "producer" else -1,
        "versions_behind": 0,
        "in_flight": 128 if role == "producer" else 0,
        "credits": 64 if role == "producer" else 0,
        "oldest_s": 1.2,
        "silent_s": 0.1,
        "joined_s": 250.0,
        "connected": True,
    }
    return PeerStatus(**(plain | changes))


def status(**changes: Any) -> Status:  # noqa: ANN401
    """A run in good health, but for `changes`."""
    tokens = {"trained": 700_000, "zero_signal": 400_000, "evaluation": 90_000, "pending": 44_000, "stale": 0}
    plain: dict[str, Any] = {
        "run": "arithmetic",
        "phase": "training",
        "step": 34,
        "steps": 120,
        "version": 34,
        "seconds": 252.0,
        "rollouts": 8704,
        "tokens": {**tokens, "generated": sum(tokens.values())},
        "running": 256,
        "scored": 40,
        "max_lag": 1,
        "conserved": True,
        "refused": 0,
        "duplicates": 0,
        "expired": 0,
        "spool_bytes": 12 << 20,
        "spool_waiting": 0,
        "price": 5.7e-5,
        "gain": 1.32,
        "gain_interval": (1.1, 1.58),
        "accuracy": ((0, 0.333), (10, 0.41), (20, 0.43), (30, 0.465)),
        "last_step": STATS,
        "peers": (peer("learner", "learner"), peer("producer", "p0"), peer("producer", "p1")),
        "waits": (
            Wait(who="run", what="rollouts of batch 35: 256 are running", seconds=3.4),
            Wait(who="learner learner", what="batch 35", seconds=3.2),
        ),
    }
    return Status(**(plain | changes))


def new_run() -> Status:
    """Nothing has happened yet."""
    return status(
        phase="waiting for the learner",
        step=0,
        version=-1,
        seconds=0.2,
        rollouts=0,
        tokens={"generated": 0, "trained": 0},
        running=0,
        scored=0,
        spool_bytes=0,
        price=None,
        gain=None,
        gain_interval=None,
        accuracy=(),
        last_step=None,
        peers=(),
        waits=(Wait(who="run", what="a learner to join", seconds=0.2),),
    )
