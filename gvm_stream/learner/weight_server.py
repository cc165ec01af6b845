"""`python -m gvm_stream.learner.weight_server FOLDER STREAM`: serves published weights to producers on other hosts.

A process of its own, started by the learner, so that neither the learner nor the allocator is disturbed by large reads.
The files never change once announced, so a chunk is just bytes at an offset and a fetch can go on after any loss.
STREAM is the configuration's section as JSON; its key is the learner's, and with keys only producers get through to it.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import msgspec
import trio

from gvm_stream.config import StreamSection
from gvm_stream.errors import WireError
from gvm_stream.learner.beside import run_beside
from gvm_stream.wire.codec import decode_to_weight_server, encode
from gvm_stream.wire.messages import Message
from gvm_stream.wire.weight_messages import Chunk, ChunkRefused, ChunkRequest
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
        ((identity, content),) = await socket.recv_requests(1)
        try:
            request = decode_to_weight_server(content)
        except WireError:
            continue  # a stray peer; there is nobody to answer in a way it would understand
        reply = await trio.to_thread.run_sync(answer, folder, request)
        socket.try_send([identity, encode(reply)])


def main() -> int:
    folder, section = sys.argv[1:]
    stream = msgspec.json.decode(section, type=StreamSection)
    return run_beside("weights", stream.weights_address, "stream.weights_address", stream, partial(serve, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
