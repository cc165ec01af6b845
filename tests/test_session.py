"""A producer's session between a scripted engine and a scripted allocator, with real sockets and a real verifier."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import trio

from gvm_stream.allocator.types import Cancelled, Failed, Scored, Unscorable
from gvm_stream.config import (
    Config,
    DataSection,
    ModelSection,
    ProducerSection,
    SamplingSection,
    VerifierSection,
)
from gvm_stream.errors import GvmStreamError, ModelError
from gvm_stream.metrics import Metrics
from gvm_stream.process import leaf_error
from gvm_stream.producers import engine_thread
from gvm_stream.producers.engine import EngineLoad
from gvm_stream.producers.engine_thread import Event, run_engine
from gvm_stream.producers.following import LOAD_ATTEMPTS, TOLERANCE
from gvm_stream.producers.session import Session
from gvm_stream.producers.weights import weights_source
from gvm_stream.verify.pool import VerifierPool
from gvm_stream.weights import checksum
from gvm_stream.wire import messages as m
from gvm_stream.wire.check import open_rollout
from gvm_stream.wire.link import open_link
from gvm_stream.wire.payload import unpack
from tests.doubles import (
    ENDLESS,
    IMPOSSIBLE,
    ScriptedAllocator,
    ScriptedEngine,
    local_stream,
    scripted_allocator,
    text_tokens,
)

SLOTS, MAX_TOKENS = 4, 12
FOR_EVER = 10_000_000


@dataclass
class Stage:
    allocator: ScriptedAllocator
    engine: ScriptedEngine
    leave: trio.Event
    folder: Path
    metrics: Metrics = field(default_factory=lambda: Metrics("producer"))
    result: str | GvmStreamError = "still running"
    ended: trio.Event = field(default_factory=trio.Event)

    def weights(self, version: int, *, there: bool = True, canary: float | None = None) -> m.WeightsInfo:
        """`canary`: what every token of the canary must score; None: there is none."""
        path = self.folder / f"v{version}"
        path.write_bytes(b"weights %d" % version)
        info = m.WeightsInfo(
            version=version,
            path=str(path),
            size=path.stat().st_size,
            checksum=checksum(path),
            address="",
            canary=None if canary is None else expected_scores(canary),
        )
        if not there:
            path.unlink()
        return info

    async def join(self, weights: m.WeightsInfo | None) -> None:
        assert isinstance(await self.allocator.receive(), m.Hello)
        self.allocator.say(m.Welcome(run="r", next_step=0, settled=0, weights=weights))

    async def asked(self, version: int) -> None:
        """Wait until the session has asked for work: enough of it to fill its slots."""
        ask = await self.allocator.receive()
        assert isinstance(ask, m.Ask)
        assert ask.slots >= SLOTS
        assert ask.version == version

    async def running(self, count: int) -> None:
        """Wait until so many orders are in the engine, and at least one has tokens."""
        running: dict[int, int] = {}
        while len(running) < count or not any(running.values()):
            message = await self.allocator.receive_any()
            running = message.running if isinstance(message, m.Heartbeat) else {}

    async def rollouts(self, count: int) -> dict[int, m.Rollout]:
        """The next `count` rollouts by work, received; no work comes twice."""
        found: dict[int, m.Rollout] = {}
        while len(found) < count:
            message = await self.allocator.receive()
            assert isinstance(message, m.Rollouts), message
            self.allocator.say(m.Received(seq=message.seq))
            for rollout in message.rollouts:
                assert rollout.work not in found
                assert open_rollout(rollout)[1] == ""
                found[rollout.work] = rollout
        return found


def expected_scores(logprob: float) -> m.Canary:
    return m.Canary(tokens=np.arange(5, dtype="<i4").tobytes(), logprobs=np.full(4, logprob, "<f4").tobytes())


def order(work: int, prompt: str | int, answer: str = "", attempt: int = 0) -> m.WorkOrder:
    tokens = text_tokens(prompt) if isinstance(prompt, str) else np.array([prompt], "<i4").tobytes()
    return m.WorkOrder(work=work, attempt=attempt, prompt="train-1", prompt_tokens=tokens, answer=answer)


@asynccontextmanager
async def staged(
    folder: Path,
    *,
    heartbeat_s: float = 0.05,
    silence_s: float = 10,
    progress_s: float = 30,
    max_tokens: int = MAX_TOKENS,
    verifier: VerifierSection = VerifierSection(),  # noqa: B008 (frozen)
) -> AsyncIterator[Stage]:
    """A session beside the block; the block ends when the session has."""
    config = Config(
        model=ModelSection(path="m"),
        data=DataSection(train="t"),
        stream=local_stream(heartbeat_s=heartbeat_s, silence_s=max(silence_s, 3 * heartbeat_s), progress_s=progress_s),
        sampling=SamplingSection(max_tokens=max_tokens),
        producer=ProducerSection(slots=SLOTS),
        verifier=verifier,
    )
    engine, leave = ScriptedEngine(), trio.Event()
    async with scripted_allocator(config.stream) as allocator, trio.open_nursery() as nursery:
        stage = Stage(allocator, engine, leave, folder)
        nursery.start_soon(play, config, stage)
        with trio.fail_after(8):
            yield stage
            await stage.ended.wait()


async def play(config: Config, stage: Stage) -> None:
    to_session, events = trio.open_memory_channel[Event](math.inf)
    try:
        async with (
            open_link(config.stream, role="producer", name="p", agreed={}, patience_s=10) as link,
            trio.open_nursery() as nursery,
            weights_source(config, "p") as weights,
            VerifierPool(config.verifier) as pool,
            run_engine(lambda: stage.engine, to_session) as thread,
        ):
            nursery.start_soon(link.beat)
            session = Session(config, link, thread, events, pool, weights, decode, stage.metrics)
            stage.result = await session.run(stage.leave)
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = leaf_error(group)
        if error is None:
            raise
        stage.result = error
    stage.ended.set()


def decode(tokens: object) -> str:
    assert isinstance(tokens, list)
    return "".join(map(chr, tokens))


async def test_every_order_ends_as_exactly_one_rollout(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.join(stage.weights(3))
        await stage.asked(version=3)
        stage.allocator.say(
            m.Work(orders=(order(1, "42", "42"), order(2, "42", "43", attempt=1), order(3, IMPOSSIBLE))),
            m.Work(orders=(order(4, "much longer than the cap", "42"), order(-5, "7", "7"))),
        )
        found = await stage.rollouts(5)
        stage.allocator.say(m.Stop(reason="all done", final=True))
        assert await stage.allocator.receive() == m.Goodbye(reason="all done", generated_tokens=2 + 2 + MAX_TOKENS + 1)
    assert stage.result == "all done"
    rewards = {work: r.outcome.reward for work, r in found.items() if isinstance(r.outcome, Scored)}
    assert rewards == {1: 1.0, 2: 0.0, 4: 0.0, -5: 1.0}
    assert found[3].outcome == Failed(reason="the script says so", tokens=0)
    assert found[2].attempt == 1
    payload = unpack(found[1].payload)
    assert payload.tokens == text_tokens("42")
    assert payload.logprobs == np.full(2, -1.0, "<f4").tobytes()
    assert payload.spans == ((3, 0, 2),)
    assert [work for work, r in found.items() if isinstance(r.outcome, Scored) and r.outcome.truncated] == [4]


async def test_work_cancelled_by_the_allocator_comes_back_and_unknown_work_is_passed_over(tmp_path: Path) -> None:
    async with staged(tmp_path, max_tokens=FOR_EVER) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.allocator.say(m.Work(orders=(order(1, ENDLESS), order(2, ENDLESS))), m.Cancel(works=(2, 99), reason="r"))
        outcome = (await stage.rollouts(1))[2].outcome
        assert isinstance(outcome, Cancelled)
        assert outcome.reason == "cancelled by the allocator"
        stage.allocator.say(m.Stop(reason="s", final=False))
        assert (await stage.rollouts(1)).keys() == {1}


async def test_work_that_was_taken_for_lost_and_is_ordered_again_ends_once_for_each_attempt(tmp_path: Path) -> None:
    """A hello said twice can make an order cross it: the allocator then takes for lost what is on its way."""
    async with staged(tmp_path, max_tokens=FOR_EVER) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.allocator.say(m.Work(orders=(order(1, ENDLESS), order(2, "ab"))))
        await stage.rollouts(1)
        stage.allocator.say(m.Work(orders=(order(1, "7", "7", attempt=1), order(3, "7", "7"))))
        ended: list[tuple[int, int, type]] = []
        while len(ended) < 3:
            message = await stage.allocator.receive()
            assert isinstance(message, m.Rollouts)
            stage.allocator.say(m.Received(seq=message.seq))
            ended += [(r.work, r.attempt, type(r.outcome)) for r in message.rollouts]
        assert sorted(ended, key=repr) == [(1, 0, Cancelled), (1, 1, Scored), (3, 0, Scored)]
        stage.allocator.say(m.Stop(reason="s", final=True))
    assert stage.result == "s"


@pytest.mark.parametrize("how", ["stop", "leave"])
async def test_at_the_end_work_in_hand_goes_back_with_its_tokens_before_the_goodbye(tmp_path: Path, how: str) -> None:
    async with staged(tmp_path, max_tokens=FOR_EVER) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.allocator.say(m.Work(orders=tuple(order(work, ENDLESS) for work in range(1, 4))))
        await stage.running(3)
        if how == "stop":
            stage.allocator.say(m.Stop(reason="interrupted", final=False))
        else:
            stage.leave.set()
            # Before anything goes back: it would be handed out again to the same producer at once.
            assert await stage.allocator.receive() == m.Ask(slots=0, version=0)
        outcomes = [rollout.outcome for rollout in (await stage.rollouts(3)).values()]
        reason = "interrupted" if how == "stop" else "producer leaves"
        goodbye = await stage.allocator.receive()
    assert {type(outcome) for outcome in outcomes} == {Cancelled if how == "stop" else Failed}
    tokens = sum(outcome.tokens for outcome in outcomes)
    assert tokens >= 3
    assert goodbye == m.Goodbye(reason=reason, generated_tokens=tokens)
    assert stage.result == reason


async def test_an_order_that_crosses_the_farewell_goes_back_too(tmp_path: Path) -> None:
    async with staged(tmp_path, max_tokens=FOR_EVER) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.allocator.say(m.Work(orders=(order(1, ENDLESS),)))
        stage.engine.after[3] = lambda: trio.from_thread.run_sync(stage.leave.set)
        stage.engine.after[4] = lambda: trio.from_thread.run_sync(
            stage.allocator.say, m.Work(orders=(order(2, ENDLESS),))
        )
        assert await stage.allocator.receive() == m.Ask(slots=0, version=0)
        found: dict[int, m.Rollout] = {}
        while not isinstance(message := await stage.allocator.receive(), m.Goodbye):
            assert isinstance(message, m.Rollouts)
            stage.allocator.say(m.Received(seq=message.seq))
            found.update((rollout.work, rollout) for rollout in message.rollouts)
    assert found.keys() <= {1, 2}
    assert message.generated_tokens == sum(rollout.outcome.tokens for rollout in found.values())


async def test_a_restarted_allocator_hears_what_is_in_hand_and_gets_what_it_had_not_received(tmp_path: Path) -> None:
    async with staged(tmp_path, max_tokens=FOR_EVER) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.allocator.say(m.Work(orders=(order(1, "4", "4"), order(2, ENDLESS), order(3, "4", "4", attempt=2))))
        sent: list[m.Rollouts] = []
        while sum(len(message.rollouts) for message in sent) < 2:
            message = await stage.allocator.receive()
            assert isinstance(message, m.Rollouts)
            sent.append(message)
        stage.allocator.say(m.Unknown(), m.Unknown())
        hello = await stage.allocator.receive()
        assert isinstance(hello, m.Hello)
        assert hello.in_hand == {1: 0, 2: 0, 3: 2}
        stage.allocator.say(m.Welcome(run="r", next_step=0, settled=0, weights=stage.weights(1)))
        assert [await stage.allocator.receive() for _ in sent] == sent
        await stage.asked(version=0)
        assert await stage.allocator.receive() == m.Loaded(version=1)
        stage.allocator.say(m.Received(seq=sent[-1].seq))
        while not (isinstance(beat := await stage.allocator.receive_any(), m.Heartbeat) and beat.running.keys() == {2}):
            pass
        stage.allocator.say(m.Stop(reason="s", final=False))
        assert (await stage.rollouts(1)).keys() == {2}


async def test_rollouts_that_are_not_received_are_sent_again_and_stay_in_hand(tmp_path: Path) -> None:
    async with staged(tmp_path, silence_s=0.3) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.allocator.say(m.Work(orders=(order(1, "4", "4"),)))
        first = await stage.allocator.receive()
        while isinstance(again := await stage.allocator.receive_any(), m.Heartbeat):
            assert again.running.keys() == {1}
            stage.allocator.say(m.Alive())
        assert again == first
        stage.allocator.say(m.Received(seq=1), m.Stop(reason="s", final=True))


@pytest.mark.parametrize("how", ["stop", "leave"])
async def test_a_farewell_waits_no_longer_than_the_silence_for_an_allocator_that_is_gone(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(tmp_path, silence_s=0.3, max_tokens=FOR_EVER) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.allocator.say(m.Work(orders=(order(1, ENDLESS), order(2, ENDLESS))))
        await stage.running(2)
        if how == "stop":
            stage.allocator.say(m.Stop(reason="s", final=True), m.Stop(reason="said again after a hello", final=True))
        stage.leave.set()
        await stage.ended.wait()
    assert stage.result in ("s", "producer leaves")
    assert caplog.messages.count("the allocator has not said that it has 2 rollouts; they count as lost") == 1


async def test_the_first_weights_are_waited_for_and_newer_ones_are_followed(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.join(None)
        while await stage.allocator.receive_any() != m.Heartbeat(waiting_for="the learner's first weights"):
            pass
        stage.allocator.say(m.NewWeights(weights=stage.weights(0)))
        await stage.asked(version=0)
        stage.allocator.say(m.NewWeights(weights=stage.weights(1)))
        assert await stage.allocator.receive() == m.Loaded(version=1)
        assert stage.engine.version == 1
        stage.allocator.say(m.Stop(reason="s", final=True))


async def test_newest_weights_win(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.allocator.say(*(m.NewWeights(weights=stage.weights(version)) for version in range(1, 30)))
        versions = [0]
        while versions[-1] < 29:
            message = await stage.allocator.receive()
            assert isinstance(message, m.Loaded)
            versions.append(message.version)
        assert versions == sorted(set(versions))
        assert len(stage.engine.loaded) == len(versions) < 30
        stage.allocator.say(m.Stop(reason="s", final=True))


async def test_newer_weights_end_the_wait_after_a_failed_load(tmp_path: Path) -> None:
    async with staged(tmp_path, heartbeat_s=1000) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.engine.unloadable = {1}
        stage.allocator.say(m.NewWeights(weights=stage.weights(1)), m.Work(orders=(order(1, "4", "4"),)))
        assert unpack((await stage.rollouts(1))[1].payload).spans == ((0, 0, 1),)
        stage.allocator.say(m.NewWeights(weights=stage.weights(2)))
        assert await stage.allocator.receive() == m.Loaded(version=2)
        stage.allocator.say(m.Stop(reason="s", final=True))


@pytest.mark.parametrize("cause", ["file", "engine"])
async def test_loads_that_keep_failing_end_the_producer_with_the_reason(tmp_path: Path, cause: str) -> None:
    async with staged(tmp_path, heartbeat_s=0.02) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.engine.unloadable = {1}
        stage.allocator.say(m.NewWeights(weights=stage.weights(1, there=cause == "engine")))
    assert isinstance(stage.result, ModelError)
    reason = "cannot be loaded" if cause == "engine" else "cannot be read: No such file or directory"
    assert f"{LOAD_ATTEMPTS} times in a row" in str(stage.result)
    assert reason in str(stage.result)
    assert stage.engine.version == 0
    assert stage.engine.closed


async def test_a_load_that_hangs_ends_the_producer_and_its_engine_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "CLOSE_S", 0.2)
    hangs = threading.Event()

    def load(path: Path, version: int) -> None:
        hangs.wait()

    async with staged(tmp_path, progress_s=0.3) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.engine.load_weights = load  # type: ignore[method-assign]
        stage.allocator.say(m.NewWeights(weights=stage.weights(1)))
    assert isinstance(stage.result, ModelError)
    assert str(stage.result) == "the engine has not taken the weights of version 1 for 0.3 s"
    assert not stage.engine.closed
    hangs.set()


async def test_an_engine_that_dies_gives_its_work_back_and_ends_the_producer(tmp_path: Path) -> None:
    async with staged(tmp_path, max_tokens=FOR_EVER) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)

        def explode() -> None:
            raise RuntimeError("device lost")

        stage.engine.after[stage.engine.steps + 5] = explode
        stage.allocator.say(m.Work(orders=(order(1, ENDLESS), order(2, ENDLESS))))
        outcomes = [rollout.outcome for rollout in (await stage.rollouts(2)).values()]
    assert all(isinstance(o, Failed) and o.reason == "the engine died: device lost" for o in outcomes)
    assert isinstance(stage.result, ModelError)
    assert str(stage.result) == "the engine died: device lost"


async def test_a_producer_all_of_whose_work_waits_for_verdicts_says_so(tmp_path: Path) -> None:
    hangs = VerifierSection(kind="python", function="tests.verifier_faults:misbehave", timeout_s=0.5)
    async with staged(tmp_path, verifier=hangs) as stage:
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        stage.allocator.say(m.Work(orders=(order(1, "hang", "4"),)))
        waiting_for = ""
        while waiting_for != "verdicts":
            message = await stage.allocator.receive_any()
            waiting_for = message.waiting_for if isinstance(message, m.Heartbeat) else waiting_for
        assert isinstance((await stage.rollouts(1))[1].outcome, Unscorable)
        stage.allocator.say(m.Stop(reason="enough", final=True))
    value_of = stage.metrics.registry.get_sample_value
    assert value_of("gvm_unscorable_total", {"cause": "timeout"}) == 1
    assert (value_of("gvm_producer_wait_seconds_total", {"reason": "verdicts"}) or 0) > 0


async def test_an_engine_that_does_not_give_the_learners_logprobs_hands_its_work_back_and_takes_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(tmp_path, max_tokens=FOR_EVER, heartbeat_s=0.3) as stage:
        await stage.join(stage.weights(0, canary=-1.0))
        await stage.asked(version=0)
        stage.engine.scores = {1: -1.0 - 2 * TOLERANCE["float32"]}  # half loaded, say
        stage.allocator.say(m.Work(orders=(order(1, ENDLESS), order(2, ENDLESS))))
        await stage.running(2)
        stage.allocator.say(m.NewWeights(weights=stage.weights(1, canary=-1.0)))
        assert await stage.allocator.receive() == m.Ask(slots=0, version=1)
        outcomes = [rollout.outcome for rollout in (await stage.rollouts(2)).values()]
        reason = (
            "with the weights of version 1 the engine's log-probs of the canary differ from the learner's by "
            "0.002 nats on average, at most 0.001 are expected"
        )
        assert {(type(outcome), outcome.reason) for outcome in outcomes if isinstance(outcome, Failed)} == {
            (Failed, reason)
        }
        stage.allocator.say(m.Work(orders=(order(3, "4", "4"),)))  # it crossed our asking for none
        (back,) = (await stage.rollouts(1)).values()
        assert back.outcome == Failed(reason=reason, tokens=0)
        assert stage.metrics.registry.get_sample_value("gvm_engine_quarantined") == 1
        stage.engine.scores = {}  # the next attempt loads them whole
        await stage.asked(version=1)
        assert stage.metrics.registry.get_sample_value("gvm_engine_quarantined") == 0
        stage.allocator.say(m.Work(orders=(order(4, "4", "4"),)))
        assert isinstance((await stage.rollouts(1))[4].outcome, Scored)
        stage.allocator.say(m.Stop(reason="s", final=True))
    assert f"quarantined: {reason}" in caplog.messages


async def test_an_engine_that_stays_wrong_ends_its_producer_with_the_figures(tmp_path: Path) -> None:
    async with staged(tmp_path, heartbeat_s=0.02) as stage:
        stage.engine.scores = {0: -3.0}
        await stage.join(stage.weights(0, canary=-1.0))
        await stage.ended.wait()
    assert isinstance(stage.result, ModelError)
    assert f"weights could not be updated {LOAD_ATTEMPTS} times in a row: quarantined: " in str(stage.result)
    assert "by 2 nats" in str(stage.result)


async def test_orders_asked_for_follow_what_the_engine_can_keep_running(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        stage.engine.fullness = EngineLoad(running=2, waiting=2, cache_used=1.0, preemptions=3)
        await stage.join(stage.weights(0))
        await stage.asked(version=0)
        assert await stage.allocator.receive() == m.Ask(slots=3, version=0)  # two, and one at hand
        assert await stage.allocator.receive() == m.Ask(slots=4, version=0)  # nothing put back since
        assert await stage.allocator.receive() == m.Ask(slots=5, version=0)
        stage.allocator.say(m.Stop(reason="s", final=True))
