"""Publishing beside the training: weights are copied at once, then written, checked and announced in a thread."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gvm_stream.config import Config
from gvm_stream.learner.canary import canary_of
from gvm_stream.learner.distributed import Ranks, SharedFeed, gather_weights, weights_of
from gvm_stream.learner.publish import publish
from gvm_stream.wire.messages import Canary, Published

KEEP = 4
"""Newest weight files kept: enough for a producer that is still loading one when the next ones appear."""


class Publisher:
    """One version at a time is being written. Every rank has a publisher and calls it alike."""

    def __init__(self, config: Config, folder: Path, model: PreTrainedModel, feed: SharedFeed, ranks: Ranks) -> None:
        self._config, self._folder, self._model, self._feed, self._ranks = config, folder, model, feed, ranks
        self._thread = ThreadPoolExecutor(1, "publish")
        self._writing: Future[None] | None = None
        self._host: dict[str, Tensor] = {}
        """The version being written; kept, as memory that has been used before is filled several times as fast."""

    def publish(self, version: int, step: int) -> None:
        """Begin to publish the weights as they are, behind `step` batches.

        Waits for the version before: every version that a step is reported with appears, and there is one copy in
        memory. To skip to the newest would gain nothing where `allocation.max_lag` makes the sampling wait for each.
        Raises `WeightsError` if the version before could not be written.
        """
        self.wait()
        weights = weights_of(self._model, self._config.model.dtype)
        canary = canary_of(self._model, weights)
        if self._ranks.first and not self._host:
            self._host = {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for n, t in weights.items()}
        gather_weights(weights, self._ranks, self._host)
        if self._ranks.first:
            self._writing = self._thread.submit(self._write, version, step, canary)

    def wait(self) -> None:
        """Until the last version is announced. Raises `WeightsError` if it could not be written."""
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, version: int, step: int, canary: Canary) -> None:
        try:
            info = publish(
                self._host, self._folder, version, self._config.stream.weights_address, canary=canary, keep=KEEP
            )
        except Exception:
            self._feed.interrupt()  # it may be waiting for a batch that nobody can make without these weights
            raise
        self._feed.post(Published(weights=info, step=step))
