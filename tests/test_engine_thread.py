from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio

from gvm_stream.errors import ModelError
from gvm_stream.producers.engine import Completion, Engine, Request
from gvm_stream.producers.engine_thread import (
    Completed,
    EngineDied,
    EngineThread,
    Event,
    WeightsFailed,
    WeightsLoaded,
    run_engine,
)
from gvm_stream.wire.messages import Canary
from tests.doubles import ENDLESS, ScriptedEngine

Events = trio.MemoryReceiveChannel[Event]


def request(id: int, *prompt: int, max_tokens: int = 1000) -> Request:
    return Request(id=id, prompt_tokens=np.array(prompt, np.int32), max_tokens=max_tokens, temperature=1.0)


@asynccontextmanager
async def running(make: Callable[[], Engine]) -> AsyncIterator[tuple[EngineThread, Events]]:
    send, events = trio.open_memory_channel[Event](math.inf)
    with trio.fail_after(10):
        async with run_engine(make, send) as thread:
            yield thread, events


async def test_completions_come_back_and_one_thread_of_its_own_did_it_all() -> None:
    engine = ScriptedEngine()
    async with running(lambda: engine) as (thread, events):
        thread.submit([request(1, 7, 8, 9), request(2, 5)])
        ended: dict[int, Completion] = {}
        while len(ended) < 2:
            event = await events.receive()
            assert isinstance(event, Completed)
            ended.update({completion.id: completion for completion in event.completions})
        assert ended[1].tokens.tolist() == [7, 8, 9]
        assert ended[2].tokens.tolist() == [5]
        assert thread.generated_tokens == 4
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


async def test_a_version_update_falls_between_two_steps() -> None:
    engine = ScriptedEngine()
    async with running(lambda: engine) as (thread, events):
        engine.after[2] = lambda: thread.load_weights(Path("w1"), 1, None)
        thread.submit([request(1, ENDLESS, max_tokens=5)])
        loaded, completed = await events.receive(), await events.receive()
    assert isinstance(loaded, WeightsLoaded)
    assert loaded.version == 1
    assert loaded.seconds >= 0
    assert isinstance(completed, Completed)
    assert completed.completions[0].spans == ((0, 0, 2), (1, 2, 5))
    assert engine.loaded == [Path("w1")]


async def test_a_load_that_fails_keeps_the_old_version_and_the_work() -> None:
    engine = ScriptedEngine()
    engine.unloadable = {1}
    async with running(lambda: engine) as (thread, events):
        engine.after[2] = lambda: thread.load_weights(Path("w1"), 1, None)
        thread.submit([request(1, ENDLESS, max_tokens=4)])
        failed, completed = await events.receive(), await events.receive()
    assert failed == WeightsFailed(1, "version 1 cannot be loaded")
    assert isinstance(completed, Completed)
    assert completed.completions[0].spans == ((0, 0, 4),)


async def test_the_canary_is_scored_with_the_new_weights_before_anything_else_is_submitted() -> None:
    engine = ScriptedEngine()
    engine.scores = {1: -1.5, 2: math.nan}
    canary = Canary(tokens=np.arange(4, dtype="<i4").tobytes(), logprobs=np.array([-1, -1, -2], "<f4").tobytes())
    async with running(lambda: engine) as (thread, events):
        for version in (1, 2):
            thread.load_weights(Path(f"w{version}"), version, canary)
        first, second = await events.receive(), await events.receive()
    assert isinstance(first, WeightsLoaded)
    assert first.difference == pytest.approx(0.5)
    assert isinstance(second, WeightsLoaded)
    assert second.difference == math.inf  # what is not a number is never right


async def test_an_idle_engine_loads_weights_at_once_and_does_not_step() -> None:
    engine = ScriptedEngine()
    async with running(lambda: engine) as (thread, events):
        thread.load_weights(Path("w1"), 1, None)
        assert isinstance(await events.receive(), WeightsLoaded)
    assert engine.version == 1
    assert engine.steps <= 1  # the one after the command
    assert engine.closed


async def test_an_aborted_request_comes_back_with_what_it_has() -> None:
    engine = ScriptedEngine()
    async with running(lambda: engine) as (thread, events):
        engine.after[3] = lambda: thread.abort([1, 99])
        thread.submit([request(1, ENDLESS)])
        event = await events.receive()
        assert isinstance(event, Completed)
        (completion,) = event.completions
        assert completion.finish == "abort"
        assert len(completion.tokens) == thread.generated_tokens == 3


async def test_an_engine_that_raises_is_reported_once_with_its_error_and_closed() -> None:
    engine = ScriptedEngine()

    def explode() -> None:
        raise RuntimeError("out of memory")

    engine.after[2] = explode
    async with running(lambda: engine) as (thread, events):
        thread.submit([request(1, ENDLESS), request(2, 5)])
        assert isinstance(await events.receive(), Completed)
        died = await events.receive()
        assert isinstance(died, EngineDied)
        assert str(died.error) == "out of memory"
        thread.submit([request(3, 5)])  # into the void
    with pytest.raises(trio.WouldBlock):
        events.receive_nowait()
    assert engine.closed
    assert thread.generated_tokens == 3


async def test_an_error_of_the_maker_is_raised() -> None:
    def make() -> Engine:
        raise ModelError("no such model")

    with pytest.RaisesGroup(pytest.RaisesExc(ModelError, match="no such model"), flatten_subgroups=True):
        async with running(make):
            raise AssertionError("there is no engine")


async def test_the_thread_is_gone_after_the_block_however_it_ends() -> None:
    engine = ScriptedEngine()
    with trio.move_on_after(5) as scope:
        async with running(lambda: engine) as (thread, _):
            thread.submit([request(1, ENDLESS)])
            engine.after[5] = lambda: trio.from_thread.run_sync(scope.cancel)
            await trio.sleep_forever()
    assert engine.closed
    steps = engine.steps
    thread.submit([request(2, 5)])
    await trio.sleep(0.01)
    assert engine.steps == steps


async def test_progress_is_a_picture_of_the_running_requests() -> None:
    engine = ScriptedEngine()
    async with running(lambda: engine) as (thread, events):
        seen: list[dict[int, int]] = []
        engine.after[2] = lambda: seen.append(thread.progress)  # taken after the first step
        engine.after[3] = lambda: thread.abort([1])
        thread.submit([request(1, ENDLESS)])
        await events.receive()
    assert seen == [{1: 1}]
    assert thread.progress == {}


async def test_a_test_is_made_once_with_the_first_weights_and_its_tokens_do_not_count() -> None:
    engine, seen = ScriptedEngine(), []

    def test(tested: Engine, weights: Path) -> None:
        seen.append(weights)
        tested.submit(request(-1, 7, 8))
        while tested.has_work():
            tested.step()

    send, events = trio.open_memory_channel[Event](math.inf)
    with trio.fail_after(10):
        async with run_engine(lambda: engine, send, test) as thread:
            for version in (1, 2):
                thread.load_weights(Path(f"w{version}"), version, None)
            thread.submit([request(1, 5, 6, 7)])
            while not isinstance(await events.receive(), Completed):
                pass
    assert seen == [Path("w1")]
    assert (engine.generated_tokens, thread.generated_tokens) == (5, 3)


async def test_an_engine_that_fails_its_test_is_dead() -> None:
    def test(engine: Engine, weights: Path) -> None:
        raise ModelError("its log-probs are wrong")

    send, events = trio.open_memory_channel[Event](math.inf)
    with trio.fail_after(10):
        async with run_engine(ScriptedEngine, send, test) as thread:
            thread.load_weights(Path("w1"), 1, None)
            died = await events.receive()
    assert isinstance(died, EngineDied)
    assert str(died.error) == "its log-probs are wrong"
