from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from gvm_stream.canary import canary_logprobs, canary_tokens
from gvm_stream.config import Config, DataSection, ModelSection
from gvm_stream.errors import WeightsError
from gvm_stream.learner import publisher
from gvm_stream.learner.distributed import Ranks
from gvm_stream.learner.publish import publish
from gvm_stream.learner.publisher import KEEP, Publisher
from gvm_stream.weights import verify_weights
from gvm_stream.wire.messages import Published
from tests.scripted_feed import ScriptedFeed
from tests.tiny_models import VOCABULARY, tiny_model

CONFIG = Config(model=ModelSection(path="-"), data=DataSection(train="-"))


def make_publisher(model: PreTrainedModel, folder: Path, feed: ScriptedFeed) -> Publisher:
    return Publisher(CONFIG, folder, model, feed.shared(), Ranks())


def move(model: PreTrainedModel) -> None:
    """As an optimiser step: in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def assert_holds(published: Published, bias: float) -> None:
    """Its file is whole and has the weights of `tiny_model`, moved by `bias`."""
    verify_weights(published.weights, Path(published.weights.path))
    start = tiny_model("qwen2", seed=0).state_dict()
    for name, weight in load_file(published.weights.path).items():
        torch.testing.assert_close(weight, start[name] + bias, atol=1e-6, rtol=0)


def test_the_training_goes_on_while_weights_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, feed, go_on = tiny_model("qwen2", seed=0), ScriptedFeed(), threading.Event()
    monkeypatch.setattr(publisher, "publish", lambda *a, **k: (go_on.wait(), publish(*a, **k))[1])
    publishing = make_publisher(model, tmp_path, feed)
    publishing.publish(1, step=1)
    move(model)
    assert feed.published == []
    go_on.set()
    publishing.wait()
    (published,) = feed.published
    assert (published.weights.version, published.step) == (1, 1)
    assert_holds(published, bias=0.0)


def test_every_version_is_announced_with_its_own_weights(tmp_path: Path) -> None:
    model, feed = tiny_model("qwen2", seed=0), ScriptedFeed()
    publishing = make_publisher(model, tmp_path, feed)
    for version in range(KEEP):
        publishing.publish(version, step=version)
        move(model)
    publishing.wait()
    assert [p.weights.version for p in feed.published] == list(range(KEEP))
    for version, published in enumerate(feed.published):
        assert_holds(published, bias=0.01 * version)


def test_the_announcement_has_the_canary_of_these_weights(tmp_path: Path) -> None:
    model, feed = tiny_model("qwen2", seed=0).train(False), ScriptedFeed()
    publishing = make_publisher(model, tmp_path, feed)
    publishing.publish(1, step=1)
    expected = canary_logprobs(model, canary_tokens(VOCABULARY))
    move(model)
    publishing.wait()
    canary = feed.published[0].weights.canary
    assert canary is not None
    assert np.frombuffer(canary.tokens, "<i4").tolist() == canary_tokens(VOCABULARY).tolist()
    torch.testing.assert_close(torch.frombuffer(bytearray(canary.logprobs), dtype=torch.float32), expected)


def test_a_write_that_fails_ends_the_wait_for_a_batch_and_is_raised_at_the_next_step(tmp_path: Path) -> None:
    """With `max_lag = 0` nobody could make that batch without the weights."""
    (tmp_path / "v00000001.safetensors").mkdir()
    model, feed = tiny_model("qwen2", seed=0), ScriptedFeed()
    publishing = make_publisher(model, tmp_path, feed)
    publishing.publish(1, step=1)
    with pytest.raises(WeightsError, match="weights of version 1 cannot be written"):
        publishing.publish(2, step=2)
    assert feed.interrupted
    assert feed.said == []
