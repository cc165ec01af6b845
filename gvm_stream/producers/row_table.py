"""The state of running requests, one row each, in tensors: what every step reads and writes without a Python loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gvm_stream.producers.engine import Float32, Int32, Request


class RowTable:
    """`slots` rows of up to `length` tokens, prompt included. Which rows are in use is the owner's business."""

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self._device = device
        self.tokens = torch.zeros(slots, length, dtype=torch.int64, device=device)
        """int64 [slots, length]: prompt and response."""
        self.logprobs = torch.zeros(slots, length, device=device)
        """float32 [slots, length], indexed like `tokens`; meaningless in the prompt."""
        self.length = torch.ones(slots, dtype=torch.int64, device=device)
        """int64 [slots]: tokens so far."""
        self.limit = torch.ones(slots, dtype=torch.int64, device=device)
        """int64 [slots]: tokens at which the row ends."""
        self.temperature = torch.ones(slots, device=device)
        """float32 [slots]."""

    def write(self, first: int, requests: Sequence[Request]) -> None:
        """Start `requests` in rows first, first + 1, ..."""
        rows = slice(first, first + len(requests))
        width = max(len(request.prompt_tokens) for request in requests)
        prompts = np.zeros((len(requests), width), dtype=np.int64)
        for prompt, request in zip(prompts, requests, strict=True):
            prompt[: len(request.prompt_tokens)] = request.prompt_tokens
        self.tokens[rows, :width] = torch.from_numpy(prompts).to(self._device)
        self.length[rows] = self.index([len(request.prompt_tokens) for request in requests])
        self.limit[rows] = self.length[rows] + self.index([request.max_tokens for request in requests])
        self.temperature[rows] = torch.tensor([request.temperature for request in requests], device=self._device)

    def read(self, rows: Sequence[int]) -> list[tuple[Int32, Float32]]:
        """(tokens int32, log-probs float32) of each of `rows`, both over prompt and response, on the CPU."""
        index = self.index(rows)
        lengths = self.length[index].tolist()
        tokens = self.tokens[index, : max(lengths)].to("cpu", torch.int32).numpy()
        logprobs = self.logprobs[index, : max(lengths)].cpu().numpy()
        return [(t[:length], p[:length]) for t, p, length in zip(tokens, logprobs, lengths, strict=True)]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        for table in (self.tokens, self.logprobs, self.length, self.limit, self.temperature):
            table[targets] = table[sources]

    def lengths(self, rows: int) -> list[int]:
        """Tokens so far of rows 0 .. rows - 1."""
        lengths: list[int] = self.length[:rows].tolist()
        return lengths

    def index(self, values: Sequence[int]) -> Tensor:
        """`values` as int64 on the device of the table."""
        return torch.tensor(values, dtype=torch.int64, device=self._device)
