"""The learner's benchmarks run, on a fraction of their work; what they measure is not judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks import gpu_learner, learner
from benchmarks.completions import Completed


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_the_gpu_benchmark_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--device cpu --size tiny --rollouts 4 --prompt-tokens 3 --response-tokens 5 --steps 1"
    monkeypatch.setattr("sys.argv", ["benchmark", "--json", *options.split()])
    gpu_learner.main()
    result = json.loads(capsys.readouterr().out)
    for variant in ("plain", "checkpointed"):
        assert min(result[variant][key] for key in ("tokens_per_second", "tflops", "energy_overhead")) > 0
        assert result[variant]["mfu"] is None


def test_floating_point_operations_by_hand() -> None:
    """Two layers of 4 x 64 x 64 for attention and 3 x 64 x 128 for the MLP, two norms each and one at the end."""
    (row,) = gpu_learner.make_rows(1, 10, 1, 512)
    model = gpu_learner.make_model("tiny", "cpu")
    length, response = row.tokens.size, row.logprobs.size
    body = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert gpu_learner.flops(model, [row]) == 6 * (body * length + 512 * 64 * response + 64 * 2 * length**2)


def test_a_learner_benchmark_without_trl_says_so_and_compares_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(part: str, name: str, work: Path, steps: int) -> dict[str, Any]:
        completed = msgspec.json.decode(work.read_bytes(), type=list[Completed])
        return learner.measure_part(part, learner.make_model(name), completed, steps)

    monkeypatch.setattr(learner, "in_child", here)
    monkeypatch.setattr(learner, "is_installed", lambda name: name == "accelerate")
    monkeypatch.setattr(
        "sys.argv", ["benchmark", "--json", "--models", "small", "--rounds", "1", "--steps", "1", "--prompts", "4"]
    )
    learner.main()
    printed = capsys.readouterr()
    assert "no comparison with TRL: trl not installed (pip install 'gvm-stream[bench-trl]')" in printed.err
    small = json.loads(printed.out)["small"]
    assert small["ratio_to_bare"] == small["tokens_per_second"]["ours"] / small["tokens_per_second"]["bare"]
    assert small["energy_overhead"] > 0
    assert small["noise_overhead"] > -1
    assert "ratio_to_trl" not in small


def test_the_best_micro_batch_of_trl_is_compared_round_by_round() -> None:
    def part(rate: float, memory: float = 1.0) -> dict[str, float]:
        others = dict.fromkeys(
            ("padding_share", "energy_overhead", "noise_overhead", "publish_seconds", "announce_seconds"), 0.1
        )
        return {"tokens_per_second": rate, "memory_mb": memory, **others}

    rounds = [
        {"ours": part(ours), "bare": part(100), "trl-32": part(trl, 4.0), "trl-64": part(other, 2.0)}
        for ours, trl, other in ((80, 20, 10), (90, 30, 10), (40, 40, 50))
    ]
    compared = learner.compare(rounds)
    assert (compared["best_trl"], compared["ratio_to_trl"], compared["memory_ratio_to_trl"]) == ("trl-32", 3.0, 0.25)
    assert compared["ratio_to_bare"] == 0.8
