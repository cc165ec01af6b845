"""vLLM in the process, beyond the contract of engines: updates under load, shared prefixes, memory, what may be set."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from gvm_stream.errors import ConfigError, ModelError, WeightsError
from gvm_stream.producers.causal_lm import expected_shapes
from gvm_stream.producers.engine import Completion, Engine, Int32, Request
from gvm_stream.weights import checksum
from tests.stream_processes import free_address
from tests.test_weight_server import served
from tests.tiny_models import (
    cache_argument,
    full_forward_logprobs,
    prompt,
    random_prompts,
    requests_for,
    run,
    save_tiny_model,
)

pytestmark = pytest.mark.vllm

ARITHMETIC = Path(__file__).parents[1] / "examples" / "arithmetic" / "model"
GREEDY = 0.01  # the lowest temperature of vLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "one-head", seed=0)


def perturbed(folder: Path, model: Path, version: int) -> Path:
    """A checkpoint near `model`: its output layer is a little different."""
    path = folder / f"v{version}"
    path.mkdir()
    for name in ("config.json", "generation_config.json"):
        (path / name).write_bytes((model / name).read_bytes())
    weights = load_file(model / "model.safetensors")
    noise = torch.Generator().manual_seed(version)
    weights["lm_head.weight"] += 0.02 * torch.randn(weights["lm_head.weight"].shape, generator=noise)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def assert_spans_are_right(completions: Iterable[Completion], requests: list[Request], weights: list[Path]) -> None:
    """Every token's log-prob is that of the weights its span names."""
    for completion in completions:
        request = requests[completion.id]
        bounds = [0, *(end for _, _, end in completion.spans)]
        assert [start for _, start, _ in completion.spans] == bounds[:-1]
        assert bounds[-1] == len(completion.tokens)
        for version, start, end in completion.spans:
            expected = full_forward_logprobs(weights[version], request, completion.tokens)[start:end]
            np.testing.assert_allclose(completion.logprobs[start:end], expected, rtol=0, atol=2e-4)


def test_twenty_updates_under_128_requests_lose_nothing_and_every_token_knows_its_version(tmp_path: Path) -> None:
    from tests.shared_vllm import shared_engine

    engine = shared_engine(ARITHMETIC, slots=128, max_length=80)
    weights = [ARITHMETIC, *(perturbed(tmp_path, ARITHMETIC, version) for version in range(1, 21))]
    rng = np.random.default_rng(0)
    requests = [
        Request(id=i, prompt_tokens=rng.integers(8, 90, 20).astype(np.int32), max_tokens=int(cap), temperature=1.0)
        for i, cap in enumerate(rng.integers(5, 60, 400))
    ]
    for request in requests:
        engine.submit(request)
    completions: list[Completion] = []
    for version in range(1, 21):
        for _ in range(4):
            completions += engine.step()
        assert engine.load().running > 100
        engine.load_weights(weights[version] / "model.safetensors", version)
    completions += run(engine, []).values()
    assert sorted(completion.id for completion in completions) == list(range(400))
    assert {completion.finish for completion in completions} == {"length"}
    assert sum(len(completion.spans) > 3 for completion in completions) > 100
    assert engine.load().preemptions == 0  # what an update puts back is not counted
    assert_spans_are_right(completions, requests, weights)


def greedy(engine: Engine, tokens: Int32, id: int) -> Completion:
    """The answer to a prompt, while whatever else is in the engine runs on."""
    engine.submit(Request(id=id, prompt_tokens=tokens, max_tokens=24, temperature=GREEDY))
    while True:
        for completion in engine.step():
            if completion.id == id:
                return completion


@pytest.mark.parametrize("kv_policy", ["recompute", "keep"])
def test_after_an_update_a_shared_prefix_gives_what_a_fresh_engine_gives_while_others_run(
    kv_policy: str, tmp_path: Path
) -> None:
    from tests.shared_vllm import shared_engine

    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((ARITHMETIC / "config.json").read_bytes())
    weights = load_file(ARITHMETIC / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(1, 0)  # other keys and values
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    tokens = np.random.default_rng(1).integers(8, 90, 40).astype(np.int32)
    answers: dict[str, Completion] = {}
    for fresh in (True, False):
        engine = shared_engine(
            other if fresh else ARITHMETIC,
            slots=8,
            max_length=80,
            kv_policy=kv_policy,  # type: ignore[arg-type]
        )
        if not fresh:
            for sibling in range(3):
                engine.submit(Request(id=sibling, prompt_tokens=tokens, max_tokens=40, temperature=1.0))
            before = greedy(engine, tokens, 10)
            engine.load_weights(other / "model.safetensors", 1)
            assert len(engine.progress()) == 3
        answers[f"{fresh}"] = greedy(engine, tokens, 11)
    assert answers["True"].tokens.tolist() == answers["False"].tokens.tolist()
    np.testing.assert_allclose(answers["True"].logprobs, answers["False"].logprobs, atol=1e-3)
    assert before.tokens.tolist() != answers["False"].tokens.tolist()
    assert answers["False"].spans == ((1, 0, len(answers["False"].tokens)),)


def test_siblings_share_the_computation_of_their_prompt(model: Path) -> None:
    from tests.shared_vllm import shared_engine

    engine = shared_engine(model, slots=8, max_length=64)
    tokens = random_prompts(1, shortest=40, longest=40)[0]
    pool = engine._scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    engine.submit(Request(id=0, prompt_tokens=tokens, max_tokens=8, temperature=1.0))
    engine.step()
    for sibling in (1, 2):
        engine.submit(Request(id=sibling, prompt_tokens=tokens, max_tokens=8, temperature=1.0))
    engine.step()
    assert free - pool.get_num_free_blocks() == 1 + 3  # the first block of 32 tokens is that of all three


def test_keep_continues_on_the_keys_and_values_of_the_old_weights(model: Path, tmp_path: Path) -> None:
    from tests.shared_vllm import shared_engine

    other = save_tiny_model(tmp_path / "other", "one-head", seed=1)
    engine = shared_engine(model, slots=4, max_length=64, kv_policy="keep")
    request = Request(id=0, prompt_tokens=prompt(5, 6, 7), max_tokens=9, temperature=1.0)
    engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.load_weights(other / "model.safetensors", 1)
    completion = run(engine, [])[0]
    assert completion.spans == ((0, 0, 4), (1, 4, 9))
    sequence = torch.tensor([[*request.prompt_tokens.tolist(), *completion.tokens.tolist()]])
    cache = cache_argument(DynamicCache())
    with torch.no_grad():
        # Three prompt tokens and the first three sampled ones went in under the old weights.
        first = AutoModelForCausalLM.from_pretrained(model)(sequence[:, :6], **cache).logits
        second = AutoModelForCausalLM.from_pretrained(other)(sequence[:, 6:-1], **cache).logits
    logprobs = torch.log_softmax(torch.cat([first[0, 2:], second[0]]), dim=-1)
    expected = logprobs.gather(1, sequence[0, 3:, None])[:, 0].numpy()
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)


def test_an_update_reaches_an_output_layer_that_is_tied_to_the_embedding(tmp_path: Path) -> None:
    from tests.shared_vllm import shared_engine

    old, new = (save_tiny_model(tmp_path / str(seed), "one-head-tied", seed) for seed in (0, 1))
    engine = shared_engine(old, slots=4, max_length=64)
    for version, path in ((1, new), (2, old)):
        engine.load_weights(path / "model.safetensors", version)
        request = Request(id=0, prompt_tokens=prompt(1, 2, 3), max_tokens=20, temperature=1.0)
        completion = run(engine, [request])[0]
        expected = full_forward_logprobs(path, request, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)


def test_only_modules_with_a_changed_tensor_are_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gvm_stream.vllm.transfer import GvmTransfer
    from tests.shared_vllm import shared_engine

    loaded: list[list[str]] = []
    load = GvmTransfer._load

    def spy(self: GvmTransfer, weights: dict[str, torch.Tensor], names: list[str]) -> None:
        loaded.append(list(names))
        load(self, weights, names)

    engine = shared_engine(model, slots=4, max_length=64)
    monkeypatch.setattr(GvmTransfer, "_load", spy)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] *= 2
    changed = tmp_path / "model.safetensors"
    save_file(weights, changed, {"format": "pt"})
    engine.load_weights(changed, 1)
    assert [set(names) for names in loaded] == [{f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkvo"}]
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    requests = requests_for(random_prompts(3))
    completions = run(engine, requests)
    for request in requests:
        expected = full_forward_logprobs(tmp_path, request, completions[request.id].tokens)
        np.testing.assert_allclose(completions[request.id].logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("right", [True, False])
def test_a_worker_that_does_not_see_the_file_fetches_it_from_the_learner_and_checks_it(
    right: bool, model: Path, tmp_path: Path
) -> None:
    from tests.shared_vllm import shared_engine

    other = save_tiny_model(tmp_path / "other", "one-head", seed=1)
    published = tmp_path / "weights" / "v00000005.safetensors"
    published.parent.mkdir()
    published.write_bytes((other / "model.safetensors").read_bytes())
    engine = shared_engine(model, slots=4, max_length=64)
    address = free_address()
    with served(published.parent, address):
        update = {
            "version": 5,
            "path": "/on/another/host/v00000005.safetensors",
            "size": published.stat().st_size,
            "checksum": checksum(published) if right else "0" * 32,
            "address": address,
        }
        engine._llm.collective_rpc("start_weight_update")
        if right:
            engine._llm.collective_rpc("update_weights", kwargs={"update_info": update})
            engine._llm.collective_rpc("finish_weight_update")
        else:
            with pytest.raises(WeightsError, match=r"have checksum .*, expected 0000"):
                engine._llm.collective_rpc("update_weights", kwargs={"update_info": update})
    request = requests_for(random_prompts(1), max_tokens=20)[0]
    completion = run(engine, [request])[0]
    expected = full_forward_logprobs(other if right else model, request, completion.tokens)
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)


def test_an_update_that_fails_half_way_brings_back_the_weights_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.shared_vllm import shared_engine

    other = save_tiny_model(tmp_path / "other", "one-head", seed=1)
    engine = shared_engine(model, slots=4, max_length=64)
    worker = engine._llm.engine_core.engine_core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    vllm_model = worker.get_model()
    load = vllm_model.load_weights
    failures = iter([True, False])

    def failing(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        if not next(failures):
            return load(weights)
        load(list(weights)[:7])
        raise RuntimeError("out of memory")

    monkeypatch.setattr(vllm_model, "load_weights", failing)
    requests = requests_for(random_prompts(4))
    for request in requests:
        engine.submit(request)
    engine.step()
    with pytest.raises(WeightsError, match="cannot be loaded: out of memory"):
        engine.load_weights(other / "model.safetensors", 1)
    assert engine.version == 0
    completions = run(engine, [])
    for request in requests:
        assert completions[request.id].spans == ((0, 0, 12),)
        expected = full_forward_logprobs(model, request, completions[request.id].tokens)
        np.testing.assert_allclose(completions[request.id].logprobs, expected, rtol=0, atol=1e-5)


def test_requests_put_back_for_want_of_memory_are_counted_and_come_to_the_right_end(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.shared_vllm import shared_engine

    engine = shared_engine(model, slots=16, max_length=80)
    pool = engine._scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 10)  # of 32 tokens: room for three long responses
    try:
        requests = requests_for(random_prompts(16, shortest=16, longest=16), max_tokens=60)
        for request in requests:
            engine.submit(request)
        fullest, completions = 0.0, []
        while engine.has_work():
            completions += engine.step()
            fullest = max(fullest, engine.load().cache_used)
    finally:
        pool.free_blocks(taken)
    assert engine.load().preemptions > 4
    assert fullest > 0.99
    assert sorted(completion.id for completion in completions) == list(range(16))
    for completion in completions:
        expected = full_forward_logprobs(model, requests[completion.id], completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)


def test_an_abort_frees_memory_and_scheduler_before_the_next_step(model: Path) -> None:
    from tests.shared_vllm import shared_engine

    engine = shared_engine(model, slots=8, max_length=80)
    for request in requests_for(random_prompts(12, shortest=16), max_tokens=60):
        engine.submit(request)
    for _ in range(20):
        engine.step()
    engine.abort(list(range(12)))
    assert engine.load().cache_used == 0
    assert not engine._scheduler.has_unfinished_requests()
    assert sorted(len(completion.tokens) for completion in engine.step()) == [0] * 4 + [20] * 8


def test_work_that_comes_again_at_once_is_another_request(model: Path) -> None:
    from tests.shared_vllm import shared_engine

    engine = shared_engine(model, slots=2, max_length=64)
    request = Request(id=7, prompt_tokens=prompt(1, 2), max_tokens=5, temperature=1.0)
    engine.submit(request)
    engine.step()
    engine.abort([7])
    engine.submit(request)
    ended = engine.step()
    while engine.has_work():
        ended += engine.step()
    assert [(completion.finish, len(completion.tokens)) for completion in ended] == [("abort", 1), ("length", 5)]


def test_the_sampling_of_a_checkpoint_does_not_leak_in(model: Path, tmp_path: Path) -> None:
    from tests.shared_vllm import start

    hostile = save_tiny_model(tmp_path / "hostile", "one-head", seed=0)
    settings = {"repetition_penalty": 1.3, "top_k": 5, "top_p": 0.5, "temperature": 0.1, "do_sample": True}
    (hostile / "generation_config.json").write_text(json.dumps(settings))
    engine = start(hostile, slots=4, max_length=64)
    requests = requests_for(random_prompts(8), max_tokens=30, temperature=1.5)
    completions = run(engine, requests)
    for request in requests:
        expected = full_forward_logprobs(model, request, completions[request.id].tokens)
        np.testing.assert_allclose(completions[request.id].logprobs, expected, rtol=0, atol=1e-5)
    engine.close()


def test_temperatures_that_vllm_would_change_are_refused(model: Path) -> None:
    from tests.shared_vllm import shared_engine

    engine = shared_engine(model, slots=2, max_length=64)
    engine.submit(Request(id=0, prompt_tokens=prompt(1), max_tokens=5, temperature=0.001))
    (completion,) = engine.step()
    assert completion.finish == "error"
    assert completion.error == "request 0: temperature = 0.001; vLLM samples at 0.01 or above"


def test_arguments_that_would_break_the_promises_cannot_be_set(model: Path) -> None:
    from tests.shared_vllm import start_vllm

    with pytest.raises(ConfigError, match=r"producer.engine_options.logprobs_mode cannot be set"):
        start_vllm(
            str(model), slots=2, max_length=64, dtype="float32", seed=0, options={"logprobs_mode": "raw_logprobs"}
        )


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("absent", {}, "absent"),
        ("", {"no_such_argument": 1}, "no_such_argument"),
        ("", {"block_size": 16}, "block size"),
    ],
)
def test_what_vllm_cannot_serve_is_one_sentence(
    path: str, options: dict[str, object], words: str, model: Path, tmp_path: Path
) -> None:
    from tests.shared_vllm import start_vllm

    with pytest.raises(ModelError, match=words) as raised:
        start_vllm(
            str(tmp_path / path if path else model), slots=2, max_length=64, dtype="float32", seed=0, options=options
        )
    assert "\n" not in str(raised.value)


def test_shapes_of_a_checkpoint_are_known_without_its_weights(model: Path) -> None:
    shapes = expected_shapes(str(model))
    assert shapes.shapes["lm_head.weight"] == (64, 32)
    assert all(len(same) == 1 for same in shapes.tied)
