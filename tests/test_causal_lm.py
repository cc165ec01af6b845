"""Checkpoints the engine refuses: unreadable, incomplete, or of a kind it would run wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from gvm_stream.errors import ModelError
from gvm_stream.producers.causal_lm import load_causal_lm
from tests.tiny_models import VOCABULARY, save_tiny_model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "llama")


def load(path: Path, max_length: int = 64) -> PreTrainedModel:
    return load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), max_length=max_length)


def test_a_checkpoint_is_loaded_for_inference_in_the_type_asked_for(llama: Path) -> None:
    model = load_causal_lm(str(llama), dtype=torch.bfloat16, device=torch.device("cpu"), max_length=64)
    assert not model.training
    assert {(weight.dtype, weight.requires_grad) for weight in model.parameters()} == {(torch.bfloat16, False)}


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path = .*nowhere"):
        load(tmp_path / "nowhere")


def test_a_damaged_checkpoint_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    weights = (llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path)


def test_a_checkpoint_without_all_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_more_positions_than_the_model_has_are_refused(llama: Path) -> None:
    with pytest.raises(ModelError, match="64 positions; at least max_length = 65"):
        load(llama, max_length=65)


def test_sliding_windows_shorter_than_a_row_are_refused(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=32,
        max_window_layers=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"window of 32 tokens; .* at least max_length = 64"):
        load(tmp_path)
    assert load(tmp_path, max_length=32).config.sliding_window == 32


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="MambaForCausalLM does not support"):
        load(tmp_path)
