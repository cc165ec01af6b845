"""The broker behind a socket: one nursery, one loop that reads, one that keeps the time, one that writes and sends."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from gvm_stream.allocator.broker import Broker
from gvm_stream.allocator.spool import Spool
from gvm_stream.allocator.writer import Writer
from gvm_stream.errors import WireError
from gvm_stream.wire.codec import decode_to_allocator, encode
from gvm_stream.wire.messages import Alive
from gvm_stream.wire.zmq_trio import ZmqSocket

log = logging.getLogger(__name__)

BATCH = 128
"""Messages handled per turn: the more, the less a rollout costs, and the longer a learner waits for its answer."""


async def serve(broker: Broker, socket: ZmqSocket, spool: Spool, stop: trio.Event) -> None:
    """Run the broker until its run is done. `stop` ends it early and in order."""
    writer = Writer(broker, socket, spool)
    async with trio.open_nursery() as loops:
        loops.start_soon(writer.run)
        loops.start_soon(receive_messages, broker, socket, writer)
        loops.start_soon(stop_when_told, broker, writer, stop)
        await keep_time(broker, socket, writer)
        await writer.put(snapshot=True)
        await writer.drain()
        loops.cancel_scope.cancel()


async def receive_messages(broker: Broker, socket: ZmqSocket, writer: Writer) -> None:
    while True:
        for identity, content in await socket.recv_requests(BATCH):
            handle(broker, identity, content)
        broker.advance(trio.current_time())
        await writer.put()


def handle(broker: Broker, identity: bytes, content: Sequence[bytes | memoryview]) -> None:
    """Hand one message to the broker; one that cannot be read is counted and dropped."""
    try:
        message = decode_to_allocator(content)
    except WireError as error:
        broker.refuse(str(error))
        return
    broker.receive(identity, message, trio.current_time())


async def keep_time(broker: Broker, socket: ZmqSocket, writer: Writer) -> None:
    """Tell the broker the time, and the peers that the allocator is alive, until the run is done."""
    alive = encode(Alive())
    while not broker.done(trio.current_time()):
        await trio.sleep(broker.config.stream.heartbeat_s)
        now = trio.current_time()
        broker.tick(now)
        broker.advance(now)
        for peer in broker.peers.all():  # not by the writer: a slow disk is no reason to be taken for dead
            if peer.joined_at is not None and not socket.try_send([peer.identity, alive]):
                broker.unreachable(peer.identity, now)
        await writer.put()


async def stop_when_told(broker: Broker, writer: Writer, stop: trio.Event) -> None:
    await stop.wait()
    broker.stop("interrupted", trio.current_time())
    await writer.put()
