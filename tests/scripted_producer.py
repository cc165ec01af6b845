"""`python -m tests.scripted_producer CONFIG NAME`: the real producer with an engine that follows a script.

For tests of faults, where a model would only take time: everything but the tokens is real.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gvm_stream.config import Config
from gvm_stream.config_file import load_config
from gvm_stream.logs import set_up_logging
from gvm_stream.producers import main as producer
from gvm_stream.producers.engine import Completion, Engine, EngineLoad, Float32, Int32, Request

STEP_S = 2e-3
"""What a forward pass takes."""


class Response(msgspec.Struct):
    request: Request
    tokens: list[int]
    """All of them; the policy has nothing to do with it."""
    versions: list[int]
    """Of those so far."""


class DeterministicEngine:
    """The response to a work item is a function of its prompt and its identity: the prompt itself, every third time
    backwards."""

    def __init__(self) -> None:
        self.version = self.generated_tokens = 0
        self._running: dict[int, Response] = {}
        self._ended: list[Completion] = []
        self._pace = threading.Event()

    def submit(self, request: Request) -> None:
        text = request.prompt_tokens.tolist()
        tokens = text if request.id % 3 else text[::-1]
        self._running[request.id] = Response(request, tokens[: request.max_tokens], [])

    def abort(self, ids: list[int]) -> None:
        for id in ids:
            if id in self._running:
                self._end(id, "abort")

    def step(self) -> list[Completion]:
        self._pace.wait(STEP_S)
        for id, response in list(self._running.items()):
            response.versions.append(self.version)
            self.generated_tokens += 1
            if len(response.versions) == len(response.tokens):
                self._end(id, "stop")
        ended, self._ended = self._ended, []
        return ended

    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def progress(self) -> dict[int, int]:
        return {id: len(response.versions) for id, response in self._running.items()}

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._running), waiting=0, cache_used=0.0, preemptions=0)

    def load_weights(self, path: Path, version: int) -> None:
        self.version = version

    def score(self, tokens: Int32) -> Float32:
        return np.full((1, len(tokens) - 1), -1.0, np.float32)

    def close(self) -> None:
        pass

    def _end(self, id: int, finish: str) -> None:
        response = self._running.pop(id)
        versions = response.versions
        starts = [i for i, v in enumerate(versions) if i == 0 or versions[i - 1] != v]
        self._ended.append(
            Completion(
                id=id,
                tokens=np.array(response.tokens[: len(versions)], "<i4"),
                logprobs=np.full(len(versions), -1.0, "<f4"),
                spans=tuple(
                    (versions[start], start, end)
                    for start, end in zip(starts, [*starts[1:], len(versions)], strict=False)
                ),
                finish=finish,
            )
        )


def prepare_engine(config: Config, name: str) -> tuple[Callable[[], Engine], Callable[[Sequence[int]], str]]:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(Path(config.model.path) / "tokenizer.json"))
    return DeterministicEngine, lambda tokens: str(tokenizer.decode(list(tokens)))


def main() -> None:
    config, name = load_config(Path(sys.argv[1]), []), sys.argv[2]
    set_up_logging(name, "producer")
    producer.prepare_engine = prepare_engine
    producer.main(config, name)


if __name__ == "__main__":
    main()
