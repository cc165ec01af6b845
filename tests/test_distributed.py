"""The learner on two ranks (gloo, CPU) against one: the same steps, checkpoints, ends. Run by torchrun, this file is a
rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from transformers import PreTrainedModel

from gvm_stream.config import LearnerSection
from gvm_stream.errors import TrainingError
from gvm_stream.learner.batch import Row
from gvm_stream.learner.canary import canary_of
from gvm_stream.learner.checkpoint import Saver, complete_checkpoints, read_trainer_state
from gvm_stream.learner.distributed import Ranks, balance, gather_weights, join_ranks, shard, weights_of
from gvm_stream.learner.model import load_model
from gvm_stream.learner.trainer import Trainer
from gvm_stream.wire.messages import Canary, TrainGroup
from tests.stream_processes import (
    CONFIG,
    ROOT,
    TIMEOUT_S,
    assert_account_sums,
    descendants,
    free_address,
    gone_within,
    kill,
    overrides,
    report,
    started,
    wait_for_status,
)
from tests.test_trainer import group, make_config, rollout
from tests.tiny_models import tiny_model

pytestmark = [
    pytest.mark.stream,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

STEPS, SAVED = 5, 3
FAMILIES = {"pg": "qwen2", "gvpo": "llama"}  # tied and not; `gvpo` compares rollouts that are on different ranks
TOKENIZER = str(ROOT / "examples" / "arithmetic" / "model")


def make_model(family: str) -> PreTrainedModel:
    model = tiny_model(family, seed=0)
    model.train(False)
    return model


def make_groups(step: int, off_by: float = 0.0) -> list[TrainGroup]:
    """Ragged: responses of 1 to 40 tokens, groups of 1 to 5; in step 3 one group, with one row on a rank and two short
    ones on the other. `off_by` spoils the log-probs of group 4."""
    random = np.random.default_rng(step)
    scorer: Any = make_model("qwen2")
    groups = []
    for number in range(1 if step == 3 else 6):
        spoiled = number == 4
        lengths = [40, 1, 1] if step == 3 else random.integers(1, 41, random.integers(1 + spoiled, 6))
        rollouts = [
            rollout(
                scorer, 10 * number + j, random.integers(4, 60, length).tolist(), float(j == 0), off_by=off_by * spoiled
            )
            for j, length in enumerate(lengths)
        ]
        groups.append(group(number, *rollouts))
    return groups


def make_trainer(loss: str, model: PreTrainedModel, ranks: Ranks) -> Trainer:
    learner = LearnerSection(
        lr=1e-3, loss=loss, micro_batch_tokens=64, weight_decay=0.1, warmup_steps=4, max_logprob_mismatch=20.0
    )
    return Trainer(make_config(learner), model, ranks)


def run_steps(loss: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Weights after STEPS steps and a spoiled batch, and what was said of each; a checkpoint of step SAVED is left."""
    model = shard(make_model(FAMILIES[loss]), ranks, "cpu", "float32")
    trainer = make_trainer(loss, model, ranks)
    canaries = [canary_of(model, weights_of(model, "float32"))]
    saver = Saver(folder / loss, model, TOKENIZER, 2, ranks, complete=(), announce=lambda steps: None)
    results = []
    for step in range(STEPS):
        results.append(trainer.train(step, make_groups(step), lambda: None))
        if step + 1 == SAVED:
            saver.save(SAVED, SAVED, trainer.state_dict())
    results.append(trainer.train(STEPS, make_groups(STEPS, off_by=1e3), lambda: None))
    saver.wait()
    low = shard(make_model(FAMILIES[loss]), ranks, "cpu", "bfloat16")
    canaries += [canary_of(model, weights_of(model, "float32")), canary_of(low, weights_of(low, "bfloat16"))]
    return {
        "weights": gather_weights(weights_of(model), ranks),
        "canaries": [logprobs_of(c) for c in canaries],
        "figures": [(r.stats.loss, r.stats.grad_norm, r.stats.mismatch) for r in results],
        "reasons": [r.reason for r in results],
    }


def logprobs_of(canary: Canary) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(canary.logprobs, "<f4").copy())


def as_a_rank(task: str, folder: Path) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it as soon as one rank has failed
    with join_ranks("cpu") as ranks:
        if task == "fail":
            if ranks.rank == 1:
                raise TrainingError("nothing is left")
            ranks.gather(None)
        if task == "killed":
            trainer = make_trainer("pg", shard(make_model("qwen2"), ranks, "cpu", "float32"), ranks)
            end = partial(os.kill, os.getpid(), signal.SIGKILL) if ranks.rank == 1 else lambda: None
            trainer.train(0, make_groups(0), end)
        for loss in FAMILIES:
            result = run_steps(loss, ranks, folder)
            if ranks.first:
                torch.save(result, folder / f"{loss}.pt")


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    command = torchrun("-m", "tests.test_distributed", "train", str(folder))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("loss", FAMILIES)
def test_two_ranks_take_the_steps_of_one(two_ranks: Path, tmp_path: Path, loss: str) -> None:
    one, two = run_steps(loss, Ranks(), tmp_path), torch.load(two_ranks / f"{loss}.pt")
    assert two["weights"].keys() == one["weights"].keys()
    start = gather_weights(weights_of(make_model(FAMILIES[loss])), Ranks())
    for name, weight in one["weights"].items():
        assert (weight - start[name]).abs().max() > 1e-3
        torch.testing.assert_close(two["weights"][name], weight, atol=1e-5, rtol=0)
    for figures, expected in zip(two["figures"], one["figures"], strict=True):
        assert figures == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for canary, expected in zip(two["canaries"], one["canaries"], strict=True):
        torch.testing.assert_close(canary, expected, atol=1e-4, rtol=0)
    assert two["reasons"] == one["reasons"]
    assert one["reasons"][:STEPS] == [""] * STEPS
    assert one["reasons"][STEPS].endswith("because of group 4")


@pytest.mark.parametrize("loss", FAMILIES)
def test_a_checkpoint_of_two_ranks_is_continued_by_one(two_ranks: Path, loss: str) -> None:
    (found,) = complete_checkpoints(two_ranks / loss)
    assert (found.step, found.version) == (SAVED, SAVED)
    model = load_model(str(found.path), "float32", "cpu")
    trainer = make_trainer(loss, model, Ranks())
    state = trainer.state_dict()
    read_trainer_state(found.path, state, Ranks())
    trainer.load_state_dict(state)
    assert trainer.trained_steps == SAVED
    for step in range(SAVED, STEPS):
        assert trainer.train(step, make_groups(step), lambda: None).trained
    weights = torch.load(two_ranks / f"{loss}.pt")["weights"]
    for name, weight in gather_weights(weights_of(model), Ranks()).items():
        torch.testing.assert_close(weight, weights[name], atol=1e-5, rtol=0)


def test_an_error_of_one_rank_ends_the_others_with_its_reason(tmp_path: Path) -> None:
    command = torchrun("-m", "tests.test_distributed", "fail", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert "TrainingError: nothing is left" in done.stderr
    assert "StreamError: the learner ends because of rank 1: nothing is left" in done.stderr


def test_the_others_say_which_rank_was_killed(tmp_path: Path) -> None:
    """In the middle of a step, where torch has no word for it."""
    command = torchrun("-m", "tests.test_distributed", "killed", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert "StreamError: the learner ends because of rank 1, which is gone (killed or crashed)" in done.stderr


@pytest.mark.parametrize("victim", [0, 1])
def test_a_learner_that_loses_a_rank_ends_with_a_sentence_and_leaves_nothing(tmp_path: Path, victim: int) -> None:
    """While rank 0 waits for the allocator's welcome, and the other for rank 0."""
    address, output = free_address(), tmp_path / "learner.txt"
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as allocator,
        learner([str(CONFIG), *overrides(tmp_path, stream__address=address)], output) as launcher,
    ):
        allocator.bind(address)
        assert allocator.poll(TIMEOUT_S * 1000), output.read_text()
        everyone = descendants(launcher.pid)
        kill(next(pid for pid in everyone if f"RANK={victim}" in environment_of(pid)))
        assert launcher.wait(TIMEOUT_S) == 1
        assert gone_within(everyone, 5) == []
    assert f"error: the learner ends because of rank {victim}, which is gone (killed or crashed)" in output.read_text()


def test_a_run_on_two_ranks_is_interrupted_and_resumed(tmp_path: Path) -> None:
    given = overrides(
        tmp_path,
        run__steps="12",
        learner__checkpoint_every="4",
        allocation__prompts_per_step="8",
        allocation__rollouts_per_prompt="4",
        eval__prompts="20",
    )
    common = ["--config", str(CONFIG), *given]
    with (
        started(["allocator", *common], tmp_path / "allocator.txt") as allocator,
        started(["producer", *common], tmp_path / "producer.txt") as producer,
        learner([str(CONFIG), *given], tmp_path / "learner.txt") as ranks,
    ):
        wait_for_status(given, lambda status: status.step >= 6)
        everyone = descendants(ranks.pid)
        ranks.send_signal(signal.SIGTERM)
        ranks.wait(TIMEOUT_S)
        assert gone_within(everyone, 5) == []
        assert "learner ends: interrupted" in (tmp_path / "learner.txt").read_text()
        allocator.send_signal(signal.SIGTERM)
        allocator.wait(TIMEOUT_S)
        producer.wait(TIMEOUT_S)
    newest = complete_checkpoints(tmp_path / "run" / "checkpoints")[0]
    assert newest.step >= 6

    with (
        started(["allocator", *common, "--resume"], tmp_path / "allocator.txt") as allocator,
        started(["producer", *common], tmp_path / "producer.txt") as producer,
        learner([str(CONFIG), "--resume", *given], tmp_path / "again.txt") as ranks,
    ):
        statuses = [process.wait(TIMEOUT_S) for process in (ranks, allocator, producer)]
        assert statuses == [0, 0, 0], (tmp_path / "again.txt").read_text()
    assert f"continuing from {newest.path}" in (tmp_path / "again.txt").read_text()
    content = report(tmp_path)
    assert content["outcome"] == "finished"
    assert [row["step"] for row in content["history"]["steps"]] == list(range(12))
    assert_account_sums(content)


def test_rows_are_divided_by_tokens_and_each_has_one_place() -> None:
    lengths = [9, 40, 1, 7, 7, 30, 12]
    rows = [
        Row(0, i, 1, np.zeros(length, np.int32), np.zeros(length - 1, np.float32), 1.0, 1.0)
        for i, length in enumerate(lengths)
    ]
    parts = [balance(rows, Ranks(rank, 2)) for rank in range(2)]
    assert sorted(row.work for part in parts for row in part) == list(range(7))
    assert [sum(row.tokens.size for row in part) for part in parts] == [56, 50]
    assert [row.work for row in balance(rows[:1], Ranks(1, 2))] == []


def environment_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


@contextmanager
def learner(arguments: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two ranks of `gvm_stream.learner ARGUMENTS`, output in a file."""
    command = torchrun("-m", "gvm_stream.learner", *arguments)
    environment = {**os.environ, "COLUMNS": "200"}
    with (
        output.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=environment) as process,
    ):
        try:
            yield process
        finally:
            for pid in [*descendants(process.pid), process.pid]:
                kill(pid)


if __name__ == "__main__":
    as_a_rank(sys.argv[1], Path(sys.argv[2]))
