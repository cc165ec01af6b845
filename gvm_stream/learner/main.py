"""The learner process: join, publish, then batch after batch until the allocator ends the run."""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
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
from gvm_stream.errors import ConfigError, ModelError, StreamError, TrainingError, WeightsError
from gvm_stream.health import Health
from gvm_stream.learner.beside import beside
from gvm_stream.learner.checkpoint import Checkpoint, Saver, complete_checkpoints, read_trainer_state, set_aside
from gvm_stream.learner.distributed import Ranks, SharedFeed, join_ranks, shard
from gvm_stream.learner.feed import Feed
from gvm_stream.learner.model import load_model
from gvm_stream.learner.objective import Objective
from gvm_stream.learner.publish import published_versions
from gvm_stream.learner.publisher import Publisher
from gvm_stream.learner.trainer import StepResult, Trainer
from gvm_stream.logs import set_version
from gvm_stream.metrics import Metrics
from gvm_stream.metrics.gpu import watch_gpu
from gvm_stream.trackers import Log, Tracked, open_trackers
from gvm_stream.wire.messages import Batch, Checkpointed, Goodbye, StepDone

log = logging.getLogger(__name__)


def main(config: Config, *, resume: bool) -> None:
    """The learner, or one rank of it under torchrun. Raises GvmStreamError for whatever ends it but the end of the run
    or a signal."""
    disable_progress_bar()
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    Objective.of(config)  # a class of the user's that cannot be imported is found before anything waits for anything
    with join_ranks(config.learner.device) as ranks, ExitStack() as stack:
        root = Path(config.run.dir)
        checkpoints = ranks.share(_checkpoints(root, resume=resume) if ranks.first else [])
        metrics, health = Metrics("learner"), Health(config.stream.progress_s)
        health.waiting_for = "the allocator"
        feed: Feed | None = None
        if ranks.first:
            feed = stack.enter_context(_feed(config, checkpoints, health))
            metrics.watch_disk(root)
            watch_gpu(metrics, config.learner.device)
            stack.enter_context(metrics.serve(config.metrics, health))
            serve_weights(config, root / "weights", stack)
        else:  # rank 0 says when to stop, and what there is to say
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            logging.getLogger().setLevel(logging.ERROR)
        shared = SharedFeed(feed, ranks)
        start, settled = shared.join()
        health.waiting_for = ""
        behind = [c for c in checkpoints if c.step <= start]
        if start and (not behind or behind[0].step != start):
            raise StreamError(f"the allocator goes on from batch {start}, for which there is no checkpoint")
        if ranks.first:
            set_aside(c for c in checkpoints if c.step > start)
        track = stack.enter_context(
            open_trackers(
                config.metrics.trackers if ranks.first else (), Tracked(root, "learner", msgspec.to_builtins(config))
            )
        )
        try:
            with closing(Learner(config, shared, metrics, track, behind, settled, ranks)) as learner:
                learner.run()
        except (ModelError, TrainingError, WeightsError) as error:  # the run need not wait for a learner to come back
            shared.send(Goodbye(reason=str(error), failed=True))
            raise


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
def _feed(config: Config, checkpoints: Sequence[Checkpoint], health: Health) -> Iterator[Feed]:
    """The connection to the allocator; a signal interrupts it, a second one ends the process."""
    feed = Feed(
        config.stream,
        name="learner",
        agreed=agreed_values(config),
        checkpoints=tuple(c.step for c in checkpoints),
        health=health,
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
    """From the newest of `checkpoints`, or from the base model, to the end of the run."""

    def __init__(
        self,
        config: Config,
        feed: SharedFeed,
        metrics: Metrics,
        track: Log,
        checkpoints: Sequence[Checkpoint],
        settled: int,
        ranks: Ranks,
    ) -> None:
        """`checkpoints` are those of the history that goes on, newest first. Batches before `settled` that are not
        behind it have been trained on by a learner that died: once more they make the same model of this one."""
        root = Path(config.run.dir)
        self._config, self._feed, self._metrics, self._settled = config, feed, metrics, settled
        self._track = track
        checkpoint = checkpoints[0] if checkpoints else None
        source = str(checkpoint.path) if checkpoint else config.model.path
        # Whole on every rank, in the memory of the host; each layer then goes to the devices in parts.
        device = config.learner.device if ranks.size == 1 else "cpu"
        model = load_model(source, "float32", device, gradient_checkpointing=config.learner.gradient_checkpointing)
        model = shard(model, ranks, config.learner.device, config.model.dtype)
        self._trainer = Trainer(config, model, ranks)
        self._publisher = Publisher(config, root / "weights", model, feed, ranks)
        self._saver = Saver(
            root / "checkpoints",
            model,
            config.model.path,
            config.learner.keep_checkpoints,
            ranks,
            complete=[c.step for c in checkpoints],
            announce=lambda steps: feed.post(Checkpointed(steps=steps)),
        )
        self._step = self._saved = 0
        # Versions only grow: producers may have those that were published after the checkpoint.
        self._version = max(ranks.share(published_versions(root / "weights")), default=-1)
        if checkpoint:
            state = self._trainer.state_dict()
            read_trainer_state(checkpoint.path, state, ranks)
            self._trainer.load_state_dict(state)
            self._step = self._saved = checkpoint.step
            self._version = max(self._version, checkpoint.version)
            log.info("continuing from %s", checkpoint.path)
        if self._step < settled:
            log.info("batches %d to %d are trained on again", self._step, settled - 1)

    def run(self) -> None:
        feed, steps = self._feed, self._config.run.steps
        if self._step == self._settled:
            self._publish()
        while self._step < steps:
            asked_at = time.monotonic()
            batch = feed.batch(self._step)
            if batch is None:
                break
            self._train(batch, time.monotonic() - asked_at)
            if self._step % self._config.learner.checkpoint_every == 0 or self._step == steps:
                self._save()
        self._publisher.wait()
        if self._step == steps and not feed.problem:
            feed.wait_for_stop()
        if self._saved < self._step:
            self._save()
        self._saver.wait()
        if feed.problem:
            raise feed.problem
        feed.settle(self._config.stream.silence_s)
        feed.send(Goodbye(reason=feed.end))
        log.info("learner ends: %s", feed.end)

    def close(self) -> None:
        """Wait for what is being written: it is announced through the feed, which must not close before."""
        self._publisher.close()
        self._saver.close()

    def _train(self, batch: Batch, waited_s: float) -> None:
        result = self._trainer.train(batch.step, batch.groups, self._working)
        self._step += 1
        if batch.step >= self._settled:
            if result.trained:
                self._publish()
            self._report(batch, result, waited_s)
        elif self._step == self._settled:
            self._publish()
        if self._trainer.skipped_in_a_row >= self._config.learner.max_skipped:
            self._save()
            self._saver.wait()
            raise TrainingError(
                f"{self._trainer.skipped_in_a_row} batches in a row gave no usable gradient, the last because of "
                f"{result.reason}"
            )

    def _working(self) -> None:
        self._feed.working()
        self._metrics.progress()

    def _publish(self) -> None:
        started = time.monotonic()
        self._version += 1
        set_version(self._version)
        self._publisher.publish(self._version, self._step)
        self._metrics.observe("gvm_publish_seconds", time.monotonic() - started)

    def _save(self) -> None:
        self._saver.save(self._step, self._version, self._trainer.state_dict())
        self._saved = self._step

    def _report(self, batch: Batch, result: StepResult, waited_s: float) -> None:
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
        self._track(self._step, self._metrics.scalars())

    def _export(self, batch: Batch, result: StepResult, waited_s: float) -> None:
        metrics, stats = self._metrics, result.stats
        metrics.count("gvm_learner_batches", label="trained" if result.trained else "skipped")
        if result.cause:
            metrics.count("gvm_learner_skips", label=result.cause)
        metrics.count("gvm_learner_wait_seconds", waited_s)
        metrics.observe("gvm_learner_step_seconds", stats.seconds)
        trained = set(result.fates.get(Fate.TRAINED, ()))
        rollouts = [r for group in batch.groups for r in group.rollouts if r.work in trained]
        lags = Counter(rollout.lag for rollout in rollouts)
        metrics.count("gvm_learner_tokens", sum(len(rollout.tokens) // 4 for rollout in rollouts))
        metrics.observe_counts("gvm_lag_batches", lags)
        metrics.count("gvm_rollouts_at_max_lag", lags[self._config.allocation.max_lag])
        metrics.count("gvm_tokens_clamped", result.clamped_tokens)
        metrics.set("gvm_loss", stats.loss)
        metrics.set("gvm_grad_norm", stats.grad_norm)
        metrics.set("gvm_reward_mean", stats.reward_mean)
        metrics.set("gvm_zero_signal_share", stats.zero_signal_groups / max(stats.groups, 1))
        metrics.set("gvm_logprob_mismatch", stats.mismatch)
        metrics.set("gvm_effective_sample_size", stats.effective_sample_size)
        metrics.set("gvm_entropy", stats.entropy)
        metrics.set("gvm_kl", stats.kl)
        if stats.noise is not None:
            metrics.set("gvm_gradient_variance", stats.noise.variance)
            metrics.set("gvm_gradient_signal", stats.noise.signal)
            metrics.set("gvm_noise_scale_tokens", stats.noise.noise_scale)


def serve_weights(config: Config, folder: Path, stack: ExitStack) -> None:
    """From processes beside this one, to producers that do not see its files, or that take weights from GPU to GPU."""
    section = msgspec.json.encode(config.stream).decode()
    if config.stream.weights_address:
        stack.enter_context(beside("gvm_stream.learner.weight_server", str(folder), section))
    if config.stream.nccl_address:
        stack.enter_context(beside("gvm_stream.vllm.nccl_sender", str(folder), section, config.learner.device))
