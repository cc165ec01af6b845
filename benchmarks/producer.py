"""Tokens/s through a whole producer with vLLM, socket to socket, over tokens/s of vLLM alone on the same work.

Three processes that take turns on the same machine, in one run:
  generate   vLLM's LLM.generate, its engine in a process of its own;
  async      vLLM's AsyncLLM, the same;
  producer   `gvm-stream producer`: orders come in over ZeroMQ, rollouts go out with tokens, log-probs, version spans
             and their verdict. This process plays the allocator; it gives and takes messages and does nothing else.
All sample the same prompts of the main job, eight times each, with the log-probs of the sampled tokens. `ratio` is
producer over the better of the other two, medians of rounds.

Then the producer works without end while new weights are announced every five seconds: `update_stall_share` is the
time that generation stands still for them (loading, and the canary), over all time.

    python -m benchmarks.producer --json [--prompts 768] [--repeats 5]
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import trio
import zmq
from safetensors.torch import load_file

from benchmarks.report import finish, free_address, machine, parser, say
from gvm_stream.allocator.types import Scored
from gvm_stream.canary import canary_logprobs, canary_tokens
from gvm_stream.config import Config
from gvm_stream.config_file import load_config
from gvm_stream.data.encode import end_token_ids
from gvm_stream.data.prepare import load_tokenizer, prepare_prompts
from gvm_stream.data.prompts import Prompt
from gvm_stream.learner.publish import publish
from gvm_stream.producers.causal_lm import load_causal_lm
from gvm_stream.wire import messages as m
from gvm_stream.wire.codec import decode_to_allocator, encode
from gvm_stream.wire.sockets import bind_router
from gvm_stream.wire.zmq_trio import ZmqSocket

CONFIG = Path(__file__).parents[1] / "examples" / "arithmetic.toml"
SAMPLES = 8
UPDATE_S = 5.0
UPDATES = 6
CACHE_BYTES = 1 << 30


@dataclass
class Feeder:
    """An allocator for one producer: keeps its credit used up, takes what comes."""

    socket: ZmqSocket
    orders: Iterator[m.WorkOrder]
    identity: bytes = b""
    slots: int = 0
    in_hand: int = 0
    tokens: int = 0
    rollouts: int = 0
    loaded: dict[int, float] = field(default_factory=dict)
    """Version -> when the producer said that it samples with it."""

    async def take(self) -> None:
        """One message; the answer to it."""
        self.identity, *content = await self.socket.recv()
        match decode_to_allocator(content):
            case m.Ask(slots=slots):
                self.slots = slots
            case m.Loaded(version=version):
                self.loaded[version] = time.perf_counter()
            case m.Rollouts(seq=seq, rollouts=rollouts):
                self.say(m.Received(seq=seq))
                for rollout in rollouts:
                    if not isinstance(rollout.outcome, Scored):
                        raise RuntimeError(f"a rollout came back as {rollout.outcome}")
                    self.tokens += rollout.outcome.tokens
                self.rollouts += len(rollouts)
                self.in_hand -= len(rollouts)
            case _:
                pass

    def give(self) -> None:
        work = tuple(order for _, order in zip(range(self.slots - self.in_hand), self.orders, strict=False))
        if work:
            self.in_hand += len(work)
            self.say(m.Work(orders=work))

    def say(self, message: m.ToPeer) -> None:
        if not self.socket.try_send([self.identity, encode(message)]):
            raise RuntimeError("the producer does not read")


def orders_of(prompts: Sequence[Prompt], first: int) -> Iterator[m.WorkOrder]:
    return (
        m.WorkOrder(
            work=first + i,
            attempt=0,
            prompt=prompt.id,
            prompt_tokens=prompt.tokens,
            answer=prompt.answer,
        )
        for i, prompt in enumerate(prompts)
    )


@asynccontextmanager
async def running_producer(config: Config, weights: m.WeightsInfo, folder: Path) -> AsyncIterator[Feeder]:
    """A real producer process that has loaded `weights` and asks for work."""
    path, log = folder / "config.json", folder / "producer.log"
    path.write_bytes(msgspec.json.encode(config))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with log.open("wb") as out:
        command = [sys.executable, "-m", "gvm_stream", "producer", "--config", str(path), "--name", "p"]
        process = await trio.lowlevel.open_process(command, stdout=out, stderr=out)
    try:
        with ZmqSocket(
            bind_router(context, config.stream.address, "address", stream=config.stream, server="allocator")
        ) as socket:
            feeder = Feeder(socket, iter(()))
            await feeder.take()
            feeder.say(m.Welcome(run="benchmark", next_step=0, settled=0, weights=weights))
            with trio.fail_after(180):
                while not feeder.slots:
                    await feeder.take()
            yield feeder
    finally:
        process.kill()
        await process.wait()
        context.destroy(linger=0)


async def producer_round(feeder: Feeder, prompts: Sequence[Prompt], first: int) -> tuple[int, float]:
    feeder.orders, feeder.tokens = orders_of(prompts, first), 0
    started = time.perf_counter()
    feeder.give()
    while feeder.in_hand:
        await feeder.take()
        feeder.give()
    return feeder.tokens, time.perf_counter() - started


async def updates(
    feeder: Feeder, prompts: Sequence[Prompt], versions: Sequence[m.WeightsInfo], log: Path
) -> dict[str, float]:
    """Work without end, new weights every five seconds."""
    feeder.orders, feeder.tokens = endless(prompts), 0
    feeder.give()
    before, started = stalled(log), time.perf_counter()
    for info in versions:
        feeder.say(m.NewWeights(weights=info))
        announced = time.perf_counter()
        while time.perf_counter() - announced < UPDATE_S:
            await feeder.take()
            feeder.give()
    seconds, stall = time.perf_counter() - started, stalled(log) - before
    if missing := [info.version for info in versions if info.version not in feeder.loaded]:
        raise RuntimeError(f"versions {missing} were not loaded")
    return {
        "updates": len(versions),
        "seconds": seconds,
        "update_stall_share": stall / seconds,
        "stall_seconds_per_update": stall / len(versions),
        "tokens_per_second_with_updates": feeder.tokens / seconds,
    }


def endless(prompts: Sequence[Prompt]) -> Iterator[m.WorkOrder]:
    first = 1 << 30
    while True:
        yield from orders_of(prompts, first)
        first += len(prompts)


def stalled(log: Path) -> float:
    """Seconds that generation has stood still so far, from the producer's own metrics."""
    url = re.search(r"http://\S+/metrics", log.read_text())
    assert url is not None
    with urllib.request.urlopen(url[0], timeout=10) as answer:
        found = re.search(r"^gvm_weight_stall_seconds_sum (\S+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


@contextmanager
def bare(kind: str, work: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.bare_vllm", str(work), kind]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        while (line := process.stdout.readline()) and line.strip() != "ready":
            pass
        if not line:
            raise RuntimeError(f"benchmarks.bare_vllm {kind} ended with status {process.wait()}")
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def bare_round(process: subprocess.Popen[str]) -> tuple[int, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    found = json.loads(process.stdout.readline())
    return found["tokens"], found["seconds"]


def published(config: Config, folder: Path, count: int) -> list[m.WeightsInfo]:
    """The checkpoint's weights, and versions that differ in every tensor, as a learner publishes them."""
    model = load_causal_lm(config.model.path, dtype=torch.float32, device=torch.device("cpu"), max_length=64)
    original = load_file(Path(config.model.path) / "model.safetensors")
    tokens = canary_tokens(model.config.vocab_size)
    infos = []
    for version in range(count):
        weights = {name: tensor * (1 + 1e-3 * version) for name, tensor in original.items()}
        model.load_state_dict(weights)
        canary = m.Canary(
            tokens=tokens.numpy().astype("<i4").tobytes(), logprobs=canary_logprobs(model, tokens).numpy().tobytes()
        )
        infos.append(publish(weights, folder / "weights", version, "", canary=canary, keep=count))
    return infos


async def measure(
    config: Config, prompts: Sequence[Prompt], end_tokens: Sequence[int], folder: Path, repeats: int
) -> dict[str, Any]:
    max_length = config.data.max_prompt_tokens + config.sampling.max_tokens
    work = folder / "work.json"
    engine = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "enforce_eager": True,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "max_model_len": max_length,
        "max_num_seqs": config.producer.slots,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
    }
    sampling = {
        "temperature": config.sampling.temperature,
        "max_tokens": config.sampling.max_tokens,
        "stop_token_ids": list(end_tokens),
        "ignore_eos": True,
    }
    ids = [np.frombuffer(prompt.tokens, "<i4").tolist() for prompt in prompts]
    work.write_text(json.dumps({"engine": engine, "sampling": sampling, "prompts": ids}))
    rates: dict[str, list[float]] = {"generate": [], "async": [], "producer": []}
    infos = published(config, folder, UPDATES + 1)
    with bare("generate", work) as generate, bare("async", work) as asynchronous:
        async with running_producer(config, infos[0], folder) as feeder:
            await producer_round(feeder, prompts[:512], 1 << 29)  # warm-up
            for repeat in range(repeats):
                for name in rates:
                    if name == "producer":
                        tokens, seconds = await producer_round(feeder, prompts, repeat * len(prompts))
                    else:
                        tokens, seconds = bare_round(generate if name == "generate" else asynchronous)
                    rates[name].append(tokens / seconds)
                say(f"round {repeat + 1} of {repeats}: " + ", ".join(f"{k} {v[-1]:,.0f}" for k, v in rates.items()))
            stall = await updates(feeder, prompts, infos[1:], folder / "producer.log")
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best = max(medians["generate"], medians["async"])
    return {
        "rollouts": len(prompts),
        "tokens_per_second": medians["producer"],
        "bare_tokens_per_second": best,
        "bare_generate_tokens_per_second": medians["generate"],
        "bare_async_tokens_per_second": medians["async"],
        "ratio": medians["producer"] / best,
        **stall,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--prompts", type=int, default=768, help="prompts, each sampled eight times")
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    overrides = [
        "--producer.engine=vllm",
        f"--producer.engine_options={{kv_cache_memory_bytes = {CACHE_BYTES}}}",
        f"--stream.address={free_address()}",
    ]
    config = load_config(CONFIG, overrides)
    tokenizer = load_tokenizer(config.model.path)
    end_tokens = end_token_ids(tokenizer, config.model.path)
    found = prepare_prompts(config.data, tokenizer, end_tokens=end_tokens, verifier=config.verifier)
    prompts = [prompt for prompt in found.train[: options.prompts] for _ in range(SAMPLES)]
    with tempfile.TemporaryDirectory(prefix="gvm-producer-") as folder:
        result = trio.run(measure, config, prompts, end_tokens, Path(folder), options.repeats)
    finish({"benchmark": "producer", "machine": machine(), **result}, as_json=options.json)


if __name__ == "__main__":
    main()
