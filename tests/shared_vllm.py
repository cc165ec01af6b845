"""One vLLM for all tests of a process: a start takes tens of seconds. Each test sees an engine with its own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gvm_stream.vllm import environment

environment.prepare()

import torch  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from vllm import LLMEngine  # noqa: E402

from gvm_stream.producers.causal_lm import expected_shapes  # noqa: E402
from gvm_stream.vllm.engine import VllmEngine  # noqa: E402
from gvm_stream.vllm.engine import start_vllm as start_vllm  # noqa: E402

SLOTS = 200
OPTIONS = {"kv_cache_memory_bytes": 1 << 28, "block_size": 32}
"""Blocks small enough for prompts of tests to share some."""


class SharedEngine(VllmEngine):
    def close(self) -> None:
        self.forget()


_started: dict[str, LLMEngine] = {}
"""By architecture."""
_last: dict[str, VllmEngine] = {}


def shared_engine(
    model: Path,
    *,
    slots: int,
    max_length: int,
    end_tokens: tuple[int, ...] = (),
    kv_policy: Literal["recompute", "keep"] = "recompute",
    seed: int = 0,
) -> VllmEngine:
    shapes = expected_shapes(str(model))
    architecture = repr((shapes.shapes, sorted(map(sorted, shapes.tied))))
    if architecture not in _started:
        positions = AutoConfig.from_pretrained(model).max_position_embeddings
        _started[architecture] = start_vllm(
            str(model), slots=SLOTS, max_length=positions, dtype="float32", seed=0, options=OPTIONS
        )
    llm = _started[architecture]
    if architecture in _last:
        _last[architecture].close()
    engine = SharedEngine(llm, shapes, slots=slots, max_length=max_length, end_tokens=end_tokens, kv_policy=kv_policy)
    _last[architecture] = engine
    engine.load_weights(model / "model.safetensors", 0)
    assert llm.reset_prefix_cache()
    torch.manual_seed(seed)
    return engine


def start(model: Path, *, slots: int, max_length: int) -> VllmEngine:
    """A vLLM of its own."""
    llm = start_vllm(
        str(model),
        slots=slots,
        max_length=max_length,
        dtype="float32",
        seed=0,
        options={"kv_cache_memory_bytes": 1 << 26},
    )
    shapes = expected_shapes(str(model))
    return VllmEngine(llm, shapes, slots=slots, max_length=max_length, end_tokens=(), kv_policy="recompute")
