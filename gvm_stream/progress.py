"""Live progress of a run in the terminal, and the summary at its end. Plain lines where there is no terminal."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from gvm_stream import terminal
from gvm_stream.config import Config
from gvm_stream.top_view import View, figures, title
from gvm_stream.wire.messages import Status

PLAIN_INTERVAL_S = 5.0
"""Seconds between lines where there is no terminal."""
MOST_ROWS = 8
"""Of processes, and of waits; `gvm-stream top` shows all."""


class Progress:
    def __init__(self, config: Config, folder: Path, *, plain: bool) -> None:
        self._config = config
        self._console = Console(highlight=False, soft_wrap=True)
        self._live = None if plain or not self._console.is_terminal else Live(console=self._console, transient=True)
        self._shown_at = -PLAIN_INTERVAL_S
        self._view = View(config.stream.address)
        self._console.print(
            f"run directory {folder}  policy {config.allocation.policy}  {config.run.steps} batches of "
            f"{config.allocation.prompts_per_step} prompts  {config.learner.advantage}/{config.learner.loss}",
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(text)

    def show(self, status: Status) -> None:
        now = time.monotonic()
        self._view.saw(status, now)
        if self._live:
            self._live.update(picture(self._view, status, self._console.width))
        elif now - self._shown_at >= PLAIN_INTERVAL_S:
            self._shown_at = now
            self._console.print(terminal.line(status, self._view.rates))

    def summary(self, report: dict[str, Any], folder: Path) -> None:
        tokens, lag, waited = report["tokens"], report["mean_lag"], report["learner_wait_share"] or 0
        before, after = (
            "not measured" if value is None else terminal.share(value)
            for value in (report["heldout_before"], report["heldout_after"])
        )
        fates = ", ".join(f"{fate} {n:,}" for fate, n in tokens.items() if n and fate != "generated")
        table = Table.grid(padding=(0, 2))
        table.add_row("held-out accuracy", f"{before} before, {after} after")
        table.add_row("training", f"{report['steps']} batches, {report['policy_versions']} policy updates")
        table.add_row("rollouts", f"{report['rollouts']:,}")
        table.add_row("tokens", f"{tokens['generated']:,} generated: {fates}")
        table.add_row(
            "time", f"{terminal.duration(report['seconds'])}, {report['tokens_per_second'] or 0:,.0f} tokens/s"
        )
        table.add_row("lag", f"mean {lag}, most {report['max_lag']} batches" if lag is not None else "nothing trained")
        table.add_row("learner", f"waited for rollouts {waited:.0%} of the time")
        table.add_row("written", f"{folder / 'report.html'}, {folder / 'report.json'}, {folder / 'checkpoints'}")
        self._console.print(table)


def picture(view: View, status: Status, width: int) -> Group:
    """The run now, in rows of `width` columns."""
    peers = sorted(status.peers, key=terminal.in_trouble)[:MOST_ROWS]
    shown = terminal.processes(peers), "", terminal.waits(status, MOST_ROWS, wrap=False)
    return Group(*title(status, width), "", figures(view, status), "", *shown)
