"""Speed and memory of the allocator library by number of prompts: `python -m benchmarks.allocator --json`.

A pair is one `ask` for a rollout and one `tell` of its outcome, everything they cause included: planning, estimates
from every reward, length and gradient energy, closing visits with their coefficients, settling batches. Batches are of
512 prompts out of P with 16 rollouts each on average, of the same with 8, and of all P prompts at once with 16 (there
the plan counts with its share per rollout, settling not at all). Rates are per second of CPU time of one core, medians
of several; what a visit costs once is spread over its rollouts, so larger visits are faster. `bytes_per_prompt` is what
P prompts take at rest, their ids left out.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np

from benchmarks.report import finish, machine, parser, say
from gvm_stream.allocator import Fate, OnlineAllocator, Rollouts, Scored, Settings

SLOTS = 256


def allocator(prompts: list[str], per_step: int, policy: str, per_prompt: int = 16) -> OnlineAllocator:
    made = OnlineAllocator(
        Settings(
            policy=policy,
            prompts_per_step=per_step,
            budget=Rollouts(rollouts=per_prompt),
            max_rollouts=4 * per_prompt,
            max_lag=1,
        ),
        seed=0,
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


def pairs_per_second(a: OnlineAllocator, pairs: int) -> float:
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


def pairs_per_second_at_once(a: OnlineAllocator, pairs: int, rollouts: float) -> float:
    """Within a batch of `rollouts` rollouts."""
    stream = outcomes([0])
    started = time.process_time()
    items = a.ask(1, 0)
    planned = time.process_time()
    done = 0
    while done < pairs:
        for item in items:
            a.tell(item.work, item.attempt, next(stream))
        done += len(items)
        items = a.ask(SLOTS, 0)
    return 1 / ((planned - started) / rollouts + (time.process_time() - planned) / done)


def bytes_per_prompt(prompts: list[str]) -> float:
    tracemalloc.start()
    a = allocator(prompts, 512, "neyman")
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / len(a.roster.ids)


def measure(count: int, policy: str, pairs: int, repeats: int) -> dict[str, float]:
    prompts = [f"train-{i}" for i in range(count)]
    say(f"{count} prompts")
    rates = {
        "pairs_per_second": [pairs_per_second(allocator(prompts, 512, policy), pairs) for _ in range(repeats)],
        "pairs_per_second_8": [pairs_per_second(allocator(prompts, 512, policy, 8), pairs) for _ in range(repeats)],
        "pairs_per_second_all_at_once": [
            pairs_per_second_at_once(allocator(prompts, count, policy), min(pairs, 8 * count), 16 * count)
            for _ in range(repeats)
        ],
    }
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    return {"prompts": count, **medians, "bytes_per_prompt": round(bytes_per_prompt(prompts), 1)}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--prompts", default="1000,10000,100000,1000000")
    arguments.add_argument("--policy", default="neyman")
    arguments.add_argument("--pairs", type=int, default=200_000)
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    rows = [measure(int(count), options.policy, options.pairs, options.repeats) for count in options.prompts.split(",")]
    rates = [row["pairs_per_second"] for row in rows]
    result = {"benchmark": "allocator", "machine": machine(), "policy": options.policy, "rows": rows}
    finish(result | {"slowest_over_fastest": round(min(rates) / max(rates), 2)}, as_json=options.json)


if __name__ == "__main__":
    main()
