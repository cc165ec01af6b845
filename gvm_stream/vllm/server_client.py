"""The HTTP routes of one `vllm serve`: tokens in, tokens out, and its weights."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import numpy as np

from gvm_stream.errors import ModelError
from gvm_stream.producers.engine import EngineLoad, Float32, Int32, Request

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request

CONTROL_S = 600.0
"""Longest answer to anything but a generation: loading large weights takes long."""
STREAM_INTERVAL = 8
"""Tokens between two messages of a generation."""
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
"""Said with every request, as unset ones may come from the checkpoint."""
LOAD = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


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
            async with self._client.stream("POST", f"{self.url}/inference/v1/generate", json=body) as answer:
                if answer.status_code != httpx2.codes.OK:
                    await answer.aread()
                    raise ModelError(f"the server {self.url} refuses a generation: {answer.text[:300]}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        yield chunk_of(json.loads(line.removeprefix("data: ")), self.url)
        return

    async def abort(self, keys: list[str]) -> None:
        await self._post("abort_requests", {"request_ids": [f"generate-tokens-{key}" for key in keys]})

    async def score(self, tokens: Int32) -> Float32:
        sampling = {**NEUTRAL, "temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": tokens.tolist(), "sampling_params": sampling}
        answer = (await self._post("inference/v1/generate", body)).json()
        rows = answer["prompt_logprobs"][1:]
        return np.array([row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)], np.float32)

    async def load(self) -> EngineLoad:
        with self._named():
            answer = await self._client.get(f"{self.url}/metrics")
        found = {name: float(value) for name, value in LOAD.findall(answer.text)}
        return EngineLoad(
            running=int(found["num_requests_running"]),
            waiting=int(found["num_requests_waiting"]),
            cache_used=found["kv_cache_usage_perc"],
            preemptions=int(found["num_preemptions_total"]),
        )

    @asynccontextmanager
    async def paused(self, *, clear_cache: bool) -> AsyncIterator[None]:
        """Nothing is generated while the block runs; with `clear_cache` all that runs is computed again afterwards."""
        await self._post(f"pause?mode=keep&clear_cache={str(clear_cache).lower()}", {})
        try:
            yield
        finally:
            await self._post("resume", {})

    async def update(self, info: dict[str, Any], version: int) -> None:
        await self._post("start_weight_update", {})
        await self._post("update_weights", {"update_info": info})
        await self._post("finish_weight_update", {"weight_version": str(version)})

    async def start(self, version: int) -> None:
        """Make sure that it is a server that can be trained with."""
        await self._post("init_weight_transfer_engine", {"init_info": {}})
        await self._post("update_weight_version", {"new_version": str(version)})

    async def _post(self, route: str, body: dict[str, Any]) -> httpx2.Response:
        with self._named():
            answer = await self._client.post(f"{self.url}/{route}", json=body, timeout=CONTROL_S)
        if answer.status_code == httpx2.codes.NOT_FOUND:
            raise ModelError(
                f"the server {self.url} has no route {route.partition('?')[0]}: start it with VLLM_SERVER_DEV_MODE=1"
            )
        if answer.status_code != httpx2.codes.OK:
            raise ModelError(
                f"the server {self.url} answers {route.partition('?')[0]} with status {answer.status_code}: "
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
