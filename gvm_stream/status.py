"""`gvm-stream status`: one picture of a run, asked of its allocator."""

from __future__ import annotations

import os
import socket
from functools import partial

import trio
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gvm_stream import terminal
from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError
from gvm_stream.process import run_process
from gvm_stream.wire.link import Link, open_link
from gvm_stream.wire.messages import Status

PATIENCE_S = 5.0
"""An allocator that has not answered by then is not there, or stuck."""


def fetch_status(stream: StreamSection) -> Status:
    """Ask once. Raises StreamError if nobody answers within `PATIENCE_S`."""
    answers: list[Status] = []
    run_process(partial(_fetch, stream, answers))
    return answers[0]


async def _fetch(stream: StreamSection, answers: list[Status]) -> None:
    async with open_link(stream, role="observer", name=observer("status"), agreed={}, patience_s=PATIENCE_S) as link:
        answers.append(await ask(link, stream.address))


async def ask(link: Link, address: str) -> Status:
    """A status by the link of an observer, within `PATIENCE_S`. Raises StreamError."""
    with trio.move_on_after(PATIENCE_S):
        return await link.status()
    raise StreamError(f"the allocator at {address} has not said how the run is within {PATIENCE_S:g} s")


def observer(command: str) -> str:
    """A name for this process: two people may watch the same run."""
    return f"{command}-{socket.gethostname()}-{os.getpid()}"


def show_status(status: Status) -> None:
    Console(highlight=False).print(picture(status))


def picture(status: Status) -> RenderableType:
    """Fits 80 columns."""
    parts: list[RenderableType] = [
        Text(f"run {status.run}: {status.phase}", "bold"),
        _figures(status),
    ]
    if terminal.fates_of(status):
        parts += ["", terminal.fates(status, bar=30)]
    if status.peers:
        parts += ["", terminal.processes(sorted(status.peers, key=terminal.in_trouble))]
    if status.waits:
        parts += ["", Text("waits", "dim"), terminal.waits(status)]
    return Group(*parts)


def _figures(status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    left = terminal.left(status)
    table.add_row("batches", f"{status.step} of {status.steps}" + (f", {left}" if left else ""))
    table.add_row("time", terminal.duration(status.seconds))
    table.add_row("policy", f"version {status.version}" if status.version >= 0 else "not published yet")
    table.add_row("held-out", terminal.accuracy(status))
    table.add_row(
        "rollouts",
        f"{status.rollouts:,} done, {status.running:,} running, {status.scored:,} scored and waiting to be trained on",
    )
    table.add_row("tokens", f"{terminal.count(status.tokens['generated'])} generated")
    last = status.last_step
    lag = f"mean {last.mean_lag:.2f}, most {last.max_lag} in the last batch; " if last else ""
    table.add_row("lag", f"{lag}bound: {status.max_lag} batches")
    table.add_row(
        "gain", f"{terminal.number(status.gain)} over uniform ({terminal.interval(status.gain_interval)})"
        if status.gain is not None else "not measured yet",
    )  # fmt: skip
    if status.price is not None:
        table.add_row("price", f"{terminal.number(status.price)} of variance per token")
    table.add_row("spool", spool(status))
    table.add_row("account", Text(terminal.account(status), "" if status.conserved else "bold red"))
    return table


def spool(status: Status) -> str:
    waiting = f"{status.spool_waiting:,} turns not on disk yet" if status.spool_waiting else "all on disk"
    return f"{terminal.size(status.spool_bytes)}, {waiting}"
