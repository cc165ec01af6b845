"""Nobody is told of anything before it is written down, and everybody hears things in order."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from gvm_stream.allocator import writer as writer_module
from gvm_stream.allocator.spool import Changes, MemorySpool, Spool
from gvm_stream.allocator.writer import Writer
from gvm_stream.errors import StreamError
from gvm_stream.wire import messages as m
from gvm_stream.wire.codec import decode_to_peer
from gvm_stream.wire.payload import works_of
from tests.scripted_peers import Disk, Learner, Producer, Stage, config

P, L, WATCHER = b"producer/p/1", b"learner/l/1", b"observer/o/1"


class Socket:
    """Takes what is sent; `gone` are those whose connection is lost."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, m.ToPeer]] = []
        self.gone: set[bytes] = set()

    def try_send(self, frames: Sequence[bytes]) -> bool:
        identity, *content = frames
        if identity in self.gone:
            return False
        self.sent.append((identity, decode_to_peer(list(content))))
        return True

    def to(self, identity: bytes) -> list[m.ToPeer]:
        return [message for to, message in self.sent if to == identity]


class SlowDisk(Disk):
    """Each commit waits for its `permit`; `fails` is the reason why it does not succeed."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.commits: list[int] = []
        """Turns in each."""
        self.fails = ""

    def commit(self, turns: Sequence[Changes]) -> None:
        assert self.permits.acquire(timeout=10)
        if self.fails:
            raise StreamError(self.fails)
        super().commit(turns)
        self.commits.append(len(turns))


class Desk:
    """A broker whose messages go out by the writer under test."""

    def __init__(self, spool: Spool, *, durable: bool = True) -> None:
        self.stage = Stage(config(steps=2), durable=durable)
        self.socket = Socket()
        self.writer = Writer(self.stage.broker, self.socket, spool)  # type: ignore[arg-type]

    def change(self, number: int = 1, nbytes: int = 0) -> None:
        """Something that must be written down."""
        changes = self.stage.broker.work._changes
        changes.journal.append(b"%d" % number)
        changes.rollouts.append((number, bytes(nbytes)))

    def say(self, identity: bytes, message: m.ToPeer) -> None:
        self.stage.broker.outbox.append((identity, message))


@asynccontextmanager
async def desk(spool: Spool) -> AsyncIterator[Desk]:
    made = Desk(spool)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.writer.run)
        with trio.fail_after(20):
            yield made
        nursery.cancel_scope.cancel()


async def test_nothing_is_sent_before_it_is_written_down() -> None:
    disk = SlowDisk()
    async with desk(disk) as d:
        d.change()
        d.say(P, m.Received(seq=1))
        await d.writer.put()
        await trio.testing.wait_all_tasks_blocked()
        assert d.socket.sent == []
        assert d.stage.broker.spool_waiting == 1
        disk.permits.release()
        await d.writer.drain()
        assert d.socket.sent == [(P, m.Received(seq=1))]
        assert disk.load().journal == [b"1"]


async def test_observers_do_not_wait_for_a_disk_and_see_that_the_run_does() -> None:
    disk = SlowDisk()
    async with desk(disk) as d:
        d.change()
        d.say(P, m.Received(seq=1))
        await d.writer.put()
        await trio.testing.wait_all_tasks_blocked()
        status = d.stage.broker.status(d.stage.now)
        d.say(WATCHER, status)
        await d.writer.put()
        assert d.socket.sent == [(WATCHER, status)]
        assert "the disk: 1 turns of the allocator are not written" in [wait.what for wait in status.waits]
        disk.permits.release()
        await d.writer.drain()
        assert d.socket.to(P) == [m.Received(seq=1)]


async def test_turns_that_gather_during_a_commit_share_the_next_one_and_stay_in_order() -> None:
    disk = SlowDisk()
    async with desk(disk) as d:
        for seq in range(1, 6):
            d.change(seq)
            d.say(P, m.Received(seq=seq))
            await d.writer.put()
            await trio.testing.wait_all_tasks_blocked()
        d.say(L, m.Unknown())  # changes nothing, but must not overtake what was said before
        await d.writer.put()
        assert d.stage.broker.spool_waiting == 5
        disk.permits.release(2)
        await d.writer.drain()
        assert disk.commits == [1, 4]
        assert d.socket.to(P) == [m.Received(seq=seq) for seq in range(1, 6)]
        assert d.socket.sent[-1] == (L, m.Unknown())
        assert d.stage.broker.spool_waiting == 0


async def test_what_changes_nothing_is_sent_at_once() -> None:
    disk = SlowDisk()
    async with desk(disk) as d:
        d.say(P, m.Unknown())
        await d.writer.put()
        assert d.socket.sent == [(P, m.Unknown())]
        assert disk.commits == []


async def test_a_disk_that_fails_ends_the_run_and_no_promise_is_made() -> None:
    disk = SlowDisk()
    async with desk(disk) as d:
        disk.fails = "spool /r/spool.sqlite cannot be written: database or disk is full"
        disk.permits.release(9)
        d.change()
        d.say(P, m.Received(seq=1))
        d.say(L, m.Settled(step=0))
        await d.writer.put()
        await d.writer.drain()
        assert d.socket.sent == []
        assert d.stage.broker.failure == disk.fails
        d.change(2)
        d.say(P, m.Received(seq=2))
        d.say(P, m.Stop(reason=disk.fails, final=False))
        await d.writer.put(snapshot=True)
        await d.writer.drain()
        assert d.socket.sent == [(P, m.Stop(reason=disk.fails, final=False))]
        assert disk.load().journal == []


async def test_a_disk_that_cannot_be_read_ends_the_run_too() -> None:
    class Unreadable(SlowDisk):
        def __init__(self) -> None:
            super().__init__()
            self.batch = self.broken

        def broken(self, step: int) -> bytes | None:
            raise StreamError(f"batch {step} cannot be read: disk I/O error")

    async with desk(Unreadable()) as d:
        d.stage.broker.replays.append((L, 3))
        await d.writer.put()
        await d.writer.drain()
        assert d.stage.broker.failure == "batch 3 cannot be read: disk I/O error"
        d.say(P, m.Stop(reason="failed", final=False))
        await d.writer.put()
        assert d.socket.sent == [(P, m.Stop(reason="failed", final=False))]


async def test_too_much_that_waits_to_be_written_holds_the_reader_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MOST_WAITING_BYTES", 100)
    disk = SlowDisk()
    async with desk(disk) as d:
        put: list[int] = []

        async def put_four() -> None:
            for number in range(4):
                d.change(number, nbytes=60)
                await d.writer.put()
                put.append(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put_four)
            await trio.testing.wait_all_tasks_blocked()
            assert len(put) < 4
            disk.permits.release(4)
        await d.writer.drain()
        assert put == [0, 1, 2, 3]
        assert len(disk.load().journal) == 4


async def test_without_a_spool_everything_is_sent_at_once_and_payloads_are_kept() -> None:
    memory = MemorySpool()
    d = Desk(memory, durable=False)
    d.stage.broker.work._changes.rollouts.append((1, b"payload"))
    d.say(P, m.Received(seq=1))
    await d.writer.put()
    assert d.socket.sent == [(P, m.Received(seq=1))]
    assert (memory.rollouts([1]), d.stage.broker.spool_bytes) == ({1: b"payload"}, 7)
    await d.writer.drain()


@pytest.mark.parametrize("durable", [True, False])
async def test_batches_and_those_handed_out_again_come_with_their_payloads(durable: bool) -> None:
    stage = Stage(config(steps=2), durable=durable)
    learner, producer = Learner(stage), Producer(stage, "p")
    spool = stage.disk if durable else MemorySpool()
    socket = Socket()
    w = Writer(stage.broker, socket, spool)  # type: ignore[arg-type]

    async def deliver() -> None:
        while learner.to_allocator or producer.to_allocator:
            for peer in (learner, producer):
                while peer.to_allocator:
                    stage.receive(peer)
            stage.broker.advance(stage.now)
            await w.put()
            await w.drain()
            sent, socket.sent = socket.sent, []
            for identity, message in sent:
                stage.peers[identity].hear(message)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(w.run)
        with trio.fail_after(20):
            await deliver()
            while not learner.model:
                producer.finish()
                await deliver()
            (batch,) = learner.model
            assert len(works_of(batch)) == 6
            assert all(r.tokens and r.logprobs and r.spans for g in batch.groups for r in g.rollouts)
            stage.broker.replays += [(learner.identity, 0), (learner.identity, -1)]
            await w.put()
            await w.drain()
            assert socket.sent == [(learner.identity, batch)]
        nursery.cancel_scope.cancel()


async def test_who_cannot_be_reached_is_told_to_the_broker() -> None:
    d = Desk(MemorySpool(), durable=False)
    producer = Producer(d.stage, "p")
    d.stage.receive(producer)
    d.socket.gone.add(producer.identity)
    await d.writer.put()
    peer = d.stage.broker.peers.get(producer.identity)
    assert peer is not None
    assert (peer.joined_at, peer.unreachable_at is None) == (None, False)
