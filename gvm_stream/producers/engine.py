"""The seam between a producer and what generates its tokens.

An engine is a synchronous object owned by one thread. Everything happens between or inside calls of `step`, so a weight
update falls between two tokens and the version of every token is known exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One response to generate."""

    id: int
    prompt_tokens: Int32
    """int32 [P]."""
    max_tokens: int
    temperature: float


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request; exactly one per submitted request."""

    id: int
    tokens: Int32
    """int32 [T], the end token included when there was one; possibly empty after an abort."""
    logprobs: Float32
    """float32 [T], of the sampled tokens under softmax(logits / temperature)."""
    spans: tuple[tuple[int, int, int], ...]
    """(policy version, start, end) covering [0, T) in order."""
    finish: str
    """`stop` (an end token), `length` (cap reached), `abort`, or `error`."""
    error: str = ""
    """For `error`: what went wrong, in one sentence."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How full an engine is."""

    running: int
    """Requests in generation."""
    waiting: int
    """Requests in its queue, those included that it has put back for want of memory."""
    cache_used: float
    """Share of the key-value cache in use, 0 .. 1."""
    preemptions: int
    """Running requests put back into the queue for want of key-value memory, since the engine was made."""


class Engine(Protocol):
    """What a producer needs from an inference engine."""

    @property
    def version(self) -> int:
        """Policy version the next token will be sampled with."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the engine was made, whatever became of them."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never run (too long for the engine) ends as `error` in the next `step`."""
        ...

    def abort(self, ids: list[int]) -> None:
        """End these requests with what they have; the completions come out of the next `step`. Unknown ids are ignored:
        they have ended already."""
        ...

    def step(self) -> list[Completion]:
        """Generate at least one token for every running request; return what ended. Cheap when idle."""
        ...

    def has_work(self) -> bool:
        """True while a submitted request has not come out of `step`."""
        ...

    def progress(self) -> dict[int, int]:
        """Tokens so far of every request that has not ended."""
        ...

    def load(self) -> EngineLoad:
        """How full it is now. Cheap."""
        ...

    def load_weights(self, path: Path, version: int) -> None:
        """Replace the weights by those of a safetensors file (Hugging Face names). All or nothing: on
        `WeightsError` the old weights and version stay in force."""
        ...

    def score(self, tokens: Int32) -> Float32:
        """Log-probs of tokens 1 .. T - 1 of int32 [T], each after those before it, under softmax(logits) with the
        weights in force; float32 [C, T - 1] in nats, a row for each of the C copies of the model that the engine
        samples with. Requests that end meanwhile come out of the next `step`."""
        ...

    def close(self) -> None:
        """Forget all requests, leave no process and free what it holds."""
        ...
