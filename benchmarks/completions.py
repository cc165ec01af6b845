"""The completions that `benchmarks.learner` trains on, and the memory of a process."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoTokenizer

from gvm_stream.learner.model import load_model

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic"
PER_PROMPT = 8
MAX_TOKENS = 80
LR = 1e-6


class Completed(msgspec.Struct, frozen=True):
    """A prompt with its responses, in token ids."""

    prompt: list[int]
    responses: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(len(self.prompt) + len(response) for response in self.responses)


def sample(prompts: int) -> list[Completed]:
    """Completions of the first training prompts by the example's model; the same every time."""
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    model = load_model(str(EXAMPLE / "model"), "float32", "cpu")
    lines = (EXAMPLE / "train.jsonl").read_text().splitlines()[:prompts]
    torch.manual_seed(0)
    completed = []
    for line in lines:
        chat = [{"role": "user", "content": json.loads(line)["prompt"]}]
        ids: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
        rows = generate(torch.tensor([ids]), do_sample=True, num_return_sequences=PER_PROMPT, max_new_tokens=MAX_TOKENS)
        responses = [row[len(ids) :].tolist() for row in rows]
        end = tokenizer.eos_token_id
        completed.append(Completed(ids, [r[: r.index(end) + 1] if end in r else r for r in responses]))
    return completed


def rewards(count: int) -> list[float]:
    """Every group has some of both: all rollouts are trained on."""
    return [float(i % 2) for i in range(count)]


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
