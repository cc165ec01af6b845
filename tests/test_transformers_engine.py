"""The `transformers` engine beyond the contract: models, slots, cache policies, weights files, broken numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from gvm_stream.errors import WeightsError
from gvm_stream.producers.engine import Completion, Request
from gvm_stream.producers.transformers_engine import REFILL_STEPS, TransformersEngine
from tests.tiny_models import (
    FAMILIES,
    VOCABULARY,
    cache_argument,
    full_forward_logprobs,
    prompt,
    random_prompts,
    requests_for,
    run,
    save_tiny_model,
    tiny_model,
)

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(family: str, seed: int) -> Path:
        path = folder / f"{family}-{seed}"
        return path if path.exists() else save_tiny_model(path, family, seed)

    return checkpoint


@pytest.fixture(scope="module")
def llama(checkpoints: Callable[[str, int], Path]) -> Path:
    return checkpoints("llama", 0)


def engine_for(model: Path | str, **changes: object) -> TransformersEngine:
    options: dict[str, object] = {
        "slots": 4,
        "max_length": 64,
        "end_tokens": (),
        "dtype": "float32",
        "device": "cpu",
        "kv_policy": "recompute",
        "seed": 0,
    }
    return TransformersEngine(str(model), **(options | changes))  # type: ignore[arg-type]


def assert_logprobs(model: Path, request: Request, completion: Completion, start: int = 0) -> None:
    expected = full_forward_logprobs(model, request, completion.tokens)
    np.testing.assert_allclose(completion.logprobs[start:], expected[start:], rtol=0, atol=1e-5)


def steps_until_done(engine: TransformersEngine) -> int:
    steps = 0
    while engine.has_work():
        engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_full_forward_for_any_architecture_through_refills_and_an_update(
    family: str, checkpoints: Callable[[str, int], Path]
) -> None:
    old, new = checkpoints(family, 0), checkpoints(family, 1)
    caps = np.random.default_rng(1).integers(1, 25, 17).tolist()
    requests = [
        Request(id=i, prompt_tokens=tokens, max_tokens=cap, temperature=1.0)
        for i, (tokens, cap) in enumerate(zip(random_prompts(17), caps, strict=True))
    ]
    engine = engine_for(old)
    completions: dict[int, Completion] = {}
    for request in requests:
        engine.submit(request)
    for _ in range(20):
        completions |= {completion.id: completion for completion in engine.step()}
    engine.load_weights(new / "model.safetensors", 1)
    completions |= run(engine, [])
    assert sum(len(completion.spans) == 2 for completion in completions.values()) == 4
    for request in requests:
        completion = completions[request.id]
        assert len(completion.tokens) == request.max_tokens
        for version, start, end in completion.spans:
            expected = full_forward_logprobs((old, new)[version], request, completion.tokens)[start:end]
            np.testing.assert_allclose(completion.logprobs[start:end], expected, rtol=0, atol=1e-5)


def test_keep_continues_on_the_keys_and_values_of_the_old_weights(checkpoints: Callable[[str, int], Path]) -> None:
    old, new = checkpoints("qwen2", 0), checkpoints("qwen2", 1)
    engine = engine_for(old, kv_policy="keep")
    request = Request(id=0, prompt_tokens=prompt(5, 6, 7), max_tokens=9, temperature=1.0)
    engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.load_weights(new / "model.safetensors", 1)
    completion = run(engine, [])[0]
    assert completion.spans == ((0, 0, 4), (1, 4, 9))

    sequence = torch.tensor([[*request.prompt_tokens.tolist(), *completion.tokens.tolist()]])
    cache = cache_argument(DynamicCache())
    with torch.no_grad():
        # Three prompt tokens and the first three sampled ones went in under the old weights.
        first = AutoModelForCausalLM.from_pretrained(old)(sequence[:, :6], **cache).logits
        second = AutoModelForCausalLM.from_pretrained(new)(sequence[:, 6:-1], **cache).logits
    logprobs = torch.log_softmax(torch.cat([first[0, 2:], second[0]]), dim=-1)
    expected = logprobs.gather(1, sequence[0, 3:, None])[:, 0].numpy()
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)
    assert np.abs(completion.logprobs - full_forward_logprobs(new, request, completion.tokens))[4:].max() > 0.1


def test_recomputation_in_several_passes_is_exact(llama: Path, checkpoints: Callable[[str, int], Path]) -> None:
    other = checkpoints("llama", 1)
    engine = engine_for(llama, slots=200)
    requests = requests_for(random_prompts(200, shortest=50, longest=60), max_tokens=4)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.load_weights(other / "model.safetensors", 1)
    completions = run(engine, [])
    for request in requests:
        assert_logprobs(other, request, completions[request.id], start=1)


def test_siblings_share_the_computation_of_their_prompt(llama: Path) -> None:
    engine = engine_for(llama, slots=8)
    tokens = random_prompts(1, shortest=20)[0]
    seen: list[int] = []

    def count(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            seen.append(arguments[0].numel())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    requests = requests_for([tokens] * 8, max_tokens=3)
    completions = run(engine, requests)
    hook.remove()
    assert seen == [19, 8, 8, 8]
    for request in requests:
        assert_logprobs(llama, request, completions[request.id])
    assert len({completion.tokens.tobytes() for completion in completions.values()}) > 1


def test_a_freed_slot_is_refilled_in_the_next_step(llama: Path) -> None:
    engine = engine_for(llama, slots=2)
    for request in requests_for(random_prompts(5), max_tokens=3):
        engine.submit(request)
    assert steps_until_done(engine) == 9  # three waves of three tokens


def test_one_free_slot_among_many_waits_a_few_steps_at_most(llama: Path) -> None:
    engine = engine_for(llama, slots=64)
    prompts = random_prompts(65)
    engine.submit(Request(id=0, prompt_tokens=prompts[0], max_tokens=1, temperature=1.0))
    for i in range(1, 65):
        engine.submit(Request(id=i, prompt_tokens=prompts[i], max_tokens=20, temperature=1.0))
    engine.step()
    waited = 0
    while engine.progress()[64] == 0:
        engine.step()
        waited += 1
    assert waited == REFILL_STEPS


def test_an_empty_engine_admits_a_single_request_at_once(llama: Path) -> None:
    engine = engine_for(llama, slots=64)
    engine.submit(requests_for([prompt(1)], max_tokens=1)[0])
    assert [completion.id for completion in engine.step()] == [0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_tokens": prompt()}, "0 prompt tokens"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"temperature": 0.0}, "temperature = 0"),
        ({"prompt_tokens": prompt(1, VOCABULARY)}, "token 64 is not in the model's vocabulary of 64"),
        ({"prompt_tokens": prompt(-1, 5)}, "token -1"),
    ],
)
def test_a_request_that_cannot_run_is_an_error_not_a_crash(llama: Path, changes: dict[str, object], said: str) -> None:
    fields: dict[str, object] = {"id": 3, "prompt_tokens": prompt(1), "max_tokens": 4, "temperature": 1.0}
    completion = run(engine_for(llama), [Request(**(fields | changes))])[3]  # type: ignore[arg-type]
    assert (completion.finish, completion.spans, len(completion.tokens)) == ("error", (), 0)
    assert said in completion.error


def test_a_row_with_broken_numbers_ends_as_error_and_harms_neither_neighbours_nor_successors(
    llama: Path, tmp_path: Path
) -> None:
    weights = load_file(llama / "model.safetensors")
    weights["model.embed_tokens.weight"][0] = torch.nan
    save_file(weights, tmp_path / "broken.safetensors", metadata={"format": "pt"})
    engine = engine_for(llama, slots=2, end_tokens=(0,))
    engine.load_weights(tmp_path / "broken.safetensors", 1)
    sound = Request(id=0, prompt_tokens=prompt(1, 2), max_tokens=40, temperature=1e-4)
    broken = Request(id=1, prompt_tokens=prompt(*range(1, 30), 0), max_tokens=9, temperature=1.0)
    after = Request(id=2, prompt_tokens=prompt(3), max_tokens=40, temperature=1e-4)
    completions = run(engine, [sound, broken, after])
    assert completions[1].finish == "error"
    assert "response token 0 under policy version 1 are not finite" in completions[1].error
    assert len(completions[1].tokens) == 0
    for request in (sound, after):
        assert completions[request.id].finish == "length"
        assert_logprobs(llama, request, completions[request.id])
    assert engine.generated_tokens == 80


def test_broken_weights_in_flight_keep_the_tokens_before_them(llama: Path, tmp_path: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    weights["model.norm.weight"][0] = torch.inf
    save_file(weights, tmp_path / "broken.safetensors", metadata={"format": "pt"})
    engine = engine_for(llama)
    request = requests_for([prompt(1, 2)])[0]
    engine.submit(request)
    engine.step()
    engine.load_weights(tmp_path / "broken.safetensors", 1)
    (completion,) = engine.step()
    assert (completion.finish, completion.spans) == ("error", ((0, 0, 1),))
    assert_logprobs(llama, request, completion)
    engine.load_weights(llama / "model.safetensors", 2)
    assert_logprobs(llama, request, run(engine, [request])[0])


def drop(weights: Weights) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def transpose(weights: Weights) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"].T.contiguous()


def add(weights: Weights) -> None:
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)


def quantise(weights: Weights) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop, r"lacks model\.layers\.1\.mlp\.up_proj\.weight; all weights"),
        (transpose, r"lm_head\.weight .* F32 \[32, 64\]; .* \[64, 32\] was expected"),
        (add, r"holds model\.layers\.2\.mlp\.up_proj\.weight, which the model does not have"),
        (quantise, r"model\.norm\.weight .* I8 \[32\]; a floating-point tensor"),
    ],
)
def test_weights_that_do_not_match_change_nothing(
    llama: Path, tmp_path: Path, damage: Callable[[Weights], None], said: str
) -> None:
    weights = {name: torch.zeros_like(weight) for name, weight in load_file(llama / "model.safetensors").items()}
    damage(weights)
    save_file(weights, tmp_path / "bad.safetensors")
    engine = engine_for(llama)
    with pytest.raises(WeightsError, match=said):
        engine.load_weights(tmp_path / "bad.safetensors", 1)
    request = requests_for([prompt(1, 2)])[0]
    completion = run(engine, [request])[0]
    assert completion.spans == ((0, 0, 12),)
    assert_logprobs(llama, request, completion)


def test_a_folder_is_not_a_weights_file(llama: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read as safetensors"):
        engine_for(llama).load_weights(llama, 1)


@pytest.mark.parametrize(
    "names", [("model.embed_tokens.weight",), ("lm_head.weight",), ("model.embed_tokens.weight", "lm_head.weight")]
)
def test_tied_weights_may_come_under_either_name_or_both(
    checkpoints: Callable[[str, int], Path], tmp_path: Path, names: tuple[str, ...]
) -> None:
    old, new = checkpoints("qwen2", 0), checkpoints("qwen2", 1)
    weights = load_file(new / "model.safetensors")
    tied = weights.pop("model.embed_tokens.weight")
    save_file(weights | {name: tied.clone() for name in names}, tmp_path / "tied.safetensors")
    engine = engine_for(old)
    engine.load_weights(tmp_path / "tied.safetensors", 1)
    request = requests_for([prompt(1, 2)])[0]
    assert_logprobs(new, request, run(engine, [request])[0])


def test_weights_are_cast_to_the_type_of_the_engine(llama: Path, tmp_path: Path) -> None:
    halves = tiny_model("llama", 0).to(torch.bfloat16)  # type: ignore[arg-type]
    halves.save_pretrained(tmp_path / "halves")
    halves.to(torch.float32).save_pretrained(tmp_path / "rounded")
    engine = engine_for(llama)
    engine.load_weights(tmp_path / "halves" / "model.safetensors", 1)
    request = requests_for([prompt(1, 2)])[0]
    assert_logprobs(tmp_path / "rounded", request, run(engine, [request])[0])


def test_a_bfloat16_engine_gives_float32_logprobs_near_those_of_the_float32_model(llama: Path) -> None:
    engine = engine_for(llama, dtype="bfloat16")
    requests = requests_for(random_prompts(6))
    completions = run(engine, requests)
    for request in requests:
        completion = completions[request.id]
        assert completion.logprobs.dtype == np.float32
        expected = full_forward_logprobs(llama, request, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=0.2)


def test_the_generation_config_of_the_checkpoint_does_not_touch_sampling(llama: Path, tmp_path: Path) -> None:
    configured_model = save_tiny_model(tmp_path)
    defaults = {"do_sample": True, "top_k": 1, "repetition_penalty": 5.0, "eos_token_id": [9]}
    (configured_model / "generation_config.json").write_text(json.dumps(defaults))
    requests = requests_for(random_prompts(4))
    plain, configured = run(engine_for(llama), requests), run(engine_for(configured_model), requests)
    assert all(plain[i].tokens.tolist() == configured[i].tokens.tolist() for i in plain)
