"""External `vllm serve` processes as a `producers.engine.Engine`.

The engine is synchronous, its connections are not: a thread with a trio loop holds them, and what they bring comes
through a queue. `step` takes what has come.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import httpx2
import numpy as np
import trio

from gvm_stream.canary import LENGTH
from gvm_stream.config import StreamSection
from gvm_stream.errors import ModelError, WeightsError
from gvm_stream.producers.causal_lm import Shapes, check_weights_file
from gvm_stream.producers.engine import Completion, EngineLoad, Float32, Int32, Request
from gvm_stream.producers.requests import why_impossible, without_tokens
from gvm_stream.vllm.nccl import NcclWeights
from gvm_stream.vllm.server_client import Chunk, Server
from gvm_stream.weights import checksum

T = TypeVar("T")

STEP_S = 0.05
"""Longest `step` without news."""
LOOK_S = 1.0
"""Between two looks at how full the servers are."""
ABORT_AGAIN_S = 0.2
"""A server passes over an abort that comes before the request."""
KEPT_S = 2.0
"""Longest that a connection idles here. A server closes it after five seconds, perhaps under the next request."""
TEMPERATURES = (0.01, 2.0)
"""A server samples at the lowest when asked for less, and refuses more."""
IDLE = EngineLoad(running=0, waiting=0, cache_used=0.0, preemptions=0)


@dataclass(eq=False)
class Sent:
    """A request at a server, with what has come of it."""

    request: Request
    key: str
    server: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    aborted: bool = False


@dataclass(frozen=True)
class Came:
    key: str
    chunk: Chunk


class VllmServerEngine:
    """At most `slots` requests at once over all servers; each goes to the server with the fewest, siblings of a prompt
    to the same one while it is not fuller than the others, for their common prefix.

    Servers are started with VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --logprobs-mode processed_logprobs and
    --weight-transfer-config '{"backend": "gvm"}', or "nccl" with `pull_as`. `stream`: how servers that do not see the
    files of weights reach the learner. `pull_as`: the name under which servers take weights by NCCL; empty: from files.
    """

    def __init__(
        self,
        servers: Sequence[str],
        shapes: Shapes,
        *,
        slots: int,
        max_length: int,
        vocabulary: int,
        end_tokens: Sequence[int],
        kv_policy: Literal["recompute", "keep"],
        stream: StreamSection | None = None,
        pull_as: str = "",
        version: int = 0,
    ) -> None:
        self._shapes, self._slots, self._max_length, self._vocabulary = shapes, slots, max_length, vocabulary
        self._end_tokens, self._recompute = list(end_tokens), kv_policy == "recompute"
        self._stream, self._version = stream or StreamSection(), version
        self._waiting: dict[int, Request] = {}
        """At no server yet."""
        self._sent: dict[str, Sent] = {}
        self._by_id: dict[int, Sent] = {}
        self._ended: list[Completion] = []
        self._generated = self._started = 0
        self._loads = [IDLE] * len(servers)
        self._put_back = [0] * len(servers)
        """Requests that an update has put back and that the server has not counted as preempted yet."""
        self._preemptions = 0
        self._home: dict[bytes, int] = {}
        """Prompt -> the server of its last request."""
        self._news: queue.SimpleQueue[Came | Exception] = queue.SimpleQueue()
        self._pulls: list[Callable[[int], None]] = []
        """By server, when weights come by NCCL."""
        self._open(servers)
        try:
            for number, server in enumerate(self._servers):
                self._call(partial(server.start, version, max(max_length, LENGTH + 1), by_file=not pull_as))
                self._loads[number] = self._call(server.load)
                if pull_as:
                    self._pulls.append(self._nccl_weights(server, f"{pull_as}-{number}").pull)
            self._spawn(self._look)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        return self._version

    @property
    def generated_tokens(self) -> int:
        return self._generated

    def submit(self, request: Request) -> None:
        problem = why_impossible(request, self._max_length, self._vocabulary)
        low, high = TEMPERATURES
        if not problem and not low <= request.temperature <= high:
            problem = f"temperature = {request.temperature:g}; vLLM samples at {low:g} .. {high:g}"
        if problem:
            self._ended.append(without_tokens(request, "error", f"request {request.id}: {problem}"))
        else:
            self._waiting[request.id] = request

    def abort(self, ids: list[int]) -> None:
        for request in [self._waiting.pop(id) for id in ids if id in self._waiting]:
            self._ended.append(without_tokens(request, "abort"))
        for sent in [self._by_id[id] for id in ids if id in self._by_id]:
            if not sent.aborted:
                sent.aborted = True
                self._spawn(self._abort, sent)

    def step(self) -> list[Completion]:
        while self._waiting and len(self._sent) < self._slots:
            self._send(self._waiting.pop(next(iter(self._waiting))))
        if self._sent and not self._ended:
            self._take(STEP_S)
        while not self._news.empty():
            self._take(0)
        ended, self._ended = self._ended, []
        return ended

    def has_work(self) -> bool:
        return bool(self._waiting or self._sent or self._ended)

    def progress(self) -> dict[int, int]:
        running = {id: len(sent.tokens) for id, sent in self._by_id.items()}
        return dict.fromkeys(self._waiting, 0) | running

    def load(self) -> EngineLoad:
        running = min(len(self._sent), sum(load.running for load in self._loads))
        return EngineLoad(
            running=running,
            waiting=len(self._waiting) + len(self._sent) - running,
            cache_used=max(load.cache_used for load in self._loads),
            preemptions=self._preemptions,
        )

    def load_weights(self, path: Path, version: int) -> None:
        """Raises `ModelError` when some servers have the new weights and another cannot take them."""
        info = {} if self._pulls else self._announcement(path, version)
        for number, server in enumerate(self._servers):
            try:
                with self._paused(server):
                    if self._pulls:
                        self._pulls[number](version)
                    else:
                        self._call(server.update, info, version)
            except ModelError as error:
                if number == 0 and not self._pulls:
                    raise WeightsError(str(error)) from error
                raise
            except WeightsError as error:
                if number == 0:
                    raise
                raise ModelError(str(error)) from error
            if self._recompute:
                self._put_back[number] += sum(sent.server == number for sent in self._sent.values())
        self._version = version

    def _announcement(self, path: Path, version: int) -> dict[str, object]:
        check_weights_file(self._shapes, path)
        return {
            "version": version,
            "path": str(path.resolve()),
            "size": path.stat().st_size,
            "checksum": checksum(path) if self._stream.weights_address else "",
            "address": self._stream.weights_address,
            "keys": self._stream.keys,
        }

    def score(self, tokens: Int32) -> Float32:
        rows: Float32 = np.stack([self._call(server.score, tokens) for server in self._servers])
        return rows

    def close(self) -> None:
        for work in (self._waiting, self._sent, self._by_id, self._ended):
            work.clear()
        if self._thread.is_alive():
            trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
        self._thread.join()

    # --- in the engine's thread ---

    @contextmanager
    def _paused(self, server: Server) -> Iterator[None]:
        try:
            self._call(partial(server.pause, clear_cache=self._recompute))
            yield
        finally:
            self._call(server.resume)

    def _nccl_weights(self, server: Server, name: str) -> NcclWeights:
        return NcclWeights(
            self._stream,
            name,
            workers=self._call(server.workers),
            shapes=self._shapes,
            call=partial(self._call, server.call),
        )

    def _send(self, request: Request) -> None:
        counts = [0] * len(self._servers)
        for sent in self._sent.values():
            counts[sent.server] += 1
        prompt = request.prompt_tokens.tobytes()
        server = self._home.get(prompt, 0)
        if counts[server] > min(counts) or prompt not in self._home:
            server = counts.index(min(counts))
        self._home = {**self._home, prompt: server} if len(self._home) < 4 * self._slots else {prompt: server}
        self._started += 1
        sent = Sent(request, f"{request.id}-{self._started}", server)
        self._sent[sent.key] = self._by_id[request.id] = sent
        self._spawn(self._generate, sent, str(self._version))

    def _take(self, timeout_s: float) -> None:
        """One piece of news; what a connection raised is raised here."""
        try:
            news = self._news.get(timeout=timeout_s) if timeout_s else self._news.get_nowait()
        except queue.Empty:
            return
        if isinstance(news, Exception):
            raise news
        sent = self._sent.get(news.key)
        if sent is None:
            return
        sent.tokens += news.chunk.tokens
        sent.logprobs += news.chunk.logprobs
        self._generated += len(news.chunk.tokens)
        if news.chunk.finish:
            self._end(sent, news.chunk)

    def _end(self, sent: Sent, last: Chunk) -> None:
        del self._sent[sent.key], self._by_id[sent.request.id]
        known = last.finish in ("stop", "length", "abort")
        self._ended.append(
            Completion(
                id=sent.request.id,
                tokens=np.array(sent.tokens, np.int32),
                logprobs=np.array(sent.logprobs, np.float32),
                spans=last.spans if sent.tokens else (),
                finish=last.finish if known else "error",
                error="" if known else f"request {sent.request.id}: the server ended it as {last.finish}",
            )
        )

    def _call(self, function: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Run it in the loop and wait for it; a loop that has ended says why."""
        try:
            return trio.from_thread.run(function, *arguments, trio_token=self._token)
        except trio.RunFinishedError:
            raise ModelError("the connections to the servers are closed") from None

    def _spawn(self, function: Callable[..., Awaitable[object]], *arguments: object) -> None:
        self._token.run_sync_soon(self._nursery.start_soon, self._watched, function, *arguments)

    def _open(self, servers: Sequence[str]) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._serve, servers, ready), name="vllm-servers")
        self._thread.start()
        ready.wait()

    # --- in the loop ---

    async def _serve(self, servers: Sequence[str], ready: threading.Event) -> None:
        self._token = trio.lowlevel.current_trio_token()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT_S)
        async with (
            httpx2.AsyncClient(limits=limits, timeout=httpx2.Timeout(30, read=None, pool=None)) as client,
            trio.open_nursery() as self._nursery,
        ):
            self._scope = self._nursery.cancel_scope
            self._servers = [Server(url, client) for url in servers]
            ready.set()
            await trio.sleep_forever()

    async def _watched(self, function: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Whatever it raises, `step` raises: nothing may end unseen while the engine waits for news."""
        try:
            await function(*arguments)
        except Exception as error:
            self._news.put(error)

    async def _generate(self, sent: Sent, salt: str) -> None:
        server = self._servers[sent.server]
        async for chunk in server.generate(sent.key, sent.request, self._end_tokens, salt):
            self._news.put(Came(sent.key, chunk))
            if chunk.finish:
                return
        raise ModelError(f"the server {server.url} broke off a generation")

    async def _abort(self, sent: Sent) -> None:
        while sent.key in self._sent:
            await self._servers[sent.server].abort([sent.key])
            await trio.sleep(ABORT_AGAIN_S)

    async def _look(self) -> None:
        while True:
            for number, server in enumerate(self._servers):
                load = await server.load()
                more = load.preemptions - self._loads[number].preemptions
                ours = min(more, self._put_back[number])
                self._put_back[number] -= ours
                self._preemptions += more - ours
                self._loads[number] = load
            await trio.sleep(LOOK_S)
