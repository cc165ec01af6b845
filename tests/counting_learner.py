"""`python -m tests.counting_learner CONFIG [--resume]`: a learner whose model is what it has been trained on.

For tests of faults: feed, weights files and checkpoints are as real ones; training adds the batch to a list. So the
last checkpoint shows whether every rollout has been through the model that survives, and how often.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import closing
from pathlib import Path

from gvm_stream.config import Config
from gvm_stream.config_file import agreed_values, load_config
from gvm_stream.files import write_atomically
from gvm_stream.health import Health
from gvm_stream.learner.feed import Feed
from gvm_stream.logs import set_up_logging
from gvm_stream.weights import checksum
from gvm_stream.wire import messages as m

log = logging.getLogger(__name__)

STATS = m.StepStats(
    loss=0.0,
    grad_norm=0.0,
    reward_mean=0.0,
    zero_signal_groups=0,
    groups=0,
    mean_lag=0.0,
    max_lag=0,
    mismatch=0.0,
    effective_sample_size=1.0,
    seconds=0.0,
    padding_share=0.0,
)


class Model:
    """Batch by batch, the works it was trained on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.batches: list[list[int]] = []

    def checkpoints(self) -> tuple[int, ...]:
        return tuple(sorted(int(path.stem) for path in self._folder.glob("*.json")))

    def load(self, step: int) -> None:
        self.batches = json.loads((self._folder / f"{step}.json").read_text()) if step else []

    def save(self, keep: int) -> tuple[int, ...]:
        write_atomically(self._folder / f"{len(self.batches)}.json", json.dumps(self.batches).encode())
        for step in self.checkpoints()[:-keep]:
            (self._folder / f"{step}.json").unlink()
        return self.checkpoints()


def publish(folder: Path, version: int) -> m.WeightsInfo:
    path = folder / f"v{version}.safetensors"
    write_atomically(path, b"weights of version %d" % version)
    return m.WeightsInfo(version=version, path=str(path), size=path.stat().st_size, checksum=checksum(path), address="")


def train(config: Config, feed: Feed, model: Model, root: Path, step_s: float) -> None:
    welcome = feed.join()
    model.load(welcome.next_step)
    weights = root / "weights"
    version = max((int(path.stem[1:]) for path in weights.glob("v*.safetensors")), default=-1)

    def publish_if_new() -> None:
        nonlocal version
        if len(model.batches) >= welcome.settled:
            version += 1
            feed.send(m.Published(weights=publish(weights, version), step=len(model.batches)))

    publish_if_new()
    while (step := len(model.batches)) < config.run.steps:
        batch = feed.batch(step)
        if batch is None:
            break
        time.sleep(step_s)
        assert all(rollout.tokens for group in batch.groups for rollout in group.rollouts)
        works = [rollout.work for group in batch.groups for rollout in group.rollouts]
        model.batches.append(works)
        publish_if_new()
        done = m.StepDone(
            step=step,
            version=version,
            trained=True,
            reason="",
            fates={"trained": tuple(works)},
            stats=STATS,
        )
        feed.send(done)
        if (step + 1) % config.learner.checkpoint_every == 0 or step + 1 == config.run.steps:
            keep = config.learner.keep_checkpoints
            complete = model.save(keep)
            feed.send(m.Checkpointed(steps=complete if len(complete) >= keep else (0, *complete)))
    feed.wait_for_stop()
    feed.send(m.Goodbye(reason=feed.stop.reason if feed.stop else "interrupted"))


def main() -> None:
    set_up_logging("learner", "learner")
    config = load_config(Path(sys.argv[1]), [])
    root = Path(config.run.dir)
    model = Model(root / "checkpoints")
    checkpoints, health = model.checkpoints(), Health(60)
    feed = Feed(config.stream, name="learner", agreed=agreed_values(config), checkpoints=checkpoints, health=health)
    with closing(feed):
        train(config, feed, model, root, step_s=0.4)


if __name__ == "__main__":
    main()
