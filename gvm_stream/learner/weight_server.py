"""`python -m gvm_stream.learner.weight_server FOLDER STREAM`: serves published weights to producers on other hosts.

A process of its own, started by the learner, so that neither the learner nor the allocator is disturbed by large reads.
The files never change once announced, so a chunk is just bytes at an offset and a fetch can go on after any loss. It
ends with its standard input. STREAM is the configuration's section as JSON; its key is the learner's, and with keys
only producers get through to it.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import msgspec
import trio

from gvm_stream.config import StreamSection
from gvm_stream.errors import GvmStreamError, WireError
from gvm_stream.logs import set_up_logging
from gvm_stream.process import run_process
from gvm_stream.wire.codec import decode_to_weight_server, encode
from gvm_stream.wire.messages import Chunk, ChunkRefused, ChunkRequest, Message
from gvm_stream.wire.zap import listening
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


async def run(folder: Path, stream: StreamSection) -> None:
    async with listening(
        stream.weights_address,
        "stream.weights_address",
        stream=stream,
        server="learner",
        count=lambda reason: None,  # logged; this process has no metrics
    ) as socket:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, folder, socket)
            async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
                while await stdin.receive_some():
                    pass
            nursery.cancel_scope.cancel()


def main() -> int:
    folder, section = sys.argv[1:]
    stream = msgspec.json.decode(section, type=StreamSection)
    set_up_logging("weights", "learner")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is for the learner, which still needs this
    try:
        # Requests are small, and so may everything be that is not one.
        run_process(partial(run, Path(folder), msgspec.structs.replace(stream, max_message_mib=1)))
    except GvmStreamError as error:
        sys.stdout.write(f"{error}\n")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
