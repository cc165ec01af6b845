"""The learner's side of the stream against a scripted allocator, over real sockets. The feed blocks, so it works in a
thread of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest
import trio

from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError, WireError
from gvm_stream.health import Health
from gvm_stream.learner.feed import Feed
from gvm_stream.wire import messages as m
from tests.doubles import ScriptedAllocator, local_stream, scripted_allocator
from tests.wire_samples import STATS, WEIGHTS

WELCOME = m.Welcome(run="r", next_step=4, settled=4, weights=None)
STOP = m.Stop(reason="all batches are done", final=True)
DONE = m.StepDone(
    step=4,
    version=5,
    trained=True,
    reason="",
    fates={"trained": (1, 2)},
    stats=STATS,
)
PUBLISHED = m.Published(weights=WEIGHTS, step=5)
CHECKPOINTED = m.Checkpointed(steps=(0, 4))


def batch(step: int) -> m.Batch:
    return m.Batch(step=step, groups=())


@dataclass
class Stage:
    allocator: ScriptedAllocator
    feed: Feed
    answered: trio.Event = field(default_factory=trio.Event)

    async def join(self) -> m.Hello:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, self.feed.join)
            hello = await self.allocator.receive()
            self.allocator.say(WELCOME)
        assert isinstance(hello, m.Hello)
        return hello

    async def batch(self, step: int) -> m.Batch | None:
        return await trio.to_thread.run_sync(self.feed.batch, step)

    async def expect(self, answer: m.Batch | None) -> None:
        """The learner waits for batch 4 and gets this."""
        assert await self.batch(4) == answer
        self.answered.set()

    async def next(self, *expected: m.ToAllocator) -> None:
        """The allocator gets exactly this."""
        for message in expected:
            assert await self.allocator.receive() == message

    async def restart(self) -> m.Hello:
        """The allocator does not know the learner any more."""
        self.allocator.say(m.Unknown())
        hello = await self.allocator.receive()
        assert isinstance(hello, m.Hello)
        self.allocator.say(WELCOME)
        return hello


def feed_of(stream: StreamSection) -> Feed:
    health = Health(stream.progress_s)
    return Feed(stream, name="learner", agreed={"k": "v"}, checkpoints=(0, 4), health=health)


@asynccontextmanager
async def staged(stream: StreamSection) -> AsyncIterator[Stage]:
    async with scripted_allocator(stream) as allocator:
        with closing(feed_of(stream)) as feed, trio.fail_after(10):
            yield Stage(allocator, feed)


async def test_the_hello_says_which_checkpoints_there_are_and_the_answer_where_to_begin() -> None:
    async with staged(local_stream()) as stage:
        hello = await stage.join()
        assert (hello.role, hello.agreed, hello.checkpoints, hello.step) == ("learner", {"k": "v"}, (0, 4), None)


async def test_a_hello_is_said_until_it_is_answered() -> None:
    async with staged(local_stream(silence_s=0.1)) as stage, trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, stage.feed.join)
        first = await stage.allocator.receive()
        await stage.next(first)
        stage.allocator.say(WELCOME)


async def test_batches_are_handed_out_as_they_are_asked_for() -> None:
    async with staged(local_stream()) as stage, trio.open_nursery() as nursery:
        await stage.join()

        async def hand_out() -> None:
            for step in (4, 5):
                await stage.next(m.BatchRequest(step=step))
                stage.allocator.say(batch(step - 1), batch(step))  # a late answer to an older question comes first

        nursery.start_soon(hand_out)
        assert await stage.batch(4) == batch(4)
        assert await stage.batch(5) == batch(5)


@pytest.mark.parametrize("lost", ["question", "answer"])
async def test_a_lost_question_or_answer_is_asked_for_again(lost: str) -> None:
    async with staged(local_stream(silence_s=0.2)) as stage, trio.open_nursery() as nursery:
        await stage.join()

        async def ignore_the_first() -> None:
            await stage.next(m.BatchRequest(step=4), m.BatchRequest(step=4))
            stage.allocator.say(batch(4), *([batch(4)] if lost == "answer" else []))

        nursery.start_soon(ignore_the_first)
        assert await stage.batch(4) == batch(4)


async def test_a_restarted_allocator_is_told_again_what_it_has_not_acknowledged() -> None:
    async with staged(local_stream()) as stage, trio.open_nursery() as nursery:
        await stage.join()
        old = m.Published(weights=msgspec.structs.replace(WEIGHTS, version=1), step=1)
        settled = msgspec.structs.replace(DONE, step=3)
        for message in (old, settled, DONE, PUBLISHED, CHECKPOINTED):
            stage.feed.send(message)
        await stage.next(old, settled, DONE, PUBLISHED, CHECKPOINTED)

        async def restart() -> None:
            await stage.next(m.BatchRequest(step=5))
            stage.allocator.say(m.Settled(step=3))
            assert (await stage.restart()).step == 5
            await stage.next(PUBLISHED, DONE, CHECKPOINTED, m.BatchRequest(step=5))
            stage.allocator.say(m.Settled(step=4))
            assert (await stage.restart()).step == 5  # a second time: only what is still open
            await stage.next(PUBLISHED, CHECKPOINTED, m.BatchRequest(step=5))
            stage.allocator.say(batch(5))

        nursery.start_soon(restart)
        assert await stage.batch(5) == batch(5)


async def test_an_allocator_that_knows_nothing_of_many_messages_gets_one_hello() -> None:
    async with staged(local_stream()) as stage, trio.open_nursery() as nursery:
        await stage.join()

        async def forget() -> None:
            await stage.next(m.BatchRequest(step=4))
            stage.allocator.say(*[m.Unknown()] * 200, WELCOME)
            assert isinstance(await stage.allocator.receive(), m.Hello)
            await stage.next(m.BatchRequest(step=4))
            stage.allocator.say(batch(4))

        nursery.start_soon(forget)
        assert await stage.batch(4) == batch(4)


async def test_a_learner_outlives_an_allocator_that_is_started_again() -> None:
    stream = local_stream()
    with trio.fail_after(10), closing(feed_of(stream)) as feed:
        async with trio.open_nursery() as nursery:
            async with scripted_allocator(stream) as allocator:
                stage = Stage(allocator, feed)
                await stage.join()
                nursery.start_soon(stage.expect, batch(4))
                await stage.next(m.BatchRequest(step=4))
            async with scripted_allocator(stream) as allocator:
                again = Stage(allocator, feed)
                assert await allocator.receive_any() == m.Heartbeat(waiting_for="batch 4")
                assert (await again.restart()).step == 4
                await again.next(m.BatchRequest(step=4))
                allocator.say(batch(4))
                await stage.answered.wait()


async def test_an_allocator_that_never_comes_ends_the_learner_with_a_sentence() -> None:
    stream = local_stream(progress_s=0.2)
    unanswered = rf"no allocator has answered at {stream.address} within 0\.2 s"
    with closing(feed_of(stream)) as feed, pytest.raises(StreamError, match=unanswered):
        feed.join()


async def test_an_allocator_that_stays_away_ends_the_learner_with_a_sentence() -> None:
    stream = local_stream(progress_s=0.3)
    with closing(feed_of(stream)) as feed:
        async with scripted_allocator(stream) as allocator:
            await Stage(allocator, feed).join()
        for wait in (partial(feed.batch, 4), feed.wait_for_stop):
            with pytest.raises(StreamError, match=rf"{stream.address} has been silent for \d s: it is dead or cut off"):
                await trio.to_thread.run_sync(wait)


async def test_heartbeats_of_the_allocator_hold_off_the_silence() -> None:
    async with staged(local_stream(heartbeat_s=0.05, progress_s=0.4)) as stage, trio.open_nursery() as nursery:
        await stage.join()
        nursery.start_soon(stage.expect, batch(4))
        await stage.next(m.BatchRequest(step=4))
        for _ in range(12):
            await trio.sleep(0.05)
            stage.allocator.say(m.Alive())
        stage.allocator.say(batch(4))


async def test_a_refusal_ends_the_learner_with_its_reason() -> None:
    async with staged(local_stream()) as stage, trio.open_nursery() as nursery:

        async def refuse() -> None:
            await stage.allocator.receive()
            stage.allocator.say(m.Refused(reason="it speaks protocol 0"))

        nursery.start_soon(refuse)
        with pytest.raises(StreamError, match="refused this learner: it speaks protocol 0"):
            await trio.to_thread.run_sync(stage.feed.join)
        nursery.start_soon(refuse)
        with pytest.raises(StreamError, match="refused this learner: it speaks protocol 0"):
            await stage.batch(4)


async def test_garbage_from_the_allocator_is_a_wire_error() -> None:
    async with staged(local_stream()) as stage:
        await stage.join()
        stage.allocator.say_bytes(b"\xc1")
        with pytest.raises(WireError, match="unreadable message of 1 bytes"):
            await stage.batch(4)


async def test_the_end_of_the_run_ends_every_wait() -> None:
    async with staged(local_stream()) as stage:
        await stage.join()
        stage.allocator.say(STOP)
        assert await stage.batch(4) is None
        assert stage.feed.stop == STOP
        await trio.to_thread.run_sync(stage.feed.wait_for_stop)


async def test_an_interruption_ends_every_wait() -> None:
    async with staged(local_stream()) as stage, trio.open_nursery() as nursery:
        await stage.join()
        nursery.start_soon(stage.expect, None)
        await stage.next(m.BatchRequest(step=4))
        stage.feed.interrupted = True
        await stage.answered.wait()
        await trio.to_thread.run_sync(stage.feed.wait_for_stop)
        assert stage.feed.stop is None
        with pytest.raises(StreamError, match="interrupted while waiting for the allocator"):
            stage.feed.join()


async def test_what_another_thread_posts_is_sent_at_once_while_the_learner_waits() -> None:
    async with staged(local_stream(heartbeat_s=1000, progress_s=2000)) as stage, trio.open_nursery() as nursery:
        await stage.join()
        nursery.start_soon(stage.expect, batch(4))
        await stage.next(m.BatchRequest(step=4))
        for version in range(5):
            published = m.Published(weights=msgspec.structs.replace(WEIGHTS, version=version), step=version)
            await trio.to_thread.run_sync(stage.feed.post, published)
            await stage.next(published)
        stage.allocator.say(batch(4))


async def test_what_another_thread_posts_while_the_learner_trains_is_sent_between_two_micro_batches() -> None:
    async with staged(local_stream(heartbeat_s=1000)) as stage, trio.open_nursery() as nursery:
        await stage.join()
        await trio.to_thread.run_sync(stage.feed.post, CHECKPOINTED)
        await trio.to_thread.run_sync(stage.feed.post, PUBLISHED)
        stage.feed.working()
        await stage.next(CHECKPOINTED, PUBLISHED)
        nursery.start_soon(stage.expect, batch(4))
        await stage.next(m.BatchRequest(step=4))
        await stage.restart()
        await stage.next(PUBLISHED, CHECKPOINTED, m.BatchRequest(step=4))  # posted, and remembered as sent
        stage.allocator.say(batch(4))


async def test_a_learner_at_work_beats_and_one_that_waits_says_for_what() -> None:
    async with staged(local_stream(heartbeat_s=0.01)) as stage, trio.open_nursery() as nursery:
        await stage.join()
        await trio.sleep(0.02)
        stage.feed.working()
        assert await stage.allocator.receive_any() == m.Heartbeat()
        nursery.start_soon(trio.to_thread.run_sync, stage.feed.wait_for_stop)
        assert await stage.allocator.receive_any() == m.Heartbeat(waiting_for="the end of the run")
        stage.allocator.say(STOP)


async def test_before_the_end_it_is_waited_for_that_what_was_done_is_safe() -> None:
    async with staged(local_stream()) as stage, trio.open_nursery() as nursery:
        await stage.join()
        stage.feed.send(DONE)
        settled = trio.Event()

        async def settle() -> None:
            await trio.to_thread.run_sync(stage.feed.settle, 10)
            settled.set()

        nursery.start_soon(settle)
        await stage.next(DONE)
        assert (await stage.restart()).step == 5
        await stage.next(DONE)
        assert not settled.is_set()
        stage.allocator.say(m.Settled(step=4))
        await settled.wait()


async def test_what_was_done_is_given_up_after_the_patience() -> None:
    stream = local_stream()
    with closing(feed_of(stream)) as feed:
        feed.send(DONE)
        feed.settle(0.1)  # nobody is there
