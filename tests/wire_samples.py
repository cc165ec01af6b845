"""One message of every type, and how each is read. The bytes of them are in `wire_golden/`, as they were first sent."""

from __future__ import annotations

from gvm_stream.allocator.types import Cancelled, Failed, Scored, Unscorable
from gvm_stream.wire import messages as m
from gvm_stream.wire import weight_messages as w
from gvm_stream.wire.payload import pack

WEIGHTS = m.WeightsInfo(
    version=7,
    path="/w/v00000007.safetensors",
    size=4096,
    checksum="00ff",
    address="tcp://10.0.0.1:5711",
    canary=m.Canary(tokens=b"\x01\0\0\0\x02\0\0\0", logprobs=b"\0\0\x80\xbf"),
)
STATS = m.StepStats(
    loss=-0.25,
    grad_norm=1.5,
    reward_mean=0.5,
    zero_signal_groups=1,
    groups=2,
    mean_lag=0.5,
    max_lag=1,
    mismatch=0.001,
    effective_sample_size=0.75,
    seconds=2.0,
    padding_share=0.125,
    wait_seconds=3.0,
    noise=m.NoiseStats(variance=2.0, standard_error=0.5, signal=-0.25, tokens=900, allocated=1800.0, shadow=None),
)
TOKENS, LOGPROBS = b"\x01\0\0\0\x02\0\0\0", b"\0\0\x80\xbf\0\0\0\xbf"  # 1, 2 and -1.0, -0.5
ROLLOUT = m.Rollout(
    work=11,
    attempt=1,
    outcome=Scored(reward=1.0, tokens=2, seconds=0.5, oldest_version=6, newest_version=7, energy=0.5),
    payload=pack(TOKENS, LOGPROBS, ((6, 0, 1), (7, 1, 2)), truncated=False),
)

TO_ALLOCATOR: dict[str, m.ToAllocator] = {
    "hello": m.Hello(
        protocol=3,
        role="learner",
        name="a",
        epoch=2**60,
        agreed={"model.path": "m"},
        checkpoints=(0, 50),
        step=51,
        in_hand={11: 1, -1: 0},
    ),
    "goodbye": m.Goodbye(reason="interrupted", failed=True, generated_tokens=99),
    "heartbeat": m.Heartbeat(waiting_for="work", running={11: 3, -1: 0}),
    "status_request": m.StatusRequest(),
    "ask": m.Ask(slots=256, version=3),
    "loaded": m.Loaded(version=4),
    "rollouts": m.Rollouts(
        seq=4,
        rollouts=(
            ROLLOUT,
            m.Rollout(work=12, attempt=0, outcome=Unscorable(reason="verifier timeout", tokens=5, seconds=10.0)),
            m.Rollout(work=13, attempt=0, outcome=Cancelled(reason="stop", tokens=1)),
            m.Rollout(work=-2, attempt=2, outcome=Failed(reason="too long", tokens=0)),
        ),
    ),
    "published": m.Published(weights=WEIGHTS, step=6),
    "batch_request": m.BatchRequest(step=6),
    "step_done": m.StepDone(
        step=6,
        version=8,
        trained=True,
        reason="",
        fates={"trained": (11,), "stale": (12, 13)},
        energies={11: 4.0},
        stats=STATS,
    ),
    "checkpointed": m.Checkpointed(steps=(3, 6)),
}
TO_PEER: dict[str, m.ToPeer] = {
    "welcome": m.Welcome(run="arithmetic", next_step=6, settled=8, weights=WEIGHTS),
    "unknown": m.Unknown(),
    "received": m.Received(seq=4),
    "settled": m.Settled(step=6),
    "refused": m.Refused(reason="another protocol"),
    "alive": m.Alive(),
    "work": m.Work(
        orders=(
            m.WorkOrder(
                work=11,
                attempt=1,
                prompt="train-3",
                prompt_tokens=TOKENS,
                answer="\N{MINUS SIGN}4",
                verifier="numeric",
            ),
        )
    ),
    "cancel": m.Cancel(works=(11, 12), reason="no progress"),
    "new_weights": m.NewWeights(weights=WEIGHTS),
    "batch": m.Batch(
        step=6,
        groups=(
            m.TrainGroup(
                group=2,
                prompt="train-3",
                prompt_tokens=TOKENS,
                weight=0.5,
                prior=(0.5, 2.0),
                shadow=True,
                rollouts=(
                    m.TrainRollout(
                        work=11,
                        reward=1.0,
                        tokens=TOKENS,
                        logprobs=LOGPROBS,
                        spans=((6, 0, 2),),
                        truncated=True,
                        lag=1,
                        coefficient=0.25,
                    ),
                ),
            ),
        ),
    ),
    "stop": m.Stop(reason="all batches are done", final=True),
    "status": m.Status(
        run="arithmetic",
        phase="training",
        step=6,
        steps=100,
        version=8,
        seconds=61.5,
        rollouts=1536,
        tokens={"generated": 10, "trained": 10},
        running=9,
        scored=200,
        max_lag=1,
        conserved=True,
        refused=1,
        duplicates=2,
        expired=3,
        spool_bytes=4096,
        spool_waiting=1,
        price=0.5,
        gain=1.25,
        gain_interval=(1.0, 1.5),
        accuracy=((0, 0.25), (20, 0.5)),
        last_step=STATS,
        peers=(
            m.PeerStatus(
                role="producer",
                name="p",
                version=7,
                versions_behind=1,
                in_flight=9,
                credits=3,
                oldest_s=1.5,
                silent_s=0.5,
                joined_s=60.0,
                connected=True,
            ),
        ),
        waits=(m.Wait(who="run", what="the learner to train on batch 6", seconds=2.0),),
    ),
}
TO_WEIGHT_SERVER: dict[str, w.ToWeightServer] = {"chunk_request": w.ChunkRequest(version=7, offset=4 << 20)}
FROM_WEIGHT_SERVER: dict[str, w.FromWeightServer] = {
    "chunk": w.Chunk(version=7, offset=0, data=b"\0\xff"),
    "chunk_refused": w.ChunkRefused(version=7, reason="gone"),
}
TO_NCCL_SENDER: dict[str, w.ToNcclSender] = {
    "pull": w.Pull(version=7, workers=2),
    "worker_answer": w.WorkerAnswer(number=3, problem="no such tensor"),
}
FROM_NCCL_SENDER: dict[str, w.FromNcclSender] = {
    "worker_call": w.WorkerCall(number=3, name="update_weights", info={"names": ["a"], "shapes": [[2, 3]]}),
    "pulled": w.Pulled(version=7),
    "pull_refused": w.PullRefused(version=7, reason="gone"),
}
SAMPLES: dict[str, m.Message] = {
    **TO_ALLOCATOR,
    **TO_PEER,
    **TO_WEIGHT_SERVER,
    **FROM_WEIGHT_SERVER,
    **TO_NCCL_SENDER,
    **FROM_NCCL_SENDER,
}
