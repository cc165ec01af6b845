"""The allocator process: wiring only."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import trio

from gvm_stream.allocator.broker import Broker
from gvm_stream.allocator.service import serve
from gvm_stream.allocator.spool import MemorySpool, Spool, SqliteSpool
from gvm_stream.allocator.tuning import tune
from gvm_stream.config import Config
from gvm_stream.config_file import agreed_values, written
from gvm_stream.data.prompts import PromptSet
from gvm_stream.data.store import describe, load_prompt_set
from gvm_stream.errors import ConfigError, DataError, GvmStreamError, ModelError, StreamError
from gvm_stream.files import write_atomically
from gvm_stream.health import Health
from gvm_stream.metrics import Metrics
from gvm_stream.process import run_process, set_on_signal
from gvm_stream.trackers import Log, Tracked, open_trackers
from gvm_stream.wire.zap import listening
from gvm_stream.wire.zmq_trio import ZmqSocket

log = logging.getLogger(__name__)

SPOOL = Path("allocator") / "spool.sqlite"
"""In the run directory."""


def main(config: Config, *, resume: bool, supervised: bool) -> None:
    tune()
    run_process(partial(allocate, config, resume=resume, supervised=supervised))


async def allocate(config: Config, *, resume: bool, supervised: bool) -> None:
    """Run the allocator of one run to its end; report.json is there then. Raises StreamError if the run failed."""
    folder = Path(config.run.dir)
    if not resume and (folder / SPOOL).exists():
        raise ConfigError(
            f'run.dir = "{folder}" holds a run already: continue it with --resume, or choose another folder'
        )
    if resume and not config.stream.spool:  # it would begin again from nothing, and the learner with it
        raise ConfigError(f"{folder} cannot be continued: with stream.spool = false nothing was written down")
    metrics, health = Metrics("allocator"), Health(config.stream.silence_s)
    health.waiting_for = "the prompts"
    # The socket first: an occupied port shows before any work is done.
    async with (
        listening(
            config.stream.address,
            "stream.address",
            stream=config.stream,
            server="allocator",
            count=lambda reason: metrics.count("gvm_connections_refused", label=reason),
        ) as socket,
        health.turning(),
    ):
        with metrics.serve(config.metrics, health):
            prompts = await trio.to_thread.run_sync(prepare, config, folder)
            metrics.watch_disk(folder)
            spool = await trio.to_thread.run_sync(open_spool, config, folder)
            try:
                broker = Broker(
                    config,
                    agreed_values(config),
                    prompts,
                    metrics,
                    run=folder.name,
                    now=trio.current_time(),
                    saved=await trio.to_thread.run_sync(spool.load) if config.stream.spool else None,
                )
                # Only now: one that the run cannot go on with must not take the place of the one that it has.
                write_atomically(folder / "config.json", written(config))
                health.waiting_for = ""
                log.info("allocator listens on %s; run directory %s", config.stream.address, folder)
                tracked = Tracked(folder, "allocator", msgspec.to_builtins(config))
                with open_trackers(config.metrics.trackers, tracked) as track:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(track_batches, broker, metrics, track)
                        await serve_until_done(broker, socket, spool, supervised=supervised)
                        nursery.cancel_scope.cancel()
            finally:
                spool.close()
            report = msgspec.json.format(msgspec.json.encode(broker.report(trio.current_time())))
            try:
                await trio.to_thread.run_sync(write_atomically, folder / "report.json", report)
            except OSError as error:
                unwritten = f"{folder / 'report.json'} cannot be written: {error.strerror}"
                raise StreamError(broker.failure or unwritten) from error
            if broker.failure:
                raise StreamError(broker.failure)


def open_spool(config: Config, folder: Path) -> Spool:
    if not config.stream.spool:
        return MemorySpool()
    (folder / SPOOL).parent.mkdir(parents=True, exist_ok=True)
    return SqliteSpool(folder / SPOOL)


async def serve_until_done(broker: Broker, socket: ZmqSocket, spool: Spool, *, supervised: bool) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(set_on_signal, stop)
        if supervised:
            nursery.start_soon(stop_with_stdin, stop)
        await serve(broker, socket, spool, stop)
        nursery.cancel_scope.cancel()


async def track_batches(broker: Broker, metrics: Metrics, track: Log) -> None:
    """Once a heartbeat, as the metrics are set: tell the trackers of batches that were settled."""
    told = 0
    while True:
        await trio.sleep(broker.config.stream.heartbeat_s)
        settled = broker.work.state.allocator.settled_steps
        if settled > told:
            track(settled, metrics.scalars())
            told = settled


async def stop_with_stdin(stop: trio.Event) -> None:
    """The supervisor holds the other end of standard input: it is gone when that ends, however it died."""
    async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
        while await stdin.receive_some():
            pass
    stop.set()


def prepare(config: Config, folder: Path) -> PromptSet:
    """Prepare the prompts in a process of its own (it needs a tokenizer library, the allocator does not)."""
    settings, out = folder / "allocator" / "config.json", folder / "prompts.msgpack"
    write_atomically(settings, written(config))
    command = [sys.executable, "-m", "gvm_stream.data.prepare", str(settings), str(out)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"preparing the prompts ended with status {done.returncode}"]
        error: type[GvmStreamError] = DataError if done.returncode == DataError.exit_status else ModelError
        raise error(lines[-1])
    prompts = load_prompt_set(out)
    log.info("%s", describe(prompts))
    return prompts
