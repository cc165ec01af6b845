"""What the embedding examples train: a softmax over 10 answers, linear in what a prompt looks like. It stands for the
model, the engine and the verifier. A response is some tokens of thought and an answer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gvm_stream.allocator import ClosedGroup, Fate, OnlineAllocator, Scored, Told, WorkItem
from gvm_stream.allocator.arrays import Floats

LEARNING_RATE = 3.0


class EngineError(Exception):
    pass


class Response(NamedTuple):
    answer: int
    tokens: int
    version: int
    """Of the policy."""
    energy: float
    """||grad log pi(answer)||^2."""


class TinyPolicy:
    def __init__(self, prompts: int) -> None:
        rng = np.random.default_rng(0)
        features = rng.normal(size=(prompts, 16))
        right = np.argmax(features @ rng.normal(size=(16, 10)), axis=1)
        names = [f"prompt-{i}" for i in range(prompts)]
        self.features = dict(zip(names, features, strict=True))
        self.right = dict(zip(names, right.tolist(), strict=True))
        self.weights = np.zeros((16, 10))
        self.version = 0
        self.answers: dict[int, int] = {}
        """By work, of the responses that may be trained on."""

    def sample(self, item: WorkItem) -> Response:
        rng = np.random.default_rng((item.work, item.attempt))
        if rng.random() < 0.02:
            raise EngineError("out of memory")
        answer = int(rng.choice(10, p=self._probabilities(item.prompt)))
        energy = float(np.sum(self._score(item.prompt, answer) ** 2))
        return Response(answer, int(rng.geometric(0.05)), self.version, energy)

    def verify(self, item: WorkItem, response: Response) -> Scored:
        self.answers[item.work] = response.answer
        return Scored(
            reward=float(response.answer == self.right[item.prompt]),
            tokens=response.tokens,
            seconds=0.0,
            oldest_version=response.version,
            energy=response.energy,
        )

    def forget(self, item: WorkItem, told: Told) -> None:
        """Drop the answers that nobody will ask for any more."""
        unused = {work for group in told.closed for work in group.unused}
        for work in unused if told.kept else unused | {item.work}:
            self.answers.pop(work, None)

    def train(self, groups: tuple[ClosedGroup, ...]) -> dict[Fate, list[int]]:
        """A step up the mean of the groups' gradients. (A learner that samples far ahead corrects for old samples.)"""
        gradient = np.zeros_like(self.weights)
        fates: dict[Fate, list[int]] = {Fate.TRAINED: [], Fate.ZERO_SIGNAL: []}
        for group in groups:
            for member in group.members:
                score = self._score(group.prompt, self.answers.pop(member.work))
                gradient += group.weight * member.coefficient * score
                fates[Fate.TRAINED if member.coefficient else Fate.ZERO_SIGNAL].append(member.work)
        self.weights += LEARNING_RATE * gradient / max(len(groups), 1)
        self.version += 1
        return fates

    def mean_reward(self) -> float:
        return float(np.mean([self._probabilities(prompt)[right] for prompt, right in self.right.items()]))

    def _probabilities(self, prompt: str) -> Floats:
        logits = self.features[prompt] @ self.weights
        odds = np.exp(logits - logits.max())
        return np.asarray(odds / odds.sum())

    def _score(self, prompt: str, answer: int) -> Floats:
        return np.outer(self.features[prompt], np.eye(10)[answer] - self._probabilities(prompt))


def report(allocator: OnlineAllocator, before: float, after: float) -> None:
    gain = allocator.gain
    fates = ", ".join(f"{count} {fate.value}" for fate, count in allocator.account.rollouts.items() if count)
    print(f"mean reward: {before:.3f} before, {after:.3f} after {allocator.settled_steps} steps")
    print(f"rollouts: {fates}")
    print(f"gain over uniform: {gain.gain:.2f}, 95 % interval {gain.low:.2f} to {gain.high:.2f}")
    print(allocator.explain("prompt-0"))
