"""The real weight server, a process of its own, and a producer on "another host": the announced path is not there."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import pytest
import trio
import zmq

from gvm_stream.config import StreamSection
from gvm_stream.errors import WeightsError
from gvm_stream.producers.weights import WeightsSource
from gvm_stream.weights import checksum
from gvm_stream.wire.codec import decode_from_weight_server, encode
from gvm_stream.wire.keys import create_keys
from gvm_stream.wire.messages import WeightsInfo
from gvm_stream.wire.sockets import bind_router, connect_dealer
from gvm_stream.wire.weight_messages import Chunk, ChunkRefused, ChunkRequest
from gvm_stream.wire.zmq_trio import ZmqSocket
from tests.strangers import PickleBomb
from tests.stream_processes import free_address

pytestmark = pytest.mark.stream

SIZE = 10_000_000
CONTENT = np.random.default_rng(0).bytes(SIZE)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def start(folder: Path, address: str, keys: str = "") -> subprocess.Popen[str]:
    section = msgspec.json.encode(StreamSection(weights_address=address, keys=keys)).decode()
    command = [sys.executable, "-m", "gvm_stream.learner.weight_server", str(folder), section]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@contextmanager
def served(folder: Path, address: str, keys: str = "") -> Iterator[subprocess.Popen[str]]:
    with start(folder, address, keys) as server:
        try:
            assert pipe(server.stdout).readline() == "ready\n"
            yield server
        finally:
            server.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published weights: version 3, of 10 MB."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "v00000003.safetensors").write_bytes(CONTENT)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    address = free_address()
    with served(folder, address):
        yield address


@pytest.fixture
def source(tmp_path: Path) -> WeightsSource:
    return WeightsSource(StreamSection(heartbeat_s=0.1, silence_s=5), "p", tmp_path)


def announced(folder: Path, address: str) -> WeightsInfo:
    path = folder / "v00000003.safetensors"
    return WeightsInfo(version=3, path="/nowhere/v3", size=SIZE, checksum=checksum(path), address=address)


async def failure(source: WeightsSource, info: WeightsInfo) -> str:
    with trio.fail_after(20), pytest.raises(WeightsError) as caught:
        async with source.local(info):
            raise AssertionError("these weights must not be used")
    return str(caught.value)


async def test_weights_are_fetched_whole_and_the_copy_lasts_as_long_as_the_block(
    folder: Path, address: str, source: WeightsSource, tmp_path: Path
) -> None:
    async with source.local(announced(folder, address)) as copy:
        assert copy.parent == tmp_path
        assert await trio.Path(copy).read_bytes() == CONTENT
    assert names(tmp_path) == []


async def test_a_file_that_is_there_is_used_in_place(folder: Path, source: WeightsSource) -> None:
    path = folder / "v00000003.safetensors"
    info = msgspec.structs.replace(announced(folder, free_address()), path=str(path))
    async with source.local(info) as used:
        assert used == path
    assert names(folder) == [path.name]


async def test_weights_that_are_not_the_announced_ones_are_refused(
    folder: Path, address: str, source: WeightsSource, tmp_path: Path
) -> None:
    info = announced(folder, address)
    assert "checksum" in await failure(source, msgspec.structs.replace(info, checksum="00" * 16))
    assert f"have {SIZE} bytes, expected {SIZE - 1}" in await failure(
        source, msgspec.structs.replace(info, size=SIZE - 1)
    )
    longer = await failure(source, msgspec.structs.replace(info, size=SIZE + 1))
    assert f"end after {SIZE} bytes" in longer
    assert f"expected {SIZE + 1}" in longer
    assert names(tmp_path) == []


async def test_a_version_that_is_gone_is_said_to_be(folder: Path, address: str, source: WeightsSource) -> None:
    sentence = await failure(source, msgspec.structs.replace(announced(folder, address), version=2))
    assert sentence.startswith("weights of version 2 cannot be fetched: they are not there any more")


async def test_a_server_that_is_not_there_is_silent(folder: Path, tmp_path: Path) -> None:
    source = WeightsSource(StreamSection(heartbeat_s=0.1, silence_s=0.3), "p", tmp_path)
    address = free_address()
    sentence = await failure(source, announced(folder, address))
    assert f"{address} has been silent for 0.3 s at byte 0 of {SIZE}" in sentence


async def test_a_copy_that_cannot_be_written_is_a_weights_error(folder: Path, address: str, tmp_path: Path) -> None:
    source = WeightsSource(StreamSection(), "p", tmp_path / "gone")
    assert "No such file or directory" in await failure(source, announced(folder, address))


async def test_a_server_that_talks_nonsense_is_a_weights_error(folder: Path, source: WeightsSource) -> None:
    address = free_address()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with ZmqSocket(bind_router(context, address, "k", stream=StreamSection(), server="learner")) as rogue:

        async def answer() -> None:
            identity, _ = await rogue.recv()
            rogue.try_send([identity, b"nonsense"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            assert "unreadable message of 8 bytes" in await failure(source, announced(folder, address))
    context.term()


async def test_nonsense_and_impossible_offsets_do_not_end_the_server(
    folder: Path, address: str, tmp_path: Path
) -> None:
    bomb = PickleBomb(tmp_path / "marker")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw, watch = connect_dealer(context, address, "k", stream=StreamSection(), role="producer", identity=b"stray")
    with watch, ZmqSocket(raw) as stray, trio.fail_after(10):
        for frames in ([b""], [b"\xc1"], [b"a", b"b"], [b"\x91" * 100_000], [bomb.message()]):
            await stray.send(frames)
        bomb.throw_at(address)
        for offset in (-1, 2**63, 2**64 - 1):
            await stray.send([encode(ChunkRequest(version=3, offset=offset))])
            assert isinstance(decode_from_weight_server(await stray.recv()), ChunkRefused)
        await stray.send([encode(ChunkRequest(version=3, offset=SIZE - 2))])
        chunk = decode_from_weight_server(await stray.recv())
        assert isinstance(chunk, Chunk)
        assert (chunk.offset, len(chunk.data)) == (SIZE - 2, 2)
        bomb.assert_harmless()
    context.term()


async def test_with_keys_weights_are_for_producers_that_have_one(folder: Path, tmp_path: Path) -> None:
    keys, strangers, copies = tmp_path / "keys", tmp_path / "strangers", tmp_path / "copies"
    create_keys(keys)
    create_keys(strangers)
    copies.mkdir()
    (strangers / "public.keys").write_text((keys / "public.keys").read_text())
    address = free_address()

    def source(keys: Path | str) -> WeightsSource:
        return WeightsSource(StreamSection(heartbeat_s=0.1, silence_s=1, keys=str(keys)), "p", copies)

    with served(folder, address, str(keys)):
        async with source(keys).local(announced(folder, address)) as copy:
            assert await trio.Path(copy).read_bytes() == CONTENT
        refused = await failure(source(strangers), announced(folder, address))
        assert f"cannot be fetched to {copies / 'v00000003.safetensors'}: the learner at {address} does not " in refused
        assert "cannot be fetched" in await failure(source(""), announced(folder, address))
    assert names(copies) == []


def test_an_interrupt_of_the_terminal_is_for_the_learner(folder: Path) -> None:
    with served(folder, free_address()) as server:
        server.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(0.5)
        pipe(server.stdin).close()
        assert server.wait(10) == 0


def test_the_server_ends_with_its_standard_input(folder: Path) -> None:
    with served(folder, free_address()) as server:
        pipe(server.stdin).close()
        assert server.wait(10) == 0


@pytest.mark.parametrize(
    ("listen", "status", "part"),
    [(None, 1, "is in use"), ("tcp://0.0.0.0:5711", 2, "allow_plaintext"), ("tcp://h", 2, "tcp://HOST:PORT")],
)
def test_an_address_that_cannot_be_served_on_is_one_sentence(
    folder: Path, address: str, listen: str | None, status: int, part: str
) -> None:
    with start(folder, listen or address) as server:
        said, _ = server.communicate(timeout=20)
        assert server.returncode == status
    (line,) = said.splitlines()
    assert line.startswith(f'stream.weights_address = "{listen or address}" ')
    assert part in line
