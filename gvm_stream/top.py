"""`gvm-stream top`: a run as it goes. Lives in the alternate screen of a terminal; elsewhere it writes lines.

One task asks the allocator, one reads the keyboard, one notices a resized terminal; each tells `View`, which is all
there is to draw. It outlives the allocator: what it shows says how old it is.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import trio
from rich.console import Console
from rich.live import Live

from gvm_stream import terminal
from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError, WireError
from gvm_stream.process import leaf_error, run_process, set_on_signal
from gvm_stream.status import PATIENCE_S, ask, observer
from gvm_stream.top_view import View, picture
from gvm_stream.wire.link import open_link

INTERVAL_S = 1.0
LINE_INTERVAL_S = 5.0
"""Between lines where there is no terminal."""


def watch(stream: StreamSection) -> None:
    """Show the run until the user quits."""
    console = Console(highlight=False)
    run_process(partial(_watch, stream, View(stream.address), console))


async def _watch(stream: StreamSection, view: View, console: Console) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(set_on_signal, stop)
        if console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty():
            nursery.start_soon(_live, stream, view, console, stop)
        else:
            nursery.start_soon(_lines, stream, view, console)
        await stop.wait()
        nursery.cancel_scope.cancel()


async def _live(stream: StreamSection, view: View, console: Console, stop: trio.Event) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live, _single_keys(sys.stdin.fileno()):

        def draw() -> None:
            live.update(picture(view, time.time(), console.width, console.height), refresh=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_resized, draw)
            nursery.start_soon(_ask_for_ever, stream, view)
            nursery.start_soon(_keyboard, view, draw, stop)
            while True:
                draw()
                await trio.sleep(INTERVAL_S)


async def _lines(stream: StreamSection, view: View, console: Console) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ask_for_ever, stream, view)
        await trio.sleep(INTERVAL_S)
        while True:
            complaint = view.complaint(time.time())
            text = terminal.line(view.status, view.rates) if view.status and not complaint else complaint
            console.print(text, soft_wrap=True)
            await trio.sleep(LINE_INTERVAL_S)


async def _ask_for_ever(stream: StreamSection, view: View) -> None:
    while True:
        try:
            async with open_link(
                stream, role="observer", name=observer("top"), agreed={}, patience_s=PATIENCE_S
            ) as link:
                while True:
                    view.saw(await ask(link, stream.address), time.time())
                    await trio.sleep(INTERVAL_S)
        except* (StreamError, WireError) as group:
            view.problem = str(leaf_error(group))
        await trio.sleep(INTERVAL_S)


async def _keyboard(view: View, draw: Callable[[], None], stop: trio.Event) -> None:
    """Reading only once there is something keeps the descriptor, which the output shares, in blocking mode."""
    fd = sys.stdin.fileno()
    while not view.quit:
        await trio.lowlevel.wait_readable(fd)
        for key in os.read(fd, 64).decode(errors="replace") or "q":  # nothing: the terminal is gone
            view.press(key)
        draw()
    stop.set()


async def _resized(draw: Callable[[], None]) -> None:
    with trio.open_signal_receiver(signal.SIGWINCH) as signals:
        async for _ in signals:
            draw()


@contextmanager
def _single_keys(fd: int) -> Iterator[None]:
    """Keys arrive as they are pressed, unseen; Ctrl-C is still a signal."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
