"""What every engine behind `producers.engine.Engine` promises. A new engine joins by a factory in `FACTORIES`.

Engines in this process generate one token for every running request in a step, and with the same seed the same ones;
`make_stepped` makes only those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gvm_stream.errors import WeightsError
from gvm_stream.producers.engine import Completion, Engine, Request
from gvm_stream.producers.transformers_engine import TransformersEngine
from tests.tiny_models import (
    LONGEST,
    VOCABULARY,
    full_forward_logprobs,
    prompt,
    random_prompts,
    requests_for,
    run,
    save_tiny_model,
)

GREEDY = 0.01  # a temperature
ENDLESS = 5900
"""Tokens of a response that still runs when something happens to it. A server can be far ahead of what it has sent."""

Factory = Callable[..., Engine]


def transformers_engine(model: Path, slots: int = 4, end_tokens: tuple[int, ...] = (), seed: int = 0) -> Engine:
    return TransformersEngine(
        str(model),
        slots=slots,
        max_length=LONGEST,
        end_tokens=end_tokens,
        dtype="float32",
        device="cpu",
        kv_policy="recompute",
        seed=seed,
    )


def vllm_engine(model: Path, slots: int = 4, end_tokens: tuple[int, ...] = (), seed: int = 0) -> Engine:
    from tests.shared_vllm import shared_engine

    return shared_engine(model, slots=slots, max_length=LONGEST, end_tokens=end_tokens, seed=seed)


def vllm_server_engine(model: Path, slots: int = 4, end_tokens: tuple[int, ...] = (), seed: int = 0) -> Engine:
    from tests.vllm_server_process import shared_server_engine

    return shared_server_engine(model, slots=slots, max_length=LONGEST, end_tokens=end_tokens)


FACTORIES: dict[str, Factory] = {
    "transformers": transformers_engine,
    "vllm": vllm_engine,
    "vllm-server": vllm_server_engine,
}
STEPPED = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
KINDS = ["transformers", *(pytest.param(kind, marks=pytest.mark.vllm) for kind in ("vllm", "vllm-server"))]


@pytest.fixture(params=KINDS)
def make_engine(request: pytest.FixtureRequest) -> Iterator[Factory]:
    yield from one_at_a_time(request.param)


@pytest.fixture(params=STEPPED)
def make_stepped(request: pytest.FixtureRequest) -> Iterator[Factory]:
    yield from one_at_a_time(request.param)


def one_at_a_time(kind: str) -> Iterator[Factory]:
    """Makes engines; the one before is closed."""
    made: list[Engine] = []

    def make(*args: object, **options: object) -> Engine:
        while made:
            made.pop().close()
        made.append(FACTORIES[kind](*args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def until_all_run(engine: Engine, ids: Iterable[int]) -> None:
    """Step until each of these has more tokens than now. None of them may end."""
    before = engine.progress()
    while any(engine.progress()[id] == before[id] for id in ids):
        assert engine.step() == []


def abort(engine: Engine, ids: Iterable[int]) -> dict[int, Completion]:
    """Abort these, and run the others to their ends; all of it."""
    engine.abort(list(ids))
    return run(engine, [])


def assert_logprobs(weights: dict[int, Path], request: Request, completion: Completion) -> None:
    """Every token's log-prob is that of the weights its span names."""
    bounds = [0, *(end for _, _, end in completion.spans)]
    assert [start for _, start, _ in completion.spans] == bounds[:-1]
    assert bounds[-1] == len(completion.tokens)
    for version, start, end in completion.spans:
        expected = full_forward_logprobs(weights[version], request, completion.tokens)[start:end]
        np.testing.assert_allclose(completion.logprobs[start:end], expected, rtol=0, atol=2e-5)


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
    ends = tuple(range(0, VOCABULARY, 3))
    completions = run(make_engine(model, end_tokens=ends), requests_for(random_prompts(12), max_tokens=28))
    assert sum(completion.finish == "stop" for completion in completions.values()) > 6
    for completion in completions.values():
        *before, last = completion.tokens.tolist()
        assert not set(before) & set(ends)
        assert (completion.finish == "stop") == (last in ends)


def test_an_end_token_at_the_cap_is_a_stop(make_engine: Factory, model: Path) -> None:
    request = Request(id=0, prompt_tokens=prompt(1, 2, 3), max_tokens=1, temperature=1.0)
    assert run(make_engine(model, end_tokens=tuple(range(VOCABULARY))), [request])[0].finish == "stop"
    assert run(make_engine(model), [request])[0].finish == "length"


def test_end_tokens_in_the_prompt_end_nothing(make_engine: Factory, model: Path) -> None:
    request = Request(id=0, prompt_tokens=prompt(1, 2, 3), max_tokens=20, temperature=1.0)
    completion = run(make_engine(model, end_tokens=(3,)), [request])[0]
    assert len(completion.tokens) == 20 or completion.tokens[-1] == 3
    assert completion.finish == ("stop" if completion.tokens[-1] == 3 else "length")


def test_what_exactly_fits_runs_and_one_token_more_is_an_error_with_the_numbers(
    make_engine: Factory, model: Path
) -> None:
    engine = make_engine(model)
    prompts = [random_prompts(1, shortest=length, longest=length)[0] for length in (LONGEST - 8, LONGEST - 7)]
    completions = run(engine, requests_for(prompts, max_tokens=8))
    assert (completions[0].finish, len(completions[0].tokens)) == ("length", 8)
    assert (completions[1].finish, len(completions[1].tokens), completions[1].spans) == ("error", 0, ())
    assert "5993 prompt tokens and max_tokens = 8 make 6001" in completions[1].error
    assert "6000" in completions[1].error


def test_abort_ends_running_requests_with_what_they_have_and_waiting_ones_with_nothing(
    make_engine: Factory, model: Path
) -> None:
    engine = make_engine(model, slots=4)
    requests = requests_for(random_prompts(8, longest=6), max_tokens=ENDLESS)
    for request in requests:
        engine.submit(request)
    until_all_run(engine, range(4))
    completions = abort(engine, [*range(8), 99])
    assert completions.keys() == set(range(8))
    assert {completion.finish for completion in completions.values()} == {"abort"}
    for request in requests[:4]:
        assert 1 <= len(completions[request.id].tokens) < ENDLESS
        assert_logprobs({0: model}, request, completions[request.id])
    for request in requests[4:]:
        assert (len(completions[request.id].tokens), completions[request.id].spans) == (0, ())
    assert engine.generated_tokens == sum(len(completion.tokens) for completion in completions.values())


def test_a_step_is_a_token_for_every_running_request_and_an_abort_comes_between_two(
    make_stepped: Factory, model: Path
) -> None:
    engine = make_stepped(model, slots=4)
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
    requests = requests_for(random_prompts(6, shortest=5, longest=6), max_tokens=250)
    for i in (0, 2, 5):
        requests[i] = replace(requests[i], max_tokens=ENDLESS)
    for request in requests:
        engine.submit(request)
    engine.step()
    ended = abort(engine, (0, 2, 5))
    assert {i for i, completion in ended.items() if completion.finish == "abort"} == {0, 2, 5}
    for i in (1, 3, 4):
        assert len(ended[i].tokens) == 250
        assert_logprobs({0: model}, requests[i], ended[i])


def test_aborting_what_has_just_ended_does_nothing(make_engine: Factory, model: Path) -> None:
    engine = make_engine(model)
    (completion,) = run(engine, requests_for([prompt(1)], max_tokens=1)).values()
    engine.abort([completion.id])
    assert (completion.finish, engine.has_work(), engine.step()) == ("length", False, [])


def test_an_update_in_the_middle_splits_spans_and_continues_as_a_fresh_engine_would(
    make_engine: Factory, model: Path, other: Path
) -> None:
    engine = make_engine(model, slots=5)
    requests = requests_for(random_prompts(5, longest=6), max_tokens=ENDLESS)
    for request in requests[:4]:
        engine.submit(request)
    until_all_run(engine, range(4))
    engine.load_weights(other / "model.safetensors", 7)
    assert engine.version == 7
    requests[4] = replace(requests[4], max_tokens=8)  # when it ends, the others have tokens of the new version, too
    engine.submit(requests[4])
    while not (ended := engine.step()):
        pass
    completions = {completion.id: completion for completion in ended} | abort(engine, range(4))
    assert [version for version, _, _ in completions.pop(4).spans] == [7]
    for request in requests[:4]:
        assert [version for version, _, _ in completions[request.id].spans] == [0, 7]
        assert_logprobs({0: model, 7: other}, request, completions[request.id])


def test_an_update_between_two_steps_splits_spans_exactly_there(
    make_stepped: Factory, model: Path, other: Path
) -> None:
    engine = make_stepped(model, slots=4)
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


def test_an_update_before_the_first_token_leaves_one_span(make_stepped: Factory, model: Path, other: Path) -> None:
    engine = make_stepped(model, slots=1)
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
    engine.submit(requests_for([prompt(1, 2)], max_tokens=ENDLESS)[0])
    until_all_run(engine, [0])
    engine.load_weights(model / "model.safetensors", 0)
    until_all_run(engine, [0])
    completion = abort(engine, [0])[0]
    assert completion.spans == ((0, 0, len(completion.tokens)),)


def test_a_failed_update_leaves_weights_and_version_in_force(make_engine: Factory, model: Path, tmp_path: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(whole[: len(whole) // 2])
    engine = make_engine(model)
    requests = requests_for(random_prompts(4, longest=6), max_tokens=ENDLESS)
    for request in requests:
        engine.submit(request)
    until_all_run(engine, range(4))
    for path in (truncated, tmp_path / "absent.safetensors"):
        with pytest.raises(WeightsError, match=path.name):
            engine.load_weights(path, 1)
    assert engine.version == 0
    until_all_run(engine, range(4))
    completions = abort(engine, range(4))
    for request in requests:
        assert [version for version, _, _ in completions[request.id].spans] == [0]
        assert_logprobs({0: model}, request, completions[request.id])


def test_a_failed_update_leaves_the_random_stream_as_it_was(make_stepped: Factory, model: Path, tmp_path: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(whole[: len(whole) // 2])
    requests = requests_for(random_prompts(4))

    def sample(disturb: Callable[[Engine], None]) -> dict[int, Completion]:
        engine = make_stepped(model)
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


def test_the_seed_decides_the_samples(make_stepped: Factory, model: Path) -> None:
    requests = requests_for(random_prompts(6))
    first, again, another = (run(make_stepped(model, seed=seed), requests) for seed in (3, 3, 4))
    assert all(first[i].tokens.tolist() == again[i].tokens.tolist() for i in first)
    assert any(first[i].tokens.tolist() != another[i].tokens.tolist() for i in first)


def test_scores_are_those_of_a_full_forward_with_the_weights_in_force(
    make_engine: Factory, model: Path, other: Path
) -> None:
    engine = make_engine(model)
    tokens = random_prompts(1, seed=5, shortest=30, longest=30)[0]
    sequence = Request(id=0, prompt_tokens=tokens[:1], max_tokens=29, temperature=1.0)
    (scores,) = engine.score(tokens)
    np.testing.assert_allclose(scores, full_forward_logprobs(model, sequence, tokens[1:]), atol=1e-5)
    engine.load_weights(other / "model.safetensors", 1)
    (scores,) = engine.score(tokens)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, full_forward_logprobs(other, sequence, tokens[1:]), atol=1e-5)
    assert engine.generated_tokens == 0


def test_scoring_loses_nothing_of_what_runs(make_engine: Factory, model: Path) -> None:
    engine = make_engine(model, slots=4)
    requests = requests_for(random_prompts(6), max_tokens=12)
    for request in requests:
        engine.submit(request)
    ended = engine.step()
    engine.score(prompt(1, 2, 3))  # with all slots taken
    completions = {completion.id: completion for completion in ended} | run(engine, [])
    for request in requests:
        assert len(completions[request.id].tokens) == 12
        assert_logprobs({0: model}, request, completions[request.id])


def test_the_load_tells_what_runs_and_what_waits(make_stepped: Factory, model: Path) -> None:
    engine = make_stepped(model, slots=3)
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
        assert_logprobs(dict(enumerate(weights)), requests[completion.id], completion)
