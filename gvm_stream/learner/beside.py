"""Processes beside the learner that hand out its weights. Each is ready when it says so, and ends with its input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import trio

from gvm_stream.config import StreamSection
from gvm_stream.errors import GvmStreamError, StreamError
from gvm_stream.logs import set_up_logging
from gvm_stream.process import run_process
from gvm_stream.wire.zap import listening
from gvm_stream.wire.zmq_trio import ZmqSocket

READY = "ready"


@contextmanager
def beside(module: str, *arguments: str) -> Iterator[None]:
    """`python -m MODULE ARGUMENTS` runs while the block does. Raises `StreamError`, with its words, if it cannot."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        first = process.stdout.readline().strip()
        if first != READY:
            raise StreamError(first or f"{module} ended at once")
        try:
            yield
        finally:
            process.stdin.close()
            process.wait()


def run_beside(
    name: str, address: str, key: str, stream: StreamSection, serve: Callable[[ZmqSocket], Awaitable[None]]
) -> int:
    """The other side of `beside`: `serve` a socket that listens on `address`, configured as `key`; the exit status."""
    set_up_logging(name, "learner")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is for the learner, which still needs this
    # Requests are small, and so may everything be that is not one.
    stream = msgspec.structs.replace(stream, max_message_mib=1)
    try:
        run_process(partial(_serve, address, key, stream, serve))
    except GvmStreamError as error:
        sys.stdout.write(f"{error}\n")
        return error.exit_status
    return 0


async def _serve(address: str, key: str, stream: StreamSection, serve: Callable[[ZmqSocket], Awaitable[None]]) -> None:
    async with listening(
        address,
        key,
        stream=stream,
        server="learner",
        count=lambda reason: None,  # logged; these processes have no metrics
    ) as socket:
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, socket)
            async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
                while await stdin.receive_some():
                    pass
            nursery.cancel_scope.cancel()
