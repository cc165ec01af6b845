"""The learner process: join, publish, then batch after batch until the allocator ends the run."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from gvm_stream.allocator.types import Fate
from gvm_stream.config import Config
from gvm_stream.config_file import agreed_values
from gvm_stream.errors import ConfigError, StreamError, TrainingError
from gvm_stream.learner.checkpoint import Checkpoint, Saver, complete_checkpoints, read_trainer_state
from gvm_stream.learner.distributed import Ranks, SharedFeed, gather_weights, join_ranks, shard
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
    """The learner, or one rank of it under torchrun. Raises GvmStreamError for whatever ends it but the end of the run
    or a signal."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    with join_ranks(config.learner.device) as ranks, ExitStack() as stack:
        root = Path(config.run.dir)
        checkpoints = ranks.share(_checkpoints(root, resume=resume) if ranks.first else [])
        metrics = Metrics("learner")
        feed: Feed | None = None
        if ranks.first:
            feed = stack.enter_context(_feed(config, checkpoints))
            stack.enter_context(metrics.serve(config.metrics))
            stack.enter_context(weight_server(config, root / "weights"))
        else:  # rank 0 says when to stop, and what there is to say
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            logging.getLogger().setLevel(logging.ERROR)
        shared = SharedFeed(feed, ranks)
        start = shared.join()
        checkpoint = next((c for c in checkpoints if c.step == start), None)
        if start and checkpoint is None:
            raise StreamError(f"the allocator stands after batch {start}, for which there is no checkpoint")
        Learner(config, root, shared, metrics, checkpoint, ranks).run()


def _checkpoints(root: Path, *, resume: bool) -> list[Checkpoint]:
    """To continue from."""
    if resume:
        return complete_checkpoints(root / "checkpoints")
    if (root / "checkpoints").exists():
        raise ConfigError(
            f'run.dir = "{root}" holds checkpoints already: continue that run with --resume, or choose another folder'
        )
    return []


@contextmanager
def _feed(config: Config, checkpoints: Sequence[Checkpoint]) -> Iterator[Feed]:
    """The connection to the allocator; a signal interrupts it, a second one ends the process."""
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
    with closing(feed):
        yield feed


class Learner:
    def __init__(
        self,
        config: Config,
        root: Path,
        feed: SharedFeed,
        metrics: Metrics,
        checkpoint: Checkpoint | None,
        ranks: Ranks,
    ) -> None:
        self._config, self._root, self._feed, self._metrics, self._ranks = config, root, feed, metrics, ranks
        source = str(checkpoint.path) if checkpoint else config.model.path
        # Whole on every rank, in the memory of the host; each layer then goes to the devices in parts.
        device = config.learner.device if ranks.size == 1 else "cpu"
        model = load_model(source, "float32", device, gradient_checkpointing=config.learner.gradient_checkpointing)
        self._model = shard(model, ranks, config.learner.device, config.model.dtype)
        self._trainer = Trainer(config, self._model, ranks)
        self._saver = Saver(
            root / "checkpoints", self._model, config.model.path, config.learner.keep_checkpoints, ranks
        )
        self._step = self._saved = 0
        self._version = 0
        if checkpoint:
            state = self._trainer.state_dict()
            read_trainer_state(checkpoint.path, state, ranks)
            self._trainer.load_state_dict(state)
            self._step = self._saved = checkpoint.step
            # Versions only grow: those published after this checkpoint belong to another history.
            self._version = max(checkpoint.version, *ranks.share(published_versions(root / "weights")), 0) + 1
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
        self._saver.wait()
        feed.send(Goodbye(reason=feed.end))
        log.info("learner ends: %s", feed.end)

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
                energies=result.energies,
                stats=stats,
            )
        )
        self._export(batch, result, waited_s)
        if self._trainer.skipped_in_a_row >= self._config.learner.max_skipped:
            self._save()
            self._saver.wait()
            raise TrainingError(
                f"{self._trainer.skipped_in_a_row} batches in a row gave no usable gradient, the last because of "
                f"{result.reason}"
            )

    def _publish(self) -> None:
        weights = gather_weights(self._model, self._ranks, self._config.model.dtype)
        if self._ranks.first:
            folder, address = self._root / "weights", self._config.stream.weights_address
            info = publish(weights, folder, self._version, address, keep=KEEP_PUBLISHED)
            self._feed.send(Published(weights=info, step=self._step))

    def _save(self) -> None:
        """The allocator keeps its state of this moment. It goes with the checkpoint once that is complete, and should
        it never be, the pair before is still there."""
        path = self._saver.save(self._step, self._version, self._trainer.state_dict())
        self._saved = self._step
        self._feed.send(Checkpointed(step=self._step, version=self._version, path=str(path)))

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
        if stats.noise is not None:
            metrics.set("gvm_gradient_variance", stats.noise.variance)
            metrics.set("gvm_gradient_signal", stats.noise.signal)


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
