"""Rollouts per second through the allocator's service, against a bare ROUTER loop that receives, decodes and replies.

Both are processes of their own on the same socket adapter, under the same load: producers that answer every order at
once with a rollout in a message of its own, and for the service a learner that takes every batch and is done with it
at once, so that each rollout goes all the way: received, checked, told to the allocator, kept in the spool, grouped,
read again, sent to the learner, settled. The load is made by one process with prepared messages, so that it is faster
than what it loads.

    python -m benchmarks.service --json [--rollouts 20000] [--repeats 3]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks.report import finish, free_address, machine, parser, say
from gvm_stream.allocator.tuning import tune
from gvm_stream.allocator.types import Cancelled, Scored
from gvm_stream.config import Config
from gvm_stream.config_file import agreed_values, load_config
from gvm_stream.wire import messages as m
from gvm_stream.wire.codec import decode_to_peer, encode
from gvm_stream.wire.link import identity_of
from gvm_stream.wire.payload import pack
from tests.counting_learner import STATS

CONFIG = Path(__file__).parents[1] / "examples" / "arithmetic.toml"
SLOTS = 1024
"""Rollouts in hand of all producers together."""
PLACE = 2**31
"""Stands for the numbers of a prepared message; four bytes, as every number up to 2^32 has room in."""


def prepared(payload_bytes: int) -> tuple[bytearray, int, int]:
    """A message of one rollout with tokens and log-probs of so many bytes together; where its seq and its work are."""
    tokens = payload_bytes // 8
    rollout = m.Rollout(
        work=PLACE + 1,
        attempt=0,
        outcome=Scored(reward=1.0, tokens=tokens, seconds=0.5, oldest_version=0, newest_version=0),
        payload=pack(bytes(4 * tokens), bytes(4 * tokens), ((0, 0, tokens),), truncated=False),
    )
    frame = bytearray(encode(m.Rollouts(seq=PLACE, rollouts=(rollout,))))
    return frame, frame.index(PLACE.to_bytes(4, "big")), frame.index((PLACE + 1).to_bytes(4, "big"))


class Producer:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, name: str, payload_bytes: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.identity = identity_of("producer", name, 1)
        self.socket.connect(address)
        self.name = name
        self._frame, self._seq_at, self._work_at = prepared(payload_bytes)
        self._seq = 0
        self.sent: dict[int, float] = {}
        """Seq -> when."""

    def send(self, work: int) -> None:
        self._seq += 1
        if work < 0:  # an evaluation's: too few to count
            failed = m.Rollout(work=work, attempt=0, outcome=Cancelled(reason="not measured"))
            self.socket.send(encode(m.Rollouts(seq=self._seq, rollouts=(failed,))))
            return
        self._frame[self._seq_at : self._seq_at + 4] = self._seq.to_bytes(4, "big")
        self._frame[self._work_at : self._work_at + 4] = work.to_bytes(4, "big")
        self.sent[self._seq] = time.perf_counter()
        self.socket.send(bytes(self._frame))


class Load:
    """Producers and a learner, until so many rollouts have been through."""

    def __init__(self, address: str, producers: int, payload_bytes: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.producers = [Producer(self._context, address, f"p{i}", payload_bytes) for i in range(producers)]
        self._poller = zmq.Poller()
        for producer in self.producers:
            self._poller.register(producer.socket, zmq.POLLIN)
        self._by_socket = {producer.socket: producer for producer in self.producers}
        self.latencies: list[float] = []
        """From a rollout's message to its receipt."""
        self.done = 0

    def close(self) -> None:
        for socket in self._by_socket:
            socket.close()
        self._context.term()

    def received(self, producer: Producer, seq: int) -> None:
        now = time.perf_counter()
        while producer.sent and (number := next(iter(producer.sent))) <= seq:  # in the order they were sent
            self.latencies.append(now - producer.sent.pop(number))
            self.done += 1


class BareLoad(Load):
    def run(self, rollouts: int) -> float:
        started = time.perf_counter()
        for producer in self.producers:
            for _ in range(SLOTS // len(self.producers)):
                producer.send(1)
        while self.done < rollouts:
            for socket, _ in self._poller.poll():
                producer = self._by_socket[socket]
                while self.done < rollouts and socket.poll(0):
                    message = decode_to_peer(socket.recv_multipart()[:1])
                    assert isinstance(message, m.Received)
                    self.received(producer, message.seq)
                    producer.send(1)
        return time.perf_counter() - started


class ServiceLoad(Load):
    def __init__(self, config: Config, producers: int, payload_bytes: int) -> None:
        super().__init__(config.stream.address, producers, payload_bytes)
        self._agreed = agreed_values(config)
        self._learner = self._context.socket(zmq.DEALER)
        self._learner.linger = 0
        self._learner.identity = identity_of("learner", "learner", 1)
        self._learner.connect(config.stream.address)
        self._poller.register(self._learner, zmq.POLLIN)
        self._step = 0
        self.trained = 0
        self._complete_at: dict[int, float] = {}
        self._heard_of: dict[int, float] = {}
        """Work -> when its rollout was sent."""
        self.ready: list[float] = []
        """From the last rollout of a batch, in order of finishing, to the batch at the learner."""

    def close(self) -> None:
        self._learner.close()
        super().close()

    def join(self) -> None:
        hello = m.Hello(protocol=m.PROTOCOL, role="learner", name="learner", epoch=1, agreed=self._agreed)
        self._learner.send(encode(hello))
        assert isinstance(self._expect(self._learner), m.Welcome)
        weights = m.WeightsInfo(version=0, path="/none", size=0, checksum="", address="")
        self._learner.send(encode(m.Published(weights=weights, step=0)))
        self._learner.send(encode(m.BatchRequest(step=0)))
        for p in self.producers:
            p.socket.send(
                encode(m.Hello(protocol=m.PROTOCOL, role="producer", name=p.name, epoch=1, agreed=self._agreed))
            )
            assert isinstance(self._expect(p.socket), m.Welcome)

    def run(self, rollouts: int) -> float:
        """Seconds until so many more rollouts have been trained on."""
        slots = SLOTS // len(self.producers)
        started = time.perf_counter()
        for producer in self.producers:
            producer.socket.send(encode(m.Ask(slots=slots, version=0)))
        beat_at = started
        until = self.trained + rollouts
        while self.trained < until:
            for socket, _ in self._poller.poll(1000):
                while socket.poll(0):
                    message = decode_to_peer(socket.recv_multipart()[:1])
                    if socket is self._learner:
                        self._learn(message)
                    else:
                        self._work(self._by_socket[socket], message)
            if time.perf_counter() - beat_at > 1:
                beat_at = time.perf_counter()
                for socket in (self._learner, *self._by_socket):
                    socket.send(encode(m.Heartbeat()))
        return time.perf_counter() - started

    def _work(self, producer: Producer, message: m.ToPeer) -> None:
        match message:
            case m.Work():
                for order in message.orders:
                    self._heard_of[order.work] = time.perf_counter()
                    producer.send(order.work)
            case m.Received():
                self.received(producer, message.seq)
            case m.Refused():
                raise RuntimeError(message.reason)
            case _:
                pass

    def _learn(self, message: m.ToPeer) -> None:
        if not isinstance(message, m.Batch):
            return
        now = time.perf_counter()
        works = tuple(rollout.work for group in message.groups for rollout in group.rollouts)
        self.ready.append(now - max(self._heard_of.pop(work) for work in works))
        done = m.StepDone(step=message.step, version=0, trained=True, reason="", fates={"trained": works}, stats=STATS)
        self._learner.send(encode(done))
        self._learner.send(encode(m.Checkpointed(steps=(message.step + 1,))))
        self._learner.send(encode(m.BatchRequest(step=message.step + 1)))
        self.trained += len(works)

    def _expect(self, socket: zmq.Socket[bytes]) -> m.ToPeer:
        while True:
            if not socket.poll(600_000):  # it prepares the prompts first
                raise RuntimeError("the service does not answer")
            message = decode_to_peer(socket.recv_multipart()[:1])
            if not isinstance(message, m.Alive):
                return message


def make_config(folder: Path, *, spool: bool, prompts: int, payload_bytes: int) -> Config:
    for name, numbers in (("train", range(prompts)), ("heldout", range(prompts, prompts + 10))):
        rows = [{"prompt": f"{n:06d}=", "answer": str(n)} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "run.dir": str(folder / "run"),
        "run.steps": "1000000",
        "data.train": str(folder / "train.jsonl"),
        "data.heldout": str(folder / "heldout.jsonl"),
        "data.format": "raw",
        "sampling.max_tokens": str(payload_bytes // 8),
        "stream.address": free_address(),
        "stream.spool": str(spool).lower(),
        # Batches of 1,024 rollouts, five in flight: a learner asks for one after the other, and is not to be the limit.
        "allocation.prompts_per_step": "128",
        "allocation.max_lag": "4",
        "eval.prompts": "1",
        "eval.samples": "1",
        "eval.every_steps": "0",
        "metrics.port": "0",
    }
    config = load_config(CONFIG, [f"{key}={value}" for key, value in values.items()])
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return config


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out, subprocess.Popen([sys.executable, *command], stdout=out, stderr=out) as running:
        try:
            yield running
        finally:
            running.kill()


def bare(producers: int, payload_bytes: int, rollouts: int) -> dict[str, Any]:
    address = free_address()
    with (
        tempfile.TemporaryDirectory() as folder,
        process(["-m", "benchmarks.bare_router", address], Path(folder) / "log") as server,
    ):
        load = BareLoad(address, producers, payload_bytes)
        try:
            load.run(rollouts // 2)  # the start included
            load.done, load.latencies = 0, []
            before = cpu_seconds(server.pid)
            seconds = load.run(rollouts)
            busy = (cpu_seconds(server.pid) - before) / seconds
            return {"rollouts_per_second": load.done / seconds, "busy": busy}
        finally:
            load.close()


def service(producers: int, payload_bytes: int, rollouts: int, *, spool: bool, prompts: int = 1000) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make_config(folder, spool=spool, prompts=prompts, payload_bytes=payload_bytes)
        with process(
            ["-m", "gvm_stream", "allocator", "--config", str(folder / "config.json")], folder / "log"
        ) as server:
            load = ServiceLoad(config, producers, payload_bytes)
            try:
                load.join()
                load.run(rollouts // 2)  # memory that is new to a process costs more than all the rest
                load.latencies, load.ready, load.trained = [], [], 0
                before = cpu_seconds(server.pid)
                seconds = load.run(rollouts)
                busy = (cpu_seconds(server.pid) - before) / seconds
                return {
                    "rollouts_per_second": load.trained / seconds,
                    "busy": busy,
                    "receipt_p99_ms": 1e3 * quantile(load.latencies, 0.99),
                    "ready_p50_ms": 1e3 * quantile(load.ready, 0.5),
                    "ready_p99_ms": 1e3 * quantile(load.ready, 0.99),
                }
            finally:
                load.close()


def cpu_seconds(pid: int) -> float:
    """Of the main thread so far: the loop's."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rollouts", type=int, default=20_000)
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    tune()  # as the service: the load must be faster than what it loads
    rows = []
    for payload_kb in (4, 64):
        rollouts = options.rollouts if payload_kb == 4 else options.rollouts // 5
        for producers in (1, 4, 16):
            rounds = [
                {
                    "bare": bare(producers, payload_kb << 10, rollouts),
                    "off": service(producers, payload_kb << 10, rollouts, spool=False),
                    "on": service(producers, payload_kb << 10, rollouts, spool=True),
                }
                for _ in range(options.repeats)
            ]
            row = {"payload_kb": payload_kb, "producers": producers, **summary(rounds)}
            say(str(row))
            rows.append(row)
    few, many = (
        [service(4, 4 << 10, options.rollouts, spool=True, prompts=prompts) for _ in range(options.repeats)]
        for prompts in (1_000, 100_000)
    )
    flat = statistics.median(cost(r) for r in many) / statistics.median(cost(r) for r in few)
    result = {
        "benchmark": "service",
        "machine": machine(),
        "rows": rows,
        "cost_per_rollout_100k_prompts_over_1k": round(flat, 3),
    }
    finish(result, as_json=options.json)


def cost(result: dict[str, Any]) -> float:
    """CPU seconds of the loop per rollout."""
    return float(result["busy"] / result["rollouts_per_second"])


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    ratio = {
        name: median([r[name]["rollouts_per_second"] / r["bare"]["rollouts_per_second"] for r in rounds])
        for name in ("off", "on")
    }
    return {
        "bare_rollouts_per_second": median([r["bare"]["rollouts_per_second"] for r in rounds]),
        "bare_cpu_microseconds": median([1e6 * cost(r["bare"]) for r in rounds]),
        "bare_loop_busy": median([r["bare"]["busy"] for r in rounds]),
        **{f"ratio_spool_{name}": value for name, value in ratio.items()},
        **{
            f"spool_{name}": {
                "cpu_microseconds": median([1e6 * cost(r[name]) for r in rounds]),
                **{key: median([r[name][key] for r in rounds]) for key in rounds[0][name]},
            }
            for name in ("off", "on")
        },
    }


if __name__ == "__main__":
    main()
