"""The other side of the allocator for tests: prompts, results, and scripted peers on a stage with its own clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from gvm_stream.allocator import Cancelled, Scored
from gvm_stream.allocator.broker import Broker
from gvm_stream.config import (
    AllocationSection,
    Config,
    DataSection,
    EvalSection,
    ModelSection,
    RunSection,
    StreamSection,
)
from gvm_stream.data.prompts import Prompt, PromptSet
from gvm_stream.metrics import Metrics
from gvm_stream.wire import messages as m

T = TypeVar("T", bound=m.Message)

AGREED = {"sampling.temperature": "1.0", "model.path": "model"}


def config(*, steps: int = 4, per_step: int = 2, max_lag: int = 0, max_attempts: int = 3, every: int = 0) -> Config:
    """Three rollouts of each prompt, four held-out prompts once."""
    return Config(
        run=RunSection(steps=steps),
        model=ModelSection(path="model"),
        data=DataSection(train="train.jsonl"),
        allocation=AllocationSection(
            policy="uniform",
            prompts_per_step=per_step,
            rollouts_per_prompt=3,
            max_rollouts=4,
            max_lag=max_lag,
            max_attempts=max_attempts,
        ),
        stream=StreamSection(heartbeat_s=1, silence_s=10, progress_s=60),
        eval=EvalSection(prompts=4, samples=1, every_steps=every, curve_samples=1),
    )


def prompt_set(train: int = 40) -> PromptSet:
    def prompts(split: str, count: int) -> tuple[Prompt, ...]:
        ids = [f"{split}-{row}" for row in range(1, count + 1)]
        tokens = [np.array([len(split), row], "<i4").tobytes() for row in range(1, count + 1)]
        return tuple(Prompt(id=i, text=i, tokens=t, answer=f"answer of {i}") for i, t in zip(ids, tokens, strict=True))

    return PromptSet(train=prompts("train", train), heldout=prompts("heldout", 5), bad_rows=(), end_tokens=(0,))


def rollout_of(order: m.WorkOrder, *, reward: float = 1.0, tokens: int = 3, version: int = 0) -> m.Rollout:
    return m.Rollout(
        work=order.work,
        attempt=order.attempt,
        outcome=Scored(reward=reward, tokens=tokens, seconds=1.0, oldest_version=version),
        tokens=np.full(tokens, order.work, "<i4").tobytes(),
        logprobs=np.full(tokens, -0.5, "<f4").tobytes(),
        spans=((version, 0, tokens),) if tokens else (),
    )


def done(batch: m.Batch, version: int) -> m.StepDone:
    works = tuple(r.work for group in batch.groups for r in group.rollouts)
    stats = m.StepStats(
        loss=0.0, grad_norm=1.0, reward_mean=0.5, zero_signal_groups=0, groups=2, mean_lag=0.0, max_lag=0,
        mismatch=0.0, effective_sample_size=1.0, seconds=1.0, padding_share=0.0, wait_seconds=0.5,
    )  # fmt: skip
    fates = {"trained": works[1:], "zero_signal": works[:1]}
    return m.StepDone(step=batch.step, version=version, trained=True, reason="", fates=fates, stats=stats)


class Peer:
    """A process at the other end. It answers what it hears at once, unless it has fallen silent."""

    role: m.Role = "observer"

    def __init__(self, stage: Stage, name: str, epoch: int = 1, **hello: object) -> None:
        self.stage, self.name, self.identity = stage, name, f"{self.role}/{name}/{epoch}".encode()
        self.heard: list[m.ToPeer] = []
        self.silent = False
        stage.peers[self.identity] = self
        said = m.Hello(protocol=m.PROTOCOL, role=self.role, name=name, epoch=epoch, agreed=AGREED)
        self.say(msgspec.structs.replace(said, **hello))

    def say(self, message: m.ToAllocator) -> None:
        self.stage.broker.receive(self.identity, message, self.stage.now)

    def hear(self, message: m.ToPeer) -> None:
        self.heard.append(message)

    def all(self, kind: type[T]) -> list[T]:
        return [message for message in self.heard if isinstance(message, kind)]

    def last(self, kind: type[T]) -> T:
        return self.all(kind)[-1]


class Producer(Peer):
    """Gives half of the held-out prompts a right answer from version 1 on, a quarter before."""

    role: m.Role = "producer"

    def __init__(self, stage: Stage, name: str, epoch: int = 1, *, slots: int = 4, **hello: object) -> None:
        self.slots, self.version, self.generated = slots, -1, 0
        self.orders: list[tuple[m.WorkOrder, int]] = []
        super().__init__(stage, name, epoch, **hello)

    def hear(self, message: m.ToPeer) -> None:
        super().hear(message)
        match message:
            case m.Welcome() | m.NewWeights() if message.weights is not None:
                self.version, before = message.weights.version, self.version
                loaded = (
                    m.Ask(credits=self.slots, version=self.version) if before < 0 else m.Loaded(version=self.version)
                )
                self.say(loaded)
            case m.Work():
                self.orders += [(order, self.version) for order in message.orders]
                assert len(self.orders) <= self.slots
            case m.Stop():
                self.end_all(m.Goodbye(reason=message.reason))

    def finish(self) -> None:
        order, version = self.orders.pop(0)
        split, row = order.prompt.split("-")
        reward = int(row) <= 1 + (version > 0) if split == "heldout" else order.work % 2
        self.generated += 3
        self.say(m.Rollouts(rollouts=(rollout_of(order, reward=float(reward), version=version),)))

    def end_all(self, goodbye: m.Goodbye) -> None:
        ended = [
            m.Rollout(work=o.work, attempt=o.attempt, outcome=Cancelled(reason="", tokens=1)) for o, _ in self.orders
        ]
        self.generated += len(ended)
        self.orders.clear()
        self.say(m.Rollouts(rollouts=tuple(ended)))
        self.say(msgspec.structs.replace(goodbye, generated_tokens=self.generated))


class Learner(Peer):
    role: m.Role = "learner"

    def __init__(self, stage: Stage, name: str = "l", epoch: int = 1, *, version: int = 0, **hello: object) -> None:
        self.step, self.version = 0, version
        self.batches: list[m.Batch] = []
        super().__init__(stage, name, epoch, **hello)

    def hear(self, message: m.ToPeer) -> None:
        super().hear(message)
        match message:
            case m.Welcome():
                self.step = message.next_step
                self.publish()
                self.say(m.BatchRequest(step=self.step))
            case m.Batch():
                self.batches.append(message)
                self.step, self.version = self.step + 1, self.version + 1
                self.publish()
                self.say(done(message, self.version))
                self.say(m.Checkpointed(step=self.step, version=self.version, path="checkpoint"))
                if self.step < self.stage.broker.config.run.steps:
                    self.say(m.BatchRequest(step=self.step))
            case m.Stop():
                self.say(m.Goodbye(reason=message.reason))

    def publish(self) -> None:
        info = m.WeightsInfo(version=self.version, path="weights", size=1, checksum="00", address="")
        self.say(m.Published(weights=info, step=self.step))


class Stage:
    def __init__(
        self, config: Config, load_state: Callable[[tuple[int, ...]], dict[str, Any] | None] | None = None
    ) -> None:
        self.now, self.peers = 100.0, dict[bytes, Peer]()
        metrics = Metrics("allocator")
        self.registry = metrics.registry
        self.broker = Broker(config, AGREED, prompt_set(), metrics, run="run", now=self.now, load_state=load_state)

    def deliver(self) -> None:
        while self.broker.outbox:
            identity, message = self.broker.outbox.popleft()
            if not self.peers[identity].silent:
                self.peers[identity].hear(message)

    def play(self, until: Callable[[], bool] = lambda: False) -> None:
        """Deliver messages and let producers finish their orders in turn, until nothing is left to do."""
        self.deliver()
        while not until():
            busy = [p for p in self.peers.values() if isinstance(p, Producer) and p.orders and not p.silent]
            if not busy:
                return
            self.now += 0.25
            for producer in busy:
                if producer.orders:
                    producer.finish()
            self.deliver()

    def wait(self, seconds: float, **waiting: str) -> None:
        """Time passes; the peers that are not silent send heartbeats."""
        for _ in range(round(seconds)):
            self.now += 1
            for peer in self.peers.values():
                if not peer.silent and self.broker.peers.get(peer.identity):
                    peer.say(m.Heartbeat(waiting_for=waiting.get(peer.name, "")))
            self.broker.tick(self.now)
            self.deliver()

    def report(self) -> dict[str, Any]:
        report = self.broker.report(self.now)
        assert report["ledger_conserved"]
        assert report["tokens"]["pending"] == 0
        assert sum(n for fate, n in report["tokens"].items() if fate != "generated") == report["tokens"]["generated"]
        return report


def ready(config: Config, **slots: int) -> tuple[Stage, Learner, list[Producer]]:
    stage = Stage(config)
    learner = Learner(stage)
    return stage, learner, [Producer(stage, name, slots=n) for name, n in slots.items()]
