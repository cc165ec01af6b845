"""`gvm-stream run`: start allocator, learner and producers on this machine, show progress, end them in order.

The processes are the same that people start by hand; this supervisor only starts, watches and stops them, and restarts
those that die: producers always, allocator and learner when they are killed (an error of their own would only come
again). The allocator ends with its standard input, so nothing outlives a supervisor that is killed.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import trio
import zmq

from gvm_stream.config import Config, StreamSection
from gvm_stream.config_file import written
from gvm_stream.errors import ConfigError, DataError, GvmStreamError, StreamError
from gvm_stream.files import write_atomically
from gvm_stream.process import leaf_error, set_on_signal
from gvm_stream.progress import Progress
from gvm_stream.wire.link import open_link
from gvm_stream.wire.sockets import bind_router

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.5
LEAST_ROOM = 4096
"""Bytes free on a disk that a log can still grow on."""
STOP_GRACE_S = 30.0
"""Time the processes have to end in order after a stop, the learner's last checkpoint included."""


class Child:
    """One process of the run; its output goes to a log file."""

    def __init__(self, name: str, arguments: list[str], log_path: Path) -> None:
        self.name, self.arguments, self.log_path = name, arguments, log_path
        self.process: trio.Process | None = None

    async def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "gvm_stream", *self.arguments]
        with self.log_path.open("ab") as out:
            # A session of its own: Ctrl-C is for the supervisor, which stops the others in order.
            self.process = await trio.lowlevel.open_process(
                command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    async def wait(self) -> int:
        assert self.process is not None
        return await self.process.wait()

    def terminate(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def last_words(self) -> str:
        """The error sentence it ended with, or the last line of its log (without the frames of nested tracebacks)."""
        written = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        lines = [words for line in written if (words := line.strip(" |+-"))]
        errors = [line for line in lines if line.startswith("error: ")]
        if errors:
            return errors[-1].removeprefix("error: ")
        if shutil.disk_usage(self.log_path.parent).free < LEAST_ROOM:  # what it said has not reached its log
            return f"No space left on device: {self.log_path.parent} is full"
        return lines[-1] if lines else "it said nothing"


class Supervisor:
    def __init__(self, config: Config, settings: Path, *, resume: bool, progress: Progress) -> None:
        """`settings` is the file that the processes read `config` from."""
        self._config, self._folder, self._progress = config, Path(config.run.dir), progress
        given = ["--config", str(settings)]
        resumed = ["--resume"] if resume else []
        self.allocator = self._child("allocator", ["allocator", *given, "--supervised", *resumed])
        self._learner = self._child("learner", ["learner", *given, *resumed])
        self._producers = [
            self._child(f"producer-{i}", ["producer", *given, "--name", f"producer-{i}"])
            for i in range(config.run.producers)
        ]
        self._restarts_left = config.run.restarts
        self._stopping = False
        self.interrupted = False
        self.problem = ""
        """What ended the run early, if a process other than the allocator did."""
        self.exit_status = 0

    async def run(self) -> None:
        """Start everything, wait for the allocator to end, see the others out."""
        children = [self.allocator, self._learner, *self._producers]
        try:
            async with trio.open_nursery() as nursery:
                interrupted = trio.Event()
                await nursery.start(set_on_signal, interrupted)  # before there is anything to leave behind
                for child in children:
                    await child.start()
                nursery.start_soon(self._stop_when_told, interrupted)
                nursery.start_soon(self._watch_learner)
                for child in self._producers:
                    nursery.start_soon(self._watch_producer, child)
                nursery.start_soon(self._show_progress)
                self.exit_status = await self._watch_allocator()
                self._stopping = True
                with trio.move_on_after(STOP_GRACE_S):
                    if self.exit_status:
                        for child in (self._learner, *self._producers):
                            child.terminate()
                    for child in (self._learner, *self._producers):
                        await child.wait()
                nursery.cancel_scope.cancel()
        finally:
            for child in children:
                child.kill()

    def _child(self, name: str, arguments: list[str]) -> Child:
        return Child(name, arguments, self._folder / "logs" / f"{name}.log")

    async def _watch_allocator(self) -> int:
        """Its last exit status."""
        spool = self._config.stream.spool
        while (status := await self.allocator.wait()) < 0 and spool and self._may_restart(self.allocator, status):
            await self._restart(self.allocator, resume=True)
            if self._stopping:  # told so while it was being started
                self.allocator.terminate()
        if status < 0 and not spool:
            self._fail(f"the allocator ended ({_status(status)}), and with stream.spool = false the run ends with it")
        return status

    async def _watch_learner(self) -> None:
        while status := await self._learner.wait():
            if status > 0 or not self._may_restart(self._learner, status):
                self._fail(f"the learner ended ({_status(status)}): {self._learner.last_words()}")
                return
            await self._restart(self._learner, resume=True)

    async def _watch_producer(self, child: Child) -> None:
        while status := await child.wait():
            if status == ConfigError.exit_status or not self._may_restart(child, status):
                self._fail(
                    f"{child.name} ended ({_status(status)}), {self._restarts_left} restarts left: {child.last_words()}"
                )
                return
            await self._restart(child)

    def _may_restart(self, child: Child, status: int) -> bool:
        if self._stopping or not self._restarts_left:
            return False
        self._restarts_left -= 1
        self._progress.note(f"{child.name} ended ({_status(status)}) and is started again: {child.last_words()}")
        return True

    async def _restart(self, child: Child, *, resume: bool = False) -> None:
        if resume and "--resume" not in child.arguments:
            child.arguments.append("--resume")
        await child.start()

    def _fail(self, problem: str) -> None:
        if not self._stopping:
            self.problem = problem
        self._stop()

    def _stop(self) -> None:
        """The allocator ends the run in order; it tells the others."""
        self._stopping = True
        self.allocator.terminate()

    async def _stop_when_told(self, interrupted: trio.Event) -> None:
        await interrupted.wait()
        self.interrupted = True
        self._progress.note("stopping: the learner saves a checkpoint, everybody says goodbye (again to end at once)")
        self._stop()

    async def _show_progress(self) -> None:
        try:
            async with open_link(
                self._config.stream, role="observer", name="run", agreed={}, patience_s=math.inf
            ) as link:
                while True:
                    self._progress.show(await link.status())
                    await trio.sleep(STATUS_INTERVAL_S)
        except* GvmStreamError as group:
            log.debug("no more status: %s", leaf_error(group))


def run(config: Config, *, resume: Path | None, plain: bool) -> int:
    """The whole run, in `run.dir` or continued in `resume`; its exit status: 0 finished, 130 interrupted, else failed.
    Raises GvmStreamError."""
    check_address(config.stream)
    folder = resume or free_folder(Path(config.run.dir))
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, dir=str(folder)))
    # Changed on a resume, it becomes config.json once the allocator has found that the run can go on with it.
    settings = folder / ("resumed.json" if resume else "config.json")
    write_atomically(settings, written(config))
    with Progress(config, folder, plain=plain) as progress:
        supervisor = Supervisor(config, settings, resume=resume is not None, progress=progress)
        trio.run(supervisor.run)
    report_path = folder / "report.json"
    again = f"; continue with: gvm-stream run --resume {folder}"
    if supervisor.interrupted and supervisor.exit_status == -signal.SIGTERM:
        progress.note("interrupted before the run began")
        return 130
    if supervisor.exit_status or supervisor.problem:
        problem = supervisor.problem or supervisor.allocator.last_words()
        error = DataError if supervisor.exit_status == DataError.exit_status else StreamError
        raise error(problem + (again if config.stream.spool and (folder / "allocator").exists() else ""))
    report = json.loads(report_path.read_text())
    from gvm_stream.report.page import render  # jinja2, only now

    try:
        write_atomically(folder / "report.html", render(report, folder.name).encode())
    except OSError as error:
        progress.note(f"{folder / 'report.html'} cannot be written: {error.strerror}")
    progress.summary(report, folder)
    return 0 if report["outcome"] == "finished" else 130


def check_address(stream: StreamSection) -> None:
    """Raise what the allocator would, before anything is written or started: while it finds out that its port is taken,
    the other processes would join the run that listens there."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        bind_router(context, stream.address, "stream.address", stream=stream, server="allocator").close()
    finally:
        context.term()


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, ... that does not hold a run."""
    wanted = wanted if wanted.name else wanted.absolute()
    for number in range(1, 10_000):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            taken = folder.exists() and any(folder.iterdir())
        except OSError as error:
            raise ConfigError(f'run.dir = "{folder}" cannot be used as a folder: {error.strerror}') from error
        if not taken:
            return folder
    raise ConfigError(f'run.dir = "{wanted}": there are 10,000 runs beside it; choose another folder')


def _status(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
