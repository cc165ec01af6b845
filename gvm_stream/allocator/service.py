"""The broker behind a socket: one nursery, one loop that reads, one that keeps the time, one that writes files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import trio

from gvm_stream.allocator.broker import Broker
from gvm_stream.errors import WireError
from gvm_stream.files import write_atomically
from gvm_stream.wire.codec import decode_to_allocator, encode
from gvm_stream.wire.zmq_trio import ZmqSocket

log = logging.getLogger(__name__)

BATCH = 64
"""Messages handled per wake-up."""
SAVES_AHEAD = 16
"""States waiting to be written before the loop that produces them waits."""

Saves = trio.MemorySendChannel[tuple[int, dict[str, Any]]]


async def serve(broker: Broker, socket: ZmqSocket, state_dir: Path, stop: trio.Event) -> None:
    """Run the broker until its run is done. `stop` ends it early and in order."""
    to_save, saves = trio.open_memory_channel[tuple[int, dict[str, Any]]](SAVES_AHEAD)
    async with trio.open_nursery() as files:
        files.start_soon(save_states, saves, state_dir)
        async with to_save, trio.open_nursery() as loops:
            loops.start_soon(receive_messages, broker, socket, to_save)
            loops.start_soon(stop_when_told, broker, socket, stop)
            await keep_time(broker, socket)
            loops.cancel_scope.cancel()


async def receive_messages(broker: Broker, socket: ZmqSocket, to_save: Saves) -> None:
    while True:
        for frames in await socket.recv_batch(BATCH):
            handle(broker, frames)
        flush(broker, socket)
        while broker.saves:
            await to_save.send(broker.saves.popleft())


def handle(broker: Broker, frames: list[bytes]) -> None:
    """Hand one message to the broker; one that cannot be read is counted and dropped."""
    identity, *content = frames
    try:
        message = decode_to_allocator(content)
    except WireError as error:
        broker.refuse(str(error))
        return
    broker.receive(identity, message, trio.current_time())


async def keep_time(broker: Broker, socket: ZmqSocket) -> None:
    """Tell the broker the time until its run is done."""
    while not broker.done(trio.current_time()):
        await trio.sleep(broker.config.stream.heartbeat_s)
        broker.tick(trio.current_time())
        flush(broker, socket)


async def stop_when_told(broker: Broker, socket: ZmqSocket, stop: trio.Event) -> None:
    await stop.wait()
    broker.stop("interrupted", trio.current_time())
    flush(broker, socket)


def flush(broker: Broker, socket: ZmqSocket) -> None:
    while broker.outbox:
        identity, message = broker.outbox.popleft()
        if not socket.try_send([identity, encode(message)]):
            broker.unreachable(identity, trio.current_time())


async def save_states(saves: trio.MemoryReceiveChannel[tuple[int, dict[str, Any]]], state_dir: Path) -> None:
    async for step, state in saves:
        await trio.to_thread.run_sync(write_state, state_dir, step, state)


def state_path(state_dir: Path, step: int) -> Path:
    return state_dir / f"step-{step:06d}.msgpack"


def write_state(state_dir: Path, step: int, state: dict[str, Any]) -> None:
    write_atomically(state_path(state_dir, step), msgspec.msgpack.encode(state))
