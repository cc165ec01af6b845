"""A run of real processes that are killed and stopped at random, and the account of what became of every rollout.

Allocator, producers (with a scripted engine), learner (whose model is the list of what it was trained on); every few
hundred rollouts one of them, or all, are killed with -9 and started again as a user would, or stopped for longer than
their heartbeat and let go on.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from gvm_stream.config import Config
from gvm_stream.config_file import load_config
from gvm_stream.errors import StreamError
from gvm_stream.wire.link import Link, open_link
from tests.stream_processes import ROOT, free_address

POLL_S = 0.1


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    faults: dict[str, int]
    planned: int
    """Rollouts that the run is to train on."""
    trained: int
    """Rollouts in the model that survived, each counted once."""
    lost: int
    duplicated: int
    """Rollouts that went through the surviving model more than once."""
    conserved: bool
    """Attempts and tokens, as the allocator says, and tokens as its account adds up."""
    attempts: dict[str, int]
    tokens: dict[str, int]
    allocator_restarts: int
    seconds: float


def write_config(folder: Path, *, rollouts: int, **settings: str) -> Config:
    """A run of about so many rollouts, eight a prompt, on prompts that say their own answer."""
    for name, numbers in (("train", range(1000)), ("heldout", range(1000, 1010))):
        rows = [{"prompt": "#### " + "1" * (n % 13) + str(n), "answer": "1" * (n % 13) + str(n)} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "run.dir": str(folder / "run"),
        "run.steps": str(math.ceil(rollouts / 256)),
        "data.train": str(folder / "train.jsonl"),
        "data.heldout": str(folder / "heldout.jsonl"),
        "data.format": "raw",
        "allocation.policy": "uniform",
        "allocation.shadow_uniform": "0",
        "stream.address": free_address(),
        "stream.heartbeat_s": "0.2",
        "stream.silence_s": "2",
        "stream.progress_s": "60",
        "producer.slots": "64",
        "producer.self_test": "false",  # the scripted engine computes nothing
        "learner.checkpoint_every": "3",
        "eval.prompts": "10",
        "eval.samples": "1",
        "eval.every_steps": "0",
        "metrics.port": "0",
        **settings,
    }
    config = load_config(ROOT / "examples" / "arithmetic.toml", [f"{key}={value}" for key, value in values.items()])
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return config


class Cluster:
    """The processes of a run, as somebody has started them by hand."""

    def __init__(self, folder: Path, producers: int) -> None:
        config = str(folder / "config.json")
        self._commands = {
            "allocator": ["-m", "gvm_stream", "allocator", "--config", config],
            "learner": ["-m", "tests.counting_learner", config],
            **{f"producer-{i}": ["-m", "tests.scripted_producer", config, f"p{i}"] for i in range(producers)},
        }
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: set[str] = set()

    @property
    def names(self) -> list[str]:
        return list(self._commands)

    def start(self, name: str, *, again: bool = False) -> None:
        command = [sys.executable, *self._commands[name], *(["--resume"] if again and name == "allocator" else [])]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def kill(self, *names: str) -> None:
        for name in names:
            self._running[name].kill()
        for name in names:
            self._running[name].wait()

    def signal(self, name: str, number: int) -> None:
        os.kill(self._running[name].pid, number)

    def ended(self) -> dict[str, int]:
        """Exit statuses of those that have ended by themselves."""
        return {name: status for name, p in self._running.items() if (status := p.poll()) is not None}

    async def wait(self, name: str) -> int:
        return await trio.to_thread.run_sync(self._running[name].wait, abandon_on_cancel=True)


@asynccontextmanager
async def cluster(folder: Path, producers: int) -> AsyncIterator[Cluster]:
    running = Cluster(folder, producers)
    try:
        for name in running.names:
            running.start(name)
        yield running
    finally:
        for process in running._running.values():
            process.kill()
            process.wait()


async def inject(running: Cluster, fault: str, victim: str, silence_s: float) -> None:
    match fault:
        case "kill" if victim == "all":
            running.kill(*running.names)
            for name in running.names:
                running.start(name, again=True)
        case "kill":
            running.kill(victim)
            running.start(victim, again=True)
        case "stop":
            running.signal(victim, signal.SIGSTOP)
            await trio.sleep(1.5 * silence_s)
            running.signal(victim, signal.SIGCONT)


def kinds(names: list[str], chance: random.Random) -> Iterator[tuple[str, str]]:
    """Every fault there is in random order, again and again."""
    every = [("kill", "all"), *((fault, name) for fault in ("kill", "stop") for name in names)]
    while True:
        yield from chance.sample(every, len(every))


async def torment(
    config: Config, folder: Path, *, every: int, seed: int, producers: int = 2, timeout_s: float = 900
) -> Outcome:
    """Run to the end with a fault every `every` rollouts."""
    faults: Counter[str] = Counter()
    started = trio.current_time()
    with trio.fail_after(timeout_s):
        async with (
            cluster(folder, producers) as running,
            open_link(config.stream, role="observer", name="chaos", agreed={}, patience_s=60) as link,
        ):
            at, plan = every, kinds(running.names, random.Random(seed))
            while (generated := await rollouts_so_far(link, running)) is not None:
                if generated >= at:
                    at = generated + every
                    fault, victim = next(plan)
                    faults[f"{fault} {victim.partition('-')[0]}"] += 1
                    await inject(running, fault, victim, config.stream.silence_s)
                if failed := {name: status for name, status in running.ended().items() if status}:
                    raise StreamError(f"processes have ended by themselves: {failed}; see the logs in {folder}")
                await trio.sleep(POLL_S)
            status = await running.wait("allocator")
            if status:
                raise StreamError(f"the allocator ended with status {status}; see {folder / 'allocator.log'}")
            for name in running.names[1:]:
                await running.wait(name)
    report = json.loads((folder / "run" / "report.json").read_text())
    return account(config, folder, report, faults, trio.current_time() - started)


async def rollouts_so_far(link: Link, running: Cluster) -> int | None:
    """Rollouts trained or waiting to be; None when the run has ended."""
    with trio.move_on_after(10 * POLL_S) as scope:
        status = await link.status()
        return None if status.phase == "stopping" else status.rollouts + status.scored
    assert scope.cancelled_caught
    return None if "allocator" in running.ended() else 0


def account(config: Config, folder: Path, report: dict[str, Any], faults: Counter[str], seconds: float) -> Outcome:
    steps = config.run.steps
    batches: list[list[int]] = json.loads((folder / "run" / "checkpoints" / f"{steps}.json").read_text())
    works = [work for batch in batches for work in batch]
    planned = round(steps * config.allocation.prompts_per_step * config.allocation.rollouts_per_prompt)
    attempts, tokens = report["attempts"], report["tokens"]
    return Outcome(
        faults=dict(sorted(faults.items())),
        planned=planned,
        trained=len(set(works)),
        lost=planned - len(set(works)),
        duplicated=len(works) - len(set(works)),
        conserved=report["ledger_conserved"]
        and tokens["generated"] == sum(n for fate, n in tokens.items() if fate != "generated")
        and report["rollouts_by_fate"]["trained"] == len(works),
        attempts=attempts,
        tokens=tokens,
        allocator_restarts=report["faults"]["allocator_restarts"],
        seconds=round(seconds, 1),
    )
