"""What metrics cost the allocator: `python -m benchmarks.metrics_overhead --json`.

The broker handles messages of a producer and a learner as its process does: bytes in, decoded, work and batches handed
out, changes noted, bytes out; no socket and no disk. Visits that end are kept in the turn of the loop that
ends them, and counted once a second. CPU time:

- `turns`: pairs of turns that follow each other, one with the tally and one without, in random order; the median of
  with / without - 1, with its 95 % interval (from ranks: nothing is assumed of the noise).
- `by_the_second`: what happens by the clock, as a share of one core: the tally of as many rollouts as there are in a
  second is shown and gauges are set once a second, a scrape comes every ten.
- `overhead`: both together, with the interval of the first.
- `counted`: what the tally takes for the turns of a second, alone, as a share of them: a check on `turns`.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from itertools import count, cycle

import numpy as np
from prometheus_client import generate_latest

from benchmarks.report import finish, machine, parser, say
from gvm_stream.allocator import ClosedGroup, Scored
from gvm_stream.allocator.broker import Broker
from gvm_stream.allocator.spool import Saved
from gvm_stream.allocator.tally import Tally
from gvm_stream.config import AllocationSection, Config, DataSection, EvalSection, ModelSection, RunSection
from gvm_stream.data.prompts import Prompt, PromptSet
from gvm_stream.metrics import Metrics
from gvm_stream.wire import messages as m
from gvm_stream.wire.codec import decode_to_allocator, encode
from gvm_stream.wire.payload import pack

PROMPTS, PER_STEP, TOKENS, SLOTS = 4096, 64, 200, 512
"""Prompts, those of a batch, tokens of a response on average, rollouts in hand."""
TURN = 64
"""Rollouts that a turn takes: those of several messages, when the allocator has all it can do."""
Z95 = 1.96
SCRAPES_PER_SECOND = 0.1


class Off(Tally):
    def ended(self, groups: Sequence[ClosedGroup]) -> None:
        pass

    def show(self, metrics: Metrics) -> None:
        pass


class Recorded(Tally):
    """Keeps what it is told, to be told again."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Sequence[ClosedGroup]] = []

    def ended(self, groups: Sequence[ClosedGroup]) -> None:
        self.groups.append(groups)


class Host:
    """A broker with a producer and a learner that answer at once."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        config = Config(
            run=RunSection(steps=10**6),
            model=ModelSection(path="model"),
            data=DataSection(train="train.jsonl"),
            allocation=AllocationSection(prompts_per_step=PER_STEP, rollouts_per_prompt=8),
            eval=EvalSection(prompts=1, samples=1, every_steps=0),
        )
        prompt = np.arange(60, dtype="<i4").tobytes()
        train = tuple(Prompt(id=f"train-{i}", text="", tokens=prompt, answer="1") for i in range(PROMPTS))
        heldout = (Prompt(id="heldout-1", text="", tokens=prompt, answer="1"),)
        prompts = PromptSet(train=train, heldout=heldout, bad_rows=(), end_tokens=(0,))
        self.broker = Broker(config, {}, prompts, metrics, run="run", now=0.0, saved=Saved(snapshot=None, journal=[]))
        self.version = 0
        self._orders: list[m.WorkOrder] = []
        self._seq, self._chance = count(1), np.random.default_rng(0)
        lengths = self._chance.integers(1, 2 * TOKENS, 1000).tolist()
        self._responses = cycle([(n, np.ones(n, "<i4").tobytes(), np.zeros(n, "<f4").tobytes()) for n in lengths])
        for role in ("learner", "producer"):
            name: m.Role = "learner" if role == "learner" else "producer"
            self._say(name, m.Hello(protocol=m.PROTOCOL, role=name, name="a", epoch=1, agreed={}))
        self._publish(0)
        self._say("producer", m.Ask(slots=SLOTS, version=0))
        self._say("learner", m.BatchRequest(step=0))

    def turn(self, tally: Tally) -> float:
        """CPU time of a turn that takes a message of results."""
        self.broker.work.tally = tally
        orders, self._orders = self._orders[:TURN], self._orders[TURN:]
        rewards = (self._chance.random(len(orders)) < 0.5).tolist()
        results = tuple(map(self._rollout, orders, rewards))
        return self._say("producer", m.Rollouts(seq=next(self._seq), rollouts=results))

    def _rollout(self, order: m.WorkOrder, reward: bool) -> m.Rollout:
        length, tokens, logprobs = next(self._responses)
        return m.Rollout(
            work=order.work,
            attempt=order.attempt,
            outcome=Scored(reward=float(reward), tokens=length, seconds=1.0, oldest_version=self.version),
            payload=pack(tokens, logprobs, ((self.version, 0, length),), truncated=False),
        )

    def _say(self, role: m.Role, message: m.ToAllocator) -> float:
        """One turn of the allocator's loop; its CPU time."""
        identity, frame = f"{role}/a/1".encode(), encode(message)
        started = time.process_time()
        self.broker.receive(identity, decode_to_allocator([frame]), 0.0)
        self.broker.advance(0.0)
        self.broker.work.take_changes()
        said = [message for _, message in self.broker.outbox]
        self.broker.outbox.clear()
        for answer in said:
            encode(answer)
        seconds = time.process_time() - started
        for answer in said:
            match answer:
                case m.Work():
                    self._orders += answer.orders
                case m.Batch():
                    self._trained(answer)
        return seconds

    def _trained(self, batch: m.Batch) -> None:
        works = tuple(rollout.work for group in batch.groups for rollout in group.rollouts)
        stats = m.StepStats(
            loss=0.0, grad_norm=1.0, reward_mean=0.5, zero_signal_groups=0, groups=PER_STEP, mean_lag=0.0, max_lag=0,
            mismatch=0.0, effective_sample_size=1.0, seconds=1.0, padding_share=0.0,
        )  # fmt: skip
        self.version += 1
        self._publish(batch.step + 1)
        done = m.StepDone(
            step=batch.step, version=self.version, trained=True, reason="", fates={"trained": works}, stats=stats
        )
        self._say("learner", done)
        self._say("producer", m.Loaded(version=self.version))
        self._say("learner", m.BatchRequest(step=batch.step + 1))

    def _publish(self, step: int) -> None:
        weights = m.WeightsInfo(version=self.version, path="w", size=1, checksum="00", address="")
        self._say("learner", m.Published(weights=weights, step=step))


def alone(host: Host, turns: int) -> tuple[float, float]:
    """CPU time of the tally of so many turns, and of showing it."""
    recorded, tally = Recorded(), Tally()
    for _ in range(turns):
        host.turn(recorded)

    def told() -> None:
        for groups in recorded.groups:
            tally.ended(groups)

    telling = timeit.timeit(told, timer=time.process_time, number=1)
    return telling, timeit.timeit(lambda: tally.show(host.metrics), timer=time.process_time, number=1)


def best(call: Callable[[], object]) -> float:
    """CPU time of a call."""
    return min(timeit.repeat(call, timer=time.process_time, number=10, repeat=5)) / 10


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval, from ranks."""
    ordered, half = sorted(values), Z95 * len(values) ** 0.5 / 2
    ranks = (len(values) / 2, len(values) / 2 - half, len(values) / 2 + half)
    middle, low, high = (round(ordered[min(max(int(rank), 0), len(values) - 1)], 4) for rank in ranks)
    return middle, low, high


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--pairs", type=int, default=20_000)
    options = arguments.parse_args()
    host, chance = Host(Metrics("allocator")), random.Random(0)
    on, off = Tally(), Off()
    gc.disable()
    for _ in range(200):  # to warm up
        host.turn(on)
    ratios, seconds = [], []
    for number in range(options.pairs):
        took = {tally: host.turn(tally) for tally in chance.sample((on, off), 2)}
        ratios.append(took[on] / took[off] - 1)
        seconds.append(took[on])
        if number % 2000 == 1999:
            gc.collect()
            say(f"{number + 1} pairs: {median_interval(ratios)}")
    turn_s = statistics.fmean(seconds)
    told, shown = alone(host, round(1 / turn_s))
    tick = best(lambda: host.broker.tick(0.0))
    scrape = best(lambda: generate_latest(host.metrics.registry))
    by_the_second = shown + tick + scrape * SCRAPES_PER_SECOND
    turns = median_interval(ratios)
    middle, low, high = (round(share + by_the_second, 4) for share in turns)
    result = {
        "benchmark": "metrics_overhead",
        "machine": machine(),
        "pairs": len(ratios),
        "rollouts_per_second": round(TURN / turn_s),
        "overhead": middle,
        "overhead_interval": [low, high],
        "turns": turns,
        "counted": round(told, 4),
        "by_the_second": round(by_the_second, 4),
        "show_ms": round(shown * 1e3, 3),
        "tick_ms": round(tick * 1e3, 3),
        "scrape_ms": round(scrape * 1e3, 3),
    }
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
