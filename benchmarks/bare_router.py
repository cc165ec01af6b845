"""`python -m benchmarks.bare_router ADDRESS`: a service that receives, decodes and replies, and nothing else.

The loop of the allocator's service, on the same socket adapter, without an allocator behind it.
"""

from __future__ import annotations

import sys

import trio
import zmq

from gvm_stream.allocator.service import BATCH
from gvm_stream.allocator.tuning import tune
from gvm_stream.config import StreamSection
from gvm_stream.wire.codec import decode_to_allocator, encode
from gvm_stream.wire.messages import Received, Rollouts
from gvm_stream.wire.sockets import bind_router
from gvm_stream.wire.zmq_trio import ZmqSocket


async def serve(address: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with ZmqSocket(
        bind_router(context, address, "address", stream=StreamSection(address=address), server="allocator")
    ) as socket:
        while True:
            for identity, content in await socket.recv_requests(BATCH):
                message = decode_to_allocator(content)
                seq = message.seq if isinstance(message, Rollouts) else 0
                socket.try_send([identity, encode(Received(seq=seq))])


if __name__ == "__main__":
    tune()
    trio.run(serve, sys.argv[1])
