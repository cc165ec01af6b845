from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import trio
import zmq

from gvm_stream.wire.zmq_trio import ZmqSocket

Pair = Callable[..., tuple[ZmqSocket, "zmq.Socket[bytes]"]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Make (socket under test, plain peer), both with a small high-water mark, over real tcp."""
    context = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []

    def make(kind: int, peer_kind: int, hwm: int = 8) -> tuple[ZmqSocket, zmq.Socket[bytes]]:
        ours, peer = context.socket(kind), context.socket(peer_kind)
        opened.extend((ours, peer))
        for s in (ours, peer):
            s.linger, s.sndhwm, s.rcvhwm = 0, hwm, hwm
        port = ours.bind_to_random_port("tcp://127.0.0.1")
        peer.connect(f"tcp://127.0.0.1:{port}")
        return ZmqSocket(ours), peer

    yield make
    for s in opened:
        s.close()
    context.term()


async def test_burst_after_an_empty_read_is_delivered_whole(pair: Pair) -> None:
    sock, peer = pair(zmq.PULL, zmq.PUSH, hwm=1000)
    with trio.move_on_after(0.05):
        await sock.recv()
    for i in range(500):
        peer.send(b"%d" % i)
    with trio.fail_after(5):
        assert [await sock.recv() for _ in range(500)] == [[b"%d" % i] for i in range(500)]


async def test_batch_takes_what_is_there_and_no_more_than_limit(pair: Pair) -> None:
    sock, peer = pair(zmq.PULL, zmq.PUSH, hwm=1000)
    for i in range(100):
        peer.send(b"%d" % i)
    got: list[list[bytes]] = []
    with trio.fail_after(5):
        while len(got) < 100:
            batch = await sock.recv_batch(16)
            assert 1 <= len(batch) <= 16
            got += batch
    assert [m[0] for m in got] == [b"%d" % i for i in range(100)]


async def test_send_blocks_at_high_water_mark_and_resumes(pair: Pair) -> None:
    sock, peer = pair(zmq.PUSH, zmq.PULL, hwm=1)
    sent = 0
    with trio.move_on_after(0.5) as scope:
        while True:
            await sock.send([b"x" * 100_000])
            sent += 1
    assert scope.cancelled_caught
    assert 0 < sent < 200
    drain = threading.Thread(target=lambda: [peer.recv() for _ in range(sent + 1)])
    drain.start()
    with trio.fail_after(5):
        await sock.send([b"last"])
    drain.join()


async def test_send_that_swallows_the_edge_wakes_the_sleeping_reader(pair: Pair) -> None:
    """A reply lands while the next request is being serialised; libzmq then eats its edge inside send()."""
    sock, peer = pair(zmq.DEALER, zmq.DEALER, hwm=1000)
    stop = threading.Event()

    def echo() -> None:
        while not stop.is_set():
            if peer.poll(5):
                peer.send(peer.recv())

    def slow_request() -> Iterator[bytes]:
        time.sleep(0.005)  # longer than libzmq's 1 ms command throttle; no checkpoint in between
        yield b"second"

    thread = threading.Thread(target=echo)
    thread.start()
    replies, inbox = trio.open_memory_channel[list[bytes]](100)

    async def read() -> None:
        while True:
            await replies.send(await sock.recv())

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for _ in range(10):
                await sock.send([b"first"])
                await sock.send(slow_request())
                with trio.fail_after(10):
                    assert [await inbox.receive(), await inbox.receive()] == [[b"first"], [b"second"]]
            nursery.cancel_scope.cancel()
    finally:
        stop.set()
        thread.join()


async def test_cancelled_receives_lose_nothing(pair: Pair) -> None:
    sock, peer = pair(zmq.PULL, zmq.PUSH, hwm=10_000)
    done = threading.Event()

    def feed() -> None:
        for i in range(3000):
            peer.send(b"%d" % i)
            if i % 3 == 0:
                done.wait(0.0003)
        done.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    got: list[bytes] = []
    with trio.fail_after(20):
        while len(got) < 3000:
            with trio.move_on_after(0.0005):
                got.append((await sock.recv())[0])
    feeder.join()
    assert got == [b"%d" % i for i in range(3000)]


async def test_two_readers_share_the_work(pair: Pair) -> None:
    sock, peer = pair(zmq.PULL, zmq.PUSH, hwm=1000)
    got: list[bytes] = []
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            for _ in range(50):
                got.append((await sock.recv())[0])

        nursery.start_soon(read)
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        for i in range(100):
            peer.send(b"%d" % i)
    assert sorted(got) == sorted(b"%d" % i for i in range(100))


async def test_close_wakes_a_waiting_reader(pair: Pair) -> None:
    sock, _ = pair(zmq.PULL, zmq.PUSH)
    outcome: list[type[BaseException]] = []

    async def read() -> None:
        try:
            await sock.recv()
        except trio.ClosedResourceError as error:
            outcome.append(type(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        sock.close()
    assert outcome == [trio.ClosedResourceError]


def test_infinite_linger_is_refused() -> None:
    context = zmq.Context()
    with context.socket(zmq.PULL) as raw:
        raw.linger = -1
        with pytest.raises(ValueError, match="linger"):
            ZmqSocket(raw)
    context.term()
