"""Following the learner: the engine at the newest weights, and no work for one that computes with wrong ones."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from gvm_stream.config import Config
from gvm_stream.errors import ModelError, WeightsError
from gvm_stream.logs import set_version
from gvm_stream.metrics import Metrics
from gvm_stream.producers.engine_thread import EngineThread, WeightsFailed, WeightsLoaded
from gvm_stream.producers.weights import AnnouncedFile, WeightsSource
from gvm_stream.wire import messages as m

log = logging.getLogger(__name__)

LOAD_ATTEMPTS = 5
"""Weight updates without success, in a row, before the producer gives up."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean difference of the canary's log-probs in nats, by `model.dtype`: above what two correct programs differ by, below
what one wrong tensor makes."""


class Following:
    """`ready` is awaited when the engine may take work: with the first weights, and when its quarantine ends;
    `quarantine` is called with the version and the reason when its log-probs are not those of the learner."""

    def __init__(
        self,
        config: Config,
        engine: EngineThread,
        weights: WeightsSource | AnnouncedFile,
        metrics: Metrics,
        *,
        ready: Callable[[], Awaitable[None]],
        loaded: Callable[[int], Awaitable[None]],
        quarantine: Callable[[int, str], Awaitable[None]],
    ) -> None:
        self._config, self._engine, self._weights, self._metrics = config, engine, weights, metrics
        self._ready, self._loaded, self._quarantine = ready, loaded, quarantine
        self._tolerance = config.producer.canary_tolerance or TOLERANCE[config.model.dtype]
        self._news = trio.Event()
        self._outcomes: trio.MemorySendChannel[WeightsLoaded | WeightsFailed]
        self._outcomes, self._outcome = trio.open_memory_channel[WeightsLoaded | WeightsFailed](1)
        self.wanted: m.WeightsInfo | None = None
        self.version = -1
        """In the engine, and found right."""
        self._taking_work = False

    def want(self, weights: m.WeightsInfo | None) -> None:
        if weights is not None:
            self.wanted = weights
            self._news.set()

    async def take(self, outcome: WeightsLoaded | WeightsFailed) -> None:
        """What the engine says of a load."""
        await self._outcomes.send(outcome)

    async def run(self) -> None:
        """For ever. Raises `ModelError` when no load succeeds."""
        failures = 0
        while True:
            wanted = self.wanted
            if wanted is None or wanted.version == self.version:
                await self._wait_for_news()
                continue
            problem = await self._load(wanted)
            if not problem:
                failures = 0
                await self._take_up(wanted.version)
                continue
            failures += 1
            log.warning("%s", problem)
            if failures >= LOAD_ATTEMPTS:
                raise ModelError(f"weights could not be updated {failures} times in a row: {problem}")
            with trio.move_on_after(self._config.stream.heartbeat_s):  # newer weights end the wait before a retry
                await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        await self._news.wait()
        self._news = trio.Event()

    async def _take_up(self, version: int) -> None:
        self.version = version
        self._metrics.set("gvm_engine_version", version)
        set_version(version)
        if self._taking_work:
            await self._loaded(version)
        else:
            self._taking_work = True
            self._metrics.set("gvm_engine_quarantined", 0)
            await self._ready()

    async def _loaded_or_not(self, version: int) -> WeightsLoaded | WeightsFailed:
        with trio.move_on_after(self._config.stream.progress_s):
            return await self._outcome.receive()
        raise ModelError(
            f"the engine has not taken the weights of version {version} for {self._config.stream.progress_s:g} s"
        )

    async def _load(self, info: m.WeightsInfo) -> str:
        """Load these weights; what went wrong, if anything did."""
        started = trio.current_time()
        try:
            async with self._weights.local(info) as path:
                self._engine.load_weights(path, info.version, info.canary)
                outcome = await self._loaded_or_not(info.version)
        except WeightsError as error:
            return f"version {self.version} stays in force: {error}"
        if isinstance(outcome, WeightsFailed):
            return f"version {self.version} stays in force: {outcome.reason}"
        self._metrics.observe("gvm_weight_update_seconds", trio.current_time() - started)
        self._metrics.observe("gvm_weight_stall_seconds", outcome.seconds)
        if outcome.difference is None:
            return ""
        self._metrics.set("gvm_canary_difference", outcome.difference)
        if outcome.difference <= self._tolerance:
            return ""
        reason = (
            f"with the weights of version {info.version} the engine's log-probs of the canary differ from the "
            f"learner's by {outcome.difference:.3g} nats on average, at most {self._tolerance:g} are expected"
        )
        self.version, self._taking_work = -1, False
        self._metrics.set("gvm_engine_quarantined", 1)
        await self._quarantine(info.version, reason)
        return f"quarantined: {reason}"
