from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gvm_stream.errors import ModelError
from gvm_stream.learner.checkpoint import complete_checkpoints, load_trainer_state, save_checkpoint
from gvm_stream.learner.model import load_model

STATE: dict[str, Any] = {"optimizer": {"state": {0: {"exp_avg": torch.tensor([0.1, 0.2])}}}, "trained_steps": 3}


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
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]
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


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


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
    loaded = load_model(str(path), "float32", "cpu")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(path).encode("b") == [3]
    state = load_trainer_state(path)
    assert state["trained_steps"] == 3
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], STATE["optimizer"]["state"][0]["exp_avg"])


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
        (newest / "trainer.pt").unlink()
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
    (tmp_path / "step-000010" / "trainer.pt").write_bytes(b"")
    assert [c.step for c in complete_checkpoints(tmp_path)] == [15, 5]


def test_a_damaged_newer_checkpoint_does_not_push_out_the_good_one(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "step-000020").mkdir()
    save_checkpoint(tmp_path, 10, 10, make_model(), tokenizer, STATE, keep=1)
    assert step_of(tmp_path) == 10


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
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ModelError, match=r"checkpoint of step 1 cannot be saved in .*: No space left on device"):
        save_checkpoint(tmp_path, 1, 1, make_model(), tokenizer, STATE, keep=1)
    assert names(tmp_path) == []


def test_a_model_that_is_not_there_or_lacks_weights_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model '.*nowhere' cannot be loaded as a causal LM in float32 on cpu: "):
        load_model(str(tmp_path / "nowhere"), "float32", "cpu")
    model = make_model()
    weights = model.state_dict()
    del weights["lm_head.weight"]
    model.save_pretrained(tmp_path / "headless", state_dict=weights)
    with pytest.raises(ModelError, match=r"lacks 1 of its weights, the first of them 'lm_head.weight'"):
        load_model(str(tmp_path / "headless"), "float32", "cpu")
