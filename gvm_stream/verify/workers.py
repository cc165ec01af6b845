"""The parent's side of the verifier processes: start their template, get workers from it, talk to them, kill them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence, Set

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from gvm_stream.config import VerifierSection
from gvm_stream.errors import StreamError
from gvm_stream.verify.frames import READY, frame, split_frames
from gvm_stream.verify.verdict import Verdict, VerifyItem

START_S = 60.0
"""Seconds that a template may take to start, or to prepare for a kind of verifier, on a loaded machine."""
STOP_S = 5.0
NICE = 10

LOST = (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError, OSError)
"""What talking to a process that has ended raises."""

_VERDICTS: msgspec.msgpack.Decoder[Verdict] = msgspec.msgpack.Decoder(Verdict)


class Worker:
    """A process that judges. Killed through a file descriptor: its process id may be somebody else's by then."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._received = b""
        self._pid, self._process = -1, -1
        self.judged = 0
        """Verdicts so far."""

    async def greet(self) -> None:
        (pid,) = await self._frames()
        self._pid = msgspec.msgpack.decode(pid, type=int)
        self._process = os.pidfd_open(self._pid)

    async def send(self, items: Sequence[VerifyItem]) -> None:
        await self._stream.send(frame(items))

    async def receive(self) -> list[Verdict]:
        """The next verdicts, all that are there but at least one. May be cancelled and called again."""
        verdicts = [_VERDICTS.decode(content) for content in await self._frames()]
        self.judged += len(verdicts)
        return verdicts

    def give_way(self) -> None:
        """Lower the priority for good. Not to the lowest: beside a busy learner that would be no time at all."""
        if not self.has_ended():
            os.setpriority(os.PRIO_PROCESS, self._pid, NICE)

    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    async def kill(self) -> None:
        if self._process >= 0:
            if not self.has_ended():
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = -1
        await anyio.aclose_forcefully(self._stream)

    async def _frames(self) -> list[bytes]:
        """Waking up costs more than a frame: take every complete one."""
        contents, self._received = split_frames(self._received)
        while not contents:
            contents, self._received = split_frames(self._received + await self._stream.receive())
        return contents


class Template:
    """The process that workers are forked from. It is started when needed, and again if it has ended."""

    def __init__(self, settings: VerifierSection) -> None:
        self._settings = settings
        self._kinds: set[str] = set()
        self._process: anyio.abc.Process | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._talking = anyio.Lock()
        self._closed = False

    async def prepare(self, kinds: Set[str]) -> bool:
        """Have later workers ready for these kinds of verifiers; True if earlier ones are not."""
        new = kinds - self._kinds
        self._kinds |= new
        if new and self._process is not None:
            async with self._talking:
                with contextlib.suppress(*LOST):  # the next fork starts another, with all kinds
                    await self._tell(self._process, new)
        return bool(new)

    async def fork(self) -> Worker:
        """A new worker, ready to judge. Raises ClosedResourceError after `close`."""
        async with self._talking:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._process is not None:
                try:
                    return await self._connect()
                except LOST:
                    await self.stop()
            try:
                await self._start()
                return await self._connect()
            except LOST as error:
                await self.stop()
                raise StreamError(f"The verifier processes did not start within {START_S:g} s: {error!r}.") from error

    async def close(self) -> None:
        """Stop for good: calls that are still under way (Ctrl-C) must not start it again."""
        self._closed = True
        await self.stop()

    async def stop(self) -> None:
        """Kill and reap all workers and the template."""
        process, self._process = self._process, None
        if process is not None:
            with anyio.CancelScope(shield=True):
                assert process.stdin is not None
                await process.stdin.aclose()
                with anyio.move_on_after(STOP_S):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                await process.aclose()
        if self._folder is not None:
            self._folder.cleanup()

    async def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gvm-stream-verify-")
        command = [sys.executable, "-m", "gvm_stream.verify.worker", self._address]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TMPDIR": self._folder.name,  # what killed workers leave goes with the pool
        }
        process = await anyio.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, env=environment, start_new_session=True
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        with anyio.fail_after(START_S):
            await process.stdin.send(frame(self._settings))
            await BufferedByteReceiveStream(process.stdout).receive_exactly(len(READY))
        await self._tell(process, self._kinds)

    @property
    def _address(self) -> str:
        assert self._folder is not None
        return os.path.join(self._folder.name, "socket")

    async def _tell(self, process: anyio.abc.Process, kinds: Set[str]) -> None:
        assert process.stdin is not None
        for kind in sorted(kinds):
            await process.stdin.send(frame(kind))

    async def _connect(self) -> Worker:
        with anyio.fail_after(START_S):
            stream = await anyio.connect_unix(self._address)
            worker = Worker(stream)
            try:
                await worker.greet()
            except BaseException:
                await worker.kill()
                raise
            return worker
