"""A request on its way through an engine: refused, running, complete."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gvm_stream.producers.engine import Completion, Float32, Int32, Request


@dataclass
class Running:
    request: Request
    versions: list[tuple[int, int]]
    """(policy version, index of the first response token sampled with it)."""

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)

    def complete(self, tokens: Int32, logprobs: Float32, finish: str, error: str) -> Completion:
        """`tokens` and `logprobs` cover prompt and response."""
        response = tokens[self.prompt_length :]
        ends = [start for _, start in self.versions[1:]] + [len(response)]
        spans = ((version, start, end) for (version, start), end in zip(self.versions, ends, strict=True))
        return Completion(
            id=self.request.id,
            tokens=response,
            logprobs=logprobs[self.prompt_length :],
            spans=tuple(span for span in spans if span[1] < span[2]),
            finish=finish,
            error=error,
        )


def without_tokens(request: Request, finish: str, error: str = "") -> Completion:
    """The end of a request that never ran."""
    return Completion(
        id=request.id,
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        spans=(),
        finish=finish,
        error=error,
    )


def why_impossible(request: Request, max_length: int, vocabulary: int) -> str:
    """Why no engine with rows of `max_length` tokens can run this request; empty if one can."""
    prompt = len(request.prompt_tokens)
    if prompt < 1 or request.max_tokens < 1:
        return f"{prompt} prompt tokens and max_tokens = {request.max_tokens}; at least 1 of each was expected"
    if prompt + request.max_tokens > max_length:
        return (
            f"{prompt} prompt tokens and max_tokens = {request.max_tokens} make {prompt + request.max_tokens}, "
            f"more than the engine's max_length = {max_length}"
        )
    if not request.temperature > 0:
        return f"temperature = {request.temperature:g}; a number above 0 was expected"
    low, high = int(request.prompt_tokens.min()), int(request.prompt_tokens.max())
    if low < 0 or high >= vocabulary:
        return f"prompt token {low if low < 0 else high} is not in the model's vocabulary of {vocabulary}"
    return ""
