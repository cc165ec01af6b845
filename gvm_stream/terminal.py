"""Parts that `status`, `top` and the progress of `run` have in common. Pure: a Status comes in, text goes out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from gvm_stream.wire.messages import PeerStatus, Status

UNKNOWN = "-"
RATE_WINDOW_S = 10.0
BLOCKS = "▁▂▃▄▅▆▇█"


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits; a dash for what is not known or not finite."""
    return f"{value:.{digits}g}" if value is not None and math.isfinite(value) else UNKNOWN


def share(value: float | None) -> str:
    """Of accuracies and rewards: three decimals."""
    return f"{value:.3f}" if value is not None and math.isfinite(value) else UNKNOWN


def count(value: float) -> str:
    """12,345, then 1.23 M and so on."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Of so many bytes."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.3g} GiB"


def duration(seconds: float) -> str:
    """In the two largest units that matter."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h:02} h"
    if hours:
        return f"{h} h {m:02} min"
    return f"{m} min {s:02} s" if minutes else f"{s} s"


def interval(bounds: tuple[float, float] | None) -> str:
    return f"95 %: {number(bounds[0])} to {number(bounds[1])}" if bounds else "no interval yet"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values between their own least and greatest; NaN is a gap."""
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(
        (BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] if span else BLOCKS[3])
        if math.isfinite(value)
        else " "
        for value in shown
    )


class Rates:
    """Tokens and rollouts per second, by the run's own clock: late answers do not distort them."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def see(self, status: Status) -> None:
        now = (status.seconds, status.tokens["generated"], status.rollouts)
        if self._seen and any(new < old for new, old in zip(now, self._seen[-1], strict=True)):
            self._seen.clear()  # the allocator has gone back to what it had saved
        self._seen.append(now)
        while self._seen[0][0] < now[0] - RATE_WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()

    @property
    def per_second(self) -> tuple[float, float] | None:
        """(tokens, rollouts); None before there are two answers."""
        if not self._seen or self._seen[-1][0] <= self._seen[0][0]:
            return None
        (start, *before), (end, *after) = self._seen[0], self._seen[-1]
        tokens, rollouts = ((new - old) / (end - start) for old, new in zip(before, after, strict=True))
        return tokens, rollouts


def left(status: Status) -> str:
    """How long the rest takes at the pace so far."""
    if not 0 < status.step < status.steps:
        return ""
    return f"about {duration(status.seconds / status.step * (status.steps - status.step))} left"


def line(status: Status, rates: Rates) -> str:
    """All of it in one line, for logs."""
    parts = [
        f"{duration(status.seconds):>11}",
        f"{status.phase:>10}",
        f"batch {status.step}/{status.steps}",
        f"version {status.version}",
        f"{status.rollouts:,} rollouts",
    ]
    if rates.per_second:
        parts.append(f"{rates.per_second[0]:,.0f} tokens/s")
    if status.last_step is not None:
        parts.append(f"reward {share(status.last_step.reward_mean)}  lag {status.last_step.mean_lag:.2f}")
    if status.accuracy:
        parts.append(f"held-out {share(status.accuracy[-1][1])}")
    return "  ".join(parts)


def accuracy(status: Status) -> str:
    """Newest held-out accuracy, and the first."""
    if not status.accuracy:
        return "not measured yet"
    (first_step, first), (step, last) = status.accuracy[0], status.accuracy[-1]
    before = f" ({share(first)} after {first_step})" if step != first_step else ""
    return f"{share(last)} after batch {step}{before}"


def account(status: Status) -> str:
    """Whether every rollout and token is accounted for, and what has gone wrong on the way."""
    faults = [(status.expired, "expired"), (status.duplicates, "reported twice"), (status.refused, "refused")]
    seen = ", ".join(f"{n:,} {what}" for n, what in faults if n)
    return ("conserved" if status.conserved else "NOT CONSERVED") + (f"; {seen}" if seen else "")


def fates(status: Status, bar: int) -> Table:
    """Where the tokens went: fates that have any, largest first, with bars of up to `bar` cells."""
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(no_wrap=True)
    for _ in range(2):
        table.add_column(no_wrap=True, justify="right")
    generated = status.tokens["generated"]
    for fate, tokens in fates_of(status):
        part = tokens / generated
        style = {"trained": "green", "pending": "blue", "evaluation": "cyan", "failed": "red"}.get(fate, "yellow")
        table.add_row(
            fate.replace("_", " "), Text("█" * max(1, round(part * bar)), style), f"{part:.0%}", count(tokens)
        )
    return table


def fates_of(status: Status) -> list[tuple[str, int]]:
    found = [(fate, n) for fate, n in status.tokens.items() if n and fate != "generated"]
    return sorted(found, key=lambda pair: -pair[1])


SortKey = tuple[float, float, float, str]


def in_trouble(peer: PeerStatus) -> SortKey:
    """Who needs a look comes first."""
    return (peer.connected, -peer.versions_behind, -max(peer.oldest_s, peer.silent_s), label(peer))


def label(peer: PeerStatus) -> str:
    """As in `Wait.who`."""
    return f"{peer.role} {peer.name}"


def processes(peers: Sequence[PeerStatus]) -> Table:
    """A row per process, in the order given."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("process", no_wrap=True, overflow="ellipsis", min_width=12)
    for name in ("version", "in hand", "credits", "oldest", "silent", "here for"):
        table.add_column(name, no_wrap=True, justify="right")
    for peer in peers:
        works = peer.role == "producer"
        behind = f" (-{peer.versions_behind})" if works and peer.versions_behind else ""
        version = f"{peer.version}{behind}" if peer.version >= 0 else UNKNOWN
        table.add_row(
            label(peer),
            Text(version, "yellow" if behind else ""),
            f"{peer.in_flight:,}" if works else UNKNOWN,
            f"{peer.credits:,}" if works else UNKNOWN,
            duration(peer.oldest_s) if peer.in_flight else UNKNOWN,
            duration(peer.silent_s) if peer.connected else Text("cut off", "red"),
            duration(peer.joined_s),
        )
    return table


def waits(status: Status, limit: int | None = None, *, wrap: bool = True) -> Table:
    """What everybody waits for and since when: the run first, then the longest wait; at most `limit` rows."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim", min_width=3)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=not wrap, overflow="fold" if wrap else "ellipsis")
    found = sorted(status.waits, key=lambda wait: (wait.who != "run", -wait.seconds))
    shown = found if limit is None or len(found) <= limit else found[: max(0, limit - 1)]
    for wait in shown:
        table.add_row(wait.who, duration(wait.seconds), wait.what)
    if len(shown) < len(found):
        table.add_row("...", "", f"and {len(found) - len(shown)} more")
    return table


SORTS: dict[str, Callable[[PeerStatus], SortKey]] = {
    "trouble first": in_trouble,
    "name": lambda peer: (0, 0, 0, label(peer)),
    "in hand": lambda peer: (-peer.in_flight, 0, 0, label(peer)),
}
"""Orders of the processes, by what people call them."""
