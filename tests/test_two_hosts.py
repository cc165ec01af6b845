"""Allocator, learner and producer on hosts of their own, with keys, and a cable that is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
import zmq

from gvm_stream.config import StreamSection
from gvm_stream.errors import GvmStreamError
from gvm_stream.process import run_process
from gvm_stream.wire.keys import create_keys
from gvm_stream.wire.messages import Role
from gvm_stream.wire.sockets import connect_dealer
from gvm_stream.wire.zap import listening
from gvm_stream.wire.zmq_trio import ZmqSocket
from tests.namespaces import Hosts, hosts

pytestmark = pytest.mark.stream

SILENCE_S = 1.5
DEADLINE_S = 30


class Program:
    """One of the two below, on a host."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._unread = b""

    async def write(self, line: str) -> None:
        assert self._process.stdin is not None
        await self._process.stdin.send_all(line.encode() + b"\n")

    async def read(self) -> str:
        assert self._process.stdout is not None
        with trio.fail_after(DEADLINE_S):
            while b"\n" not in self._unread:
                more = await self._process.stdout.receive_some()
                assert more, "the program has ended"
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()


class Network:
    def __init__(self, built: Hosts, keys: Path) -> None:
        self.hosts, self._keys = built, keys
        self.address = f"tcp://{built.address('allocator')}:5710"

    @asynccontextmanager
    async def program(self, role: str, keys: Path | None = None) -> AsyncIterator[Program]:
        """Run on the host of the same name, killed at the end."""
        stream = StreamSection(address=self.address, keys=str(keys or self._keys), silence_s=SILENCE_S)
        command = self.hosts.command(
            role, sys.executable, "-m", "tests.test_two_hosts", role, msgspec.json.encode(stream).decode()
        )
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
            )
            yield Program(process)
            nursery.cancel_scope.cancel()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    create_keys(tmp_path / "keys")
    with hosts("allocator", "learner", "producer") as built:
        yield Network(built, tmp_path / "keys")


async def test_what_is_said_in_a_short_cut_arrives_after_it_once_and_in_order(network: Network) -> None:
    """Shorter than `silence_s`: connections stand, and nothing is lost."""
    async with (
        network.program("producer") as producer,  # who starts first does not matter
        network.program("allocator") as allocator,
        network.program("learner") as learner,
    ):
        assert await allocator.read() == "listens"
        await producer.write("0")
        assert await allocator.read() == "producer 0"
        await learner.write("before")
        assert await allocator.read() == "learner before"
        network.hosts.cut("producer")
        for n in range(1, 100):
            await producer.write(str(n))
        await learner.write("meanwhile")
        assert await allocator.read() == "learner meanwhile"
        network.hosts.mend("producer")
        assert [await allocator.read() for _ in range(1, 100)] == [f"producer {n}" for n in range(1, 100)]
        assert [await producer.read() for _ in range(100)] == [str(n) for n in range(100)]


async def test_a_host_that_was_cut_off_for_long_is_soon_back(network: Network) -> None:
    """Longer than `silence_s`: the connection is given up and made anew; what was on its way is the protocol's care."""
    async with network.program("allocator") as allocator, network.program("producer") as producer:
        assert await allocator.read() == "listens"
        await producer.write("before")
        assert await allocator.read() == "producer before"
        network.hosts.cut("allocator")
        await trio.sleep(4 * SILENCE_S)
        network.hosts.mend("allocator")
        await producer.write("after")
        assert await allocator.read() == "producer after"
        assert await producer.read() == "before"
        assert await producer.read() == "after"


async def test_a_stranger_on_the_network_is_refused(network: Network, tmp_path: Path) -> None:
    strangers = tmp_path / "strangers"
    create_keys(strangers)
    (strangers / "public.keys").write_text((tmp_path / "keys" / "public.keys").read_text())
    async with network.program("allocator") as allocator, network.program("producer", strangers) as stranger:
        assert await allocator.read() == "listens"
        await stranger.write("let me in")
        assert (await stranger.read()).startswith(f"the allocator at {network.address} does not accept the key")
        assert await allocator.read() == "refused key"


# --- the programs ---


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def listen(stream: StreamSection) -> None:
    """Write down what arrives, and send it back."""
    async with listening(
        stream.address, "k", stream=stream, server="allocator", count=lambda reason: say(f"refused {reason}")
    ) as socket:
        say("listens")
        while True:
            identity, content = await socket.recv()
            say(f"{identity.partition(b'/')[0].decode()} {content.decode()}")
            socket.try_send([identity, content])


async def talk(stream: StreamSection, role: Role) -> None:
    """Send every line of the input; write down what comes back."""
    with zmq.Context() as context:
        identity = f"{role}/x/1".encode()
        raw, watch = connect_dealer(context, stream.address, "k", stream=stream, role=role, identity=identity)
        with watch, ZmqSocket(raw) as socket:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch.unless_refused, partial(write_down, socket))
                async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
                    async for lines in stdin:
                        for line in lines.splitlines():
                            await socket.send([bytes(line)])
                nursery.cancel_scope.cancel()


async def write_down(socket: ZmqSocket) -> None:
    while True:
        (content,) = await socket.recv()
        say(content.decode())


def main() -> None:
    role, section = sys.argv[1:]
    stream = msgspec.json.decode(section, type=StreamSection)
    client: Role = "learner" if role == "learner" else "producer"
    try:
        run_process(partial(listen, stream) if role == "allocator" else partial(talk, stream, client))
    except GvmStreamError as error:
        say(str(error))


if __name__ == "__main__":
    main()
