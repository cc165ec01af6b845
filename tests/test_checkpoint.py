from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from gvm_stream.config import LearnerSection
from gvm_stream.errors import ModelError
from gvm_stream.learner import checkpoint
from gvm_stream.learner.checkpoint import Saver, complete_checkpoints, read_trainer_state, set_aside
from gvm_stream.learner.distributed import Ranks
from gvm_stream.learner.model import load_model
from gvm_stream.learner.trainer import Trainer
from tests import test_trainer as small
from tests.tiny_models import tiny_model

# By torch.distributed.checkpoint, outside of torchrun; the process itself ignores it.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

STATE: dict[str, Any] = {
    "optimizer": {"a": {"exp_avg": torch.tensor([0.1, 0.2])}},
    "trained_steps": 3,
    "random_0": b"x",
}


def make_model(hidden: int = 8) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4,
            hidden_size=hidden,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            eos_token_id=1,
            bos_token_id=0,
        )
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


def save_checkpoint(
    root: Path, step: int, version: int, model: PreTrainedModel, tokenizer: str, state: dict[str, Any], keep: int
) -> Path:
    """By a process of its own, as it were."""
    saver = make_saver(root, model, tokenizer, keep)
    path = saver.save(step, version, state)
    saver.wait()
    return path


def make_saver(
    root: Path,
    model: PreTrainedModel,
    tokenizer: str,
    keep: int,
    announce: Callable[[tuple[int, ...]], None] = lambda steps: None,
) -> Saver:
    complete = [c.step for c in complete_checkpoints(root)]
    return Saver(root, model, tokenizer, keep, Ranks(), complete=complete, announce=announce)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def out_of_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def step_of(root: Path) -> int | None:
    found = next(iter(complete_checkpoints(root)), None)
    return found.step if found else None


def test_a_checkpoint_gives_back_equal_bits(tmp_path: Path, tokenizer: str) -> None:
    model = make_model()
    path = save_checkpoint(tmp_path, 12, 9, model, tokenizer, STATE, keep=2)
    found = next(iter(complete_checkpoints(tmp_path)), None)
    assert found is not None
    assert (found.path, found.step, found.version) == (path, 12, 9)
    assert names(tmp_path) == ["step-000012"]
    assert (path / "model.safetensors").stat().st_mode == (path / "config.json").stat().st_mode
    loaded = load_model(str(path), "float32", "cpu")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(path).encode("b") == [3]
    moments = torch.zeros(2)
    state = {
        "optimizer": {"a": {"exp_avg": moments}},
        "trained_steps": 0,
        "random_0": b"",
        "random_1": b"of a new rank",
    }
    read_trainer_state(path, state, Ranks())
    assert (state["trained_steps"], state["random_0"]) == (3, b"x")
    assert "random_1" not in state
    assert torch.equal(moments, STATE["optimizer"]["a"]["exp_avg"])


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, tokenizer: str) -> None:
    """6 steps, and 3 + 3 with a checkpoint between them: parameters, moments, losses, rates, random numbers."""
    config = small.make_config(LearnerSection(lr=1e-3, warmup_steps=5, weight_decay=0.1))
    batches = [small.good_and_bad(small.make_model(), number) for number in range(7)]
    random.seed(1)
    np.random.seed(2)
    model = small.make_model()
    trainer = Trainer(config, model)
    for batch in batches[:3]:
        small.train(trainer, batch)
    saver = make_saver(tmp_path, model, tokenizer, keep=2)
    path = saver.save(3, 3, trainer.state_dict())
    losses = [small.train(trainer, batch).stats.loss for batch in batches[3:6]]  # while the checkpoint is written
    saver.wait()
    after = small.bits(trainer, model), draw(), small.train(trainer, batches[6]).stats.loss

    resumed_model = load_model(str(path), "float32", "cpu")
    resumed = Trainer(config, resumed_model)
    draw()
    state = resumed.state_dict()
    read_trainer_state(path, state, Ranks())
    resumed.load_state_dict(state)
    assert (resumed.trained_steps, resumed.skipped_in_a_row) == (3, 0)
    assert [small.train(resumed, batch).stats.loss for batch in batches[3:6]] == losses
    assert isinstance(resumed_model, LlamaForCausalLM)
    assert (small.bits(resumed, resumed_model), draw(), small.train(resumed, batches[6]).stats.loss) == after


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_a_save_does_not_hold_up_the_training(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the model as it was; the save after waits for it."""
    go_on = threading.Event()
    model = make_model()
    saver = make_saver(tmp_path, model, tokenizer, keep=5)
    seal = checkpoint._seal
    monkeypatch.setattr(checkpoint, "_seal", lambda folder: (go_on.wait(), seal(folder)))
    weight = model.lm_head.weight.detach().clone()
    path = saver.save(1, 1, STATE)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert step_of(tmp_path) is None
    go_on.set()
    saver.save(2, 2, STATE)
    assert step_of(tmp_path) == 1
    saver.wait()
    assert step_of(tmp_path) == 2
    assert torch.equal(load_model(str(path), "float32", "cpu").state_dict()["lm_head.weight"], weight)


def test_a_checkpoint_is_announced_when_it_is_complete_and_what_it_replaces_is_gone(
    tmp_path: Path, tokenizer: str
) -> None:
    """Whoever forgets what no announced checkpoint needs never forgets too much."""
    announced: list[tuple[tuple[int, ...], list[int]]] = []

    def announce(steps: tuple[int, ...]) -> None:
        announced.append((steps, [c.step for c in complete_checkpoints(tmp_path)]))

    saver = make_saver(tmp_path, make_model(), tokenizer, keep=2, announce=announce)
    for step in (5, 10, 15):
        saver.save(step, step, STATE)
    saver.wait()
    assert announced == [((0, 5), [5]), ((5, 10), [10, 5]), ((10, 15), [15, 10])]


def test_a_save_that_fails_announces_nothing(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[tuple[int, ...]] = []
    saver = make_saver(tmp_path, make_model(), tokenizer, keep=1, announce=announced.append)
    saver.save(5, 5, STATE)
    saver.wait()
    monkeypatch.setattr(os, "fsync", out_of_space)
    saver.save(10, 10, STATE)
    with pytest.raises(ModelError, match="step 10 cannot be saved"):
        saver.wait()
    assert announced == [(5,)]
    assert step_of(tmp_path) == 5


def test_tied_weights_come_back_tied(tmp_path: Path, tokenizer: str) -> None:
    path = save_checkpoint(tmp_path, 1, 1, tiny_model("qwen2", seed=3), tokenizer, STATE, keep=1)
    loaded = load_model(str(path), "float32", "cpu").state_dict(keep_vars=True)
    assert loaded["lm_head.weight"] is loaded["model.embed_tokens.weight"]
    assert torch.equal(loaded["lm_head.weight"], tiny_model("qwen2", seed=3).state_dict()["lm_head.weight"])


def test_no_checkpoint_is_not_an_error(tmp_path: Path) -> None:
    assert complete_checkpoints(tmp_path / "never") == []
    assert complete_checkpoints(tmp_path) == []


def test_only_the_newest_are_kept(tmp_path: Path, tokenizer: str) -> None:
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, step, step, make_model(), tokenizer, STATE, keep=2)
    assert names(tmp_path) == ["step-000010", "step-000015"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty_folder", "no_manifest", "torn_manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    save_checkpoint(tmp_path, 5, 5, make_model(), tokenizer, STATE, keep=3)
    newest = save_checkpoint(tmp_path, 10, 10, make_model(), tokenizer, STATE, keep=3)
    weights, manifest = newest / "model.safetensors", newest / "manifest.json"
    content = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(content[:-100])
    elif damage == "flipped":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        (newest / "trainer" / ".metadata").unlink()
    elif damage == "empty_folder":
        (tmp_path / "step-000020").mkdir()
        (newest / "state.json").unlink()
    elif damage == "no_manifest":
        manifest.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[:40])
    assert step_of(tmp_path) == 5
    assert f"{newest} is passed over" in caplog.text


def test_a_save_that_was_killed_leaves_no_trace_in_the_next(tmp_path: Path, tokenizer: str) -> None:
    save_checkpoint(tmp_path, 5, 5, make_model(), tokenizer, STATE, keep=2)
    half = tmp_path / ".partial-step-000010"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert step_of(tmp_path) == 5
    save_checkpoint(tmp_path, 10, 10, make_model(), tokenizer, STATE, keep=2)
    assert names(tmp_path) == ["step-000005", "step-000010"]
    assert step_of(tmp_path) == 10


def test_a_checkpoint_of_a_history_that_was_left_is_replaced(tmp_path: Path, tokenizer: str) -> None:
    for version in (10, 14):
        save_checkpoint(tmp_path, 10, version, make_model(), tokenizer, STATE, keep=1)
        assert [(c.step, c.version) for c in complete_checkpoints(tmp_path)] == [(10, version)]
    assert names(tmp_path) == ["step-000010"]


def test_complete_checkpoints_come_newest_first(tmp_path: Path, tokenizer: str) -> None:
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, step, step, make_model(), tokenizer, STATE, keep=3)
    (tmp_path / "step-000010" / "trainer" / "__0_0.distcp").write_bytes(b"")
    assert [c.step for c in complete_checkpoints(tmp_path)] == [15, 5]


def test_damaged_checkpoints_do_not_count_among_those_kept(tmp_path: Path, tokenizer: str) -> None:
    save_checkpoint(tmp_path, 5, 5, make_model(), tokenizer, STATE, keep=2)
    for damaged in ("step-000007", "step-000020"):
        (tmp_path / damaged).mkdir()
    save_checkpoint(tmp_path, 10, 10, make_model(), tokenizer, STATE, keep=2)
    assert names(tmp_path) == ["step-000005", "step-000010"]


def test_checkpoints_of_a_history_that_was_left_are_set_aside(
    tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (10, 14):  # the second time round one is there already
        for step in (5, 10):
            save_checkpoint(tmp_path, step, version, make_model(), tokenizer, STATE, keep=2)
        set_aside(c for c in complete_checkpoints(tmp_path) if c.step > 5)
    assert names(tmp_path) == ["left-step-000010", "step-000005"]
    assert [c.step for c in complete_checkpoints(tmp_path)] == [5]
    assert msgspec.json.decode((tmp_path / "left-step-000010" / "state.json").read_bytes()) == {
        "step": 10,
        "version": 14,
    }
    assert "goes on from before checkpoint" in caplog.text


@pytest.mark.parametrize("too_large", ["model", "trainer_state"])
def test_a_full_disk_leaves_the_checkpoints_before_it(small_disk: Path, tokenizer: str, too_large: str) -> None:
    save_checkpoint(small_disk, 5, 5, make_model(), tokenizer, STATE, keep=1)
    before = names(small_disk / "step-000005")
    model = make_model(hidden=512) if too_large == "model" else make_model()
    state = {**STATE, "more": torch.zeros(500_000)} if too_large == "trainer_state" else STATE
    complaint = r"step 10 cannot be saved in .*disk: .*No space left on device.* \([01] MiB free there\)"
    with pytest.raises(ModelError, match=complaint):
        save_checkpoint(small_disk, 10, 10, model, tokenizer, state, keep=1)
    assert names(small_disk) == ["step-000005"]
    assert names(small_disk / "step-000005") == before
    assert step_of(small_disk) == 5


def test_a_failing_sync_is_reported_with_its_cause(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", out_of_space)
    with pytest.raises(ModelError, match=r"checkpoint of step 1 cannot be saved in .*: No space left on device"):
        save_checkpoint(tmp_path, 1, 1, make_model(), tokenizer, STATE, keep=1)
    assert names(tmp_path) == []


def test_a_model_that_is_not_there_or_lacks_weights_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model '.*nowhere' cannot be loaded as a causal LM in float32 on cpu: "):
        load_model(str(tmp_path / "nowhere"), "float32", "cpu")
    make_model().save_pretrained(tmp_path / "whole")
    with pytest.raises(ModelError, match=r"cannot be loaded as a causal LM in float32 on cuda:99: "):
        load_model(str(tmp_path / "whole"), "float32", "cuda:99")
    model = make_model()
    weights = model.state_dict()
    del weights["lm_head.weight"]
    model.save_pretrained(tmp_path / "headless", state_dict=weights)
    with pytest.raises(ModelError, match=r"lacks 1 of its weights, the first of them 'lm_head.weight'"):
        load_model(str(tmp_path / "headless"), "float32", "cpu")
