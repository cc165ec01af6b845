from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from gvm_stream.errors import WeightsError
from gvm_stream.learner.distributed import Ranks, gather_weights, weights_of
from gvm_stream.learner.publish import publish as write
from gvm_stream.learner.publish import published_versions
from gvm_stream.weights import verify_weights
from gvm_stream.wire.messages import Canary, WeightsInfo

CANARY = Canary(tokens=b"\1\0\0\0\2\0\0\0", logprobs=b"\0\0\0\0")


def make_model(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=12,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


def publish(
    model: LlamaForCausalLM, root: Path, version: int, address: str, keep: int, dtype: str | None = None
) -> WeightsInfo:
    return write(gather_weights(weights_of(model, dtype), Ranks()), root, version, address, CANARY, keep)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_published_weights_are_the_models_and_match_their_announcement(tmp_path: Path) -> None:
    model = make_model()
    info = publish(model, tmp_path / "weights", 7, "tcp://127.0.0.1:5711", keep=2)
    path = tmp_path / "weights" / "v00000007.safetensors"
    assert (info.version, info.path, info.address) == (7, str(path), "tcp://127.0.0.1:5711")
    assert info.canary == CANARY
    assert info.size == path.stat().st_size
    assert info.checksum == hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    verify_weights(info, path)
    loaded = load_file(path)
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("of_folder", "of_file"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_who_may_list_the_folder_may_read_the_weights(of_folder: int, of_file: int, tmp_path: Path) -> None:
    tmp_path.chmod(of_folder)
    info = publish(make_model(), tmp_path, 0, "", keep=1)
    assert stat.S_IMODE(Path(info.path).stat().st_mode) == of_file


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    info = publish(make_model(tied=True), tmp_path, 0, "", keep=1)
    assert {"model.embed_tokens.weight"} == {n for n in load_file(info.path) if "embed" in n or "head" in n}


def test_weights_can_be_published_in_a_smaller_type(tmp_path: Path) -> None:
    model = make_model()
    loaded = load_file(publish(model, tmp_path, 0, "", keep=1, dtype="bfloat16").path)
    assert torch.equal(loaded["lm_head.weight"], model.lm_head.weight.to(torch.bfloat16))
    assert model.lm_head.weight.dtype == torch.float32


def test_older_versions_go_and_newer_ones_are_not_touched(tmp_path: Path) -> None:
    model = make_model()
    for version in (3, 4, 9, 5):  # the learner fell back from 9 to a checkpoint
        publish(model, tmp_path, version, "", keep=2)
    assert names(tmp_path) == ["v00000004.safetensors", "v00000005.safetensors", "v00000009.safetensors"]
    assert published_versions(tmp_path) == [4, 5, 9]
    assert published_versions(tmp_path / "nowhere") == []


def test_an_announced_file_never_changes_under_a_reader(tmp_path: Path) -> None:
    model = make_model()
    info = publish(model, tmp_path, 1, "", keep=1)
    with Path(info.path).open("rb") as reader:
        with torch.no_grad():
            model.lm_head.weight.zero_()
        publish(model, tmp_path, 1, "", keep=1)
        assert hashlib.blake2b(reader.read(), digest_size=16).hexdigest() == info.checksum


def test_weights_that_cannot_be_written_are_reported(tmp_path: Path) -> None:
    (tmp_path / "v00000001.safetensors").mkdir()
    with pytest.raises(WeightsError, match=r"version 1 cannot be written to .*v00000001\.safetensors: .*directory"):
        publish(make_model(), tmp_path, 1, "", keep=1)
    assert names(tmp_path) == ["v00000001.safetensors"]


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    info = publish(make_model(), tmp_path, 1, "", keep=1)
    path = Path(info.path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=f"version 1 at .* have checksum .*, expected {info.checksum}"):
        verify_weights(info, path)
    path.write_bytes(content[:-1])
    with pytest.raises(WeightsError, match=f"have {info.size - 1} bytes, expected {info.size}"):
        verify_weights(info, path)
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        verify_weights(msgspec.structs.replace(info), tmp_path / "elsewhere")
