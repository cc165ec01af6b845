"""What every engine behind `producers.engine.Engine` promises. A new engine joins by a factory in `FACTORIES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.errors import WeightsError
from gvm_stream.producers.engine import Completion, Engine, Request
from gvm_stream.producers.transformers_engine import TransformersEngine
from tests.tiny_models import full_forward_logprobs, prompt, random_prompts, requests_for, run, save_tiny_model

GREEDY = 0.01  # a temperature
MAX_LENGTH = 48

Factory = Callable[..., Engine]


def transformers_engine(model: Path, slots: int = 4, end_tokens: tuple[int, ...] = (), seed: int = 0) -> Engine:
    return TransformersEngine(
        str(model),
        slots=slots,
        max_length=MAX_LENGTH,
        end_tokens=end_tokens,
        dtype="float32",
        device="cpu",
        kv_policy="recompute",
        seed=seed,
    )


def vllm_engine(model: Path, slots: int = 4, end_tokens: tuple[int, ...] = (), seed: int = 0) -> Engine:
    from tests.shared_vllm import shared_engine

    return shared_engine(model, slots=slots, max_length=MAX_LENGTH, end_tokens=end_tokens, seed=seed)


FACTORIES: dict[str, Factory] = {"transformers": transformers_engine, "vllm": vllm_engine}
KINDS = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=KINDS)
def make_engine(request: pytest.FixtureRequest) -> Iterator[Factory]:
    """Makes engines, one at a time: the one before is closed."""
    made: list[Engine] = []

    def make(*args: object, **options: object) -> Engine:
        while made:
            made.pop().close()
        made.append(FACTORIES[request.param](*args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "one-head", seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), "one-head", seed=1)


def greedy_tokens(make: Factory, model: Path, tokens: tuple[int, ...], count: int) -> list[int]:
    request = Request(id=0, prompt_tokens=prompt(*tokens), max_tokens=count, temperature=GREEDY)
    return [int(token) for token in run(make(model), [request])[0].tokens]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_logprobs_are_those_of_a_full_forward_at_the_sampling_temperature(
    make_engine: Factory, model: Path, temperature: float
) -> None:
    requests = requests_for(random_prompts(11), temperature=temperature)  # three times as many as slots
    completions = run(make_engine(model), requests)
    for request in requests:
        completion = completions[request.id]
        assert completion.finish == "length"
        assert len(completion.tokens) == 12
        assert completion.tokens.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        expected = full_forward_logprobs(model, request, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)


def test_requests_of_one_batch_keep_their_own_temperature(make_engine: Factory, model: Path) -> None:
    requests = [
        Request(id=i, prompt_tokens=prompt(3, 1, 4), max_tokens=8, temperature=t) for i, t in enumerate([GREEDY, 2.0])
    ]
    completions = run(make_engine(model), requests)
    for request, tolerance in zip(requests, (1e-3, 1e-5), strict=True):
        expected = full_forward_logprobs(model, request, completions[request.id].tokens)
        np.testing.assert_allclose(completions[request.id].logprobs, expected, rtol=0, atol=tolerance)
    assert completions[0].logprobs.mean() > -0.3
    assert completions[1].logprobs.mean() < -1


def test_more_requests_than_slots_all_end_and_are_counted(make_engine: Factory, model: Path) -> None:
    engine = make_engine(model, slots=3, end_tokens=(5, 6, 7, 8, 9))
    completions = run(engine, requests_for(random_prompts(20)))
    assert completions.keys() == set(range(20))
    assert engine.generated_tokens == sum(len(completion.tokens) for completion in completions.values())
    assert {completion.finish for completion in completions.values()} == {"stop", "length"}


def test_any_of_several_end_tokens_stops_and_stays_in_the_response(make_engine: Factory, model: Path) -> None:
    free = greedy_tokens(make_engine, model, (1, 2, 3), 20)
    ends = (free[4], free[7])
    first = min(free.index(end) for end in ends)
    request = Request(id=0, prompt_tokens=prompt(1, 2, 3), max_tokens=20, temperature=GREEDY)
    completion = run(make_engine(model, end_tokens=ends), [request])[0]
    assert completion.finish == "stop"
    assert completion.tokens.tolist() == free[: first + 1]


def test_an_end_token_at_the_cap_is_a_stop(make_engine: Factory, model: Path) -> None:
    free = greedy_tokens(make_engine, model, (1, 2, 3), 20)
    cap = free.index(free[4]) + 1
    request = Request(id=0, prompt_tokens=prompt(1, 2, 3), max_tokens=cap, temperature=GREEDY)
    assert run(make_engine(model, end_tokens=(free[4],)), [request])[0].finish == "stop"
    assert run(make_engine(model), [request])[0].finish == "length"


def test_end_tokens_in_the_prompt_end_nothing(make_engine: Factory, model: Path) -> None:
    request = Request(id=0, prompt_tokens=prompt(1, 2, 3), max_tokens=20, temperature=GREEDY)
    free = run(make_engine(model), [request])[0].tokens
    end = next(token for token in request.prompt_tokens.tolist() if token not in free)
    assert run(make_engine(model, end_tokens=(end,)), [request])[0].tokens.tolist() == free.tolist()


def test_what_exactly_fits_runs_and_one_token_more_is_an_error_with_the_numbers(
    make_engine: Factory, model: Path
) -> None:
    engine = make_engine(model)
    prompts = [prompt(*range(40)), prompt(*range(41))]
    completions = run(engine, requests_for(prompts, max_tokens=8))
    assert (completions[0].finish, len(completions[0].tokens)) == ("length", 8)
    assert (completions[1].finish, len(completions[1].tokens), completions[1].spans) == ("error", 0, ())
    assert "41 prompt tokens and max_tokens = 8 make 49" in completions[1].error
    assert "48" in completions[1].error


def test_abort_ends_running_requests_with_what_they_have_and_waiting_ones_with_nothing(
    make_engine: Factory, model: Path
) -> None:
    engine = make_engine(model, slots=4)
    requests = requests_for(random_prompts(8), max_tokens=20)
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        assert engine.step() == []
    assert engine.progress() == {0: 3, 1: 3, 2: 3, 3: 3, 4: 0, 5: 0, 6: 0, 7: 0}
    engine.abort([0, 1, 2, 3, 4, 5, 6, 7, 99])
    completions = {completion.id: completion for completion in engine.step()}
    assert completions.keys() == set(range(8))
    assert not engine.has_work()
    for request in requests[:4]:
        completion = completions[request.id]
        assert (completion.finish, completion.spans) == ("abort", ((0, 0, 3),))
        expected = full_forward_logprobs(model, request, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)
    for request in requests[4:]:
        assert (completions[request.id].finish, len(completions[request.id].tokens)) == ("abort", 0)
        assert completions[request.id].spans == ()
    assert engine.generated_tokens == 12


def test_abort_leaves_the_others_alone(make_engine: Factory, model: Path) -> None:
    engine = make_engine(model, slots=4)
    requests = requests_for(random_prompts(6, shortest=5), max_tokens=10)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.abort([0, 2, 5])
    ended = run(engine, [])
    assert {i for i, completion in ended.items() if completion.finish == "abort"} == {0, 2, 5}
    for i in (1, 3, 4):
        expected = full_forward_logprobs(model, requests[i], ended[i].tokens)
        np.testing.assert_allclose(ended[i].logprobs, expected, rtol=0, atol=1e-5)


def test_aborting_what_has_just_ended_does_nothing(make_engine: Factory, model: Path) -> None:
    engine = make_engine(model)
    engine.submit(requests_for([prompt(1)], max_tokens=1)[0])
    (completion,) = engine.step()
    engine.abort([completion.id])
    assert (completion.finish, engine.has_work(), engine.step()) == ("length", False, [])


def test_an_update_in_the_middle_splits_spans_and_continues_as_a_fresh_engine_would(
    make_engine: Factory, model: Path, other: Path
) -> None:
    engine = make_engine(model, slots=4)
    requests = requests_for(random_prompts(4), max_tokens=16)
    for request in requests:
        engine.submit(request)
    for _ in range(6):
        engine.step()
    engine.load_weights(other / "model.safetensors", 7)
    assert engine.version == 7
    completions = run(engine, [])
    for request in requests:
        completion = completions[request.id]
        assert completion.spans == ((0, 0, 6), (7, 6, 16))
        before, after = (full_forward_logprobs(path, request, completion.tokens) for path in (model, other))
        np.testing.assert_allclose(completion.logprobs[:6], before[:6], rtol=0, atol=1e-5)
        np.testing.assert_allclose(completion.logprobs[6:], after[6:], rtol=0, atol=1e-5)


def test_an_update_before_the_first_token_leaves_one_span(make_engine: Factory, model: Path, other: Path) -> None:
    engine = make_engine(model, slots=1)
    for request in requests_for([prompt(1, 2), prompt(3)], max_tokens=2):
        engine.submit(request)
    engine.step()
    engine.load_weights(other / "model.safetensors", 1)
    engine.load_weights(model / "model.safetensors", 2)
    completions = run(engine, [])
    assert completions[0].spans == ((0, 0, 1), (2, 1, 2))
    assert completions[1].spans == ((2, 0, 2),)


def test_loading_the_same_version_again_does_not_split_a_span(make_engine: Factory, model: Path) -> None:
    engine = make_engine(model)
    engine.submit(requests_for([prompt(1, 2)], max_tokens=4)[0])
    engine.step()
    engine.load_weights(model / "model.safetensors", 0)
    assert run(engine, [])[0].spans == ((0, 0, 4),)


def test_a_failed_update_leaves_weights_version_and_random_stream_in_force(
    make_engine: Factory, model: Path, tmp_path: Path
) -> None:
    whole = (model / "model.safetensors").read_bytes()
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(whole[: len(whole) // 2])
    requests = requests_for(random_prompts(4))

    def sample(disturb: Callable[[Engine], None]) -> dict[int, Completion]:
        engine = make_engine(model)
        for request in requests:
            engine.submit(request)
        engine.step()
        disturb(engine)
        assert engine.version == 0
        return run(engine, [])

    def disturb(engine: Engine) -> None:
        for path in (truncated, tmp_path / "absent.safetensors"):
            with pytest.raises(WeightsError, match=path.name):
                engine.load_weights(path, 1)

    expected = sample(lambda engine: None)
    for i, completion in sample(disturb).items():
        assert completion.tokens.tolist() == expected[i].tokens.tolist()
        assert completion.logprobs.tolist() == expected[i].logprobs.tolist()
        assert completion.spans == ((0, 0, 12),)


def test_the_seed_decides_the_samples(make_engine: Factory, model: Path) -> None:
    requests = requests_for(random_prompts(6))
    first, again, another = (run(make_engine(model, seed=seed), requests) for seed in (3, 3, 4))
    assert all(first[i].tokens.tolist() == again[i].tokens.tolist() for i in first)
    assert any(first[i].tokens.tolist() != another[i].tokens.tolist() for i in first)


def test_scores_are_those_of_a_full_forward_with_the_weights_in_force(
    make_engine: Factory, model: Path, other: Path
) -> None:
    engine = make_engine(model)
    tokens = random_prompts(1, seed=5, shortest=30, longest=30)[0]
    sequence = Request(id=0, prompt_tokens=tokens[:1], max_tokens=29, temperature=1.0)
    np.testing.assert_allclose(engine.score(tokens), full_forward_logprobs(model, sequence, tokens[1:]), atol=1e-5)
    engine.load_weights(other / "model.safetensors", 1)
    scores = engine.score(tokens)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, full_forward_logprobs(other, sequence, tokens[1:]), atol=1e-5)
    assert engine.generated_tokens == 0


def test_scoring_loses_nothing_of_what_runs(make_engine: Factory, model: Path) -> None:
    engine = make_engine(model, slots=4)
    requests = requests_for(random_prompts(6), max_tokens=2)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.score(prompt(1, 2, 3))  # with all slots taken
    completions = run(engine, [])
    for request in requests:
        assert len(completions[request.id].tokens) == 2
        expected = full_forward_logprobs(model, request, completions[request.id].tokens)
        np.testing.assert_allclose(completions[request.id].logprobs, expected, rtol=0, atol=1e-5)


def test_the_load_tells_what_runs_and_what_waits(make_engine: Factory, model: Path) -> None:
    engine = make_engine(model, slots=3)
    assert (engine.load().running, engine.load().waiting) == (0, 0)
    for request in requests_for(random_prompts(5)):
        engine.submit(request)
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.preemptions) == (3, 2, 0)
    assert 0 < load.cache_used <= 1
    engine.abort([0, 1, 2, 3, 4])
    assert (engine.load().running, engine.load().waiting) == (0, 0)


def test_an_idle_engine_has_no_work_and_steps_to_nothing(make_engine: Factory, model: Path) -> None:
    engine = make_engine(model)
    assert (engine.has_work(), engine.step(), engine.progress(), engine.generated_tokens) == (False, [], {}, 0)


def test_closing_forgets_what_was_running_and_waiting(make_engine: Factory, model: Path) -> None:
    engine = make_engine(model, slots=1)
    for request in requests_for([prompt(1), prompt(2)]):
        engine.submit(request)
    engine.step()
    engine.close()
    assert (engine.has_work(), engine.progress()) == (False, {})


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 12), st.integers(1, 9)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("update"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    ),
    max_size=25,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(actions=ACTIONS)
def test_whatever_happens_every_request_ends_once_with_spans_and_logprobs_of_its_versions(
    kind: str, model: Path, other: Path, actions: list[tuple[str, int, int]]
) -> None:
    engine = FACTORIES[kind](model, slots=3, end_tokens=(1, 2, 3))
    weights = [model]
    requests: list[Request] = []
    ended: list[Completion] = []
    for action, number, cap in actions:
        if action == "submit":
            tokens = random_prompts(1, seed=len(requests) // 2, shortest=number, longest=number)[0]
            temperature = (0.5, 1.0, 1.5)[len(requests) % 3]
            requests.append(Request(id=len(requests), prompt_tokens=tokens, max_tokens=cap, temperature=temperature))
            engine.submit(requests[-1])
        elif action == "abort":
            engine.abort([number, number + 1])
        elif action == "update":
            weights.append((model, other)[number])
            engine.load_weights(weights[-1] / "model.safetensors", len(weights) - 1)
        else:
            for _ in range(number):
                ended.extend(engine.step())
        assert engine.progress().keys() <= {request.id for request in requests} - {c.id for c in ended}
    while engine.has_work():
        ended.extend(engine.step())
    assert sorted(completion.id for completion in ended) == list(range(len(requests)))
    assert engine.generated_tokens == sum(len(completion.tokens) for completion in ended)
    for completion in ended:
        request = requests[completion.id]
        bounds = [0, *(end for _, _, end in completion.spans)]
        assert [start for _, start, _ in completion.spans] == bounds[:-1]
        assert bounds[-1] == len(completion.tokens)
        for version, start, end in completion.spans:
            expected = full_forward_logprobs(weights[version], request, completion.tokens)
            np.testing.assert_allclose(completion.logprobs[start:end], expected[start:end], rtol=0, atol=1e-5)
