"""Weights by vLLM's own NCCL transfer, where there is no GPU: the real sender, the real vLLM, and a double for NCCL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from msgspec.structs import replace

from gvm_stream.config import StreamSection
from gvm_stream.errors import ModelError, WeightsError
from gvm_stream.producers.causal_lm import expected_shapes
from gvm_stream.vllm import environment
from gvm_stream.wire.weight_messages import CallName
from gvm_stream.wire.zap import listening
from tests.stream_processes import free_address
from tests.tiny_models import VOCABULARY, full_forward_logprobs, random_prompts, requests_for, run, save_tiny_model
from tests.vllm_server_process import vllm_serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

Pull = Callable[[int], None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The base model, and those of versions 1 and 2."""
    return [save_tiny_model(tmp_path_factory.mktemp(f"model-{seed}"), "one-head", seed) for seed in range(3)]


@pytest.fixture(scope="module")
def published(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for version in (1, 2):
        (folder / f"v{version:08d}.safetensors").symlink_to(models[version] / "model.safetensors")
    other = save_tiny_model(tmp_path_factory.mktemp("other"), "qwen2", 0)
    (folder / "v00000003.safetensors").symlink_to(other / "model.safetensors")
    return folder


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.prepare()
    from tests.nccl_double import PATCHES, StoreCommunicator

    for target, name, value in PATCHES:
        monkeypatch.setattr(target, name, value)
    monkeypatch.setattr(StoreCommunicator, "broken_after", None)
    monkeypatch.setattr(StoreCommunicator, "stuck", threading.Event())


@pytest.fixture
def stream(published: Path) -> Iterator[StreamSection]:
    """With the learner's sender at its address."""
    environment.prepare()
    from gvm_stream.vllm.nccl_sender import NcclSender

    section = StreamSection(nccl_address=free_address(), progress_s=20.0, heartbeat_s=0.2)
    scopes: list[tuple[trio.CancelScope, trio.lowlevel.TrioToken]] = []
    ready = threading.Event()

    async def serve() -> None:
        sender = NcclSender(published, "127.0.0.1", torch.device("cpu"), section.progress_s, packed=False)
        address, key = section.nccl_address, "stream.nccl_address"
        with trio.CancelScope() as scope:
            async with listening(address, key, stream=section, server="learner", count=lambda reason: None) as socket:
                scopes.append((scope, trio.lowlevel.current_trio_token()))
                ready.set()
                await sender.serve(socket)

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert ready.wait(20)
    yield section
    ((scope, token),) = scopes
    token.run_sync_soon(scope.cancel)
    thread.join()


def recorded_pull(stream: StreamSection, model: Path, calls: list[CallName], name: str = "p") -> Pull:
    """Of a producer without vLLM: it notes what it is asked, and joins a group as vLLM's worker does."""
    from types import SimpleNamespace

    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_process_group

    from gvm_stream.vllm.nccl import NcclWeights

    parallel: Any = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)

    def call(name: CallName, info: dict[str, Any]) -> None:
        calls.append(name)
        if name == "init_weight_transfer_engine":
            worker_init_process_group(NCCLWeightTransferInitInfo(**info), parallel)

    return NcclWeights(stream, name, workers=1, shapes=expected_shapes(str(model)), call=call).pull


def test_vllm_samples_with_each_version_that_it_takes_and_joins_the_sender_once(
    double: None, stream: StreamSection, models: list[Path]
) -> None:
    from gvm_stream.vllm.engine import VllmEngine, nccl_weights, start_vllm

    base = models[0]
    options = {"kv_cache_memory_bytes": 1 << 26}
    llm = start_vllm(str(base), slots=4, max_length=100, dtype="float32", seed=0, options=options, weights="nccl")
    shapes = expected_shapes(str(base))
    pull = nccl_weights(llm, stream, "p", shapes).pull
    engine = VllmEngine(llm, shapes, slots=4, max_length=100, end_tokens=(), kv_policy="recompute", pull=pull)
    joined: list[object] = []
    rpc = llm.collective_rpc

    def recorded(method: str, **more: Any) -> list[Any]:  # noqa: ANN401
        joined.append(method)
        return rpc(method, **more)

    llm.collective_rpc = recorded  # type: ignore[assignment,method-assign]
    try:
        for version in (1, 2):
            engine.load_weights(Path("nowhere"), version)
            requests = requests_for(random_prompts(4))
            for completion in run(engine, requests).values():
                assert completion.spans == ((version, 0, 12),)
                expected = full_forward_logprobs(models[version], requests[completion.id], completion.tokens)
                assert abs(completion.logprobs - expected).max() < 1e-4
        assert joined.count("init_weight_transfer_engine") == 1

        with pytest.raises(
            WeightsError, match=r"version 3 do not come from .*: the learner's file lacks lm_head.weight"
        ):
            engine.load_weights(Path("nowhere"), 3)  # of another model
        with pytest.raises(WeightsError, match=r"version 4 do not come from .*v00000004"):
            engine.load_weights(Path("nowhere"), 4)  # deleted
        assert engine.version == 2
        assert run(engine, requests_for(random_prompts(1)))[0].spans == ((2, 0, 12),)
        engine.load_weights(Path("nowhere"), 1)  # in a group of its own again
        assert joined.count("init_weight_transfer_engine") == 2

        from tests.nccl_double import StoreCommunicator

        StoreCommunicator.broken_after = 5
        with pytest.raises(ModelError, match=r"version 2 do not come from .*NCCL error"):
            engine.load_weights(Path("nowhere"), 2)
    finally:
        engine.close()


def test_a_transfer_that_hangs_holds_up_no_other_producer(
    double: None, stream: StreamSection, models: list[Path]
) -> None:
    from tests.nccl_double import StoreCommunicator

    hanging = recorded_pull(replace(stream, progress_s=1.0), models[0], [], "hanging")
    StoreCommunicator.stuck.set()
    with pytest.raises(ModelError, match=r"version 1 do not come from .*: silence for 1 s"):
        hanging(1)
    StoreCommunicator.stuck.clear()
    calls: list[CallName] = []
    recorded_pull(stream, models[0], calls)(1)
    assert calls == ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    with pytest.raises(WeightsError, match="the transfer before has not ended"):
        hanging(2)


def test_without_nccl_nothing_is_taken_for_sent(
    stream: StreamSection, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's communicator goes on without a word."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    calls: list[CallName] = []
    with pytest.raises(WeightsError, match=r"version 1 do not come from .*: NCCL cannot be loaded"):
        recorded_pull(stream, models[0], calls)(1)
    assert calls == ["init_weight_transfer_engine"]


def test_a_sender_that_is_not_there_is_waited_for_only_so_long(models: list[Path]) -> None:
    environment.prepare()
    nobody = StreamSection(nccl_address=free_address(), progress_s=0.5, heartbeat_s=0.1)
    with pytest.raises(WeightsError, match=f"do not come from {nobody.nccl_address}: silence for 0.5 s"):
        recorded_pull(nobody, models[0], [])(1)


def test_a_server_takes_its_weights_by_the_same_calls(
    double: None, stream: StreamSection, models: list[Path], tmp_path: Path
) -> None:
    from gvm_stream.vllm.server_engine import VllmServerEngine

    with vllm_serve(models[0], tmp_path / "log", module="tests.nccl_double", backend="nccl") as served:
        engine = VllmServerEngine(
            [served.url],
            expected_shapes(str(models[0])),
            slots=4,
            max_length=100,
            vocabulary=VOCABULARY,
            end_tokens=(),
            kv_policy="recompute",
            stream=stream,
            pull_as="p",
        )
        try:
            for version in (1, 2):
                engine.load_weights(Path("nowhere"), version)
                (completion,) = run(engine, requests_for(random_prompts(1))).values()
                assert completion.spans == ((version, 0, 12),)
                (request,) = requests_for(random_prompts(1))
                expected = full_forward_logprobs(models[version], request, completion.tokens)
                assert abs(completion.logprobs - expected).max() < 1e-4
            with pytest.raises(WeightsError, match=r"lacks lm_head\.weight"):
                engine.load_weights(Path("nowhere"), 3)
            assert run(engine, requests_for(random_prompts(1)))[0].spans == ((2, 0, 12),)
        finally:
            engine.close()
