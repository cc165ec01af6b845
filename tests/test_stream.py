"""The whole stream with real processes, sockets, engine, verifier and learner: it learns, and it survives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from gvm_stream.learner.checkpoint import complete_checkpoints
from tests.stream_processes import (
    CONFIG,
    TIMEOUT_S,
    assert_account_sums,
    descendants,
    find,
    free_address,
    gone_within,
    overrides,
    report,
    started,
    wait_for_children,
    wait_for_status,
)

pytestmark = [pytest.mark.stream, pytest.mark.timeout(2 * TIMEOUT_S)]


def test_accuracy_rises_and_nothing_is_lost_when_the_producer_is_killed(tmp_path: Path) -> None:
    given = overrides(tmp_path, run__steps="40", eval__prompts="300", eval__samples="3")
    output = tmp_path / "out.txt"
    with started(["run", str(CONFIG), "--plain", *given], output) as supervisor:
        wait_for_status(given, lambda status: status.step >= 12)
        os.kill(find(supervisor.pid, "producer"), signal.SIGKILL)
        assert supervisor.wait(TIMEOUT_S) == 0, output.read_text()
    content = report(tmp_path)
    assert "killed by signal 9" in output.read_text()
    assert content["outcome"] == "finished"
    # 900 samples before and after: the standard error of the difference is 0.023.
    assert content["heldout_after"] > content["heldout_before"] + 0.05
    assert content["attempts"]["expired"] > 0
    assert content["rollouts_by_fate"]["trained"] + content["rollouts_by_fate"]["zero_signal"] == 40 * 256
    assert content["policy_versions"] == content["steps"] == 40
    assert content["max_lag"] <= 1
    assert_account_sums(content)
    assert (tmp_path / "run" / "curve.png").stat().st_size > 10_000


def test_ctrl_c_leaves_a_run_that_can_be_resumed_to_its_end(tmp_path: Path) -> None:
    given = overrides(tmp_path, run__steps="24", learner__checkpoint_every="100")
    output = tmp_path / "out.txt"
    with started(["run", str(CONFIG), "--plain", *given], output) as supervisor:
        wait_for_status(given, lambda status: status.step >= 6)
        everyone = descendants(supervisor.pid)
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(30) == 130, output.read_text()
        assert gone_within(everyone, 5) == []
    first = report(tmp_path)
    assert first["outcome"] == "interrupted"
    assert first["heldout_before"] is not None
    assert first["heldout_after"] is None
    assert_account_sums(first)
    (checkpoint,) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoint.step == first["steps"] >= 6

    again = tmp_path / "again.txt"
    with started(["run", "--resume", str(tmp_path / "run"), "--plain"], again) as supervisor:
        assert supervisor.wait(TIMEOUT_S) == 0, again.read_text()
    second = report(tmp_path)
    assert second["outcome"] == "finished"
    assert second["heldout_before"] == first["heldout_before"]
    assert second["heldout_after"] is not None
    assert [row["step"] for row in second["history"]["steps"]] == list(range(24))
    versions = [row["version"] for row in second["history"]["steps"]]
    assert versions == sorted(set(versions))
    assert second["rollouts_by_fate"]["trained"] + second["rollouts_by_fate"]["zero_signal"] == 24 * 256
    assert_account_sums(second)


def test_ctrl_c_before_the_run_has_begun_is_no_error(tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    with started(["run", str(CONFIG), "--plain", *overrides(tmp_path)], output) as supervisor:
        wait_for_children(supervisor.pid, 3)
        everyone = descendants(supervisor.pid)
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(30) == 130, output.read_text()
        assert gone_within(everyone, 5) == []
    assert "error" not in output.read_text()


def test_a_killed_learner_ends_the_run_with_a_sentence_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    given = overrides(tmp_path, run__steps="16", learner__checkpoint_every="4")
    output = tmp_path / "out.txt"
    with started(["run", str(CONFIG), "--plain", *given], output) as supervisor:
        wait_for_status(given, lambda status: status.step >= 6)
        everyone = descendants(supervisor.pid)
        os.kill(find(supervisor.pid, "learner"), signal.SIGKILL)
        assert supervisor.wait(60) == 1, output.read_text()
        assert gone_within(everyone, 5) == []
    said = output.read_text()
    assert "error: the learner ended (killed by signal 9)" in said
    assert "--resume" in said
    assert "Traceback" not in said
    again = tmp_path / "again.txt"
    with started(["run", "--resume", str(tmp_path / "run"), "--plain"], again) as supervisor:
        assert supervisor.wait(TIMEOUT_S) == 0, again.read_text()
    content = report(tmp_path)
    assert [row["step"] for row in content["history"]["steps"]] == list(range(16))
    assert_account_sums(content)


def test_by_hand_in_any_order_with_two_producers_and_no_lag(tmp_path: Path) -> None:
    given = overrides(tmp_path, run__steps="8", allocation__max_lag="0", allocation__policy="uniform")
    common = ["--config", str(CONFIG), *given]
    with (
        started(["producer", "--name", "left", *common], tmp_path / "left.txt") as left,
        started(["producer", "--name", "right", *common], tmp_path / "right.txt") as right,
        started(["learner", *common], tmp_path / "learner.txt") as learner,
        started(["allocator", *common], tmp_path / "allocator.txt") as allocator,
    ):
        status = wait_for_status(given, lambda status: status.step >= 3)
        assert {peer.name for peer in status.peers} == {"left", "right", "learner"}
        assert [process.wait(TIMEOUT_S) for process in (allocator, learner, left, right)] == [0, 0, 0, 0]
    content = report(tmp_path)
    assert content["outcome"] == "finished"
    assert content["max_lag"] == 0
    assert content["mean_lag"] == 0
    assert_account_sums(content)


def test_a_producer_on_a_host_without_the_learners_files_fetches_the_weights(tmp_path: Path) -> None:
    """Another host is another view of the file system: the producer sees an empty folder where the run is."""
    (tmp_path / "run").mkdir()
    hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(tmp_path / "run"))
    if subprocess.run([*hidden, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not permitted here")
    given = overrides(tmp_path, run__steps="4", stream__weights_address=free_address())
    common = ["--config", str(CONFIG), *given]
    with (
        started(["allocator", *common], tmp_path / "allocator.txt") as allocator,
        started(["learner", *common], tmp_path / "learner.txt") as learner,
        started(["producer", *common], tmp_path / "producer.txt", hidden) as producer,
    ):
        assert [process.wait(TIMEOUT_S) for process in (allocator, learner, producer)] == [0, 0, 0]
    content = report(tmp_path)
    assert content["outcome"] == "finished"
    assert content["final_version"] == 4
    assert content["max_lag"] <= 1
    assert_account_sums(content)


def test_without_the_allocator_the_others_end_with_a_sentence(tmp_path: Path) -> None:
    given = overrides(tmp_path, run__steps="50", stream__silence_s="3")
    common = ["--config", str(CONFIG), *given]
    with (
        started(["allocator", *common], tmp_path / "allocator.txt") as allocator,
        started(["producer", *common], tmp_path / "producer.txt") as producer,
        started(["learner", *common], tmp_path / "learner.txt") as learner,
    ):
        wait_for_status(given, lambda status: status.step >= 2)
        allocator.kill()
        assert learner.wait(30) == 1
        assert producer.wait(30) == 1
    for name in ("learner", "producer"):
        said = (tmp_path / f"{name}.txt").read_text()
        assert re.search(r"^error: the allocator at \S+ has been silent for 3 s", said, re.MULTILINE), said
        assert "Traceback" not in said
