"""vLLM in this process, as a `producers.engine.Engine`.

vLLM's scheduler and model run inside `step`, in the thread that calls it, and what comes out is kept here token by
token: with which version each was sampled, and what an aborted request had when it was aborted, are then simply known.
Not stepping is the pause during a weight update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.request import Request as VllmRequest

from gvm_stream.canary import LENGTH
from gvm_stream.config import StreamSection
from gvm_stream.errors import ConfigError, ModelError, WeightsError
from gvm_stream.producers.causal_lm import Shapes, check_weights_file
from gvm_stream.producers.engine import Completion, EngineLoad, Float32, Int32, Request
from gvm_stream.producers.requests import why_impossible, without_tokens
from gvm_stream.vllm.nccl import NcclWeights
from gvm_stream.vllm.transfer import BACKEND, register
from gvm_stream.wire.weight_messages import CallName

ON_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
"""Arguments of `EngineArgs` on a machine without a GPU, unless told otherwise: compilation takes minutes there, and the
cache would take most of the memory."""
LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this temperature when asked for a lower one."""


@dataclass
class Sampled:
    """A request in the engine, with what it has so far."""

    request: Request
    key: str
    """What vLLM calls it: the same work may come again while the engine still forgets its last attempt."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, index of the first token sampled with it)."""
    scheduled: VllmRequest | None = None
    """What vLLM's scheduler holds of it."""
    put_back: int = 0
    """How often we, not vLLM, have put it back into vLLM's queue, for an update."""

    @property
    def preemptions(self) -> int:
        return 0 if self.scheduled is None else self.scheduled.num_preemptions - self.put_back

    def complete(self, finish: str, error: str = "") -> Completion:
        ends = [start for _, start in self.versions[1:]] + [len(self.tokens)]
        return Completion(
            id=self.request.id,
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            spans=tuple((version, start, end) for (version, start), end in zip(self.versions, ends, strict=True)),
            finish=finish,
            error=error,
        )


class VllmEngine:
    """At most `slots` requests at once, each of at most `max_length` tokens, prompt included. Sampling is plain
    softmax(logits / temperature), and a response ends with one of `end_tokens`.

    `kv_policy` says what a weight update does to running requests: their keys and values are computed again with the
    new weights (`recompute`) or stay (`keep`).
    """

    def __init__(
        self,
        llm: LLMEngine,
        shapes: Shapes,
        *,
        slots: int,
        max_length: int,
        end_tokens: Sequence[int],
        kv_policy: Literal["recompute", "keep"],
        version: int = 0,
        pull: Callable[[int], None] | None = None,
    ) -> None:
        """`llm` as `start_vllm` makes it, with room for `slots`; `shapes` of the model's weights. With `pull`, the
        weights of a version come that way, not from the file."""
        assert isinstance(llm.engine_core, InprocClient)
        self._llm, self._core = llm, llm.engine_core
        scheduler = self._core.engine_core.scheduler
        assert isinstance(scheduler, Scheduler)
        self._scheduler = scheduler
        self._shapes, self._slots, self._max_length = shapes, slots, max_length
        self._end_tokens = list(end_tokens)
        self._recompute = kv_policy == "recompute"
        self._pull = pull
        self._vocabulary: int = llm.model_config.get_vocab_size()
        self._version = version
        self._core.engine_core.set_weight_version(str(version))

        self._waiting: dict[int, Request] = {}
        """Not in vLLM yet: it holds no more than it may run, so that what waits belongs to no version."""
        self._running: dict[str, Sampled] = {}
        self._keys: dict[int, str] = {}
        """Request -> what vLLM calls it, of those running."""
        self._ended: list[Completion] = []
        self._scores: dict[str, Float32] = {}
        self._generated = self._started = 0
        self._preempted = 0
        """Preemptions of requests that have ended."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def generated_tokens(self) -> int:
        return self._generated

    def submit(self, request: Request) -> None:
        problem = why_impossible(request, self._max_length, self._vocabulary)
        if not problem and request.temperature < LOWEST_TEMPERATURE:
            problem = f"temperature = {request.temperature:g}; vLLM samples at {LOWEST_TEMPERATURE:g} or above"
        if problem:
            self._ended.append(without_tokens(request, "error", f"request {request.id}: {problem}"))
        else:
            self._waiting[request.id] = request

    def abort(self, ids: list[int]) -> None:
        for request in [self._waiting.pop(id) for id in ids if id in self._waiting]:
            self._ended.append(without_tokens(request, "abort"))
        keys = [self._keys[id] for id in ids if id in self._keys]
        self._core.abort_requests(keys)
        for key in keys:
            self._end(key, "abort")

    def step(self) -> list[Completion]:
        while self._waiting and len(self._running) < self._slots:
            self._start(self._waiting.pop(next(iter(self._waiting))))
        if self._running:
            self._advance()
        ended, self._ended = self._ended, []
        return ended

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def progress(self) -> dict[int, int]:
        return dict.fromkeys(self._waiting, 0) | {
            sampled.request.id: len(sampled.tokens) for sampled in self._running.values()
        }

    def load(self) -> EngineLoad:
        running = len(self._scheduler.running)
        return EngineLoad(
            running=running,
            waiting=len(self._waiting) + len(self._running) - running,
            cache_used=self._scheduler.kv_cache_manager.usage,
            preemptions=self._preempted + sum(sampled.preemptions for sampled in self._running.values()),
        )

    def load_weights(self, path: Path, version: int) -> None:
        if self._pull:
            self._pull(version)
        else:
            self._load_file(path, version)
        self._version = version
        self._core.engine_core.set_weight_version(str(version))
        self._drop_cache()

    def _load_file(self, path: Path, version: int) -> None:
        check_weights_file(self._shapes, path)
        self._llm.collective_rpc("start_weight_update")
        try:
            info = {"version": version, "path": str(path), "size": 0, "checksum": ""}
            self._llm.collective_rpc("update_weights", kwargs={"update_info": info})
        except WeightsError:
            self._drop_cache()  # the weights before have been loaded again
            raise
        self._llm.collective_rpc("finish_weight_update")

    def score(self, tokens: Int32) -> Float32:
        key = self._new_key("score")
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._core.add_request(self._core_request(key, tokens, params, priority=-1))  # before all others
        while key not in self._scores:
            self._advance()
        return self._scores.pop(key)[None]

    def close(self) -> None:
        self.forget()
        self._core.shutdown()

    def forget(self) -> None:
        """Everything submitted is gone."""
        self._core.abort_requests(list(self._running))
        for work in (self._waiting, self._running, self._keys, self._ended):
            work.clear()

    def _new_key(self, name: object) -> str:
        self._started += 1
        return f"{name}-{self._started}"

    def _start(self, request: Request) -> None:
        sampled = Sampled(request, self._new_key(request.id))
        self._running[sampled.key] = sampled
        self._keys[request.id] = sampled.key
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            stop_token_ids=self._end_tokens,
            ignore_eos=True,  # all ends are among them
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._core.add_request(self._core_request(sampled.key, request.prompt_tokens, params))
        sampled.scheduled = self._scheduler.requests[sampled.key]

    def _core_request(self, key: str, tokens: Int32, params: SamplingParams, priority: int = 0) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=key,
            prompt_token_ids=tokens.tolist(),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=str(self._version),
            data_parallel_rank=None,
            priority=priority,
        )

    def _advance(self) -> None:
        """One scheduling step of vLLM."""
        outputs = self._core.get_output()
        for output in outputs.outputs:
            sampled = self._running.get(output.request_id)
            if sampled is None:
                self._take_score(output)
                continue
            if output.new_token_ids:
                self._take_tokens(sampled, output)
            if output.finish_reason is not None:
                self._finish(sampled, output.finish_reason)

    def _take_tokens(self, sampled: Sampled, output: EngineCoreOutput) -> None:
        assert output.new_logprobs is not None
        if not sampled.versions or sampled.versions[-1][0] != self._version:
            sampled.versions.append((self._version, len(sampled.tokens)))
        sampled.tokens += output.new_token_ids
        sampled.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        self._generated += len(output.new_token_ids)

    def _finish(self, sampled: Sampled, reason: FinishReason) -> None:
        match reason:
            case FinishReason.STOP:
                self._end(sampled.key, "stop")
            case FinishReason.LENGTH:
                self._end(sampled.key, "length")
            case _:
                self._end(sampled.key, "error", f"request {sampled.request.id}: vLLM ended it as {reason}")

    def _end(self, key: str, finish: str, error: str = "") -> None:
        sampled = self._running.pop(key)
        del self._keys[sampled.request.id]
        self._preempted += sampled.preemptions
        self._ended.append(sampled.complete(finish, error))

    def _take_score(self, output: EngineCoreOutput) -> None:
        if output.new_prompt_logprobs_tensors is not None:
            self._scores[output.request_id] = output.new_prompt_logprobs_tensors.logprobs[:, 0].float().numpy()

    def _drop_cache(self) -> None:
        """After an update: what has begun is computed again. What has not takes the salt of the new version, so with
        `keep`, too, nothing builds on another request's keys and values of other weights."""
        if self._recompute:
            for request in self._scheduler.running:
                self._running[request.request_id].put_back += 1
            self._core.reset_prefix_cache(reset_running_requests=True)


def start_vllm(
    model_path: str,
    *,
    slots: int,
    max_length: int,
    dtype: str,
    seed: int,
    options: dict[str, Any],
    weights: Literal["file", "nccl"] = "file",
) -> LLMEngine:
    """vLLM in this process, which `environment.prepare` has made ready. `options` are further arguments of its
    `EngineArgs`.

    Raises `ConfigError` or `ModelError`.
    """
    ours: dict[str, Any] = {
        "model": model_path,
        "dtype": dtype,
        "seed": seed,
        "max_num_seqs": slots + 1,  # the canary's
        "max_model_len": max(max_length, LENGTH + 1),
        "scheduling_policy": "priority",  # the canary comes first
        "generation_config": "vllm",  # not the checkpoint's: it would change the sampling
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND if weights == "file" else weights),
    }
    if taken := sorted(ours.keys() & options.keys()):
        raise ConfigError(f"producer.engine_options.{taken[0]} cannot be set: gvm-stream does")
    defaults = {} if torch.cuda.is_available() else ON_CPU
    register()  # as the entry point does, should this checkout be newer than its installation
    try:
        llm = LLMEngine.from_engine_args(EngineArgs(**(defaults | ours | options)))
    except (TypeError, ValueError, OSError, RuntimeError) as problem:
        reason = " ".join(str(problem).split())
        raise ModelError(f"vLLM cannot serve model.path = {model_path!r}: {reason}") from problem
    if weights == "file":
        llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    return llm


def nccl_weights(llm: LLMEngine, stream: StreamSection, name: str, shapes: Shapes) -> NcclWeights:
    """Of a vLLM started with `weights = "nccl"`."""

    def call(name: CallName, info: dict[str, Any]) -> None:
        named = {"init_weight_transfer_engine": {"init_info": info}, "update_weights": {"update_info": info}}
        llm.collective_rpc(name, kwargs=named.get(name))

    workers = llm.vllm_config.parallel_config.world_size
    return NcclWeights(stream, name, workers=workers, shapes=shapes, call=call)
