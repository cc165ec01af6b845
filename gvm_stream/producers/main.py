"""The producer process: wiring only."""

from __future__ import annotations

import logging
import math
import os
import socket
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import trio

from gvm_stream.config import Config
from gvm_stream.config_file import agreed_values
from gvm_stream.health import Health
from gvm_stream.metrics import Metrics
from gvm_stream.process import run_process, set_on_signal
from gvm_stream.producers.engine import Engine
from gvm_stream.producers.engine_thread import Event, run_engine
from gvm_stream.producers.session import Session
from gvm_stream.producers.weights import weights_source
from gvm_stream.verify.pool import VerifierPool
from gvm_stream.wire.link import open_link

log = logging.getLogger(__name__)


def main(config: Config, name: str = "") -> None:
    run_process(partial(produce, config, name or f"{socket.gethostname()}-{os.getpid()}"))


async def produce(config: Config, name: str) -> None:
    to_session, events = trio.open_memory_channel[Event](math.inf)
    metrics, health = Metrics("producer"), Health(config.stream.silence_s)
    health.waiting_for = "the allocator"
    with metrics.serve(config.metrics, health):
        async with (
            health.turning(),
            open_link(
                config.stream,
                role="producer",
                name=name,
                agreed=agreed_values(config),
                patience_s=config.stream.progress_s,
            ) as link,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(link.beat)
            health.waiting_for = "its engine"
            leave = trio.Event()
            nursery.start_soon(set_on_signal, leave)
            if config.producer.device != "cpu":
                from gvm_stream.metrics.gpu import watch_gpu  # torch, only now

                watch_gpu(metrics, config.producer.device)
            make, decode = await trio.to_thread.run_sync(prepare_engine, config, name)
            async with (
                weights_source(config, name) as weights,
                VerifierPool(config.verifier) as pool,
                run_engine(make, to_session, _self_test(config)) as engine,
            ):
                health.waiting_for = ""
                session = Session(config, link, engine, events, pool, weights, decode, metrics)
                log.info("producer %s ends: %s", name, await session.run(leave))
            nursery.cancel_scope.cancel()


def prepare_engine(config: Config, name: str) -> tuple[Callable[[], Engine], Callable[[Sequence[int]], str]]:
    """Heavy imports, then (a maker for the engine's thread to call, the decoder from token ids to text)."""
    if config.producer.engine == "vllm":
        from gvm_stream.vllm import environment

        environment.prepare()
    import torch
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from gvm_stream.data.encode import end_token_ids

    disable_progress_bar()
    torch.set_num_threads(config.producer.threads)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    make = _maker(config, end_token_ids(tokenizer, config.model.path), name)

    def decode(tokens: Sequence[int]) -> str:
        return msgspec.convert(tokenizer.decode(list(tokens), skip_special_tokens=True), str)

    return make, decode


def _self_test(config: Config) -> Callable[[Engine, Path], None] | None:
    if not config.producer.self_test:
        return None
    from gvm_stream.producers.self_test import self_test

    return partial(self_test, model_path=config.model.path, dtype=config.model.dtype, max_length=_max_length(config))


def _max_length(config: Config) -> int:
    return config.data.max_prompt_tokens + config.sampling.max_tokens


def _maker(config: Config, end_tokens: tuple[int, ...], name: str) -> Callable[[], Engine]:
    path, producer = config.model.path, config.producer
    max_length = _max_length(config)
    if producer.engine == "vllm":
        from gvm_stream.producers.causal_lm import expected_shapes
        from gvm_stream.vllm.engine import VllmEngine, nccl_weights, start_vllm

        def vllm() -> Engine:
            shapes = expected_shapes(path)
            llm = start_vllm(
                path,
                slots=producer.slots,
                max_length=max_length,
                dtype=config.model.dtype,
                seed=seed_of(config.run.seed, name) % 2**32,
                options=producer.engine_options,
                weights=producer.weights,
            )
            return VllmEngine(
                llm,
                shapes,
                slots=producer.slots,
                max_length=max_length,
                end_tokens=end_tokens,
                kv_policy=producer.kv_policy,
                pull=nccl_weights(llm, config.stream, name, shapes).pull if producer.weights == "nccl" else None,
            )

        return vllm
    if producer.engine == "vllm-server":
        from transformers import AutoConfig

        from gvm_stream.producers.causal_lm import expected_shapes
        from gvm_stream.vllm.server_engine import VllmServerEngine

        def vllm_server() -> Engine:
            return VllmServerEngine(
                producer.servers,
                expected_shapes(path),
                slots=producer.slots,
                max_length=max_length,
                vocabulary=AutoConfig.from_pretrained(path).get_text_config().vocab_size,
                end_tokens=end_tokens,
                kv_policy=producer.kv_policy,
                stream=config.stream,
                pull_as=name if producer.weights == "nccl" else "",
            )

        return vllm_server
    from gvm_stream.producers.transformers_engine import TransformersEngine

    def transformers() -> Engine:
        return TransformersEngine(
            path,
            slots=producer.slots,
            max_length=max_length,
            end_tokens=end_tokens,
            dtype=config.model.dtype,
            device=producer.device,
            kv_policy=producer.kv_policy,
            seed=seed_of(config.run.seed, name),
        )

    return transformers


def seed_of(seed: int, name: str) -> int:
    """A seed of its own for every producer of a run."""
    return seed * 1_000_003 + zlib.crc32(name.encode())
