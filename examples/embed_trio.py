"""`OnlineAllocator` in a trio program: python examples/embed_trio.py

As many samplers as there are slots make one rollout after the other, each in a cancel scope of its own, and a learner
trains beside them. Who has nothing to do parks until something has changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module that both examples share

from examples.tiny_policy import EngineError, TinyPolicy, report
from gvm_stream.allocator import Cancelled, Failed, OnlineAllocator, Settings, WorkItem
from gvm_stream.allocator.types import Outcome

STEPS, SLOTS = 60, 64
SETTINGS = Settings(design="sequential", options={"round_size": 2}, rounds_ahead=1, prompts_per_step=16, steps=STEPS)


class Host:
    def __init__(self) -> None:
        self.policy = TinyPolicy(prompts=64)
        self.allocator = OnlineAllocator(SETTINGS, seed=0)
        self.allocator.add(self.policy.right)
        self.running: dict[tuple[int, int], trio.CancelScope] = {}
        self.changed = trio.lowlevel.ParkingLot()

    async def sample(self) -> None:
        while self.allocator.settled_steps < STEPS:
            items = self.allocator.ask(1, self.policy.version)
            if items:
                await self.roll(items[0])
            else:
                await self.changed.park()

    async def roll(self, item: WorkItem) -> None:
        tokens = 0
        outcome: Outcome
        with trio.CancelScope() as scope:
            self.running[item.work, item.attempt] = scope
            try:
                response = self.policy.sample(item)
                while tokens < response.tokens:
                    await trio.lowlevel.checkpoint()  # a step of the engine
                    tokens += 1
                outcome = self.policy.verify(item, response)
            except EngineError as error:
                outcome = Failed(reason=str(error))
        if scope.cancelled_caught:
            outcome = Cancelled(reason="its visit is over", tokens=tokens)
        del self.running[item.work, item.attempt]
        told = self.allocator.tell(item.work, item.attempt, outcome)
        self.policy.forget(item, told)
        for key in told.cancel:
            self.running[key].cancel()
        self.changed.unpark_all()

    async def train(self) -> None:
        for step in range(STEPS):
            while (groups := self.allocator.batch(step)) is None:
                await self.changed.park()
            fates = self.policy.train(groups)
            self.allocator.settle(step, self.policy.version, fates)
            self.changed.unpark_all()


async def main() -> None:
    host = Host()
    before = host.policy.mean_reward()
    async with trio.open_nursery() as nursery:
        for _ in range(SLOTS):
            nursery.start_soon(host.sample)
        nursery.start_soon(host.train)
    report(host.allocator, before, host.policy.mean_reward())


if __name__ == "__main__":
    trio.run(main)
