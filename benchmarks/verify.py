"""Verdicts per second against the stock library in a process pool, latency, and what bombs cost the others.

On the same work, the conformance cases without those made to hang, shuffled, each several times, and with two
processes each:
  pool      `VerifierPool` with the `math` verifier;
  stock     math-verify with its defaults in a `concurrent.futures` process pool, eight items a task.
Both are warm; a round is one pass of either over the work, and the ratio is the median of the rounds' ratios.
Latency is from asking to having the verdict of a single item, with two askers. Then 32 answers, 30 of them healthy,
with and without two computations without end: the time until the last healthy verdict, memory, and what is left.

    python -m benchmarks.verify --json [--cases FILE] [--rounds 3] [--repeats 2]
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import msgspec

from benchmarks.report import finish, machine, parser, say
from gvm_stream.config import VerifierSection
from gvm_stream.verify.cases import Case
from gvm_stream.verify.pool import VerifierPool
from gvm_stream.verify.verdict import Verdict, VerdictUnscorable, VerifyItem

CASES = Path(__file__).parents[1] / "tests" / "verify_cases.jsonl"
WORKERS = 2
STOCK_CHUNK = 8
HEALTHY = 30
BOMBS = ("The answer is 9**9**9", "\\boxed{2^{10^{9}}}")
BOMB_S = 3.0
"""Time limit of an item where there are bombs."""
SETTINGS = VerifierSection(kind="math", workers=WORKERS)
WATCH_S = 0.02


def judge_by_stock(item: tuple[str, str]) -> bool:
    from math_verify import parse, verify

    gold, response = item
    return bool(verify(parse(f"${gold}$"), parse(response)))


def load_work(path: Path, repeats: int) -> list[VerifyItem]:
    cases = [msgspec.json.decode(line, type=Case) for line in path.read_bytes().splitlines()]
    items = [VerifyItem(answer=case.gold, response=case.output) for case in cases if case.category != "dos"] * repeats
    random.Random(0).shuffle(items)
    return items


async def pool_latencies(pool: VerifierPool, items: Sequence[VerifyItem]) -> list[float]:
    seconds: list[float] = []
    left = iter(items)

    async def ask() -> None:
        for item in left:
            asked = time.perf_counter()
            await pool.verify([item])
            seconds.append(time.perf_counter() - asked)

    async with anyio.create_task_group() as tasks:
        for _ in range(WORKERS):
            tasks.start_soon(ask)
    return seconds


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


async def compare_rates(work: Sequence[VerifyItem], rounds: int) -> dict[str, Any]:
    texts = [(item.answer, item.response) for item in work]
    pool_rates, stock_rates, latencies = [], [], list[float]()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, spawn) as stock:
        async with VerifierPool(SETTINGS) as pool:
            for number in range(rounds + 1):  # the first is the warm-up
                started = time.perf_counter()
                await pool.verify(work)
                between = time.perf_counter()
                list(stock.map(judge_by_stock, texts, chunksize=STOCK_CHUNK))
                ended = time.perf_counter()
                if number:
                    pool_rates.append(len(work) / (between - started))
                    stock_rates.append(len(work) / (ended - between))
                    say(f"round {number}: pool {pool_rates[-1]:.0f}/s, stock {stock_rates[-1]:.0f}/s")
            latencies = await pool_latencies(pool, work)
            stats = {"killed": pool.stats.killed, "recycled": pool.stats.recycled}
    return {
        "verdicts_per_second": statistics.median(pool_rates),
        "stock_verdicts_per_second": statistics.median(stock_rates),
        "ratio": statistics.median(a / b for a, b in zip(pool_rates, stock_rates, strict=True)),
        "latency_s": {f"p{round(100 * share)}": percentile(latencies, share) for share in (0.5, 0.9, 0.99, 1.0)},
        "pool": stats,
        "rounds": {"pool": pool_rates, "stock": stock_rates},
    }


def descendants() -> set[int]:
    """Processes below this one; dead ones that nobody has waited for included."""
    found, waiting = set[int](), [os.getpid()]
    while waiting:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended while it was looked at
            for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                below = [int(child) for child in task.read_text().split()]
                found.update(below)
                waiting += below
    return found


def resident_mib(process: int) -> float:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0.0


async def time_of_healthy(healthy: Sequence[VerifyItem], bombs: Sequence[VerifyItem]) -> dict[str, Any]:
    """One call with the bombs at a third and at two thirds of the answers."""
    items = list(healthy)
    for number, bomb in enumerate(bombs, 1):
        items.insert(number * len(healthy) // 3, bomb)
    done: list[float] = []
    largest = 0.0
    settings = msgspec.structs.replace(SETTINGS, timeout_s=BOMB_S, function="benchmarks.endless:endless")
    async with VerifierPool(settings) as pool:

        async def watch() -> None:
            nonlocal largest
            while True:
                largest = max(largest, *map(resident_mib, descendants()))
                await anyio.sleep(WATCH_S)

        def note(index: int, verdict: Verdict) -> None:
            if not (items[index].kind or items[index].response in BOMBS):
                done.append(time.perf_counter())

        cut_off = VerifyItem(answer="7", response="7", kind="python", truncated=True)
        await pool.verify([cut_off, *healthy])  # the modules and caches of the workers
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            started = time.perf_counter()
            verdicts = await pool.verify(items, note)
            tasks.cancel_scope.cancel()
        assert len(done) == len(healthy)
        unscorable = sum(isinstance(verdict, VerdictUnscorable) for verdict in verdicts)
        killed = pool.stats.killed
    return {"healthy_s": done[-1] - started, "unscorable": unscorable, "killed": killed, "largest_mib": largest}


async def cost_of_bombs(work: Sequence[VerifyItem], rounds: int) -> dict[str, Any]:
    before = descendants()  # multiprocessing leaves one behind
    healthy = work[:HEALTHY]
    kinds = {
        "none": [],
        "formulas": [VerifyItem(answer="7", response=response) for response in BOMBS],
        "endless": [VerifyItem(answer="7", response="7", kind="python")] * 2,
    }
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, bombs in kinds.items():
            measured[name].append(await time_of_healthy(healthy, bombs))
    healthy_s = {name: statistics.median(m["healthy_s"] for m in each) for name, each in measured.items()}
    say(f"healthy answers: {healthy_s}")
    return {
        "healthy_s": healthy_s,
        "slowdown": {name: healthy_s[name] / healthy_s["none"] for name in ("formulas", "endless")},
        "largest_process_mib": max(m["largest_mib"] for each in measured.values() for m in each),
        "limit_mib": SETTINGS.memory_mib,
        "unscorable": {name: each[-1]["unscorable"] for name, each in measured.items()},
        "processes_left": len(descendants() - before),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--cases", type=Path, default=CASES)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--repeats", type=int, default=2)
    options = arguments.parse_args()
    work = load_work(options.cases, options.repeats)
    rates = anyio.run(compare_rates, work, options.rounds)
    bombs = anyio.run(cost_of_bombs, work, options.rounds)
    result = {"benchmark": "verify", "machine": machine(), "items": len(work), **rates, "bombs": bombs}
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
