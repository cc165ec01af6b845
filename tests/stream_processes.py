"""Helpers of the tests that run the real processes: start, watch, find and kill them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import trio

from gvm_stream.config_file import load_config
from gvm_stream.wire.link import open_link
from gvm_stream.wire.messages import Status

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "arithmetic.toml"
TIMEOUT_S = 120


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def overrides(folder: Path, **settings: str) -> list[str]:
    """A small run of the main job in `folder`, changed by section__key=value."""
    small = {
        "run__dir": str(folder / "run"),
        "stream__address": free_address(),
        "metrics__port": "0",
        "eval__prompts": "100",
        "eval__samples": "1",
        "eval__every_steps": "0",
        "stream__heartbeat_s": "0.5",
        "stream__silence_s": "10",
        **settings,
    }
    return [f"--{key.replace('__', '.')}={value}" for key, value in small.items()]


@contextmanager
def started(arguments: list[str], output: Path, wrapper: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """`gvm-stream ARGUMENTS`, output in a file; whatever of it is left at the end of the block is killed.

    `wrapper` is a command that runs it, as `nice` does.
    """
    environment = {**os.environ, "COLUMNS": "200"}
    with (
        output.open("wb") as out,
        subprocess.Popen(
            [*wrapper, sys.executable, "-m", "gvm_stream", *arguments],
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env=environment,
        ) as process,
    ):
        try:
            yield process
        finally:
            for pid in [*descendants(process.pid), process.pid]:
                kill(pid)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Processes started by a process, and by those."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
        except OSError:
            continue  # it has just ended
    return found


def find(pid: int, verb: str) -> int:
    """The child of a supervisor that runs `gvm-stream VERB`."""
    for child in descendants(pid):
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if verb in words:
            return child
    raise AssertionError(f"no {verb} among the children of {pid}")


def wait_for_children(pid: int, count: int) -> None:
    """Wait until a process has so many descendants."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(descendants(pid)) < count:
        assert time.monotonic() < deadline, f"process {pid} has {len(descendants(pid))} descendants"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pids: list[int], seconds: float) -> list[int]:
    """Those of `pids` still there after waiting for them up to `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def wait_for_status(given: list[str], enough: Callable[[Status], bool]) -> Status:
    """Watch a run as an observer until its status is `enough`."""
    config = load_config(CONFIG, given)

    async def watch() -> Status:
        async with open_link(config.stream, role="observer", name="test", agreed={}, patience_s=TIMEOUT_S) as link:
            with trio.fail_after(TIMEOUT_S):
                while not enough(status := await link.status()):  # noqa: ASYNC110 (another process: no event to wait for)
                    await trio.sleep(0.05)
            return status

    return trio.run(watch)


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return content


def assert_account_sums(content: dict[str, Any]) -> None:
    """Every generated token has one fate, every attempt one end, and the engines' own counters agree. Only a run that
    can go on still has rollouts to train on."""
    tokens = dict(content["tokens"])
    generated = tokens.pop("generated")
    assert generated == sum(tokens.values())
    assert content["outcome"] == "interrupted" or tokens["pending"] == 0
    assert content["ledger_conserved"]
    assert content["engine_tokens_unaccounted"] == 0
    attempts = dict(content["attempts"])
    assert attempts.pop("issued") == sum(attempts.values())
