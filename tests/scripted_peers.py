"""The other side of the allocator for tests: prompts, results, and scripted peers on a stage with its own clock.

The peers follow the protocol as the real ones do: what the allocator may not have is kept and said again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from gvm_stream.allocator import Cancelled, Scored
from gvm_stream.allocator.broker import Broker
from gvm_stream.allocator.spool import Changes, MemorySpool, Saved
from gvm_stream.allocator.types import Failed, Unscorable
from gvm_stream.config import (
    AllocationSection,
    Config,
    DataSection,
    EvalSection,
    LearnerSection,
    ModelSection,
    RunSection,
    StreamSection,
)
from gvm_stream.data.prompts import Prompt, PromptSet
from gvm_stream.metrics import Metrics
from gvm_stream.wire import messages as m
from gvm_stream.wire.link import identity_of
from gvm_stream.wire.payload import fill, frames_of, pack, works_of

T = TypeVar("T", bound=m.Message)

AGREED = {"sampling.temperature": "1.0", "model.path": "model"}
KEEP_CHECKPOINTS = 2


def config(*, steps: int = 4, per_step: int = 2, every: int = 0, progress_s: float = 60, **allocation: Any) -> Config:  # noqa: ANN401
    """Three rollouts of each prompt, four held-out prompts once."""
    plain: dict[str, Any] = {
        "policy": "uniform",
        "prompts_per_step": per_step,
        "rollouts_per_prompt": 3,
        "max_rollouts": 4,
        "max_lag": 0,
        "max_attempts": 3,
    }
    return Config(
        run=RunSection(steps=steps),
        model=ModelSection(path="model"),
        data=DataSection(train="train.jsonl"),
        allocation=AllocationSection(**(plain | allocation)),
        learner=LearnerSection(checkpoint_every=2),
        stream=StreamSection(heartbeat_s=1, silence_s=10, progress_s=progress_s),
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
        payload=pack(
            np.full(tokens, order.work, "<i4").tobytes(),
            np.full(tokens, -0.5, "<f4").tobytes(),
            ((version, 0, tokens),) if tokens else (),
            truncated=False,
        ),
    )


def weights(version: int) -> m.WeightsInfo:
    return m.WeightsInfo(version=version, path="weights", size=1, checksum="00", address="")


def done(batch: m.Batch, version: int) -> m.StepDone:
    works = tuple(works_of(batch))
    stats = m.StepStats(
        loss=0.0, grad_norm=1.0, reward_mean=0.5, zero_signal_groups=0, groups=2, mean_lag=0.0, max_lag=0,
        mismatch=0.0, effective_sample_size=1.0, seconds=1.0, padding_share=0.0, wait_seconds=0.5,
    )  # fmt: skip
    fates = {"trained": works[1:], "zero_signal": works[:1]}
    return m.StepDone(step=batch.step, version=version, trained=True, reason="", fates=fates, stats=stats)


class Disk:
    """A spool in memory that survives the allocator."""

    def __init__(self) -> None:
        self._saved = Saved(snapshot=None, journal=[])
        self._kept = MemorySpool()
        self.rollouts, self.batch = self._kept.rollouts, self._kept.batch
        self.size, self.close = self._kept.size, self._kept.close

    def load(self) -> Saved:
        return Saved(snapshot=self._saved.snapshot, journal=list(self._saved.journal))

    def commit(self, turns: Sequence[Changes]) -> None:
        self._kept.commit(turns)
        for turn in turns:
            if turn.snapshot is not None:
                self._saved = Saved(snapshot=turn.snapshot, journal=[])
            else:
                self._saved.journal.extend(turn.journal)


class Peer:
    """A process at the other end: messages wait in its queues until somebody moves them."""

    role: m.Role = "observer"

    def __init__(self, stage: Stage, name: str, epoch: int = 1, **hello: object) -> None:
        self.stage, self.name, self.epoch = stage, name, epoch
        self.identity = identity_of(self.role, name, epoch)
        self.to_allocator: deque[m.ToAllocator] = deque()
        self.from_allocator: deque[m.ToPeer] = deque()
        self.heard: list[m.ToPeer] = []
        self.silent = self.gone = False
        said = m.Hello(protocol=m.PROTOCOL, role=self.role, name=name, epoch=epoch, agreed=AGREED)
        self.hello = msgspec.structs.replace(said, **hello)
        stage.peers[self.identity] = self
        self.say(self.hello)

    def say(self, message: m.ToAllocator) -> None:
        if not self.gone:
            self.to_allocator.append(message)

    def hear(self, message: m.ToPeer) -> None:
        self.heard.append(message)
        if isinstance(message, m.Unknown) and not self.gone:
            self.say(self.hello_again())

    def hello_again(self) -> m.Hello:
        return self.hello

    def heartbeat(self) -> m.Heartbeat:
        return m.Heartbeat()

    def again(self) -> None:
        """Nothing has been heard for some time: say again what may be lost."""

    def leave(self, goodbye: m.Goodbye) -> None:
        self.say(goodbye)
        self.gone = True

    def all(self, kind: type[T]) -> list[T]:
        return [message for message in self.heard if isinstance(message, kind)]

    def last(self, kind: type[T]) -> T:
        return self.all(kind)[-1]


class Producer(Peer):
    """Gives half of the held-out prompts a right answer from version 1 on, a quarter before."""

    role: m.Role = "producer"

    def __init__(self, stage: Stage, name: str, epoch: int = 1, *, slots: int = 4, **hello: object) -> None:
        self.slots, self.version, self.generated, self.seq = slots, -1, 0, 0
        self.orders: dict[int, tuple[m.WorkOrder, int]] = {}
        """In the engine: work -> order, version."""
        self.in_hand: dict[int, int] = {}
        self.sent: deque[m.Rollouts] = deque()
        self.leaving: m.Stop | None = None
        super().__init__(stage, name, epoch, **hello)

    def hello_again(self) -> m.Hello:
        return msgspec.structs.replace(self.hello, in_hand=dict(self.in_hand))

    def heartbeat(self) -> m.Heartbeat:
        return m.Heartbeat(running=dict.fromkeys(self.in_hand, 0))

    def hear(self, message: m.ToPeer) -> None:
        super().hear(message)
        match message:
            case m.Welcome():
                self.again()
                if self.version >= 0:
                    self.ask()
                self._load(message.weights)
            case m.NewWeights():
                self._load(message.weights)
            case m.Work():
                for order in message.orders:
                    self.orders[order.work] = (order, self.version)
                    self.in_hand[order.work] = order.attempt
                if self.leaving:
                    self._hand_back()
            case m.Cancel():
                self.report([self._cancelled(work) for work in message.works if work in self.orders])
            case m.Received():
                while self.sent and self.sent[0].seq <= message.seq:
                    for rollout in self.sent.popleft().rollouts:
                        if self.in_hand.get(rollout.work) == rollout.attempt:
                            del self.in_hand[rollout.work]
                self._leave_when_empty()
            case m.Stop():
                self.leaving = message
                self._hand_back()
                self._leave_when_empty()

    def ask(self) -> None:
        self.say(m.Ask(slots=self.slots, version=self.version))

    def again(self) -> None:
        if not self.all(m.Welcome):
            self.say(self.hello)
        for message in self.sent:
            self.say(message)

    def report(self, rollouts: Sequence[m.Rollout]) -> None:
        if not rollouts:
            return
        for rollout in rollouts:
            self.orders.pop(rollout.work, None)
            self.generated += rollout.outcome.tokens
        self.seq += 1
        self.sent.append(m.Rollouts(seq=self.seq, rollouts=tuple(rollouts)))
        self.say(self.sent[-1])

    def finish(self, kind: str = "scored", tokens: int = 3) -> None:
        """The oldest order is done."""
        order, version = next(iter(self.orders.values()))
        split, row = order.prompt.split("-")
        reward = int(row) <= 1 + (version > 0) if split == "heldout" else order.work % 2
        match kind:
            case "unscorable":
                outcome = Unscorable(reason="no verdict", tokens=tokens, seconds=1.0)
                self.report([m.Rollout(work=order.work, attempt=order.attempt, outcome=outcome)])
            case "failed":
                failed = Failed(reason="out of memory", tokens=tokens)
                self.report([m.Rollout(work=order.work, attempt=order.attempt, outcome=failed)])
            case _:
                self.report([rollout_of(order, reward=float(reward), tokens=tokens, version=version)])

    def _load(self, info: m.WeightsInfo | None) -> None:
        if info is None or info.version == self.version:
            return
        first, self.version = self.version < 0, info.version
        if first:
            self.ask()
        else:
            self.say(m.Loaded(version=self.version))

    def _cancelled(self, work: int) -> m.Rollout:
        order, _ = self.orders[work]
        return m.Rollout(work=work, attempt=order.attempt, outcome=Cancelled(reason="", tokens=1))

    def _hand_back(self) -> None:
        self.report([self._cancelled(work) for work in self.orders])

    def _leave_when_empty(self) -> None:
        if self.leaving and not self.in_hand and not self.gone:
            self.leave(m.Goodbye(reason=self.leaving.reason, generated_tokens=self.generated))


class Learner(Peer):
    """Its model is the list of the batches that it was trained on; its checkpoints are on the stage."""

    role: m.Role = "learner"

    def __init__(self, stage: Stage, name: str = "l", epoch: int = 1, **hello: object) -> None:
        self.model: list[m.Batch] = []
        self.waiting: int | None = None
        self.welcome: m.Welcome | None = None
        self.version = -1
        self._published: m.Published | None = None
        self._unsettled: dict[int, m.StepDone] = {}
        self._checkpointed: m.Checkpointed | None = None
        super().__init__(stage, name, epoch, **({"checkpoints": tuple(sorted(stage.checkpoints))} | hello))

    def hello_again(self) -> m.Hello:
        return self.hello if self.welcome is None else msgspec.structs.replace(self.hello, step=len(self.model))

    def hear(self, message: m.ToPeer) -> None:
        super().hear(message)
        match message:
            case m.Welcome() if self.welcome is None:
                self.welcome = message
                self.model = list(self.stage.checkpoints[message.next_step])
                self.publish()
                self.ask()
            case m.Welcome():
                self.again()
            case m.Batch() if message.step == self.waiting:
                self.train(message)
            case m.Settled():
                self._unsettled.pop(message.step, None)
            case m.Stop() if not self.gone:
                self.leave(m.Goodbye(reason=message.reason))

    def again(self) -> None:
        if self.welcome is None:
            self.say(self.hello)
        for message in (self._published, *self._unsettled.values(), self._checkpointed):
            if message is not None:
                self.say(message)
        self.ask()

    def ask(self) -> None:
        if self.welcome is not None and len(self.model) < self.stage.config.run.steps:
            self.waiting = len(self.model)
            self.say(m.BatchRequest(step=self.waiting))

    def train(self, batch: m.Batch) -> None:
        self.model.append(batch)
        self.publish()
        self._unsettled[batch.step] = done(batch, self.version)
        self.say(self._unsettled[batch.step])
        if len(self.model) % 2 == 0 or len(self.model) == self.stage.config.run.steps:
            self.save()
        self.waiting = None
        self.ask()

    def save(self) -> None:
        kept = self.stage.checkpoints
        kept[len(self.model)] = tuple(self.model)
        for step in sorted(step for step in kept if step)[:-KEEP_CHECKPOINTS]:
            del kept[step]
        self._checkpointed = m.Checkpointed(steps=tuple(sorted(step for step in kept if step)))
        self.say(self._checkpointed)

    def publish(self) -> None:
        assert self.welcome is not None
        if len(self.model) >= self.welcome.settled:
            self.stage.newest_version += 1
            self.version = self.stage.newest_version
            self._published = m.Published(weights=weights(self.version), step=len(self.model))
            self.say(self._published)


class Stage:
    def __init__(self, config: Config, *, durable: bool = True, train: int = 40) -> None:
        self.config, self.now, self.train = config, 100.0, train
        self.peers: dict[bytes, Peer] = {}
        self.disk = Disk()
        self._durable = durable
        self.checkpoints: dict[int, tuple[m.Batch, ...]] = {0: ()}
        """Of the learner: step -> model."""
        self.newest_version = -1
        self.restart()

    def restart(self) -> None:
        """The allocator is killed and started again: what it had not written down is gone, and what it had not sent."""
        self.metrics = Metrics("allocator")
        saved = self.disk.load() if self._durable else None
        self.broker = Broker(
            self.config, AGREED, prompt_set(self.train), self.metrics, run="run", now=self.now, saved=saved
        )

    def receive(self, peer: Peer) -> None:
        """One message of a peer arrives."""
        self.broker.receive(peer.identity, peer.to_allocator.popleft(), self.now)

    def commit(self, *, snapshot: bool = False, send: bool = True) -> None:
        """Write down what has changed, then send what was said."""
        changes = self.broker.work.take_changes(snapshot=snapshot)
        if changes is not None:
            self.disk.commit([changes])
        for identity, message in [*self.broker.outbox, *map(self._replay, self.broker.replays)]:
            if send and identity in self.peers:
                filled = self._filled(message) if isinstance(message, m.Batch) else message
                self.peers[identity].from_allocator.append(filled)
        self.broker.outbox.clear()
        self.broker.replays.clear()

    def turn(self, **how: bool) -> None:
        self.broker.advance(self.now)
        self.commit(**how)

    def deliver(self) -> None:
        """Until nobody has anything to say."""
        self.turn()
        while any(p.to_allocator or (p.from_allocator and not p.silent) for p in self.peers.values()):
            for peer in list(self.peers.values()):
                while peer.to_allocator:
                    self.receive(peer)
            self.turn()
            for peer in list(self.peers.values()):
                while peer.from_allocator and not peer.silent:
                    peer.hear(peer.from_allocator.popleft())

    def play(self, until: Callable[[], bool] = lambda: False) -> None:
        """Deliver messages and let producers finish their orders in turn, until nothing is left to do."""
        self.deliver()
        while not until():
            busy = [p for p in self.peers.values() if isinstance(p, Producer) and p.orders and not p.silent]
            if not busy:
                return
            self.now += 0.25
            for producer in busy:
                producer.finish()
            self.deliver()

    def wait(self, seconds: float, **waiting: str) -> None:
        """Time passes; the peers that are not silent send heartbeats."""
        for _ in range(round(seconds)):
            self.now += 1
            for peer in self.peers.values():
                if not peer.silent:
                    beat = peer.heartbeat()
                    peer.say(msgspec.structs.replace(beat, waiting_for=waiting.get(peer.name, "")))
            self.deliver()
            self.broker.tick(self.now)
            self.deliver()

    def report(self) -> dict[str, Any]:
        report = self.broker.report(self.now)
        assert report["ledger_conserved"]
        assert sum(n for fate, n in report["tokens"].items() if fate != "generated") == report["tokens"]["generated"]
        return report

    def _replay(self, replay: tuple[bytes, int]) -> tuple[bytes, m.Batch]:
        identity, step = replay
        content = self.disk.batch(step)
        assert content is not None
        return identity, msgspec.msgpack.decode(content, type=m.Batch)

    def _filled(self, batch: m.Batch) -> m.Batch:
        works = works_of(batch)
        payloads = self.disk.rollouts(works)
        return fill(batch, [*frames_of(payloads[work] for work in works)])


def ready(config: Config, **slots: int) -> tuple[Stage, Learner, list[Producer]]:
    stage = Stage(config)
    learner = Learner(stage)
    return stage, learner, [Producer(stage, name, slots=n) for name, n in slots.items()]
