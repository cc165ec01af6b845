"""Doubles that inject what real parts do too seldom: a scripted engine and allocator, a full disk."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from gvm_stream.config import StreamSection
from gvm_stream.errors import WeightsError
from gvm_stream.producers.engine import Completion, EngineLoad, Float32, Int32, Request
from gvm_stream.wire.codec import decode_to_allocator, encode
from gvm_stream.wire.messages import Heartbeat, ToAllocator, ToPeer
from gvm_stream.wire.sockets import bind_router
from gvm_stream.wire.zmq_trio import ZmqSocket
from tests.stream_processes import free_address

ENDLESS, IMPOSSIBLE = 0, 1
"""First prompt tokens of a request that only an abort or its cap ends, and of one that ends as an error."""


class ScriptedEngine:
    """Answers a prompt with a copy of it, a token a step, log-prob -1. `after[n]` is called at the end of step n."""

    def __init__(self) -> None:
        self.version, self.generated_tokens, self.steps, self.closed = 0, 0, 0, False
        self.after: dict[int, Callable[[], None]] = {}
        self.unloadable: set[int] = set()
        self.scores: dict[int, float] = {}
        """Log-prob of every token that is scored, by version; -1 for others."""
        self.fullness: EngineLoad | None = None
        self.loaded: list[Path] = []
        self.threads: set[int] = set()
        self._running: dict[int, tuple[Request, list[int]]] = {}
        """Request and the version of every token so far, by id."""
        self._ended: list[Completion] = []
        self._pace = threading.Event()

    def submit(self, request: Request) -> None:
        self._running[request.id] = (request, [])

    def abort(self, ids: list[int]) -> None:
        for id in ids:
            if id in self._running:
                self._end(id, "abort")

    def step(self) -> list[Completion]:
        self.threads.add(threading.get_ident())
        self._pace.wait(1e-3)  # what a forward pass takes
        self.steps += 1
        for id, (request, versions) in list(self._running.items()):
            if request.prompt_tokens[0] == IMPOSSIBLE:
                self._end(id, "error")
                continue
            versions.append(self.version)
            self.generated_tokens += 1
            if request.prompt_tokens[0] != ENDLESS and len(versions) == len(request.prompt_tokens):
                self._end(id, "stop")
            elif len(versions) == request.max_tokens:
                self._end(id, "length")
        self.after.get(self.steps, lambda: None)()
        ended, self._ended = self._ended, []
        return ended

    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def progress(self) -> dict[int, int]:
        return {id: len(versions) for id, (_, versions) in self._running.items()}

    def load(self) -> EngineLoad:
        return self.fullness or EngineLoad(running=len(self._running), waiting=0, cache_used=0.0, preemptions=0)

    def score(self, tokens: Int32) -> Float32:
        return np.full((1, len(tokens) - 1), self.scores.get(self.version, -1.0), np.float32)

    def load_weights(self, path: Path, version: int) -> None:
        if version in self.unloadable:
            raise WeightsError(f"version {version} cannot be loaded")
        self.version = version
        self.loaded.append(path)

    def close(self) -> None:
        self.closed = True

    def _end(self, id: int, finish: str) -> None:
        request, versions = self._running.pop(id)
        starts = [i for i, v in enumerate(versions) if i == 0 or versions[i - 1] != v]
        ends = [*starts[1:], len(versions)]
        self._ended.append(
            Completion(
                id=id,
                tokens=np.resize(request.prompt_tokens, len(versions)).astype("<i4"),
                logprobs=np.full(len(versions), -1.0, "<f4"),
                spans=tuple((versions[start], start, end) for start, end in zip(starts, ends, strict=False)),
                finish=finish,
                error="the script says so" if finish == "error" else "",
            )
        )


class ScriptedAllocator:
    """A ROUTER that says what the test wants, to whoever spoke last."""

    def __init__(self, socket: ZmqSocket) -> None:
        self._socket = socket
        self.identity = b""

    async def receive(self) -> ToAllocator:
        """The next message that is not a heartbeat."""
        while isinstance(message := await self.receive_any(), Heartbeat):
            pass
        return message

    async def receive_any(self) -> ToAllocator:
        self.identity, *content = await self._socket.recv()
        return decode_to_allocator(content)

    def say(self, *messages: ToPeer) -> None:
        for message in messages:
            self.say_bytes(encode(message))

    def say_bytes(self, *frames: bytes) -> None:
        assert self._socket.try_send([self.identity, *frames])


@asynccontextmanager
async def scripted_allocator(stream: StreamSection) -> AsyncIterator[ScriptedAllocator]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with ZmqSocket(bind_router(context, stream.address, "address", stream=stream, server="allocator")) as socket:
            yield ScriptedAllocator(socket)
    finally:
        context.term()


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system in memory on `folder`; where mounting is not permitted, the test is skipped."""
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def local_stream(*, heartbeat_s: float = 0.05, silence_s: float = 10.0, progress_s: float = 30.0) -> StreamSection:
    return StreamSection(
        address=free_address(), heartbeat_s=heartbeat_s, silence_s=silence_s, progress_s=progress_s, max_message_mib=1
    )


def text_tokens(text: str) -> bytes:
    """A token per character."""
    return np.array([ord(c) for c in text], "<i4").tobytes()
