"""Live progress of a run in the terminal, and the summary at its end. Plain lines where there is no terminal."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gvm_stream.config import Config
from gvm_stream.wire.messages import Status

PLAIN_INTERVAL_S = 5.0
"""Seconds between lines where there is no terminal."""
RATE_WINDOW_S = 5.0


class Progress:
    def __init__(self, config: Config, folder: Path, *, plain: bool) -> None:
        self._config = config
        self._console = Console(highlight=False, soft_wrap=True)
        self._live = None if plain or not self._console.is_terminal else Live(console=self._console, transient=True)
        self._started = time.monotonic()
        self._shown_at = -PLAIN_INTERVAL_S
        self._rates: list[tuple[float, int]] = []
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
        self._rates.append((now, status.tokens["generated"]))
        while self._rates[0][0] < now - RATE_WINDOW_S:
            self._rates.pop(0)
        if self._live:
            self._live.update(self._picture(status))
        elif now - self._shown_at >= PLAIN_INTERVAL_S:
            self._shown_at = now
            self._console.print(self._line(status))

    def _tokens_per_second(self) -> float:
        (t0, n0), (t1, n1) = self._rates[0], self._rates[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0

    def _line(self, status: Status) -> str:
        last = status.last_step
        parts = [
            f"{time.monotonic() - self._started:6.1f} s",
            f"{status.phase:>10}",
            f"batch {status.step}/{status.steps}",
            f"version {status.version}",
            f"{status.rollouts} rollouts",
            f"{self._tokens_per_second():,.0f} tokens/s",
        ]
        if last is not None:
            parts.append(f"reward {last.reward_mean:.3f}  lag {last.mean_lag:.2f}")
        if status.accuracy:
            parts.append(f"held-out {status.accuracy[-1][1]:.3f}")
        return "  ".join(parts)

    def _picture(self, status: Status) -> Group:
        last = status.last_step
        table = Table.grid(padding=(0, 2))
        table.add_row("phase", status.phase, "policy version", str(status.version))
        table.add_row(
            "rollouts", f"{status.rollouts:,}", "tokens", f"{status.tokens['generated']:,}"
            f" ({self._tokens_per_second():,.0f}/s)"
        )  # fmt: skip
        if last is not None:
            table.add_row(
                "reward", f"{last.reward_mean:.3f}", "no signal", f"{last.zero_signal_groups}/{last.groups} groups"
            )
            table.add_row("lag", f"{last.mean_lag:.2f} batches", "gradient norm", f"{last.grad_norm:.2f}")
        accuracy = "  ".join(f"{step}: {value:.3f}" for step, value in status.accuracy[-8:])
        table.add_row("held-out", accuracy or "not yet", "", "")
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=status.steps, completed=status.step, width=50),
            f"batch {status.step} of {status.steps}  {time.monotonic() - self._started:.0f} s",
        )
        peers = [
            Text(
                f"{peer.role} {peer.name}: version {peer.version}, {peer.in_flight} in flight"
                if peer.role == "producer"
                else f"{peer.role} {peer.name}",
                style="dim",
            )
            + Text(f", waits for {peer.waiting_for}" if peer.waiting_for else "", style="dim")
            for peer in status.peers
        ]
        waits = Text("the run waits for " + "; ".join(status.waits), style="dim") if status.waits else Text("")
        return Group(bar, table, *peers, waits)

    def summary(self, report: dict[str, Any], folder: Path) -> None:
        before, after = report["heldout_before"], report["heldout_after"]
        tokens = report["tokens"]
        table = Table.grid(padding=(0, 2))
        shown = [f"{value:.3f}" if value is not None else "not measured" for value in (before, after)]
        table.add_row("held-out accuracy", f"{shown[0]} before, {shown[1]} after")
        table.add_row("training", f"{report['steps']} batches, {report['policy_versions']} policy updates")
        table.add_row("rollouts", f"{report['rollouts']:,}")
        fates = ", ".join(f"{fate} {n:,}" for fate, n in tokens.items() if n and fate != "generated")
        table.add_row("tokens", f"{tokens['generated']:,} generated: {fates}")
        table.add_row("time", f"{report['seconds']:.0f} s, {report['tokens_per_second'] or 0:,.0f} tokens/s")
        lag = report["mean_lag"]
        table.add_row("lag", f"mean {lag}, most {report['max_lag']} batches" if lag is not None else "nothing trained")
        waited = report["learner_wait_share"] or 0
        table.add_row("learner", f"waited for rollouts {waited:.0%} of the time")
        table.add_row("written", f"{folder / 'report.json'}, {folder / 'curve.png'}, {folder / 'checkpoints'}")
        self._console.print(table)
