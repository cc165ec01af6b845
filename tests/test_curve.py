"""Encryption and who may join, with real sockets: only a key on the list gets through, and nobody waits for ever."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import zmq

from gvm_stream.config import StreamSection
from gvm_stream.errors import ConfigError, StreamError
from gvm_stream.process import leaf_error
from gvm_stream.wire import zap
from gvm_stream.wire.handshake import HandshakeWatch
from gvm_stream.wire.keys import PUBLIC, Server, add_key, create_keys, fingerprint, load_pair, revoke_key
from gvm_stream.wire.messages import Role
from gvm_stream.wire.sockets import bind_router, connect_dealer, parse_address
from gvm_stream.wire.zap import Reason, listening
from gvm_stream.wire.zmq_trio import Frames, ZmqSocket
from tests.strangers import STRANGERS
from tests.stream_processes import free_address

DEADLINE_S = 10


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    create_keys(folder)
    return folder


@pytest.fixture(autouse=True)
def always_reread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zap, "REREAD_S", 0.0)


def section(keys: Path | str, address: str = "") -> StreamSection:
    return StreamSection(address=address or free_address(), keys=str(keys), silence_s=0.5, heartbeat_s=0.1)


class Echo:
    """A server that answers every message with itself, and what it has seen."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.refused: Counter[Reason] = Counter()
        self._changed = trio.Event()

    def count(self, reason: Reason) -> None:
        self.refused[reason] += 1
        self._changed.set()

    async def until_refused(self, reason: Reason, times: int = 1) -> None:
        with trio.fail_after(DEADLINE_S):
            while self.refused[reason] < times:
                self._changed = trio.Event()
                await self._changed.wait()

    async def answer(self, socket: ZmqSocket) -> None:
        while True:
            identity, content = await socket.recv()
            self.heard.append(content)
            socket.try_send([identity, content])


@asynccontextmanager
async def echo(stream: StreamSection, server: Server = "allocator") -> AsyncIterator[Echo]:
    running = Echo()
    async with (
        listening(stream.address, "k", stream=stream, server=server, count=running.count) as socket,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(running.answer, socket)
        yield running
        nursery.cancel_scope.cancel()


class Peer:
    def __init__(self, socket: ZmqSocket, watch: HandshakeWatch) -> None:
        self._socket, self._watch = socket, watch

    async def say(self, text: bytes) -> Frames:
        """The answer. Raises StreamError if there is a reason for none."""
        await self._socket.send([text])
        with trio.fail_after(DEADLINE_S):
            return await self._watch.unless_refused(self._socket.recv)

    async def say_in_vain(self, text: bytes) -> None:
        await self._socket.send([text])

    def check(self) -> None:
        """As a blocking learner asks."""
        self._watch.check()


@asynccontextmanager
async def peer(
    stream: StreamSection, role: Role = "producer", identity: bytes = b"", server: Server = "allocator"
) -> AsyncIterator[Peer]:
    identity = identity or f"{role}/x/1".encode()
    with zmq.Context() as context:
        raw, watch = connect_dealer(
            context, stream.address, "k", stream=stream, role=role, identity=identity, server=server
        )
        raw.linger = 0
        with watch, ZmqSocket(raw) as socket:
            yield Peer(socket, watch)


async def refusal(stream: StreamSection, role: Role = "producer", server: Server = "allocator") -> str:
    async with peer(stream, role, server=server) as refused:
        with pytest.raises(StreamError) as caught:
            await refused.say(b"let me in")
        with pytest.raises(StreamError, match=re.escape(str(caught.value))):
            refused.check()
    return str(caught.value)


@pytest.mark.parametrize("role", ["learner", "producer", "observer"])
async def test_a_key_on_the_list_gets_through(keys: Path, role: Role) -> None:
    stream = section(keys)
    async with echo(stream) as server, peer(stream, role) as client:
        assert await client.say(b"hello") == [b"hello"]
        client.check()
    assert server.refused == {}


async def test_a_key_that_is_not_on_the_list_is_told_so(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = section(keys)
    strangers = keys.with_name("strangers")
    create_keys(strangers)
    # It knows where to go, and whom to expect there.
    (strangers / PUBLIC).write_text((keys / PUBLIC).read_text())
    ours = fingerprint(load_pair(strangers, "producer").public)
    async with echo(stream) as server:
        for _ in range(3):
            sentence = await refusal(section(strangers, stream.address))
            assert sentence == (
                f"the allocator at {stream.address} does not accept the key of this process ({ours}, in "
                f"{strangers / 'producer.secret'}): see gvm-stream keys list there"
            )
    assert server.refused == {"key": 3}
    assert server.heard == []
    assert [ours in line for line in caplog.messages] == [True]  # once


async def test_no_key_is_told_to_get_one(keys: Path) -> None:
    stream = section(keys)
    async with echo(stream) as server:
        assert await refusal(section("", stream.address)) == (
            f"the allocator at {stream.address} demands a key, and this process has none: name their folder as "
            "stream.keys"
        )
        await server.until_refused("handshake")
    assert server.heard == []


async def test_a_server_with_another_key_than_expected_is_not_talked_to(keys: Path) -> None:
    """Somebody else listens there, or keys were made anew and not copied."""
    stream = section(keys)
    others = keys.with_name("others")
    create_keys(others)
    async with echo(stream) as server:
        assert await refusal(section(others, stream.address)) == (
            f"the allocator at {stream.address} closes every connection at once: its key is not the one in {others}, "
            "or a tunnel ends nowhere"
        )
        await server.until_refused("handshake")
    assert server.heard == []


async def test_keys_are_for_all_or_none(keys: Path) -> None:
    stream = section("")
    async with echo(stream) as server:
        sentence = await refusal(section(keys, stream.address))
        await server.until_refused("handshake")
    assert sentence.startswith(f"the allocator at {stream.address} ")
    # Which side hangs up first is a race: either is an explanation.
    assert "does without keys" in sentence or "closes every connection" in sentence
    assert server.heard == []


async def test_nobody_is_refused_by_a_server_that_is_not_there_yet(keys: Path) -> None:
    stream = section(keys)
    async with peer(stream) as early:
        with trio.move_on_after(4 * stream.silence_s):
            await early.say(b"too early")
        early.check()
        async with echo(stream):
            assert await early.say(b"hello") == [b"too early"]


async def test_a_revoked_key_is_not_heard_any_more_and_does_not_come_in_again(keys: Path) -> None:
    add_key(keys, "producer", "stolen")
    thief = keys.with_name("thief")
    shutil.copytree(keys, thief)
    (thief / "stolen.secret").replace(thief / "producer.secret")
    stream = section(keys)
    stolen = section(thief, stream.address)
    async with echo(stream) as server, peer(stolen, identity=b"producer/thief/1") as joined, peer(stream) as honest:
        assert await joined.say(b"1") == [b"1"]
        revoke_key(keys, "stolen")
        await joined.say_in_vain(b"2")
        await server.until_refused("revoked")
        assert await honest.say(b"3") == [b"3"]
        assert "does not accept the key" in await refusal(stolen)
    assert server.heard == [b"1", b"3"]


async def test_a_key_added_to_a_running_server_gets_through(keys: Path) -> None:
    stream = section(keys)
    async with echo(stream), peer(stream) as first:
        assert await first.say(b"1") == [b"1"]
        add_key(keys, "producer", "late")
        (keys / "late.secret").replace(keys / "producer.secret")
        async with peer(stream, identity=b"producer/late/1") as late:
            assert await late.say(b"2") == [b"2"]


async def test_a_list_that_is_broken_on_the_way_leaves_the_old_one_in_force(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = section(keys)
    async with echo(stream), peer(stream) as client:
        assert await client.say(b"1") == [b"1"]
        (keys / PUBLIC).write_text("producer half a line")
        assert await client.say(b"2") == [b"2"]
    assert "the list of keys as it was stays in force: line 1 of" in caplog.text


async def test_nobody_speaks_in_the_name_of_another_role(keys: Path) -> None:
    """A producer's key must not publish weights."""
    stream = section(keys)
    async with echo(stream) as server, peer(stream, "producer", identity=b"learner/x/1") as liar:
        await liar.say_in_vain(b"weights")
        await server.until_refused("role")
        async with peer(stream, "learner") as learner:
            assert await learner.say(b"mine") == [b"mine"]
    assert server.heard == [b"mine"]


async def test_weights_are_served_to_producers_alone(keys: Path) -> None:
    stream = section(keys)
    async with echo(stream, "learner") as server:
        async with peer(stream, "producer", server="learner") as producer:
            assert await producer.say(b"1") == [b"1"]
        assert "the learner at" in await refusal(stream, "observer", server="learner")
    assert server.refused == {"key": 1}


async def test_a_flood_of_refusals_is_counted_and_hardly_logged(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Messages of a revoked key, faster than anybody reads logs; the others get their turn."""
    add_key(keys, "producer", "stolen")
    stream = section(keys)
    (keys / "stolen.secret").replace(keys / "producer.secret")
    async with echo(stream) as server, peer(stream, "learner") as honest, peer(stream) as revoked:
        assert await revoked.say(b"1") == [b"1"]
        revoke_key(keys, "stolen")
        for _ in range(1000):
            await revoked.say_in_vain(b"flood")
        assert await honest.say(b"2") == [b"2"]
        await server.until_refused("revoked", 1000)
    assert server.heard == [b"1", b"2"]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS)
async def test_what_strangers_send_disturbs_nobody_and_is_never_a_message(keys: Path, sent: bytes) -> None:
    stream = section(keys)
    async with echo(stream) as server, peer(stream) as client:
        assert await client.say(b"before") == [b"before"]
        async with await trio.open_tcp_stream(*parse_address(stream.address, "k")) as stranger:
            with suppress(trio.BrokenResourceError):  # it may be cut off half way
                await stranger.send_all(sent)
            assert await client.say(b"while") == [b"while"]
        assert await client.say(b"after") == [b"after"]
    assert server.heard == [b"before", b"while", b"after"]


async def test_without_a_handler_nobody_gets_through(keys: Path) -> None:
    """An open door is what a CURVE server without one is, unless it is told."""
    stream = section(keys)
    with zmq.Context() as context, bind_router(context, stream.address, "k", stream=stream, server="allocator") as bare:
        bare.linger = 0
        async with peer(stream) as client:
            await client.say_in_vain(b"hello")
            assert not bare.poll(1000)


@pytest.mark.parametrize("missing", [PUBLIC, "allocator.secret"])
async def test_a_server_without_its_keys_does_not_start(keys: Path, missing: str) -> None:
    (keys / missing).unlink()
    with pytest.raises(ConfigError, match=f"{missing} does not exist"):
        async with echo(section(keys)):
            raise AssertionError("it listens")


@pytest.mark.parametrize("missing", [PUBLIC, "producer.secret"])
async def test_a_client_without_its_keys_does_not_start(keys: Path, missing: str) -> None:
    (keys / missing).unlink()
    with pytest.raises(ConfigError, match=f"{missing} does not exist"):
        async with peer(section(keys)):
            raise AssertionError("it connects")


async def test_with_keys_a_server_may_listen_beyond_this_machine(keys: Path) -> None:
    stream = section(keys)
    port = stream.address.rpartition(":")[2]
    async with echo(section(keys, f"tcp://0.0.0.0:{port}")), peer(stream) as client:
        assert await client.say(b"hello") == [b"hello"]


async def test_what_ends_the_block_comes_in_a_group_of_one(keys: Path) -> None:
    with pytest.RaisesGroup(pytest.RaisesGroup(StreamError)) as caught:
        async with echo(section(keys)):
            raise StreamError("failed")
    assert str(leaf_error(caught.value)) == "failed"
