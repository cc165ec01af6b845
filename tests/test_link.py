from __future__ import annotations

import pytest
import trio
import trio.testing

from gvm_stream.config import StreamSection
from gvm_stream.errors import ConfigError, StreamError, WireError
from gvm_stream.process import leaf_error
from gvm_stream.wire.link import Link, new_epoch, open_link
from gvm_stream.wire.messages import (
    PROTOCOL,
    Alive,
    Cancel,
    Heartbeat,
    Hello,
    Loaded,
    Refused,
    Status,
    StatusRequest,
    Stop,
    ToPeer,
    Unknown,
)
from tests.doubles import ScriptedAllocator, local_stream, scripted_allocator
from tests.wire_samples import TO_PEER

WELCOME, STATUS = TO_PEER["welcome"], TO_PEER["status"]
assert isinstance(STATUS, Status)


async def join(stream: StreamSection, patience_s: float = 5.0) -> Link:
    """Open a link and close it again."""
    async with open_link(stream, role="producer", name="p", agreed={"k": "v"}, patience_s=patience_s) as link:
        return link


async def joined(stream: StreamSection, *answers: ToPeer) -> Link | BaseException:
    """What becomes of a peer whose hello is answered like this."""
    outcome: list[Link | BaseException] = []

    async def peer() -> None:
        try:
            outcome.append(await join(stream))
        except (StreamError, WireError) as error:
            outcome.append(error)

    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(peer)
        await allocator.receive()
        allocator.say(*answers)
    return outcome[0]


async def welcome(allocator: ScriptedAllocator) -> None:
    await allocator.receive()
    allocator.say(WELCOME)


async def test_the_hello_says_who_joins_and_the_welcome_is_kept() -> None:
    stream = local_stream()
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(join, stream)
        hello = await allocator.receive()
        allocator.say(WELCOME)
    assert isinstance(hello, Hello)
    assert (hello.protocol, hello.role, hello.name, hello.agreed) == (PROTOCOL, "producer", "p", {"k": "v"})
    assert allocator.identity == f"producer/p/{hello.epoch:x}".encode()
    link = await joined(stream, WELCOME)
    assert isinstance(link, Link)
    assert link.welcome == WELCOME


async def test_a_refusal_gives_its_reason() -> None:
    error = await joined(local_stream(), Refused(reason="it speaks protocol 0"))
    assert isinstance(error, StreamError)
    assert str(error).endswith("refused this process: it speaks protocol 0")


async def test_an_answer_that_is_no_welcome_is_a_wire_error() -> None:
    error = await joined(local_stream(), Alive(), Cancel(works=(1,), reason="r"))
    assert isinstance(error, WireError)
    assert "answered a hello with Cancel" in str(error)


async def test_nobody_there_is_an_error_after_the_patience_and_a_malformed_address_at_once() -> None:
    stream = local_stream()
    with pytest.raises(StreamError, match=f"no allocator has answered at {stream.address} within 0.2 s"):
        await join(stream, patience_s=0.2)
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        await join(StreamSection(address="tcp://127.0.0.1"))


async def test_an_allocator_that_starts_later_is_found() -> None:
    stream = local_stream()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(join, stream)
        await trio.testing.wait_all_tasks_blocked()
        async with scripted_allocator(stream) as allocator:
            assert isinstance(await allocator.receive(), Hello)
            allocator.say(WELCOME)


async def test_a_hello_is_said_until_it_is_answered() -> None:
    stream = local_stream(silence_s=0.1)
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(join, stream)
        first = await allocator.receive()
        assert await allocator.receive() == first
        allocator.say(WELCOME)


async def test_a_second_welcome_to_a_hello_that_was_said_twice_is_passed_over() -> None:
    stream = local_stream()
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(welcome, allocator)
        async with open_link(stream, role="observer", name="o", agreed={}, patience_s=5) as link:
            allocator.say(WELCOME)
            nursery.start_soon(answer_once, allocator, STATUS)
            assert await link.status() == STATUS
            await link.send(Loaded(version=1))
            assert await allocator.receive() == Loaded(version=1)  # no second question, so no answer from the past


async def answer_once(allocator: ScriptedAllocator, picture: ToPeer) -> None:
    assert isinstance(await allocator.receive(), StatusRequest)
    allocator.say(picture)


async def test_messages_come_in_order_without_heartbeats_and_a_late_refusal_is_raised() -> None:
    stream = local_stream()
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(welcome, allocator)
        async with open_link(stream, role="producer", name="p", agreed={}, patience_s=5) as link:
            cancel, stop = Cancel(works=(1,), reason="r"), Stop(reason="r", final=True)
            allocator.say(Alive(), cancel, Alive(), stop, Alive(), Refused(reason="replaced"))
            assert await link.receive() == cancel
            assert await link.receive() == stop
            with pytest.raises(StreamError, match="refused this process: replaced"):
                await link.receive()


async def test_garbage_from_the_allocator_is_a_wire_error() -> None:
    stream = local_stream()
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(welcome, allocator)
        async with open_link(stream, role="producer", name="p", agreed={}, patience_s=5) as link:
            allocator.say_bytes(b"\xc1")
            with pytest.raises(WireError, match="unreadable message of 1 bytes"):
                await link.receive()


async def test_heartbeats_of_the_allocator_hold_off_silence_which_ends_the_link() -> None:
    stream = local_stream(heartbeat_s=0.1, silence_s=0.2, progress_s=0.4)
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(welcome, allocator)
        async with open_link(stream, role="producer", name="p", agreed={}, patience_s=5) as link:

            async def say_alive() -> None:
                for _ in range(5):
                    allocator.say(Alive())
                    await trio.sleep(0.1)
                allocator.say(Stop(reason="r", final=False))

            nursery.start_soon(say_alive)
            assert isinstance(await link.receive(), Stop)  # after more than progress_s
            assert link.silent_since is None
            with pytest.raises(StreamError, match=r"has been silent for \d s: it is dead or cut off"):
                await link.receive()
            assert link.silent_since is not None


async def test_a_link_outlives_an_allocator_that_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    stream = local_stream(silence_s=0.1)
    async with trio.open_nursery() as nursery:
        async with scripted_allocator(stream) as allocator:
            nursery.start_soon(welcome, allocator)
            link = await nursery.start(work_until_stop, stream)
            first = (await allocator.receive_any(), allocator.identity)
        while link.silent_since is None:  # noqa: ASYNC110 (the clock of the link, not an event)
            await trio.sleep(0.01)
        async with scripted_allocator(stream) as allocator:
            assert (await allocator.receive_any(), allocator.identity) == first  # a heartbeat of the same process
            allocator.say(Unknown())
            hello = await allocator.receive()
            assert isinstance(hello, Hello)
            assert hello.in_hand == {7: 1}
            allocator.say(WELCOME, WELCOME, Stop(reason="r", final=True))
    assert caplog.messages.count(f"the allocator at {stream.address} is silent; waiting for it to come back") == 1


async def work_until_stop(stream: StreamSection, task_status: trio.TaskStatus[Link]) -> None:
    async with open_link(stream, role="producer", name="p", agreed={}, patience_s=5) as link, trio.open_nursery() as n:
        link.in_hand = lambda: {7: 1}
        n.start_soon(link.beat)
        task_status.started(link)
        assert await link.receive() == WELCOME
        assert isinstance(await link.receive(), Stop)
        n.cancel_scope.cancel()


async def test_an_allocator_that_knows_nothing_of_many_messages_gets_one_hello() -> None:
    stream = local_stream()
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(welcome, allocator)
        async with open_link(stream, role="producer", name="p", agreed={}, patience_s=5) as link:
            for _ in range(2):  # a second restart is no different
                allocator.say(*[Unknown()] * 200, WELCOME)
                assert await link.receive() == WELCOME
                await link.send(Loaded(version=1))
                assert isinstance(await allocator.receive(), Hello)
                assert await allocator.receive() == Loaded(version=1)


async def test_a_hello_to_an_unknowing_allocator_is_said_again_when_it_seems_to_be_lost() -> None:
    stream = local_stream(silence_s=0.3)
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(welcome, allocator)
        async with open_link(stream, role="producer", name="p", agreed={}, patience_s=5) as link:

            async def lose_one() -> None:
                allocator.say(Unknown())
                for _ in range(2):
                    assert isinstance(await allocator.receive(), Hello)
                    await trio.sleep(0.15)
                    allocator.say(Unknown())
                allocator.say(WELCOME)

            nursery.start_soon(lose_one)
            assert await link.receive() == WELCOME


async def test_a_peer_beats_with_its_state_of_the_moment() -> None:
    stream = local_stream(heartbeat_s=0.01)
    counts = iter(range(100))
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(welcome, allocator)
        async with open_link(stream, role="producer", name="p", agreed={}, patience_s=5) as link:
            nursery.start_soon(link.beat)
            assert await allocator.receive_any() == Heartbeat(waiting_for="its own start")
            link.heartbeat = lambda: Heartbeat(running={1: next(counts)})
            beats = [await allocator.receive_any() for _ in range(3)]
            assert beats == [Heartbeat(running={1: n}) for n in range(3)]
            nursery.cancel_scope.cancel()


async def test_an_observer_asks_for_a_picture_of_the_run() -> None:
    stream = local_stream()
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(welcome, allocator)
        async with open_link(stream, role="observer", name="o", agreed={}, patience_s=5) as link:

            async def answer() -> None:
                assert isinstance(await allocator.receive(), StatusRequest)
                allocator.say(Stop(reason="for somebody else", final=True), TO_PEER["status"])

            nursery.start_soon(answer)
            assert await link.status() == TO_PEER["status"]


async def test_an_observer_asks_an_allocator_that_has_been_started_again_once_more() -> None:
    stream = local_stream()
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(welcome, allocator)
        async with open_link(stream, role="observer", name="o", agreed={}, patience_s=5) as link:

            async def restart() -> None:
                assert isinstance(await allocator.receive(), StatusRequest)
                allocator.say(Unknown())
                assert isinstance(await allocator.receive(), Hello)
                allocator.say(WELCOME)
                assert isinstance(await allocator.receive(), StatusRequest)
                allocator.say(TO_PEER["status"])

            nursery.start_soon(restart)
            assert await link.status() == TO_PEER["status"]


def test_epochs_grow() -> None:
    assert new_epoch() < new_epoch()


def test_our_own_errors_are_found_in_groups_and_others_are_left_alone() -> None:
    ours = StreamError("s")
    assert leaf_error(BaseExceptionGroup("g", [BaseExceptionGroup("h", [ours])])) is ours
    assert leaf_error(BaseExceptionGroup("g", [ours, OSError("o")])) is None
