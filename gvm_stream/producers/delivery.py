"""Rollouts on their way to the allocator: kept until it has them, sent again if they may be lost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import trio

from gvm_stream.wire import messages as m
from gvm_stream.wire.link import Link

HOLD_S = 0.01
"""How long a rollout waits for others to share its message: verdicts come one by one, messages cost both ends."""
MOST_PER_MESSAGE = 64


class Delivery:
    def __init__(self, link: Link, resend_s: float) -> None:
        """`resend_s`: how long the allocator may take to say that it has what was sent."""
        self._link, self._resend_s = link, resend_s
        # Unbounded, but never more than what is in hand, which credits bound.
        self._to_send, self._rollouts = trio.open_memory_channel[m.Rollout](math.inf)
        self.in_hand: dict[int, int] = {}
        """Work -> attempt of every order whose rollout the allocator does not have."""
        self._sent: deque[m.Rollouts] = deque()
        """That the allocator does not have, oldest first."""
        self._seq = 0
        self._sent_at = -math.inf
        """When the oldest of them was sent, or became the oldest."""
        self._empty = trio.Event()

    def take(self, orders: Sequence[m.WorkOrder]) -> None:
        self.in_hand.update((order.work, order.attempt) for order in orders)

    def put(self, rollout: m.Rollout) -> None:
        self._to_send.send_nowait(rollout)

    async def run(self) -> None:
        """Send what is put, and again what gets lost, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_again)
            async for first in self._rollouts:
                batch = [first]
                await trio.sleep(HOLD_S)
                while len(batch) < MOST_PER_MESSAGE:
                    try:
                        batch.append(self._rollouts.receive_nowait())
                    except trio.WouldBlock:
                        break
                await self.send(batch)

    async def send(self, rollouts: Sequence[m.Rollout]) -> None:
        self._seq += 1
        message = m.Rollouts(seq=self._seq, rollouts=tuple(rollouts))
        if not self._sent:
            self._sent_at = trio.current_time()
        self._sent.append(message)
        await self._link.send(message)

    def received(self, seq: int) -> None:
        """The allocator has all messages up to `seq`: what is in them is out of our hands."""
        while self._sent and self._sent[0].seq <= seq:
            self._sent_at = trio.current_time()
            for rollout in self._sent.popleft().rollouts:
                if self.in_hand.get(rollout.work) == rollout.attempt:
                    del self.in_hand[rollout.work]
        if not self.in_hand:
            self._empty.set()

    async def resend(self) -> None:
        self._sent_at = trio.current_time()
        for message in tuple(self._sent):
            await self._link.send(message)

    async def wait_until_empty(self) -> None:
        """Until nothing is in hand any more."""
        if self.in_hand:
            self._empty = trio.Event()
            await self._empty.wait()

    async def _send_again(self) -> None:
        """While the allocator is silent, what it is sent only queues up here."""
        while True:
            await trio.sleep(self._resend_s)
            overdue = self._sent and trio.current_time() - self._sent_at > self._resend_s
            if overdue and self._link.silent_since is None:
                await self.resend()
