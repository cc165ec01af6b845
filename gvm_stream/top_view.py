"""What `gvm-stream top` shows: all that is known of a run, drawn for a terminal of any size. No input, no output."""

from __future__ import annotations

import math
import time

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gvm_stream import terminal
from gvm_stream.status import spool
from gvm_stream.wire.messages import NoiseStats, Status

LATE_S = 3.0
"""Age at which an answer is called old."""
WIDE = 120
"""Columns from which on the tokens stand beside the figures."""
FIGURE_ROWS, FIGURE_COLUMNS = 7, 78

HELP = """\
q            quit (so does Ctrl-C)
p or space   hold the picture; again: go on
s            order of the processes: trouble first, name, most in hand
? or h       this page; any key leaves it

lag          training batches between the policy that sampled a rollout's oldest token and the one trained
ESS          effective sample size of the importance weights, as a share; 1 is on-policy
mismatch     mean |log-prob of the learner - log-prob at sampling|
variance     of the gradient of a batch; noise/signal is it over the squared norm of the expected gradient
price        decrease of variance per token of the last rollout granted
gain         error times tokens of uniform visits over that of allocated ones; above 1 allocation saves
in hand      rollouts that a producer has; credits: how many more it could take
oldest       since the rollout that has been slowest made its last token; silent: since the last message\
"""


class View:
    """What is known of the run, and what the person at the keyboard wants to see of it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.status: Status | None = None
        self.answered_at = -math.inf
        """By the clock of `time.time`."""
        self.problem = ""
        self.rates = terminal.Rates()
        self.noise: NoiseStats | None = None
        self.variances: list[float] = []
        self.order = 0
        self.held = self.help = self.quit = False

    def saw(self, status: Status, now: float) -> None:
        self.answered_at, self.problem = now, ""
        self.rates.see(status)
        noise = status.last_step.noise if status.last_step else None
        if noise is not None and noise != self.noise:
            self.noise = noise
            self.variances.append(noise.variance)
        if not self.held:
            self.status = status

    def press(self, key: str) -> None:
        if self.help and key != "q":
            self.help = False
        elif key == "q":
            self.quit = True
        elif key in "?h":
            self.help = True
        elif key in "p ":
            self.held = not self.held
        elif key == "s":
            self.order = (self.order + 1) % len(terminal.SORTS)

    def complaint(self, now: float) -> str:
        """Empty while answers come."""
        if now - self.answered_at < LATE_S:
            return ""
        reason = f": {self.problem}" if self.problem else ""
        if self.status is None:
            return f"no answer from {self.address} yet{reason}"
        since = time.strftime("%H:%M:%S", time.localtime(self.answered_at))
        return f"no answer since {since}, {terminal.duration(now - self.answered_at)} ago{reason}"


def picture(view: View, now: float, width: int, height: int) -> RenderableType:
    """Everything, in `width` columns and `height` rows; processes and waits get the rows that are left."""
    complaint = Text(view.complaint(now), "bold red", no_wrap=True, overflow="ellipsis")
    if view.help:
        return Group(Text("gvm-stream top", "bold"), "", HELP)
    if view.status is None:
        return Group(Text("gvm-stream top", "bold"), complaint, *[""] * (height - 3), _keys(view))
    status = view.status
    wide = width >= WIDE
    fates = terminal.fates(status, bar=min(20, width - FIGURE_COLUMNS - 32) if wide else 20)
    rows = max(FIGURE_ROWS, fates.row_count) if wide else FIGURE_ROWS + fates.row_count
    left = height - rows - 6  # title, bar, complaint; header of the processes, a line after them, keys
    waits = min(len(status.waits), max(1, left - len(status.peers), left // 2))
    room = max(1, left - waits)
    peers = sorted(status.peers, key=list(terminal.SORTS.values())[view.order])
    shown = peers if len(peers) <= room else peers[: room - 1]
    spare = max(0, left - waits - min(len(peers), room))
    tokens: list[RenderableType] = [figures(view, status), fates]
    if wide:
        side_by_side = Table.grid(padding=(0, 4))
        side_by_side.add_row(*tokens)
        tokens = [side_by_side]
    elif spare > 1:
        tokens.insert(1, "")
        spare -= 1
    more = [Text(f"... and {len(peers) - len(shown)} more", "dim")] if len(shown) < len(peers) else []
    return Group(
        *title(status, width),
        complaint,
        *tokens,
        *[""] * min(spare, 1),
        terminal.processes(shown),
        *more,
        "",
        terminal.waits(status, waits, wrap=False),
        *[""] * (spare - 1),
        _keys(view),
    )


def title(status: Status, width: int) -> tuple[RenderableType, RenderableType]:
    """Two rows: which run, and how far it is."""
    name = Text.assemble((f"run {status.run}", "bold"), f"  {status.phase}, {terminal.duration(status.seconds)}")
    progress = Table.grid(padding=(0, 2))
    left = terminal.left(status)
    progress.add_row(
        ProgressBar(total=status.steps, completed=status.step, width=width // 3),
        f"batch {status.step} of {status.steps}" + (f", {left}" if left else ""),
    )
    return name, progress


def figures(view: View, status: Status) -> Table:
    """`FIGURE_ROWS` rows of up to `FIGURE_COLUMNS` columns."""
    n, last, noise = terminal.number, status.last_step, view.noise
    table = Table.grid(padding=(0, 2))
    for column in range(4):
        table.add_column(style="dim" if column % 2 == 0 else "", no_wrap=True)
    table.add_row(
        "tokens/s", "{:,.0f}, {:,.1f} rollouts/s".format(*view.rates.per_second) if view.rates.per_second else "...",
        "policy", f"version {status.version}" if status.version >= 0 else "not published yet",
    )  # fmt: skip
    table.add_row(
        "reward", terminal.share(last.reward_mean if last else None),
        "no signal", f"{last.zero_signal_groups} of {last.groups} groups" if last else terminal.UNKNOWN,
    )  # fmt: skip
    table.add_row(
        "lag", f"{last.mean_lag:.2f}, most {last.max_lag} of {status.max_lag}" if last else terminal.UNKNOWN,
        "ESS", f"{n(last.effective_sample_size)}, mismatch {n(last.mismatch, 2)}" if last else terminal.UNKNOWN,
    )  # fmt: skip
    ratio = noise.variance / noise.signal if noise and noise.signal > 0 else None
    table.add_row(
        "variance", f"{n(noise.variance if noise else None)} {terminal.sparkline(view.variances, 8)}",
        "noise/signal", f"{n(ratio)}, gradient norm {n(last.grad_norm if last else None)}",
    )  # fmt: skip
    table.add_row(
        "gain", f"{n(status.gain)} ({terminal.interval(status.gain_interval)})",
        "price", f"{n(status.price)} per token",
    )  # fmt: skip
    table.add_row(
        "held-out", f"{terminal.share(status.accuracy[-1][1])} after batch {status.accuracy[-1][0]}"
        if status.accuracy else "not measured yet",
        "curve", terminal.sparkline([value for _, value in status.accuracy], 24),
    )  # fmt: skip
    account = Text(terminal.account(status), "" if status.conserved else "bold red")
    table.add_row("spool", spool(status), "account", account)
    return table


def _keys(view: View) -> Text:
    order = list(terminal.SORTS)[view.order]
    held = "  PAUSED" if view.held else ""
    return Text(f"q quit  ? help  p pause  s order: {order}{held}", "reverse", no_wrap=True, overflow="ellipsis")
