"""A producer's work between allocator and engine: orders in, verified rollouts out, weights followed.

Loops in one nursery: `read_allocator` -> engine; `read_engine` -> `verify` for those that ended together ->
`Delivery`; `Following` the weights. Every order ends as exactly one `Rollout` message, also at shutdown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import trio

from gvm_stream.allocator.estimates import SUCCESS_REWARD
from gvm_stream.allocator.types import Cancelled, Failed, Scored, Unscorable
from gvm_stream.config import Config
from gvm_stream.errors import ModelError
from gvm_stream.metrics import Metrics
from gvm_stream.producers.credits import Credits
from gvm_stream.producers.delivery import Delivery
from gvm_stream.producers.energy import energy_proxy
from gvm_stream.producers.engine import Completion, Request
from gvm_stream.producers.engine_thread import Completed, EngineDied, EngineThread, Event, WeightsFailed, WeightsLoaded
from gvm_stream.producers.following import Following
from gvm_stream.producers.weights import AnnouncedFile, WeightsSource
from gvm_stream.verify.pool import VerifierPool
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerifyItem
from gvm_stream.wire import messages as m
from gvm_stream.wire.link import Link
from gvm_stream.wire.payload import pack

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Order:
    """A work item in hand."""

    work: int
    attempt: int
    prompt: str
    answer: str
    verifier: str
    since: float


Finished = tuple[Order, Completion]


class Session:
    def __init__(
        self,
        config: Config,
        link: Link,
        engine: EngineThread,
        events: trio.MemoryReceiveChannel[Event],
        pool: VerifierPool,
        weights: WeightsSource | AnnouncedFile,
        decode: Decode,
        metrics: Metrics,
    ) -> None:
        self._config, self._link, self._engine, self._events = config, link, engine, events
        self._pool, self._decode, self._metrics = pool, decode, metrics
        self._orders: dict[int, Order] = {}
        """In the engine, by work."""
        self._next: dict[int, m.WorkOrder] = {}
        """Orders for work that is still in the engine: the allocator has taken the attempt before for lost."""
        self._delivery = Delivery(link, config.stream.silence_s / 3)
        self._credits = Credits(config.producer.slots)
        self._following = Following(
            config,
            engine,
            weights,
            metrics,
            ready=self._begin,
            loaded=lambda version: link.send(m.Loaded(version=version)),
            quarantine=self._quarantine,
        )
        self._following.want(link.welcome.weights)
        self._quarantined = ""
        """Why no work is taken; empty while it is."""
        self._spoilt: dict[int, tuple[int, str]] = {}
        """Work -> the version that it must not have tokens of, and why."""
        self._leaving = ""
        """Why work in hand is given back; empty while the producer stays."""
        self._shown_tokens = 0
        metrics.set("gvm_engine_cache_recomputed", config.producer.kv_policy == "recompute")
        link.heartbeat, link.in_hand = self._heartbeat, lambda: dict(self._delivery.in_hand)

    async def run(self, leave: trio.Event) -> str:
        """Work until the allocator stops the run or `leave` is set; the reason comes back. All work has been returned
        and said goodbye for by then, unless an error ends it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_engine, nursery)
            nursery.start_soon(self._following.run)
            nursery.start_soon(self._look_at_the_engine)
            nursery.start_soon(self._delivery.run)
            nursery.start_soon(self._read_allocator, nursery)
            nursery.start_soon(self._leave_when_told, leave, nursery.cancel_scope)
        return self._leaving

    # --- loops ---

    async def _read_allocator(self, nursery: trio.Nursery) -> None:
        """Also while the session ends: it must hear that what it handed back has arrived."""
        while True:
            message = await self._link.receive()
            match message:
                case m.Work():
                    self._submit(message.orders)
                case m.Cancel():
                    self._engine.abort([work for work in message.works if work in self._orders])
                case m.Received():
                    self._delivery.received(message.seq)
                case m.Welcome():
                    await self._rejoin(message)
                case m.NewWeights():
                    self._following.want(message.weights)
                case m.Stop():
                    nursery.start_soon(self._hand_back, message.reason, Cancelled, nursery.cancel_scope)
                case _:
                    log.warning("the allocator sent %s, which is not for a producer", type(message).__name__)

    async def _read_engine(self, verdicts: trio.Nursery) -> None:
        async for event in self._events:
            match event:
                case Completed(completions):
                    verdicts.start_soon(self._verify, [(self._orders.pop(c.id), c) for c in completions])
                    self._start([self._next.pop(c.id) for c in completions if c.id in self._next])
                case WeightsLoaded() | WeightsFailed():
                    await self._following.take(event)
                case EngineDied(error):
                    await self._engine_died(error)

    async def _verify(self, finished: list[Finished]) -> None:
        """Report what ended together, each as soon as its verdict is known: one may take long."""
        judged = []
        for order, completion in finished:
            if completion.finish in ("stop", "length") and not self._is_spoilt(order, completion):
                judged.append((order, completion))
            else:
                self._delivery.put(self._ended(order, completion))
        started = trio.current_time()

        def report(index: int, verdict: Verdict) -> None:
            self._metrics.observe("gvm_verify_seconds", trio.current_time() - started)
            self._delivery.put(self._judged(*judged[index], verdict))

        await self._pool.verify([self._item(*pair) for pair in judged], report)

    async def _look_at_the_engine(self) -> None:
        """Ask for what it can keep running."""
        while True:
            await trio.sleep(self._config.stream.heartbeat_s)
            if self._credits.look(self._engine.load):
                await self._ask()

    async def _leave_when_told(self, leave: trio.Event, scope: trio.CancelScope) -> None:
        await leave.wait()
        if not self._leaving:  # first, or what goes back would come again at once and use up its attempts
            await self._link.send(m.Ask(slots=0, version=self._following.version))
        await self._hand_back("producer leaves", Failed, scope)

    # --- steps of them ---

    def _submit(self, orders: Sequence[m.WorkOrder]) -> None:
        self._delivery.take(orders)
        again = {order.work: order for order in orders if order.work in self._orders}
        self._next |= again
        self._engine.abort(list(again))
        self._start([order for order in orders if order.work not in again])

    def _start(self, orders: Sequence[m.WorkOrder]) -> None:
        if not orders:
            return
        now = trio.current_time()
        sampling = self._config.sampling
        requests = []
        for order in orders:
            self._orders[order.work] = Order(order.work, order.attempt, order.prompt, order.answer, order.verifier, now)
            requests.append(
                Request(
                    id=order.work,
                    prompt_tokens=np.frombuffer(order.prompt_tokens, "<i4"),
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                )
            )
        self._engine.submit(requests)
        if self._leaving or self._quarantined:  # orders that crossed our farewell, or our asking for none
            self._engine.abort([request.id for request in requests])

    async def _begin(self) -> None:
        self._quarantined = ""
        await self._ask()

    async def _ask(self) -> None:
        if not self._leaving and self._following.version >= 0:
            await self._link.send(m.Ask(slots=self._credits.orders, version=self._following.version))

    async def _quarantine(self, version: int, reason: str) -> None:
        """What runs has been sampled with wrong weights since they were loaded: it goes back, and no more is taken."""
        self._quarantined = reason
        self._spoilt.update((work, (version, reason)) for work in self._orders)
        self._engine.abort(list(self._orders))
        await self._link.send(m.Ask(slots=0, version=version))

    async def _rejoin(self, welcome: m.Welcome) -> None:
        """The allocator has been started again, or had given us up."""
        await self._delivery.resend()
        self._following.want(welcome.weights)
        await self._ask()

    async def _hand_back(self, reason: str, end: type[Cancelled] | type[Failed], scope: trio.CancelScope) -> None:
        """End everything in hand as `end`, wait until it has arrived, say goodbye; the first call counts."""
        if self._leaving:
            return
        self._leaving, self._end = reason, end
        self._engine.abort(list(self._orders))
        with trio.move_on_after(self._config.stream.silence_s) as patience:
            await self._delivery.wait_until_empty()
        if patience.cancelled_caught:
            left = len(self._delivery.in_hand)
            log.warning("the allocator has not said that it has %d rollouts; they count as lost", left)
        await self._link.send(m.Goodbye(reason=reason, generated_tokens=self._engine.generated_tokens))
        scope.cancel()

    async def _engine_died(self, error: Exception) -> None:
        """Return what can be returned, then end with the engine's own error."""
        reason = str(error) if isinstance(error, ModelError) else f"the engine died: {error}"
        await self._delivery.send(
            [
                m.Rollout(work=o.work, attempt=o.attempt, outcome=Failed(reason=reason, tokens=self._tokens_of(o.work)))
                for o in self._orders.values()
            ]
        )
        raise ModelError(reason) from error

    def _item(self, order: Order, completion: Completion) -> VerifyItem:
        return VerifyItem(
            answer=order.answer,
            response=self._decode(completion.tokens.tolist()),
            truncated=completion.finish == "length",
            kind=order.verifier,
            prompt=order.prompt,
            tokens=len(completion.tokens),
            max_tokens=self._config.sampling.max_tokens,
        )

    def _judged(self, order: Order, completion: Completion, verdict: Verdict) -> m.Rollout:
        seconds = trio.current_time() - order.since
        self._metrics.observe("gvm_rollout_seconds", seconds)
        tokens = len(completion.tokens)
        if not isinstance(verdict, VerdictScored):
            self._metrics.count("gvm_verdicts", label="unscorable")
            self._metrics.count("gvm_unscorable", label=verdict.cause)
            outcome = Unscorable(reason=verdict.reason, tokens=tokens, seconds=seconds)
            return m.Rollout(work=order.work, attempt=order.attempt, outcome=outcome)
        versions = [version for version, _, _ in completion.spans] or [self._following.version]
        self._metrics.observe("gvm_response_tokens", tokens)
        self._metrics.count("gvm_rollouts_truncated", completion.finish == "length")
        self._metrics.count("gvm_verdicts", label="right" if verdict.reward >= SUCCESS_REWARD else "wrong")
        return m.Rollout(
            work=order.work,
            attempt=order.attempt,
            outcome=Scored(
                reward=verdict.reward,
                tokens=tokens,
                seconds=seconds,
                oldest_version=min(versions),
                newest_version=max(versions),
                truncated=completion.finish == "length",
                energy=energy_proxy(completion.logprobs),
            ),
            payload=pack(
                completion.tokens.astype("<i4").tobytes(),
                completion.logprobs.astype("<f4").tobytes(),
                completion.spans,
                truncated=completion.finish == "length",
            ),
        )

    def _ended(self, order: Order, completion: Completion) -> m.Rollout:
        """A request that was aborted or that the engine could not do."""
        tokens = len(completion.tokens)
        outcome: Cancelled | Failed
        if completion.finish == "error":
            outcome = Failed(reason=completion.error, tokens=tokens)
        elif spoilt := self._spoilt.pop(order.work, None):
            outcome = Failed(reason=spoilt[1], tokens=tokens)
        elif self._leaving:
            outcome = self._end(reason=self._leaving, tokens=tokens)
        elif self._quarantined:
            outcome = Failed(reason=self._quarantined, tokens=tokens)
        else:
            outcome = Cancelled(reason="cancelled by the allocator", tokens=tokens)
        return m.Rollout(work=order.work, attempt=order.attempt, outcome=outcome)

    def _is_spoilt(self, order: Order, completion: Completion) -> bool:
        """It was running when wrong weights came, and has tokens of them."""
        version, _ = self._spoilt.get(order.work, (-1, ""))
        if any(version == found for found, _, _ in completion.spans):
            return True
        self._spoilt.pop(order.work, None)
        return False

    def _heartbeat(self) -> m.Heartbeat:
        generated = self._engine.generated_tokens
        if generated > self._shown_tokens:
            self._metrics.progress()
        self._metrics.total("gvm_engine_tokens", generated)
        self._shown_tokens = generated
        load = self._engine.load
        self._metrics.set("gvm_engine_running", load.running)
        self._metrics.set("gvm_engine_waiting", load.waiting)
        self._metrics.set("gvm_engine_cache_used", load.cache_used)
        self._metrics.total("gvm_engine_preemptions", load.preemptions)
        self._metrics.set("gvm_verifier_waiting", self._pool.stats.waiting)
        self._metrics.total("gvm_verifier_killed", self._pool.stats.killed)
        waiting = ""
        if self._quarantined:
            waiting = "weights that give the learner's log-probs"
        elif self._following.version < 0:
            waiting = "weights" if self._following.wanted else "the learner's first weights"
        elif not self._delivery.in_hand:
            waiting = "work"
        elif not self._orders and self._pool.stats.waiting + self._pool.stats.running:
            waiting = "verdicts"
        if waiting:
            reason = waiting if waiting in ("work", "verdicts") else "weights"
            self._metrics.count("gvm_producer_wait_seconds", self._config.stream.heartbeat_s, label=reason)
        return m.Heartbeat(
            waiting_for=waiting, running={work: self._tokens_of(work) for work in self._delivery.in_hand}
        )

    def _tokens_of(self, work: int) -> int:
        return self._engine.progress.get(work, 0)
