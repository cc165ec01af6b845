"""`gvm-stream top`: what is drawn from what is known, and the real process in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest
import trio
from rich.console import Console

from gvm_stream.config import StreamSection
from gvm_stream.top_view import LATE_S, View, picture
from gvm_stream.wire.messages import Hello, Status, StatusRequest, Wait, Welcome
from tests.doubles import ScriptedAllocator, local_stream, scripted_allocator
from tests.status_samples import STATS, new_run, peer, status

SIZES = [(80, 24), (120, 40)]
NOW = 1_700_000_000.0
WELCOME = Welcome(run="arithmetic", next_step=34, settled=34, weights=None)
PATIENCE_S = 30


def view_of(*statuses: Status) -> View:
    view = View("tcp://127.0.0.1:5710")
    for sample in statuses or (status(),):
        view.saw(sample, NOW)
    return view


def drawn(view: View, width: int = 80, height: int = 24, now: float = NOW) -> list[str]:
    console = Console(width=width, height=height, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(picture(view, now, width, height))
    return capture.get().splitlines()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("processes", [0, 3, 100])
@pytest.mark.parametrize("waits", [0, 2, 100])
def test_a_picture_fills_the_terminal_and_no_more_and_ends_with_the_keys(
    size: tuple[int, int], processes: int, waits: int
) -> None:
    sample = status(
        peers=tuple(peer("producer", f"p{i}") for i in range(processes)),
        waits=tuple(Wait(who=f"producer p{i}", what="work " * 40, seconds=i) for i in range(waits)),
    )
    lines = drawn(view_of(sample), *size)
    assert len(lines) == size[1]
    assert max(map(len, lines)) <= size[0]
    assert lines[-1].startswith("q quit  ? help")


@pytest.mark.parametrize("size", SIZES)
def test_all_that_matters_is_on_the_smallest_screen_too(size: tuple[int, int]) -> None:
    view = view_of(
        *(status(seconds=s, rollouts=40 * s, tokens={"generated": 9000 * s, "trained": 9000 * s}) for s in (1, 2))
    )
    text = "\n".join(drawn(view, *size))
    for word in (
        "run arithmetic  training", "batch 34 of 120", "9,000, 40.0 rollouts/s", "0.83, most 1 of 1", "12 of 32 groups",
        "0.005", "11.6", "1.32 (95 %: 1.1 to 1.58)", "5.7e-05 per token", "0.465 after batch 30", "▁▅▆█", "trained",
        "producer p1", "rollouts of batch 35: 256 are running", "12 MiB", "conserved",
    ):  # fmt: skip
        assert word in text


@pytest.mark.parametrize("size", SIZES)
def test_bars_are_as_long_as_their_shares(size: tuple[int, int]) -> None:
    view = view_of(status(tokens={"generated": 100, "trained": 75, "evaluation": 25}))
    text = "\n".join(drawn(view, *size))
    longest, shortest = sorted((len(bar) for bar in re.findall("█+(?= )", text.replace("▁▅▆█", ""))), reverse=True)
    assert longest / shortest == pytest.approx(3, abs=1)
    assert shortest > 1


def test_a_run_in_which_nothing_has_happened_is_drawn() -> None:
    text = "\n".join(drawn(view_of(new_run())))
    assert "waiting for the learner" in text
    assert "a learner to join" in text
    assert "nan" not in text.lower()


def test_before_the_first_answer_it_says_whom_it_asks() -> None:
    view = View("tcp://h:1")
    view.problem = "no allocator has answered"
    lines = drawn(view)
    assert len(lines) == 24
    assert "no answer from tcp://h:1 yet: no allocator has answered" in lines[1]


def test_an_old_answer_is_called_old_and_a_new_one_clears_that() -> None:
    view = view_of()
    assert not view.complaint(NOW + LATE_S / 2)
    view.problem = "silent"
    late = "\n".join(drawn(view, now=NOW + 75))
    assert re.search(r"no answer since \d\d:\d\d:\d\d, 1 min 15 s ago: silent", late)
    assert "run arithmetic" in late
    view.saw(status(), NOW + 80)
    assert not view.complaint(NOW + 81)


def test_a_held_picture_stays_until_it_is_let_go() -> None:
    view = view_of()
    view.press("p")
    view.saw(status(step=99), NOW)
    assert "PAUSED" in drawn(view)[-1]
    assert "batch 34 of 120" in "\n".join(drawn(view))
    view.press("p")
    view.saw(status(step=99), NOW)
    assert "batch 99 of 120" in "\n".join(drawn(view))


def test_s_goes_through_the_orders_of_the_processes() -> None:
    peers = (
        peer("producer", "a", in_flight=1),
        peer("producer", "b", in_flight=9),
        peer("producer", "c", connected=False),
    )
    view = view_of(status(peers=peers))
    orders = []
    for _ in range(4):
        orders.append([line.split()[1] for line in drawn(view) if re.match("producer . ", line)])
        view.press("s")
    assert orders == [["c", "a", "b"], ["a", "b", "c"], ["c", "b", "a"], ["c", "a", "b"]]


def test_help_covers_the_picture_until_a_key_is_pressed() -> None:
    view = view_of()
    view.press("?")
    assert any("hold the picture" in line for line in drawn(view))
    assert len(drawn(view)) <= 24
    view.press("x")
    assert not any("hold the picture" in line for line in drawn(view))
    assert not view.quit


def test_the_variance_is_kept_between_the_batches_on_which_it_is_measured() -> None:
    unmeasured = status(last_step=msgspec.structs.replace(STATS, noise=None))
    view = view_of(status(), status(), unmeasured)
    assert view.variances == [0.005]
    assert "0.005" in "\n".join(drawn(view))


# --- the process in a terminal ---


class Terminal:
    """Our end of a pseudo-terminal with `gvm-stream top` on the other."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master, self.process = master, process
        self.output = ""
        self._read = 0

    async def until(self, pattern: str) -> None:
        """Read until `pattern` has come since the last call."""
        with trio.fail_after(PATIENCE_S):
            while not (found := re.compile(pattern).search(self.output, self._read)):
                await trio.lowlevel.wait_readable(self._master)
                self.output += os.read(self._master, 65536).decode()
        self._read = found.end()

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextmanager
def top_in_terminal(stream: StreamSection, **environment: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    plain = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "gvm_stream", "top", "--address", stream.address],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**plain, "TERM": "xterm-256color", **environment},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that it is told of a new size
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


async def serve(allocator: ScriptedAllocator) -> None:
    """Answer whoever asks, as an allocator does."""
    step = 34
    while True:
        match await allocator.receive():
            case Hello():
                allocator.say(WELCOME)
            case StatusRequest():
                allocator.say(status(step=step))
                step += 1
            case message:
                raise AssertionError(f"an observer sent {message}")


async def ended(process: subprocess.Popen[bytes]) -> int:
    with trio.fail_after(PATIENCE_S):
        return await trio.to_thread.run_sync(process.wait)


COLOUR = re.compile(r"\x1b\[(\d+;)*[39][0-8][;m]")


async def test_the_screen_is_live_answers_keys_follows_the_window_and_is_given_back() -> None:
    stream = local_stream()
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(serve, allocator)
        with top_in_terminal(stream) as screen:
            await screen.until(r"\x1b\[\?1049h")  # the alternate screen
            await screen.until("batch 34 of 120")
            await screen.until("batch 35 of 120")
            screen.type("?")
            await screen.until("hold the picture")
            screen.type("x")
            await screen.until("order: trouble first")
            screen.type("s")
            await screen.until("order: name")
            screen.resize(120, 40)
            await screen.until(r"version 34[^\n]*trained")  # side by side
            screen.type("q")
            await screen.until(r"\x1b\[\?1049l")
            assert await ended(screen.process) == 0
            assert COLOUR.search(screen.output)
        nursery.cancel_scope.cancel()


@pytest.mark.stream
async def test_it_outlives_the_allocator_finds_the_next_one_and_needs_no_colour() -> None:
    stream = local_stream()
    with top_in_terminal(stream, NO_COLOR="1") as screen:
        await screen.until("no answer from")
        for _ in range(2):
            async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
                nursery.start_soon(serve, allocator)
                await screen.until("batch 34 of 120")
                nursery.cancel_scope.cancel()
            await screen.until("no answer since")
        screen.type("\x03")  # Ctrl-C
        assert await ended(screen.process) == 0
        assert not COLOUR.search(screen.output)


LINE = re.compile(r"^ +4 min 12 s +training  batch 3\d/120  version 34 .* held-out 0\.465\n", re.M)


async def test_without_a_terminal_it_writes_lines() -> None:
    stream = local_stream()
    command = [sys.executable, "-m", "gvm_stream", "top", "--address", stream.address]
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(serve, allocator)
        process: trio.Process = await nursery.start(partial(trio.run_process, command, stdout=subprocess.PIPE))
        assert process.stdout is not None
        text = ""
        with trio.fail_after(PATIENCE_S):
            while not LINE.search(text):
                text += (await process.stdout.receive_some()).decode()
        process.terminate()
        assert await process.wait() == 0
        nursery.cancel_scope.cancel()
    assert "\x1b" not in text
