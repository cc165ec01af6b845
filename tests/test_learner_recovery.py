"""A learner that died in the middle of a run: the next one makes the same model of the same batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gvm_stream.config import Config, DataSection, LearnerSection, MetricsSection, ModelSection, RunSection
from gvm_stream.errors import WeightsError
from gvm_stream.learner.checkpoint import complete_checkpoints
from gvm_stream.learner.distributed import Ranks
from gvm_stream.learner.main import Learner
from gvm_stream.metrics import Metrics
from gvm_stream.wire.messages import Published, StepDone, TrainGroup
from tests import test_trainer as small
from tests.scripted_feed import Killed, ScriptedFeed
from tests.stream_processes import ROOT

# By torch.distributed.checkpoint, outside of torchrun; the process itself ignores it.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

STEPS, EVERY, DIES_AT = 7, 3, 5


@pytest.fixture(scope="module")
def batches() -> list[TrainGroup]:
    return [small.good_and_bad(small.make_model(), number) for number in range(STEPS)]


def learner(folder: Path, feed: ScriptedFeed) -> Learner:
    torch.set_num_threads(1)
    config = Config(
        run=RunSection(dir=str(folder), steps=STEPS),
        model=ModelSection(path=str(ROOT / "examples" / "arithmetic" / "model")),
        data=DataSection(train="-"),
        learner=LearnerSection(
            lr=1e-3, warmup_steps=4, weight_decay=0.1, checkpoint_every=EVERY, max_logprob_mismatch=100.0
        ),
        metrics=MetricsSection(port=0),
    )
    start, settled = feed.shared().join()
    history = [c for c in complete_checkpoints(folder / "checkpoints") if c.step <= start]
    return Learner(config, feed.shared(), Metrics("learner"), lambda step, values: None, history, settled, Ranks())


def weights(folder: Path, step: int) -> dict[str, bytes]:
    tensors = load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, batches: list[TrainGroup]) -> tuple[Path, ScriptedFeed]:
    folder, feed = tmp_path_factory.mktemp("uninterrupted"), ScriptedFeed(batches)
    learner(folder, feed).run()
    return folder, feed


def died(folder: Path, batches: list[TrainGroup]) -> ScriptedFeed:
    """A learner that has been through batch DIES_AT - 1, its checkpoint of step EVERY and its weights are there."""
    feed = ScriptedFeed(batches, dies_at=DIES_AT)
    mortal = learner(folder, feed)
    with pytest.raises(Killed):
        mortal.run()
    mortal.close()
    return feed


def test_what_a_dead_learner_had_trained_on_is_trained_on_again_bit_for_bit(
    tmp_path: Path, batches: list[TrainGroup], uninterrupted: tuple[Path, ScriptedFeed]
) -> None:
    whole, feed = uninterrupted
    before = died(tmp_path, batches)
    after = ScriptedFeed(batches, next_step=EVERY, settled=DIES_AT)
    learner(tmp_path, after).run()
    assert weights(tmp_path, STEPS) == weights(whole, STEPS)
    assert weights(tmp_path, STEPS) != weights(tmp_path, 2 * EVERY)
    checksums = [p.weights.checksum for p in feed.published]
    assert [p.weights.checksum for p in before.published] == checksums[: DIES_AT + 1]
    # The first thing published is the model that the dead learner had published last, as a new version.
    assert [p.weights.checksum for p in after.published] == checksums[DIES_AT:]
    assert [(p.step, p.weights.version) for p in after.published] == [(5, 6), (6, 7), (7, 8)]


def test_batches_that_are_settled_are_not_reported_again(tmp_path: Path, batches: list[TrainGroup]) -> None:
    died(tmp_path, batches)
    feed = ScriptedFeed(batches, next_step=EVERY, settled=DIES_AT)
    learner(tmp_path, feed).run()
    assert [(done.step, done.version) for done in feed.done] == [(5, 7), (6, 8)]
    assert feed.checkpointed == [(3, 6), (6, 7)]


def test_a_learner_that_died_before_its_first_checkpoint_begins_again(
    tmp_path: Path, batches: list[TrainGroup], uninterrupted: tuple[Path, ScriptedFeed]
) -> None:
    whole, _ = uninterrupted
    feed = ScriptedFeed(batches, dies_at=2)
    with pytest.raises(Killed):
        learner(tmp_path, feed).run()
    again = ScriptedFeed(batches, next_step=0, settled=2)
    learner(tmp_path, again).run()
    assert weights(tmp_path, STEPS) == weights(whole, STEPS)
    assert (again.published[0].step, again.published[0].weights.version) == (2, 3)


def test_a_version_is_named_only_when_the_one_before_is_announced(uninterrupted: tuple[Path, ScriptedFeed]) -> None:
    """A step may be reported while its weights are being written, but never two steps ahead of them."""
    _, feed = uninterrupted
    announced = -1
    for message in feed.said:
        if isinstance(message, Published):
            assert message.weights.version == announced + 1
            announced += 1
        elif isinstance(message, StepDone):
            assert message.version <= announced + 1
    assert announced == STEPS


def test_weights_that_cannot_be_written_end_the_learner(tmp_path: Path, batches: list[TrainGroup]) -> None:
    (tmp_path / "weights").write_bytes(b"")
    feed = ScriptedFeed(batches)
    with pytest.raises(WeightsError, match="cannot be written"):
        learner(tmp_path, feed).run()
