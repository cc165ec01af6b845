"""What the stream costs: tokens/s through the whole stream over tokens/s of the bare engine, on the same work.

Three measurements in one run, on the prompts of the main job with eight rollouts each:
  bare      the transformers engine alone in this process: submit everything, step until done;
  paused    allocator, producer, verifier worker and learner as real processes; the learner is stopped (SIGSTOP) once
            it has published, and `max_lag` is large enough that it holds up nobody;
  training  the same with the learner training on the same two cores.
Rates count from the first reported rollout to the last, so neither start-up nor evaluation is in them. CPU seconds of
every process over the same time say where the time goes.

    python -m benchmarks.stream --json [--steps 60] [--repeats 3]
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio

from benchmarks.report import finish, free_address, machine, parser, say
from gvm_stream.config import Config
from gvm_stream.config_file import load_config
from gvm_stream.data.encode import end_token_ids
from gvm_stream.data.prepare import load_tokenizer, prepare_prompts
from gvm_stream.data.prompts import Prompt
from gvm_stream.evaluate import generate
from gvm_stream.producers.main import prepare_engine
from gvm_stream.wire.link import open_link
from gvm_stream.wire.messages import Status

CONFIG = Path(__file__).parents[1] / "examples" / "arithmetic.toml"
POLL_S = 0.05


def bare_engine(config: Config, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The engine alone, on the same prompts with the same number of rollouts."""
    torch.set_num_threads(config.producer.threads)
    make, _ = prepare_engine(config, "bare")
    engine = make()
    generate(engine, config, prompts[: config.producer.slots])  # warm-up
    wall, cpu = time.perf_counter(), time.process_time()
    completions = generate(engine, config, prompts)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    tokens = sum(len(completion.tokens) for completion in completions)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "cpu_seconds": cpu_seconds}


@contextmanager
def processes(config: Config, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Allocator, learner and one producer, started as a user would by hand."""
    path = folder / "given.json"
    path.write_bytes(msgspec.json.encode(config))
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in ("allocator", "learner", "producer"):
            command = [sys.executable, "-m", "gvm_stream", name, "--config", str(path)]
            with (folder / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(command, stdout=log, stderr=log)
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Processes that any thread of `pid` has started, and those that they have."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found += map(int, task.read_text().split())
    return [*found, *(pid for child in found for pid in children(child))]


def cpu_by_part(running: dict[str, subprocess.Popen[bytes]]) -> dict[str, float]:
    parts = {name: cpu_seconds(process.pid) for name, process in running.items()}
    parts["verifier"] = sum(cpu_seconds(pid) for pid in children(running["producer"].pid))
    return parts


def standing_still(log: Path) -> float:
    """Seconds that generation has stood still for weight updates so far, from the producer's own metrics."""
    url = re.search(r"http://\S+/metrics", log.read_text())
    if url is None:
        return 0.0
    with urllib.request.urlopen(url[0], timeout=10) as answer:
        found = re.search(r"^gvm_weight_update_seconds_sum (\S+)", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


async def watch(
    config: Config, running: dict[str, subprocess.Popen[bytes]], log: Path, *, pause: bool, rollouts: int
) -> dict[str, Any]:
    """Follow the run until all rollouts have been generated; rates from the first training rollout on."""
    marks: list[tuple[int, float, dict[str, float]]] = []
    paused, still = False, 0.0
    async with open_link(config.stream, role="observer", name="benchmark", agreed={}, patience_s=120) as link:
        with trio.fail_after(600):
            while True:
                status = await link.status()
                generated = status.tokens["generated"] - status.tokens["evaluation"]
                if pause and not paused and status.version >= 0:
                    running["learner"].send_signal(signal.SIGSTOP)
                    paused = True
                if generated and not marks:
                    still = standing_still(log)
                if generated and (not marks or generated > marks[-1][0]):
                    marks.append((generated, time.perf_counter(), cpu_by_part(running)))
                if marks and done(status, rollouts, pause=pause):
                    still = standing_still(log) - still
                    break
                await trio.sleep(POLL_S)
    (tokens0, since, cpu0), (tokens1, until, cpu1) = marks[0], marks[-1]
    return {
        "tokens": tokens1 - tokens0,
        "seconds": until - since,
        "tokens_per_second": (tokens1 - tokens0) / (until - since),
        "cpu_seconds": {name: round(cpu1[name] - cpu0[name], 2) for name in cpu1},
        "update_seconds": still,
    }


def done(status: Status, rollouts: int, *, pause: bool) -> bool:
    if pause:  # nothing is settled: all that was planned has been reported when nothing is in flight any more
        return all(peer.in_flight == 0 for peer in status.peers) and status.tokens["pending"] > 0
    return status.rollouts >= rollouts


def stream(config: Config, *, pause: bool) -> dict[str, Any]:
    replace = msgspec.structs.replace
    steps = config.run.steps
    with tempfile.TemporaryDirectory(prefix="gvm-stream-") as name:
        folder = Path(name)
        config = replace(
            config,
            run=replace(config.run, dir=str(folder / "run"), steps=steps + 4),  # still running when it is measured
            stream=replace(config.stream, address=free_address()),
            allocation=replace(
                config.allocation, policy="uniform", max_lag=steps - 1 if pause else config.allocation.max_lag
            ),
            eval=replace(config.eval, prompts=1, samples=1, every_steps=0),
        )
        rollouts = round(steps * config.allocation.prompts_per_step * config.allocation.rollouts_per_prompt)
        with processes(config, folder) as running:
            return trio.run(lambda: watch(config, running, folder / "producer.log", pause=pause, rollouts=rollouts))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    config = load_config(CONFIG, [f"run.steps={options.steps}", "metrics.port=9600"])
    tokenizer = load_tokenizer(config.model.path)
    end_tokens = end_token_ids(tokenizer, config.model.path)
    train = prepare_prompts(config.data, tokenizer, end_tokens=end_tokens, verifier=config.verifier).train
    per_prompt = round(config.allocation.rollouts_per_prompt)
    visits = options.steps * config.allocation.prompts_per_step
    work = [train[i % len(train)] for i in range(visits) for _ in range(per_prompt)]
    rounds: dict[str, list[dict[str, Any]]] = {"bare": [], "paused": [], "training": []}
    for number in range(options.repeats):
        say(f"--- round {number + 1} of {options.repeats}")
        rounds["bare"].append(bare_engine(config, work))
        rounds["paused"].append(stream(config, pause=True))
        rounds["training"].append(stream(config, pause=False))
        say(str({name: round(results[-1]["tokens_per_second"]) for name, results in rounds.items()}))
    rates = {name: [r["tokens_per_second"] for r in results] for name, results in rounds.items()}
    median = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        name: statistics.median(stream / bare for stream, bare in zip(rates[name], rates["bare"], strict=True))
        for name in ("paused", "training")
    }
    result = {
        "benchmark": "stream",
        "machine": machine(),
        "rollouts": len(work),
        "bare_tokens_per_second": median["bare"],
        "tokens_per_second_learner_paused": median["paused"],
        "tokens_per_second": median["training"],
        "ratio_learner_paused": ratios["paused"],
        "ratio": ratios["training"],
        "seconds_per_million_tokens": where_time_goes(rounds),
        "cpu_seconds_per_million_tokens": {
            name: {part: per_million(rounds[name], part) for part in rounds[name][0]["cpu_seconds"]}
            for name in ("paused", "training")
        },
        "rounds": rounds,
    }
    finish(result, as_json=options.json)


def per_million(rounds: list[dict[str, Any]], part: str = "") -> float:
    """Median seconds per million tokens: wall clock, or CPU time of a part."""
    seconds = [r["cpu_seconds"][part] if part else r["seconds"] for r in rounds]
    return round(float(statistics.median(s / r["tokens"] * 1e6 for s, r in zip(seconds, rounds, strict=True))), 2)


def where_time_goes(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The wall clock of a million tokens with the learner training, taken apart."""
    bare, total = per_million(rounds["bare"]), per_million(rounds["training"])
    producer = per_million(rounds["training"], "producer")
    updates = statistics.median(r["update_seconds"] / r["tokens"] * 1e6 for r in rounds["training"])
    return {
        "total": total,
        "bare engine": bare,
        "weight updates (key-value cache recomputed)": round(updates, 2),
        "rest of the producer (orders, decoding, verdicts, messages)": round(producer - bare - updates, 2),
        "producer waits (batches to train on, pacing, the other processes)": round(total - producer, 2),
    }


if __name__ == "__main__":
    main()
