"""What training costs on a GPU: tokens/s, model FLOP/s and their share of the chip's, peak memory, cost of energies.

A step is what the learner computes of one: log-probs and policy gradient of ragged micro-batches under bfloat16
autocast with float32 masters, clipping, AdamW. The model is a Llama of random weights, the completions are random
tokens of log-normal lengths, so nothing is downloaded; torch, transformers and msgspec are all it needs. Measured
without and with `learner.gradient_checkpointing`.

    python -m benchmarks.gpu_learner --json [--size 0.5b|1.5b|7b|tiny] [--device cuda] [--response-tokens 800]
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import finish, machine, parser, say
from gvm_stream.learner.batch import MicroBatch, Row, pack, padding_share
from gvm_stream.learner.energy import cheaper, lm_head_energies
from gvm_stream.learner.losses import PolicyGradient, Responses
from gvm_stream.learner.model import checkpoint_layers, lm_head_weight, response_logprobs, response_states

# vocabulary, hidden, layers, heads, key-value heads, MLP; but for the smallest those of Qwen2.5
SIZES = {
    "tiny": (512, 64, 2, 2, 2, 128),
    "0.5b": (151_936, 896, 24, 14, 2, 4864),
    "1.5b": (151_936, 1536, 28, 12, 2, 8960),
    "7b": (152_064, 3584, 28, 28, 4, 18_944),
}
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "B200": 2250}
"""Dense bfloat16, as NVIDIA states it; by part of the device's name."""


def make_model(size: str, device: str) -> LlamaForCausalLM:
    vocabulary, hidden, layers, heads, key_value_heads, mlp = SIZES[size]
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=mlp,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(shape)
    model.train(False)
    return model


def make_rows(count: int, prompt: int, response: int, vocabulary: int) -> list[Row]:
    """Rollouts with random tokens; responses of about `response` tokens on average and at most four times as many."""
    random = np.random.default_rng(0)
    rows = []
    for i in range(count):
        length = int(np.clip(response * random.lognormal(-0.32, 0.8), 1, 4 * response))  # mean 1, median 0.73
        tokens = random.integers(0, vocabulary, prompt + length).astype(np.int32)
        logprobs = np.full(length, -np.log(vocabulary), np.float32)
        rows.append(Row(i // 8, i, prompt, tokens, logprobs, 1.0 - 2.0 * (i % 2), 1 / count))
    return rows


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: list[MicroBatch], device: str) -> None:
    for m in batch:
        with torch.autocast(device, torch.bfloat16):
            logprobs = response_logprobs(model, m, 1.0)
        r = Responses.of(logprobs, m.logprobs, m.mask, m.advantages, torch.zeros_like(m.advantages))
        terms = PolicyGradient().terms(r) * m.coefficients
        terms[m.mask].sum().backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def flops(model: LlamaForCausalLM, rows: list[Row]) -> float:
    """Of a forward and backward pass without padding or recomputation: 6 for each parameter and token, the embedding
    left out and the lm_head on responses only, and 6 x hidden x layers x length^2 for the attention of a row (PaLM,
    arXiv 2204.02311, appendix B, halved because attention is causal)."""
    head = lm_head_weight(model).numel()
    body = sum(p.numel() for p in model.parameters()) - 2 * head  # the embedding is as large
    tokens = sum(r.tokens.size for r in rows)
    responses = sum(r.logprobs.size for r in rows)
    squares = sum(r.tokens.size**2 for r in rows)
    width: int = model.config.hidden_size * model.config.num_hidden_layers
    return 6.0 * (body * tokens + head * responses + width * squares)


def seconds(device: str, steps: int, work: Callable[[], None]) -> float:
    """Median of `steps` calls after one to warm up."""
    measured = []
    for _ in range(steps + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        measured.append(time.perf_counter() - started)
    return statistics.median(measured[1:])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_gb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(
    model: LlamaForCausalLM, rows: list[Row], micro_batch_tokens: int, device: str, steps: int
) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batch = pack(rows, micro_batch_tokens, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = seconds(device, steps, lambda: train_step(model, optimizer, batch, device))
    peak = peak_gb(device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        states = [response_states(model, m).to(torch.bfloat16) for m in batch]

    def energies() -> None:
        for m, hidden in zip(batch, states, strict=True):
            row, _, position = m.index
            lm_head_energies(hidden, lm_head_weight(model), m.tokens[row, position], m.mask.sum(1).tolist())

    tokens = sum(r.tokens.size for r in rows)
    return {
        "tokens_per_second": tokens / step,
        "tflops": flops(model, rows) / step / 1e12,
        "peak_memory_gb": peak,
        "energy_overhead": seconds(device, steps, energies) / step,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--size", choices=SIZES, default="0.5b")
    arguments.add_argument("--rollouts", type=int, default=64)
    arguments.add_argument("--prompt-tokens", type=int, default=200)
    arguments.add_argument("--response-tokens", type=int, default=800, help="mean")
    arguments.add_argument("--micro-batch-tokens", type=int, default=16_384)
    arguments.add_argument("--steps", type=int, default=5)
    options = arguments.parse_args()
    device: str = options.device
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    peak_tflops = next((tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)
    rows = make_rows(options.rollouts, options.prompt_tokens, options.response_tokens, SIZES[options.size][0])
    result: dict[str, Any] = {
        "benchmark": "gpu_learner",
        "machine": machine(),
        "device": name,
        "torch": torch.__version__,
        "size": options.size,
        "tokens": sum(r.tokens.size for r in rows),
        "padding_share": padding_share(rows, pack(rows, options.micro_batch_tokens)),
        "energy_method": cheaper([r.logprobs.size for r in rows], *SIZES[options.size][:2]),
    }
    model = make_model(options.size, device)
    for variant in ("plain", "checkpointed"):
        if variant == "checkpointed":
            checkpoint_layers(model)
        measured = measure(model, rows, options.micro_batch_tokens, device, options.steps)
        measured["mfu"] = measured["tflops"] / peak_tflops if peak_tflops else None
        result[variant] = measured
        say(f"{variant}: {measured}")
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
