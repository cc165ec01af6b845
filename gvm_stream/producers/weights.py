"""Following the learner: get published weights to a local file and into the engine, always the newest."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio
import zmq

from gvm_stream.config import Config, StreamSection
from gvm_stream.errors import StreamError, WeightsError, WireError
from gvm_stream.weights import verify_weights
from gvm_stream.wire.codec import decode_from_weight_server, encode
from gvm_stream.wire.link import identity_of, new_epoch
from gvm_stream.wire.messages import WeightsInfo
from gvm_stream.wire.sockets import connect_dealer
from gvm_stream.wire.weight_messages import ChunkRefused, ChunkRequest
from gvm_stream.wire.zmq_trio import ZmqSocket

log = logging.getLogger(__name__)


class WeightsSource:
    """Local files of announced weights. On another host than the learner's, a copy fetched from its weight server."""

    def __init__(self, stream: StreamSection, name: str, folder: Path) -> None:
        self._stream, self._name, self._folder = stream, name, folder

    @asynccontextmanager
    async def local(self, info: WeightsInfo) -> AsyncIterator[Path]:
        """A checked local file with these weights, for as long as the block runs. Raises WeightsError."""
        path = Path(info.path)
        if not info.address or await trio.Path(path).exists():
            await trio.to_thread.run_sync(verify_weights, info, path)
            yield path
            return
        copy = self._folder / f"v{info.version:08d}.safetensors"
        try:
            try:
                await self._fetch(info, copy)
            except (OSError, WireError, StreamError) as error:
                raise WeightsError(f"weights of version {info.version} cannot be fetched to {copy}: {error}") from error
            await trio.to_thread.run_sync(verify_weights, info, copy)
            yield copy
        finally:
            copy.unlink(missing_ok=True)

    async def _fetch(self, info: WeightsInfo, copy: Path) -> None:
        """Chunk by chunk; a lost answer is asked for again, from where the copy ends."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            raw, watch = connect_dealer(
                context,
                info.address,
                "stream.weights_address",
                stream=self._stream,
                role="producer",
                identity=identity_of("producer", self._name, new_epoch()),
                server="learner",
            )
            raw.linger = 0  # a question that nobody has read
            with watch, ZmqSocket(raw) as socket, copy.open("wb") as file:
                while file.tell() < info.size:
                    offset = file.tell()
                    chunk = await watch.unless_refused(partial(self._chunk, socket, info, offset))
                    if not chunk:
                        raise WeightsError(
                            f"weights of version {info.version} end after {offset} bytes at {info.address}, expected "
                            f"{info.size}"
                        )
                    await trio.to_thread.run_sync(file.write, chunk)
        finally:
            context.term()

    async def _chunk(self, socket: ZmqSocket, info: WeightsInfo, offset: int) -> bytes:
        await socket.send([encode(ChunkRequest(version=info.version, offset=offset))])
        with trio.move_on_after(self._stream.silence_s):
            while True:
                answer = decode_from_weight_server(await socket.recv())
                if isinstance(answer, ChunkRefused):
                    raise WeightsError(f"weights of version {info.version} cannot be fetched: {answer.reason}")
                if (answer.version, answer.offset) == (info.version, offset):
                    return answer.data
        raise WeightsError(
            f"weights of version {info.version} cannot be fetched: {info.address} has been silent for "
            f"{self._stream.silence_s:g} s at byte {offset} of {info.size}"
        )


class AnnouncedFile:
    """For an engine that takes its weights itself: only the self-test, with the first ones, needs their file."""

    def __init__(self, source: WeightsSource, *, self_test: bool) -> None:
        self._source, self._needed = source, self_test

    @asynccontextmanager
    async def local(self, info: WeightsInfo) -> AsyncIterator[Path]:
        if not self._needed:
            yield Path(info.path)
            return
        async with self._source.local(info) as path:
            yield path
        self._needed = False


@asynccontextmanager
async def weights_source(config: Config, name: str) -> AsyncIterator[WeightsSource | AnnouncedFile]:
    with tempfile.TemporaryDirectory(prefix="gvm-weights-") as folder:
        source = WeightsSource(config.stream, name, Path(folder))
        if config.producer.weights == "nccl":
            yield AnnouncedFile(source, self_test=config.producer.self_test)
        else:
            yield source
