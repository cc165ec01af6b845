"""The processes that judge. One template imports what the rules need and forks workers, which cost milliseconds then.

    python -m gvm_stream.verify.worker SOCKET

The template reads from its standard input, in frames, the settings, then kinds of verifiers to prepare for. Whoever
connects to SOCKET gets a worker of its own: a process that answers frames of items with one frame per verdict, in
order, each sent when it is known. An item that takes longer than `timeout_s` of wall clock or of CPU time ends its
worker. When standard input ends, all workers are killed and reaped, the folder of SOCKET is
removed, and the template ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from io import FileIO
from pathlib import Path

import msgspec

from gvm_stream.config import VerifierSection
from gvm_stream.errors import ConfigError
from gvm_stream.verify import rules
from gvm_stream.verify.external import load_function
from gvm_stream.verify.frames import READY, frame, read_frame
from gvm_stream.verify.verdict import VerifyItem

REAP_S = 0.5
"""Longest time that a dead worker stays a zombie."""
_WARM_UP = (("\\frac{1}{2}", "so $\\boxed{0.5}$"), ("x^2+1", "\\boxed{1+x^2}"), ("(1, 2]", "the answer is $[1, 2)$"))


def main() -> None:
    inbox = FileIO(0)
    settings = msgspec.msgpack.decode(read_frame(inbox) or b"", type=VerifierSection)
    _limit_memory(settings.memory_mib)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(128)
        os.write(1, READY)
        _silence_output()
        serve_forks(settings, inbox, listener)
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)  # the parent may be gone


def serve_forks(settings: VerifierSection, inbox: FileIO, listener: socket.socket) -> None:
    workers: set[int] = set()
    kinds: set[str] = set()
    while True:
        readable, _, _ = select.select([inbox.fileno(), listener.fileno()], [], [], REAP_S)
        workers -= _reap(workers)
        if inbox.fileno() in readable:
            content = read_frame(inbox)
            if content is None:
                break
            kind = msgspec.msgpack.decode(content, type=str)
            prepare_template(settings, kind)
            kinds.add(kind)
        elif readable:
            connection, _ = listener.accept()
            worker = os.fork()
            if worker == 0:
                try:
                    listener.close()
                    inbox.close()
                    prepare_worker(settings, kinds)
                    judge_for(settings, connection)
                finally:
                    os._exit(0)
            connection.close()
            workers.add(worker)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    for worker in workers:
        os.waitpid(worker, 0)


def prepare_template(settings: VerifierSection, kind: str) -> None:
    """Imports and caches of a verifier, paid for once and not by an item: a second for computer algebra."""
    if kind == "math":
        from math_verify import parse

        parse("$\\frac{1}{2}$", parsing_timeout=None)  # used for some answers only
        settings = msgspec.structs.replace(settings, kind="math", weights={}, answer_marker="")
        for answer, response in _WARM_UP:
            rules.judge(settings, VerifyItem(answer=answer, response=response))
    elif kind == "reasoning_gym":
        import reasoning_gym  # noqa: F401


def prepare_worker(settings: VerifierSection, kinds: set[str]) -> None:
    """What must not be there before a fork: the user's own modules, which may have threads and connections."""
    if "python" in kinds:
        with contextlib.suppress(ConfigError):  # the verdicts will say so
            load_function(settings.function)


def judge_for(settings: VerifierSection, connection: socket.socket) -> None:
    """The life of a worker, to the end of its connection. It begins with a frame that holds its process id."""
    with open(os.devnull, "w") as nowhere, connection.makefile("rwb") as stream:
        stream.write(frame(os.getpid()))
        stream.flush()
        while (content := read_frame(stream)) is not None:
            for item in msgspec.msgpack.decode(content, type=list[VerifyItem]):
                _limit_cpu(settings.timeout_s)
                faulthandler.dump_traceback_later(settings.timeout_s, exit=True, file=nowhere)
                verdict = rules.judge(settings, item)
                faulthandler.cancel_dump_traceback_later()
                stream.write(frame(verdict))
                stream.flush()


def _limit_memory(mib: int) -> None:
    """A number with a billion digits must not take the machine down."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = mib << 20 if hard == resource.RLIM_INFINITY else min(mib << 20, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _limit_cpu(seconds: float) -> None:
    """Rounded up to whole seconds, which is what the kernel counts: the wall clock is the finer limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _silence_output() -> None:
    """What libraries and user functions print is nobody's."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    os.close(nowhere)


def _reap(workers: set[int]) -> set[int]:
    """Those of the workers that have ended."""
    return {worker for worker in workers if os.waitpid(worker, os.WNOHANG)[0] == worker}


if __name__ == "__main__":
    main()
