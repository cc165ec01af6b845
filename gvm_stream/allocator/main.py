"""The allocator process: wiring only."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio
import zmq

from gvm_stream.allocator.broker import Broker
from gvm_stream.allocator.service import serve, state_path
from gvm_stream.config import Config
from gvm_stream.config_file import agreed_values
from gvm_stream.data.prompts import PromptSet
from gvm_stream.data.store import describe, load_prompt_set
from gvm_stream.errors import ConfigError, DataError, GvmStreamError, ModelError, StreamError
from gvm_stream.files import write_atomically
from gvm_stream.metrics import Metrics
from gvm_stream.process import run_process, set_on_signal
from gvm_stream.wire.sockets import bind_router
from gvm_stream.wire.zmq_trio import ZmqSocket

log = logging.getLogger(__name__)


def main(config: Config, *, resume: bool, supervised: bool) -> None:
    run_process(partial(allocate, config, resume=resume, supervised=supervised))


async def allocate(config: Config, *, resume: bool, supervised: bool) -> None:
    """Run the allocator of one run to its end; report.json is there then. Raises StreamError if the run failed."""
    folder = Path(config.run.dir)
    states = folder / "allocator"
    if not resume and states.exists():
        raise ConfigError(
            f'run.dir = "{folder}" holds a run already: continue it with --resume, or choose another folder'
        )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    metrics = Metrics("allocator")
    try:
        # The socket first: an occupied port shows before any work is done.
        raw = bind_router(
            context,
            config.stream.address,
            "stream.address",
            plaintext=config.stream.allow_plaintext,
            limit_mib=config.stream.max_message_mib,
        )
        with ZmqSocket(raw) as socket, metrics.serve(config.metrics):
            write_atomically(folder / "config.json", msgspec.json.format(msgspec.json.encode(config)))
            prompts = await trio.to_thread.run_sync(prepare, folder)
            broker = Broker(
                config,
                agreed_values(config),
                prompts,
                metrics,
                run=folder.name,
                now=trio.current_time(),
                load_state=partial(load_state, states) if resume else None,
            )
            write_atomically(state_path(states, 0).with_name("started"), b"")
            log.info("allocator listens on %s; run directory %s", config.stream.address, folder)
            await serve_until_done(broker, socket, states, supervised=supervised)
            report = msgspec.json.format(msgspec.json.encode(broker.report(trio.current_time())))
            await trio.to_thread.run_sync(write_atomically, folder / "report.json", report)
            if broker.failure:
                raise StreamError(broker.failure)
    finally:
        context.term()


async def serve_until_done(broker: Broker, socket: ZmqSocket, states: Path, *, supervised: bool) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(set_on_signal, stop)
        if supervised:
            nursery.start_soon(stop_with_stdin, stop)
        await serve(broker, socket, states, stop)
        nursery.cancel_scope.cancel()


async def stop_with_stdin(stop: trio.Event) -> None:
    """The supervisor holds the other end of standard input: it is gone when that ends, however it died."""
    async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
        while await stdin.receive_some():
            pass
    stop.set()


def prepare(folder: Path) -> PromptSet:
    """Prepare the prompts in a process of its own (it needs a tokenizer library, the allocator does not)."""
    out = folder / "prompts.msgpack"
    command = [sys.executable, "-m", "gvm_stream.data.prepare", str(folder / "config.json"), str(out)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"preparing the prompts ended with status {done.returncode}"]
        error: type[GvmStreamError] = DataError if done.returncode == DataError.exit_status else ModelError
        raise error(lines[-1])
    prompts = load_prompt_set(out)
    log.info("%s", describe(prompts))
    return prompts


def load_state(states: Path, checkpoints: tuple[int, ...]) -> dict[str, Any] | None:
    """The newest saved state that goes with one of the learner's checkpoints; None if the run had none yet.

    Raises StreamError if there are states but none fits.
    """
    for step in sorted(checkpoints, reverse=True):
        path = state_path(states, step)
        if path.exists():
            try:
                return msgspec.msgpack.decode(path.read_bytes(), type=dict[str, Any])
            except (OSError, msgspec.DecodeError) as error:
                log.warning("allocator state %s is passed over: %s", path, error)
    saved = sorted(int(path.stem.removeprefix("step-")) for path in states.glob("step-*.msgpack"))
    if saved:
        raise StreamError(
            f"the learner has checkpoints after batches {list(checkpoints)}, the allocator has states after {saved}: "
            "none of them belong together"
        )
    return None
