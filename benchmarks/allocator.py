"""Speed and memory of the allocator library by number of prompts: `python -m benchmarks.allocator --json`.

A pair is one `ask` for a rollout and one `tell` of its outcome, everything they cause included: planning, estimates
from every reward, length and gradient energy, closing groups with their coefficients, settling batches. Two shapes of a
batch: 512 prompts of P, and all P at once. `bytes_per_prompt` is what P prompts take at rest, their ids left out.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np

from benchmarks.report import machine
from gvm_stream.allocator import Fate, OnlineAllocator, Rollouts, Scored, Settings

SLOTS = 256
PER_PROMPT = 8


def allocator(prompts: list[str], per_step: int, policy: str) -> OnlineAllocator:
    made = OnlineAllocator(
        Settings(policy=policy, prompts_per_step=per_step, budget=Rollouts(rollouts=PER_PROMPT), max_lag=1), seed=0
    )
    made.add(prompts)
    return made


def outcomes(version: list[int]) -> Iterator[Scored]:
    """Endless, made beforehand but for the version: the clock is for the allocator."""
    rng = np.random.default_rng(0)
    rewards = (rng.random(4096) < 0.4).astype(float).tolist()
    tokens = rng.integers(50, 500, 4096).tolist()
    energies = rng.lognormal(3, 0.5, 4096).tolist()
    while True:
        for reward, length, energy in zip(rewards, tokens, energies, strict=True):
            yield Scored(reward=reward, tokens=length, seconds=1.0, oldest_version=version[0], energy=energy)


def pairs_per_second(prompts: list[str], per_step: int, policy: str, pairs: int) -> float:
    a = allocator(prompts, per_step, policy)
    version = [0]
    stream = outcomes(version)
    done = 0
    started = 0.0
    while done < pairs or not started:
        for item in a.ask(SLOTS, version[0]):
            a.tell(item.work, item.attempt, next(stream))
            done += 1
        groups = a.batch(a.settled_steps)
        if groups is not None:
            version[0] += 1
            fates = {Fate.TRAINED: [member.work for group in groups for member in group.members]}
            a.settle(a.settled_steps, version[0], fates)
            if not started:  # the first batch warms up
                started, done = time.process_time(), 0
    return done / (time.process_time() - started)


def bytes_per_prompt(prompts: list[str]) -> float:
    tracemalloc.start()
    a = allocator(prompts, 512, "neyman")
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / len(a.roster.ids)


def measure(count: int, policy: str, pairs: int, repeats: int) -> dict[str, object]:
    prompts = [f"train-{i}" for i in range(count)]
    rates = {
        "pairs_per_second": [pairs_per_second(prompts, 512, policy, pairs) for _ in range(repeats)],
        "pairs_per_second_whole_set": [
            pairs_per_second(prompts, count, policy, max(pairs, PER_PROMPT * count // 4)) for _ in range(repeats)
        ],
    }
    medians = {name: round(float(np.median(values))) for name, values in rates.items()}
    return {"prompts": count, **medians, "bytes_per_prompt": round(bytes_per_prompt(prompts), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prompts", default="1000,10000,100000,1000000")
    parser.add_argument("--policy", default="neyman")
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows = [measure(int(p), args.policy, args.pairs, args.repeats) for p in args.prompts.split(",")]
    if args.json:
        print(json.dumps({"benchmark": "allocator", "policy": args.policy, "machine": machine(), "rows": rows}))
        return
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
