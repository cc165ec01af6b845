"""A real broker behind a real socket and a real spool: whatever arrives, the loops live and the next good message is
answered."""

from __future__ import annotations

import random
import socket as tcp
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from itertools import count
from pathlib import Path

import msgspec
import pytest
import trio
import zmq

from gvm_stream.allocator.broker import Broker
from gvm_stream.allocator.journal import Published, Restarted, decode_entry
from gvm_stream.allocator.run_state import RunState
from gvm_stream.allocator.service import serve
from gvm_stream.allocator.spool import Changes, Spool, SqliteSpool
from gvm_stream.errors import StreamError
from gvm_stream.metrics import Metrics
from gvm_stream.wire import messages as m
from gvm_stream.wire.codec import decode_to_peer, encode
from gvm_stream.wire.link import identity_of
from gvm_stream.wire.sockets import bind_router, connect_dealer, parse_address
from gvm_stream.wire.zmq_trio import ZmqSocket
from tests.doubles import local_stream
from tests.scripted_peers import AGREED, config, prompt_set, rollout_of
from tests.wire_samples import TO_ALLOCATOR, WEIGHTS


class Service:
    """The service under test, and peers of it."""

    def __init__(self, spool: FullDisk, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.config = msgspec.structs.replace(config(), stream=local_stream(heartbeat_s=0.05))
        self.spool, self._context, self._epochs = spool, context, count(1)
        self.metrics, self.stop = Metrics("allocator"), trio.Event()
        self.broker = Broker(
            self.config, AGREED, prompt_set(), self.metrics, run="r", now=trio.current_time(), saved=spool.load()
        )

    @property
    def refused(self) -> float | None:
        return self.metrics.registry.get_sample_value("gvm_messages_refused_total")

    @asynccontextmanager
    async def peer(self, role: m.Role, name: str = "a", *, joins: bool = True) -> AsyncIterator[Client]:
        """A connection with an identity of its own, as every start of a process has."""
        stream, epoch = self.config.stream, next(self._epochs)
        raw, watch = connect_dealer(
            self._context, stream.address, "k", stream=stream, role=role, identity=identity_of(role, name, epoch)
        )
        raw.linger = 0
        hello = m.Hello(protocol=m.PROTOCOL, role=role, name=name, epoch=epoch, agreed=AGREED)
        with watch, ZmqSocket(raw) as socket:
            client = Client(socket, hello)
            if joins:
                assert isinstance(await client.ask(hello), m.Welcome)
            yield client

    async def assert_alive(self) -> None:
        async with self.peer("observer", "probe") as probe:
            assert isinstance(await probe.ask(m.StatusRequest()), m.Status)


class Client:
    def __init__(self, socket: ZmqSocket, hello: m.Hello) -> None:
        self.socket, self.hello = socket, hello

    async def say(self, *messages: m.ToAllocator) -> None:
        for message in messages:
            await self.socket.send([encode(message)])

    async def answer(self) -> m.ToPeer:
        """The next message that is not a heartbeat."""
        with trio.fail_after(30):
            while isinstance(message := decode_to_peer(await self.socket.recv()), m.Alive):
                pass
        return message

    async def ask(self, message: m.ToAllocator) -> m.ToPeer:
        await self.say(message)
        return await self.answer()


class FullDisk(SqliteSpool):
    full = False

    def commit(self, turns: Sequence[Changes]) -> None:
        if self.full:
            raise StreamError("the spool cannot be written: the disk is full")
        super().commit(turns)


@asynccontextmanager
async def service(folder: Path) -> AsyncIterator[Service]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with closing(FullDisk(folder / "spool.sqlite")) as disk:
            spool: Spool = disk
            running = Service(disk, context)
            stream = running.config.stream
            with ZmqSocket(bind_router(context, stream.address, "k", stream=stream, server="allocator")) as socket:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(serve, running.broker, socket, spool, running.stop)
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
        async with running.peer("observer", joins=False) as stray:
            for frames in bad:
                await stray.socket.send(frames)
            assert isinstance(await stray.ask(stray.hello), m.Welcome)
        assert running.refused == len(bad)
        await running.assert_alive()


async def test_an_http_request_does_no_harm(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        with closing(tcp.create_connection(parse_address(running.config.stream.address, "k"))) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            await running.assert_alive()
        await running.assert_alive()


async def test_a_peer_that_has_not_said_hello_is_told_to(tmp_path: Path) -> None:
    async with service(tmp_path) as running, running.peer("producer", joins=False) as unknown:
        for name, message in TO_ALLOCATOR.items():
            if name != "hello":
                assert await unknown.ask(message) == m.Unknown(), name
        await running.assert_alive()


async def test_a_hello_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with service(tmp_path) as running, running.peer("producer", joins=False) as other:
        replace = msgspec.structs.replace
        for hello, reason in (
            (replace(other.hello, protocol=99), f"protocol 99, the allocator {m.PROTOCOL}"),
            (replace(other.hello, agreed={**AGREED, "model.path": "b"}), "model.path = b, the allocator's has model"),
            (replace(other.hello, name="somebody else"), "not of the process that its socket belongs to"),
        ):
            message = await other.ask(hello)
            assert isinstance(message, m.Refused)
            assert reason in message.reason
        assert running.broker.peers.all() == []


async def test_messages_that_are_not_for_a_role_or_about_unknown_work_are_counted(tmp_path: Path) -> None:
    async with service(tmp_path) as running, running.peer("producer") as producer:
        await producer.say(TO_ALLOCATOR["batch_request"], TO_ALLOCATOR["published"])
        order = m.WorkOrder(work=77, attempt=0, prompt="train-1", prompt_tokens=b"", answer="")
        assert await producer.ask(m.Rollouts(seq=1, rollouts=(rollout_of(order),))) == m.Received(seq=1)
        assert running.refused == 2
        status = await producer.ask(m.StatusRequest())
        assert isinstance(status, m.Status)
        assert (status.rollouts, status.conserved, status.refused) == (0, True, 3)


async def test_a_peer_that_vanishes_does_not_end_the_service(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        async with running.peer("producer"):
            pass
        async with running.peer("observer") as observer:
            with trio.fail_after(30):
                while running.broker.peers.all()[0].role == "producer":  # for three heartbeats
                    assert isinstance(await observer.ask(m.StatusRequest()), m.Status)
        await running.assert_alive()


async def test_what_was_answered_is_written_down_and_a_stop_ends_the_service_after_the_goodbyes(
    tmp_path: Path,
) -> None:
    with trio.fail_after(9):  # less than the grace for goodbyes
        async with service(tmp_path) as running, running.peer("learner") as learner:
            await learner.say(m.Published(weights=WEIGHTS, step=0))
            async with running.peer("producer") as producer:
                await producer.say(m.Ask(slots=1, version=WEIGHTS.version))
                work = await producer.answer()
                assert isinstance(work, m.Work)
                (order,) = work.orders
                assert await producer.ask(m.Rollouts(seq=1, rollouts=(rollout_of(order),))) == m.Received(seq=1)
                running.stop.set()
                while not isinstance(await producer.answer(), m.Stop):
                    pass
                await producer.say(m.Goodbye(reason="bye", generated_tokens=3))
                assert await learner.answer() == m.Stop(reason="interrupted", final=False)
                await learner.say(m.Goodbye(reason="bye"))
    with closing(SqliteSpool(tmp_path / "spool.sqlite")) as spool:
        saved = spool.load()
    assert saved.snapshot is not None
    state = RunState(config(), [p.id for p in prompt_set().train], [p.id for p in prompt_set().heldout[:4]])
    state.load_state_dict(msgspec.msgpack.decode(saved.snapshot, strict=False))
    assert (state.evaluation.ledger.ended["scored"], state.conserved) == (1, True)
    assert saved.journal == []


async def test_a_killed_service_goes_on_where_it_was(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        async with running.peer("learner") as learner:
            await learner.say(m.Published(weights=WEIGHTS, step=0))
            assert isinstance(await learner.ask(m.StatusRequest()), m.Status)
        await running.assert_alive()
        saved = running.spool.load()  # what a kill would leave
    assert [type(decode_entry(entry)) for entry in saved.journal] == [Published]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    again = Service(FullDisk(tmp_path / "spool.sqlite"), context)
    changes = again.broker.work.take_changes()
    assert changes is not None
    assert [type(decode_entry(entry)) for entry in changes.journal] == [Restarted]
    assert again.broker.work.state.started
    again.spool.close()
    context.term()


@pytest.mark.parametrize("known", [True, False])
async def test_a_full_disk_ends_the_run_and_says_so_to_everybody(tmp_path: Path, known: bool) -> None:
    with trio.fail_after(20):
        async with service(tmp_path) as running, running.peer("learner") as learner:
            if known:
                await learner.say(m.Published(weights=WEIGHTS, step=0))
                assert isinstance(await learner.ask(m.StatusRequest()), m.Status)
            running.spool.full = True
            async with running.peer("producer") as producer:
                await producer.say(m.Rollouts(seq=1, rollouts=()))
                stop = m.Stop(reason="the spool cannot be written: the disk is full", final=False)
                assert await producer.answer() == stop  # and nothing before it
                assert await learner.answer() == stop
                await producer.say(m.Goodbye(reason="bye"))
                await learner.say(m.Goodbye(reason="bye"))
    assert running.broker.failure == stop.reason
