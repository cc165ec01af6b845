"""Tiny random causal LMs of several architectures, and what a plain forward pass of them says."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Cache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gvm_stream.producers.engine import Completion, Engine, Float32, Int32, Request

VOCABULARY = 64
LONGEST = 6000
"""Tokens of a sequence, for engines on one-head models."""
FAMILIES = ("llama", "qwen2", "gpt2")


def tiny_model(family: str, seed: int) -> PreTrainedModel:
    """one-head, and one-head-tied: heads of size 32, the smallest that vLLM runs on a CPU.
    llama: untied, as many key-value heads as heads; qwen2: grouped heads (4 over 2), biases, tied; gpt2: learned
    positions, fused projections, tied. The weights are wide enough to make distributions far from uniform."""
    torch.manual_seed(seed)
    one_head = family.startswith("one-head")
    if one_head or family == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=1 if one_head else 2,
                max_position_embeddings=LONGEST if one_head else 64,
                initializer_range=0.2,
                tie_word_embeddings=family == "one-head-tied",
            )
        )
    if family == "qwen2":
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=48,
                intermediate_size=40,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                initializer_range=0.2,
                tie_word_embeddings=True,
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_positions=64,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def save_tiny_model(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    tiny_model(family, seed).save_pretrained(folder)
    return folder


def prompt(*tokens: int) -> Int32:
    return np.array(tokens, dtype=np.int32)


def random_prompts(count: int, seed: int = 0, shortest: int = 1, longest: int = 20) -> list[Int32]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    return [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]


def requests_for(prompts: list[Int32], max_tokens: int = 12, temperature: float = 1.0) -> list[Request]:
    """One request per prompt, with ids 0, 1, ..."""
    return [
        Request(id=i, prompt_tokens=tokens, max_tokens=max_tokens, temperature=temperature)
        for i, tokens in enumerate(prompts)
    ]


def run(engine: Engine, requests: list[Request]) -> dict[int, Completion]:
    """Submit and step until all have ended; every request must end exactly once."""
    for request in requests:
        engine.submit(request)
    completions: list[Completion] = []
    while engine.has_work():
        completions.extend(engine.step())
    by_id = {completion.id: completion for completion in completions}
    assert len(by_id) == len(completions)
    return by_id


def cache_argument(cache: Cache) -> dict[str, Cache]:
    """transformers renamed it within version 5."""
    renamed = "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    return {"cache" if renamed else "past_key_values": cache}


@cache
def _plain(model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model)
    return loaded


def full_forward_logprobs(model: Path, request: Request, tokens: Int32) -> Float32:
    """float32 [T]: log-probs of a response under softmax(logits / temperature), by one pass over the whole sequence."""
    sequence = torch.from_numpy(np.concatenate([request.prompt_tokens, tokens]).astype(np.int64))
    with torch.no_grad():
        logits = _plain(model)(sequence[None]).logits[0, len(request.prompt_tokens) - 1 : -1]
    logprobs = torch.log_softmax(logits / request.temperature, dim=-1)
    chosen: Float32 = logprobs.gather(1, sequence[len(request.prompt_tokens) :, None])[:, 0].numpy()
    return chosen
