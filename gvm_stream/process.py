"""What every process of a run has in common: signals, one sentence for an error."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable

import trio

from gvm_stream.errors import GvmStreamError


def run_process(main: Callable[[], Awaitable[None]]) -> None:
    """Run a trio main; of an exception group made of our own errors, raise the first."""
    try:
        trio.run(main)
    except BaseExceptionGroup as group:
        ours = leaf_error(group)
        if ours is None:
            raise
        raise ours from group


def leaf_error(group: BaseExceptionGroup[BaseException]) -> GvmStreamError | None:
    """The first of our own errors in a group; None if there is something else in it, too."""
    _, rest = group.split((GvmStreamError, trio.Cancelled))
    if rest is not None:
        return None
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if isinstance(found, GvmStreamError) else None


async def set_on_signal(event: trio.Event, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Set `event` on the first SIGINT or SIGTERM; end the process at once on the second."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            if event.is_set():
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            event.set()
