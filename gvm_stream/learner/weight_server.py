"""`python -m gvm_stream.learner.weight_server FOLDER ADDRESS`: serves published weights to producers on other hosts.

A process of its own, started by the learner, so that neither the learner nor the allocator is disturbed by large reads.
The files never change once announced, so a chunk is just bytes at an offset and a fetch can go on after any loss. It
ends with its standard input.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import trio
import zmq

from gvm_stream.errors import GvmStreamError, WireError
from gvm_stream.wire.codec import decode_to_weight_server, encode
from gvm_stream.wire.messages import Chunk, ChunkRefused, ChunkRequest, Message
from gvm_stream.wire.sockets import bind_router
from gvm_stream.wire.zmq_trio import ZmqSocket

CHUNK_BYTES = 4 << 20


def answer(folder: Path, request: ChunkRequest) -> Message:
    try:
        with (folder / f"v{request.version:08d}.safetensors").open("rb") as file:
            file.seek(request.offset)
            return Chunk(version=request.version, offset=request.offset, data=file.read(CHUNK_BYTES))
    except (OSError, ValueError, OverflowError) as error:  # the last two: an offset that no file has
        return ChunkRefused(version=request.version, reason=f"they are not there any more ({error})")


async def serve(folder: Path, socket: ZmqSocket) -> None:
    while True:
        identity, *content = await socket.recv()
        try:
            request = decode_to_weight_server(content)
        except WireError:
            continue  # a stray peer; there is nobody to answer in a way it would understand
        reply = await trio.to_thread.run_sync(answer, folder, request)
        socket.try_send([identity, encode(reply)])


async def run(folder: Path, address: str, plaintext: bool) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with ZmqSocket(
            bind_router(context, address, "stream.weights_address", plaintext=plaintext, limit_mib=1)
        ) as socket:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, folder, socket)
                async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
                    while await stdin.receive_some():
                        pass
                nursery.cancel_scope.cancel()
    finally:
        context.term()


def main() -> int:
    folder, address, plaintext = sys.argv[1:]
    try:
        trio.run(run, Path(folder), address, plaintext == "plaintext")
    except GvmStreamError as error:
        sys.stdout.write(f"{error}\n")
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
