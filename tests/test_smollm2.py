"""A real language model with its own tokenizer and chat template through the whole stream, on vLLM. Minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gvm_stream.data.prompts import PromptSet
from tests.stream_processes import ROOT, assert_account_sums, overrides, report, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = ROOT / "examples" / "smollm2_sums.toml"


@pytest.fixture(scope="module", autouse=True)
def model() -> Path:
    subprocess.run([sys.executable, "-m", "examples.smollm2.make"], cwd=ROOT, check=True)
    return CONFIG.parent / "smollm2" / "model"


def test_smollm2_goes_through_the_stream_with_its_own_template_once(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    arguments = overrides(tmp_path, run__steps="3", eval__prompts="8", eval__samples="1", stream__silence_s="60")
    with started(["run", str(CONFIG), *arguments], tmp_path / "out") as run:
        assert run.wait(800) == 0, (tmp_path / "out").read_text()[-3000:]
    content = report(tmp_path)
    assert_account_sums(content)
    assert (content["final_version"], content["ledger_conserved"]) == (3, True)
    assert content["rollouts_by_fate"].get("trained", 0) + content["rollouts_by_fate"].get("zero_signal", 0) > 0
    assert all(0 <= content[key] <= 1 for key in ("heldout_before", "heldout_after"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    prepared = tmp_path / "run" / "prompts.msgpack"
    prompt = msgspec.msgpack.decode(prepared.read_bytes(), type=PromptSet).train[0]
    text = str(tokenizer.decode(memoryview(prompt.tokens).cast("i").tolist()))
    assert text.count("<|im_start|>user") == 1
    assert text.endswith("<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == text.count("<|im_end|>") + 1
