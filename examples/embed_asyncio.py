"""`OnlineAllocator` in an asyncio program: python examples/embed_asyncio.py

Rollouts run side by side, end in any order, crash, and are cancelled once their visit is over, beside a learner.
Nothing polls: either side sleeps on an event that the other one sets.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from functools import partial
from pathlib import Path

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
        self.running: dict[tuple[int, int], asyncio.Task[Outcome]] = {}
        self.generated: Counter[int] = Counter()  # tokens by work
        self.more_to_launch, self.rollout_ended = asyncio.Event(), asyncio.Event()

    async def sample(self) -> None:
        async with asyncio.TaskGroup() as rollouts:
            while self.allocator.settled_steps < STEPS:
                self.more_to_launch.clear()
                for item in self.allocator.ask(SLOTS - len(self.running), self.policy.version):
                    task = self.running[item.work, item.attempt] = rollouts.create_task(self.roll(item))
                    # A callback: a task that is cancelled before it has begun runs nothing of its own.
                    task.add_done_callback(partial(self.ended, item))
                await self.more_to_launch.wait()

    async def roll(self, item: WorkItem) -> Outcome:
        try:
            response = self.policy.sample(item)
        except EngineError as error:
            return Failed(reason=str(error))
        while self.generated[item.work] < response.tokens:
            await asyncio.sleep(0)  # a step of the engine
            self.generated[item.work] += 1
        return self.policy.verify(item, response)

    def ended(self, item: WorkItem, task: asyncio.Task[Outcome]) -> None:
        del self.running[item.work, item.attempt]
        cancelled = Cancelled(reason="its visit is over", tokens=self.generated.pop(item.work, 0))
        told = self.allocator.tell(item.work, item.attempt, cancelled if task.cancelled() else task.result())
        self.policy.forget(item, told)
        for key in told.cancel:
            self.running[key].cancel()
        self.more_to_launch.set()
        self.rollout_ended.set()

    async def train(self) -> None:
        for step in range(STEPS):
            while (groups := self.allocator.batch(step)) is None:
                self.rollout_ended.clear()
                await self.rollout_ended.wait()
            fates = self.policy.train(groups)
            self.allocator.settle(step, self.policy.version, fates)
            self.more_to_launch.set()


async def main() -> None:
    host = Host()
    before = host.policy.mean_reward()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.sample())
        tasks.create_task(host.train())
    report(host.allocator, before, host.policy.mean_reward())


if __name__ == "__main__":
    asyncio.run(main())
