"""The learner process: join, publish, then batch after batch until the allocator ends the run."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from gvm_stream.allocator.types import Fate
from gvm_stream.config import Config
from gvm_stream.config_file import agreed_values
from gvm_stream.errors import ConfigError, StreamError, TrainingError
from gvm_stream.learner.checkpoint import Checkpoint, complete_checkpoints, load_trainer_state, save_checkpoint
from gvm_stream.learner.feed import Feed
from gvm_stream.learner.model import load_model
from gvm_stream.learner.publish import publish, published_versions
from gvm_stream.learner.trainer import StepResult, Trainer
from gvm_stream.metrics import Metrics
from gvm_stream.wire.messages import Batch, Checkpointed, Goodbye, Published, StepDone

log = logging.getLogger(__name__)

KEEP_PUBLISHED = 4
"""Newest weight files kept: enough for a producer that is still loading one when the next ones appear."""


def main(config: Config, *, resume: bool) -> None:
    """Raises GvmStreamError for whatever ends it but the end of the run or a signal."""
    root = Path(config.run.dir)
    checkpoints = complete_checkpoints(root / "checkpoints") if resume else []
    if not resume and (root / "checkpoints").exists():
        raise ConfigError(
            f'run.dir = "{root}" holds checkpoints already: continue that run with --resume, or choose another folder'
        )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    feed = Feed(
        config.stream,
        name="learner",
        agreed=agreed_values(config),
        checkpoints=tuple(c.step for c in checkpoints),
    )

    def interrupt(number: int, frame: FrameType | None) -> None:
        if feed.interrupted:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        feed.interrupted = True

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    metrics = Metrics("learner")
    try:
        with metrics.serve(config.metrics), weight_server(config, root / "weights"):
            start = feed.join().next_step
            checkpoint = next((c for c in checkpoints if c.step == start), None)
            if start and checkpoint is None:
                raise StreamError(f"the allocator stands after batch {start}, for which there is no checkpoint")
            Learner(config, root, feed, metrics, checkpoint).run()
    finally:
        feed.close()


class Learner:
    def __init__(self, config: Config, root: Path, feed: Feed, metrics: Metrics, checkpoint: Checkpoint | None) -> None:
        self._config, self._root, self._feed, self._metrics = config, root, feed, metrics
        source = str(checkpoint.path) if checkpoint else config.model.path
        self._model = load_model(source, "float32", config.learner.device)
        self._trainer = Trainer(config, self._model)
        self._step = self._saved = 0
        self._version = 0
        if checkpoint:
            self._trainer.load_state_dict(load_trainer_state(checkpoint.path))
            self._step = self._saved = checkpoint.step
            # Versions only grow: those published after this checkpoint belong to another history.
            self._version = max(checkpoint.version, *published_versions(root / "weights"), 0) + 1
            log.info("continuing from %s as policy version %d", checkpoint.path, self._version)

    def run(self) -> None:
        feed, steps = self._feed, self._config.run.steps
        self._publish()
        while self._step < steps:
            asked_at = time.monotonic()
            batch = feed.batch(self._step)
            if batch is None:
                break
            self._train(batch, time.monotonic() - asked_at)
            if self._step % self._config.learner.checkpoint_every == 0 or self._step == steps:
                self._save()
        if self._step == steps:
            feed.wait_for_stop()
        if self._saved < self._step:
            self._save()
        reason = feed.stop.reason if feed.stop else "interrupted"
        feed.send(Goodbye(reason=reason))
        log.info("learner ends: %s", reason)

    def _train(self, batch: Batch, waited_s: float) -> None:
        result = self._trainer.train(batch.step, batch.groups, self._version, self._feed.working)
        if result.trained:
            self._version += 1
            self._publish()
        self._step += 1
        stats = msgspec.structs.replace(result.stats, wait_seconds=waited_s)
        self._feed.send(
            StepDone(
                step=batch.step,
                version=self._version,
                trained=result.trained,
                reason=result.reason,
                fates=result.fates,
                stats=stats,
            )
        )
        self._export(batch, result, waited_s)
        if self._trainer.skipped_in_a_row >= self._config.learner.max_skipped:
            self._save()
            raise TrainingError(
                f"{self._trainer.skipped_in_a_row} batches in a row gave no usable gradient, the last because of "
                f"{result.reason}"
            )

    def _publish(self) -> None:
        weights = publish(
            self._model,
            self._root / "weights",
            self._version,
            self._config.stream.weights_address,
            keep=KEEP_PUBLISHED,
            dtype=self._config.model.dtype,
        )
        self._feed.send(Published(weights=weights, step=self._step))

    def _save(self) -> None:
        path = save_checkpoint(
            self._root / "checkpoints",
            self._step,
            self._version,
            self._model,
            self._config.model.path,
            self._trainer.state_dict(),
            self._config.learner.keep_checkpoints,
        )
        self._saved = self._step
        self._feed.send(Checkpointed(step=self._step, version=self._version, path=str(path)))
        log.info("checkpoint %s", path)

    def _export(self, batch: Batch, result: StepResult, waited_s: float) -> None:
        metrics, stats = self._metrics, result.stats
        metrics.count("gvm_learner_batches", label="trained" if result.trained else "skipped")
        metrics.count("gvm_learner_wait_seconds", waited_s)
        metrics.observe("gvm_learner_step_seconds", stats.seconds)
        trained = set(result.fates.get(Fate.TRAINED, ()))
        for rollout in (r for group in batch.groups for r in group.rollouts if r.work in trained):
            metrics.count("gvm_learner_tokens", len(rollout.tokens) // 4)
            version = self._version - result.trained
            metrics.observe("gvm_lag_batches", version - min(span[0] for span in rollout.spans))
        metrics.set("gvm_loss", stats.loss)
        metrics.set("gvm_grad_norm", stats.grad_norm)
        metrics.set("gvm_reward_mean", stats.reward_mean)
        metrics.set("gvm_zero_signal_share", stats.zero_signal_groups / max(stats.groups, 1))
        metrics.set("gvm_logprob_mismatch", stats.mismatch)
        metrics.set("gvm_effective_sample_size", stats.effective_sample_size)


@contextmanager
def weight_server(config: Config, folder: Path) -> Iterator[None]:
    """Serve published weights from a process of its own, if `stream.weights_address` says so."""
    address = config.stream.weights_address
    if not address:
        yield
        return
    plaintext = "plaintext" if config.stream.allow_plaintext else "loopback"
    command = [sys.executable, "-m", "gvm_stream.learner.weight_server", str(folder), address, plaintext]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        first = server.stdout.readline().strip()
        if first != "ready":
            raise StreamError(first or "the weight server ended at once")
        try:
            yield
        finally:
            server.stdin.close()  # it ends with its input
            server.wait()
