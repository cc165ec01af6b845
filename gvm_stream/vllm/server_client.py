"""The HTTP routes of one `vllm serve`: tokens in, tokens out, and its weights."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx2
import msgspec
import numpy as np

from gvm_stream.errors import ModelError
from gvm_stream.producers.engine import EngineLoad, Float32, Int32, Request
from gvm_stream.wire.weight_messages import CallName

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request

ANSWER_S = 30.0
"""Longest wait for an answer to what takes no time. A server that is not heard of for that long is dead."""
WORK_S = 600.0
"""The same for what does: loading large weights, a score behind the requests that run."""
STREAM_INTERVAL = 8
"""Tokens between two messages of a generation."""
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
"""Said with every request, as unset ones may come from the checkpoint."""
LOAD = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
GENERATE = "inference/v1/generate"


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a generation."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    """Empty but in the last one."""
    spans: tuple[tuple[int, int, int], ...]
    """(policy version, start, end) over all of it, in the last one."""


class Server:
    """One replica. Whatever goes wrong with it is a `ModelError` that names it."""

    def __init__(self, url: str, client: httpx2.AsyncClient) -> None:
        self.url, self._client = url.rstrip("/"), client

    async def generate(self, key: str, request: Request, end_tokens: list[int], salt: str) -> AsyncIterator[Chunk]:
        """From the first tokens to the end; one that `abort` ends comes to an end as well."""
        sampling = {
            **NEUTRAL,
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
            "stop_token_ids": end_tokens,
            "ignore_eos": True,  # all ends are among them
            "logprobs": 0,
            "detokenize": False,
            "stream_interval": STREAM_INTERVAL,
        }
        body = {
            "request_id": key,
            "token_ids": request.prompt_tokens.tolist(),
            "sampling_params": sampling,
            "stream": True,
            "cache_salt": salt,
        }
        with self._named():
            async with self._client.stream("POST", f"{self.url}/{GENERATE}", json=body) as answer:
                if answer.status_code != httpx2.codes.OK:
                    await answer.aread()
                    raise ModelError(f"the server {self.url} refuses a generation: {answer.text[:300]}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        yield chunk_of(json.loads(line.removeprefix("data: ")), self.url)

    async def abort(self, keys: list[str]) -> None:
        await self._post("abort_requests", {"request_ids": [f"generate-tokens-{key}" for key in keys]})

    async def score(self, tokens: Int32) -> Float32:
        sampling = {**NEUTRAL, "temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": tokens.tolist(), "sampling_params": sampling}
        answer = (await self._post(GENERATE, body, WORK_S)).json()
        rows = answer["prompt_logprobs"][1:]
        return np.array([row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)], np.float32)

    async def load(self) -> EngineLoad:
        answer = await self._ask("GET", "metrics", None, ANSWER_S)
        found: dict[str, list[float]] = {}
        for name, value in LOAD.findall(answer.text):
            found.setdefault(name, []).append(float(value))  # one of each data-parallel rank
        try:
            return EngineLoad(
                running=int(sum(found["num_requests_running"])),
                waiting=int(sum(found["num_requests_waiting"])),
                cache_used=max(found["kv_cache_usage_perc"]),
                preemptions=int(sum(found["num_preemptions_total"])),
            )
        except KeyError as missing:
            raise ModelError(
                f"the server {self.url} shows no vllm:{missing.args[0]} at /metrics: start it without "
                "--disable-log-stats"
            ) from missing

    async def pause(self, *, clear_cache: bool) -> None:
        """Nothing is generated until `resume`; with `clear_cache` all that runs is computed again afterwards."""
        await self._post(f"pause?mode=keep&clear_cache={str(clear_cache).lower()}", {})

    async def resume(self) -> None:
        await self._post("resume", {})

    async def update(self, info: dict[str, Any], version: int) -> None:
        await self._post("start_weight_update", {})
        await self._post("update_weights", {"update_info": info}, WORK_S)
        await self._post("finish_weight_update", {"weight_version": str(version)})

    async def workers(self) -> int:
        answer: int = (await self._ask("GET", "get_world_size", None, ANSWER_S)).json()["world_size"]
        return answer

    async def call(self, name: CallName, info: dict[str, Any]) -> None:
        """What vLLM's trainer side asks of its workers."""
        bodies = {"init_weight_transfer_engine": {"init_info": info}, "update_weights": {"update_info": info}}
        await self._post(name, bodies.get(name, info if name == "finish_weight_update" else {}), WORK_S)

    async def start(self, version: int, longest: int, *, by_file: bool) -> None:
        """Make sure that it can be trained with, and runs sequences of `longest` tokens."""
        model = (await self._ask("GET", "v1/models", None, ANSWER_S)).json()["data"][0]
        if model["max_model_len"] < longest:
            raise ModelError(
                f"the server {self.url} runs sequences of at most {model['max_model_len']} tokens, {longest} are "
                "needed: start it with a larger --max-model-len"
            )
        if by_file:
            await self._post("init_weight_transfer_engine", {"init_info": {}})
        with suppress(ModelError):  # there is one to finish only where a producer was killed in the midst of it
            await self._post("finish_weight_update", {})
        await self._post("resume", {})
        await self._post("update_weight_version", {"new_version": str(version)})
        await self.score(np.zeros(2, np.int32))

    async def _post(self, route: str, body: dict[str, Any], wait_s: float = ANSWER_S) -> httpx2.Response:
        return await self._ask("POST", route, body, wait_s)

    async def _ask(self, method: str, route: str, body: dict[str, Any] | None, wait_s: float) -> httpx2.Response:
        with self._named():
            answer = await self._client.request(
                method, f"{self.url}/{route}", json=body, timeout=wait_s, headers={"connection": "close"}
            )  # after an error a server closes the connection, perhaps under the next request: that for resuming
        name = route.partition("?")[0]
        if answer.status_code == httpx2.codes.NOT_FOUND:
            raise ModelError(f"the server {self.url} has no route {name}: start it with VLLM_SERVER_DEV_MODE=1")
        if answer.status_code != httpx2.codes.OK:
            raise ModelError(
                f"the server {self.url} answers {name} with status {answer.status_code}: "
                f"{' '.join(answer.text.split())[:300]}"
            )
        return answer

    def _named(self) -> Named:
        return Named(self.url)


class Named:
    """Turns what HTTP raises into a `ModelError` with the server's name."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx2.HTTPError):
            reason = str(error) or type(error).__name__
            raise ModelError(f"the server {self._url} is not to be reached: {reason}") from error


def chunk_of(message: dict[str, Any], url: str) -> Chunk:
    """Raises `ModelError` for what is not a piece of a generation with log-probs."""
    if "error" in message:
        raise ModelError(f"the server {url} broke off a generation: {message['error']}")
    (choice,) = message["choices"]
    content = (choice["logprobs"] or {}).get("content") or []
    spans = choice["weight_versions"] or []
    return Chunk(
        tokens=choice["token_ids"] or [],
        logprobs=[entry["logprob"] for entry in content],
        finish=choice["finish_reason"] or "",
        spans=tuple((int(span["version"]), span["start"], span["end"]) for span in spans),
    )
