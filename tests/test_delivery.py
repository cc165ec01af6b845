"""Rollouts on their way over a link that loses and repeats what it carries."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.allocator.types import Failed
from gvm_stream.producers.delivery import HOLD_S, MOST_PER_MESSAGE, Delivery
from gvm_stream.wire import messages as m

RESEND_S = 1.0


class Cable:
    """In place of the link: what is sent lies in a queue."""

    def __init__(self) -> None:
        self.sent: deque[m.Rollouts] = deque()
        self.silent_since: float | None = None

    async def send(self, message: m.ToAllocator) -> None:
        assert isinstance(message, m.Rollouts)
        self.sent.append(message)

    def take(self) -> list[list[int]]:
        """Works of every message sent since the last call."""
        taken = [[rollout.work for rollout in message.rollouts] for message in self.sent]
        self.sent.clear()
        return taken


class Receiver:
    """The allocator's rule: the next number is taken, any other is answered with what has been taken."""

    def __init__(self) -> None:
        self.heard = 0
        self.arrived: list[int] = []

    def receive(self, message: m.Rollouts) -> int:
        if message.seq == self.heard + 1:
            self.heard = message.seq
            self.arrived += [rollout.work for rollout in message.rollouts]
        return self.heard


def order(work: int, attempt: int = 0) -> m.WorkOrder:
    return m.WorkOrder(work=work, attempt=attempt, prompt="p", prompt_tokens=b"", answer="")


def rollout(work: int, attempt: int = 0) -> m.Rollout:
    return m.Rollout(work=work, attempt=attempt, outcome=Failed(reason="r"))


@asynccontextmanager
async def delivering(*works: int) -> AsyncIterator[tuple[Delivery, Cable]]:
    """A delivery at work, with these orders in hand."""
    cable: Any = Cable()
    delivery = Delivery(cable, RESEND_S)
    delivery.take([order(work) for work in works])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(delivery.run)
        yield delivery, cable
        nursery.cancel_scope.cancel()


async def finish(delivery: Delivery, *works: int) -> None:
    """These rollouts end together."""
    for work in works:
        delivery.put(rollout(work))
    await trio.sleep(5 * HOLD_S)


async def test_rollouts_that_end_together_share_a_message(autojump_clock: trio.testing.MockClock) -> None:
    async with delivering(*range(200)) as (delivery, cable):
        await finish(delivery, 0, 1, 2)
        await finish(delivery, 3)
        assert [message.seq for message in cable.sent] == [1, 2]
        assert cable.take() == [[0, 1, 2], [3]]
        await finish(delivery, *range(4, 104))
        assert [len(works) for works in cable.take()] == [MOST_PER_MESSAGE, 100 - MOST_PER_MESSAGE]


async def test_a_rollout_stays_in_hand_until_it_is_received(autojump_clock: trio.testing.MockClock) -> None:
    async with delivering(1, 2, 3) as (delivery, _):
        await finish(delivery, 1)
        await finish(delivery, 2)
        assert delivery.in_hand.keys() == {1, 2, 3}
        delivery.received(1)
        assert delivery.in_hand.keys() == {2, 3}
        delivery.received(1)
        assert delivery.in_hand.keys() == {2, 3}
        delivery.received(2)
        assert delivery.in_hand.keys() == {3}


async def test_all_that_is_missing_is_sent_again_in_order_until_it_is_received(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with delivering(1, 2, 3) as (delivery, cable):
        for work in (1, 2, 3):
            await finish(delivery, work)
        assert cable.take() == [[1], [2], [3]]
        delivery.received(1)
        for _ in range(2):
            await trio.sleep(2 * RESEND_S)
            assert cable.take()[:2] == [[2], [3]]
        delivery.received(3)
        await trio.sleep(10 * RESEND_S)
        assert cable.take() == []


async def test_a_lost_message_is_sent_again_however_many_follow_it(autojump_clock: trio.testing.MockClock) -> None:
    works = range(20)
    async with delivering(*works) as (delivery, cable):
        await finish(delivery, 0)
        cable.take()  # lost
        again: list[list[int]] = []
        for work in works[1:]:
            await finish(delivery, work)
            await trio.sleep(RESEND_S / 4)
            delivery.received(0)  # the answer to what comes after the gap
            again += cable.take()
        assert [0] in again


async def test_nothing_is_sent_again_to_an_allocator_that_is_silent(autojump_clock: trio.testing.MockClock) -> None:
    async with delivering(1) as (delivery, cable):
        await finish(delivery, 1)
        cable.take()
        cable.silent_since = trio.current_time()
        await trio.sleep(100 * RESEND_S)
        assert cable.take() == []
        cable.silent_since = None
        await trio.sleep(2 * RESEND_S)
        assert cable.take()[0] == [1]


async def test_the_end_waits_until_nothing_is_in_hand(autojump_clock: trio.testing.MockClock) -> None:
    async with delivering(1, 2) as (delivery, _), trio.open_nursery() as nursery:
        empty = trio.Event()

        async def wait() -> None:
            await delivery.wait_until_empty()
            empty.set()

        nursery.start_soon(wait)
        await finish(delivery, 1, 2)
        assert not empty.is_set()
        delivery.received(1)
        await empty.wait()
        await delivery.wait_until_empty()


async def test_work_given_again_is_still_in_hand_when_its_older_attempt_is_received(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with delivering(1) as (delivery, _):
        await finish(delivery, 1)
        delivery.take([order(1, attempt=1)])
        delivery.received(1)
        assert delivery.in_hand == {1: 1}


class Channel:
    """Producer and allocator, and what is under way between them both ways."""

    def __init__(self, delivery: Delivery, cable: Cable) -> None:
        self._delivery, self._cable, self._allocator = delivery, cable, Receiver()
        self._answers: deque[int] = deque()
        self._ended = 0
        self._taken: set[int] = set()

    @property
    def arrived(self) -> list[int]:
        return self._allocator.arrived

    async def act(self, action: str, index: int) -> None:
        """`index`: which of the messages under way; any may overtake the others."""
        up, down = self._cable.sent, self._answers
        match action:
            case "finish":
                self._delivery.take([order(self._ended)])
                self._delivery.put(rollout(self._ended))
                self._ended += 1
            case "wait":
                await trio.sleep(RESEND_S * index / 2)
            case "carry" | "carry a copy" if up:
                down.append(self._allocator.receive(up[index % len(up)]))
                if action == "carry":
                    del up[index % len(up)]
            case "answer" | "answer twice" if down:
                self._delivery.received(down[index % len(down)])
                if action == "answer":
                    del down[index % len(down)]
            case "cut":
                up.clear()
                down.clear()
            case "restart":
                down.clear()
                await self._delivery.resend()
        in_hand = self._delivery.in_hand.keys()
        assert in_hand | set(self.arrived) == set(range(self._ended)), "neither in hand nor arrived"

    async def settle(self) -> None:
        """The faults are over."""
        self._answers.clear()
        with trio.fail_after(100 * RESEND_S):
            while self._delivery.in_hand:
                await trio.sleep(RESEND_S)
                while self._cable.sent:
                    await self.act("carry", 0)
                while self._answers:
                    await self.act("answer", 0)
        assert self.arrived == list(range(self._ended))


ACTIONS = ["finish", "wait", "carry", "carry a copy", "answer", "answer twice", "cut", "restart"]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), max_size=60))
def test_every_rollout_arrives_once_and_in_order_whatever_is_lost_repeated_or_overtaken(
    actions: list[tuple[str, int]],
) -> None:
    async def play() -> None:
        async with delivering() as (delivery, cable):
            channel = Channel(delivery, cable)
            for action, index in actions:
                await channel.act(action, index)
            await channel.settle()

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0))
