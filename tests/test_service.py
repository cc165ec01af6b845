"""A real broker behind a real socket: whatever arrives, the loop lives and the next good message is answered."""

from __future__ import annotations

import random
import socket as tcp
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio
import zmq

from gvm_stream.allocator.broker import Broker
from gvm_stream.allocator.service import serve, state_path
from gvm_stream.config import Config, DataSection, MetricsSection, ModelSection
from gvm_stream.config_file import agreed_values
from gvm_stream.data.prompts import Prompt, PromptSet
from gvm_stream.metrics import Metrics
from gvm_stream.wire import messages as m
from gvm_stream.wire.codec import decode_to_peer, encode
from gvm_stream.wire.sockets import bind_router, connect_dealer, parse_address
from gvm_stream.wire.zmq_trio import ZmqSocket
from tests.doubles import local_stream
from tests.wire_samples import TO_ALLOCATOR, WEIGHTS


def prompts(split: str) -> tuple[Prompt, ...]:
    tokens = np.array([5, 6], "<i4").tobytes()
    return tuple(Prompt(id=f"{split}-{i}", text=f"{i}?", tokens=tokens, answer=str(i)) for i in range(4))


class Service:
    """The service under test, and peers of it."""

    def __init__(self, config: Config, states: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.config, self.states, self._context = config, states, context
        self._epochs = count(1)
        self.metrics = Metrics("allocator")
        self.agreed = agreed_values(config)
        self.stop = trio.Event()
        prepared = PromptSet(train=prompts("train"), heldout=prompts("heldout"), bad_rows=(), end_tokens=(2,))
        self.broker = Broker(config, self.agreed, prepared, self.metrics, run="r", now=trio.current_time())

    @property
    def refused(self) -> float | None:
        return self.metrics.registry.get_sample_value("gvm_messages_refused_total")

    def peer(self, name: str) -> ZmqSocket:
        """A connection with an identity of its own, as every start of a process has."""
        address, identity = self.config.stream.address, f"{name}/{next(self._epochs)}".encode()
        return ZmqSocket(connect_dealer(self._context, address, "k", identity=identity, limit_mib=1))

    async def hello(self, peer: ZmqSocket, role: m.Role, name: str = "a") -> m.ToPeer:
        hello = m.Hello(protocol=m.PROTOCOL, role=role, name=name, epoch=1, agreed=self.agreed)
        await peer.send([encode(hello)])
        return await answer(peer)

    async def assert_alive(self) -> None:
        with self.peer("probe") as peer:
            assert isinstance(await self.hello(peer, "observer", "probe"), m.Welcome)
            await peer.send([encode(m.StatusRequest())])
            assert isinstance(await answer(peer), m.Status)
            await peer.send([encode(m.Goodbye(reason="done"))])


async def answer(peer: ZmqSocket) -> m.ToPeer:
    """The next message that is not a heartbeat."""
    with trio.fail_after(30):
        while isinstance(message := decode_to_peer(await peer.recv()), m.Alive):
            pass
    return message


@asynccontextmanager
async def service(states: Path) -> AsyncIterator[Service]:
    config = Config(
        model=ModelSection(path="m"),
        data=DataSection(train="t"),
        stream=local_stream(heartbeat_s=0.05),
        metrics=MetricsSection(port=0),
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        running = Service(config, states, context)
        with ZmqSocket(bind_router(context, config.stream.address, "k", plaintext=False, limit_mib=1)) as socket:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, running.broker, socket, states, running.stop)
                yield running
                running.stop.set()
    finally:
        context.term()


async def test_garbage_is_counted_and_the_next_message_is_answered(tmp_path: Path) -> None:
    noise = random.Random(0)
    bad: list[list[bytes]] = [
        [b""],
        [b"", b""],
        [encode(TO_ALLOCATOR["ask"]), b"more"],
        [b"\x82\xa4type\xa9heartbeat\xa1x" + b"\x91" * 100_000 + b"\xc0"],
        [encode(m.Stop(reason="forged", final=True))],
        *([noise.randbytes(noise.randrange(1, 200))] for _ in range(200)),
    ]
    async with service(tmp_path) as running:
        assert running.refused == 0
        with running.peer("stray") as stray:
            for frames in bad:
                await stray.send(frames)
            assert isinstance(await running.hello(stray, "observer"), m.Welcome)
        assert running.refused == len(bad)
        await running.assert_alive()


async def test_an_http_request_does_no_harm(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        with closing(tcp.create_connection(parse_address(running.config.stream.address, "k"))) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            await running.assert_alive()
        await running.assert_alive()


@pytest.mark.parametrize("name", [name for name in TO_ALLOCATOR if name != "hello"])
async def test_a_peer_that_has_not_said_hello_is_told_so(tmp_path: Path, name: str) -> None:
    async with service(tmp_path) as running:
        with running.peer("unknown") as unknown:
            await unknown.send([encode(TO_ALLOCATOR[name])])
            assert isinstance(message := await answer(unknown), m.Refused)
            assert "does not know this process" in message.reason
        await running.assert_alive()


async def test_a_peer_of_another_protocol_or_configuration_learns_why_it_is_refused(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        with running.peer("other") as other:
            hello = m.Hello(protocol=99, role="producer", name="a", epoch=1, agreed=running.agreed)
            await other.send([encode(hello)])
            assert isinstance(message := await answer(other), m.Refused)
            assert f"protocol 99, the allocator {m.PROTOCOL}" in message.reason
            agreed = {**running.agreed, "sampling.max_tokens": "7"}
            await other.send([encode(msgspec.structs.replace(hello, protocol=m.PROTOCOL, agreed=agreed))])
            assert isinstance(message := await answer(other), m.Refused)
            assert "sampling.max_tokens = 7, the allocator's has 512" in message.reason


async def test_messages_that_are_not_for_a_role_or_about_unknown_work_are_counted(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        with running.peer("p") as producer:
            assert isinstance(await running.hello(producer, "producer"), m.Welcome)
            for message in (TO_ALLOCATOR["batch_request"], TO_ALLOCATOR["published"], TO_ALLOCATOR["rollouts"]):
                await producer.send([encode(message)])
            await producer.send([encode(m.StatusRequest())])
            assert isinstance(status := await answer(producer), m.Status)
            assert status.rollouts == 0
            assert running.refused == 2
            duplicates = running.metrics.registry.get_sample_value("gvm_rollouts_duplicate_total")
            assert duplicates == 4


async def test_a_peer_that_vanishes_does_not_end_the_service(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        with running.peer("p") as producer:
            await running.hello(producer, "producer")
        with running.peer("o") as observer, trio.fail_after(30):
            await running.hello(observer, "observer")
            while running.broker.peers.of("producer"):  # for three heartbeats
                await observer.send([encode(m.StatusRequest())])
                assert isinstance(await answer(observer), m.Status)
        await running.assert_alive()


async def test_states_are_written_and_a_stop_ends_the_service_after_the_goodbyes(tmp_path: Path) -> None:
    with trio.fail_after(9):  # less than the grace for goodbyes
        async with service(tmp_path) as running:
            with running.peer("l") as learner:
                assert isinstance(await running.hello(learner, "learner"), m.Welcome)
                await learner.send([encode(m.Published(weights=WEIGHTS, step=0))])
                await learner.send([encode(m.Checkpointed(step=0, version=7, path="/c"))])
                await learner.send([encode(m.StatusRequest())])
                assert isinstance(await answer(learner), m.Status)
                running.stop.set()
                assert await answer(learner) == m.Stop(reason="interrupted", final=False)
                await learner.send([encode(m.Goodbye(reason="bye"))])
    state = msgspec.msgpack.decode(state_path(tmp_path, 0).read_bytes())
    assert state.keys() == {"allocator", "record"}
