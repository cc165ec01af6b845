"""The whole stream with real processes, sockets, engine, verifier and learner: it learns, and it survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from gvm_stream.config import Config
from gvm_stream.learner.checkpoint import complete_checkpoints
from gvm_stream.wire.link import open_link
from tests import chaos
from tests.stream_processes import (
    CONFIG,
    TIMEOUT_S,
    assert_account_sums,
    descendants,
    find,
    free_address,
    gone_within,
    kill,
    overrides,
    report,
    started,
    wait_for_children,
    wait_for_status,
)

pytestmark = [pytest.mark.stream, pytest.mark.timeout(2 * TIMEOUT_S)]


def test_accuracy_rises_and_nothing_is_lost_when_any_process_is_killed(tmp_path: Path) -> None:
    given = overrides(tmp_path, run__steps="40", eval__prompts="300", eval__samples="3", learner__checkpoint_every="4")
    output = tmp_path / "out.txt"
    with started(["run", str(CONFIG), "--plain", *given], output) as supervisor:
        for victim, step in (("producer", 6), ("learner", 14), ("allocator", 22)):
            wait_for_status(given, lambda status, step=step: status.step >= step)  # type: ignore[misc]
            os.kill(find(supervisor.pid, victim), signal.SIGKILL)
        assert supervisor.wait(TIMEOUT_S) == 0, output.read_text()
    content = report(tmp_path)
    assert output.read_text().count("killed by signal 9") == 3
    assert content["outcome"] == "finished"
    # 900 samples before and after: the standard error of the difference is 0.023.
    assert content["heldout_after"] > content["heldout_before"] + 0.05
    assert content["attempts"]["expired"] > 0
    assert content["faults"]["allocator_restarts"] == 1
    assert content["rollouts_by_fate"]["trained"] + content["rollouts_by_fate"]["zero_signal"] == 40 * 256
    assert [row["step"] for row in content["history"]["steps"]] == list(range(40))
    assert content["max_lag"] <= 1
    assert_account_sums(content)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9 of everything"])
def test_a_run_that_was_ended_is_resumed_to_its_end(tmp_path: Path, how: str) -> None:
    given = overrides(tmp_path, run__steps="10", learner__checkpoint_every="3")
    output = tmp_path / "out.txt"
    with started(["run", str(CONFIG), "--plain", *given], output) as supervisor:
        wait_for_status(given, lambda status: status.step >= 4)
        everyone = descendants(supervisor.pid)
        if how == "Ctrl-C":
            supervisor.send_signal(signal.SIGINT)
            assert supervisor.wait(30) == 130, output.read_text()
            first = report(tmp_path)
            assert first["outcome"] == "interrupted"
            assert first["heldout_before"] is not None
            assert first["heldout_after"] is None
            assert_account_sums(first)
            assert complete_checkpoints(tmp_path / "run" / "checkpoints")[0].step == first["steps"] >= 4
        else:
            for pid in (supervisor.pid, *everyone):
                kill(pid)
        assert gone_within(everyone, 5) == []

    again = tmp_path / "again.txt"
    with started(["run", "--resume", str(tmp_path / "run"), "--plain"], again) as supervisor:
        assert supervisor.wait(TIMEOUT_S) == 0, again.read_text()
    second = report(tmp_path)
    assert second["outcome"] == "finished"
    assert second["heldout_after"] is not None
    assert [row["step"] for row in second["history"]["steps"]] == list(range(10))
    versions = [row["version"] for row in second["history"]["steps"]]
    assert versions == sorted(set(versions))
    assert second["rollouts_by_fate"]["trained"] + second["rollouts_by_fate"]["zero_signal"] == 10 * 256
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


def test_a_learner_that_cannot_go_on_ends_the_run_at_once_with_its_reason(tmp_path: Path) -> None:
    impossible = {"learner__max_logprob_mismatch": "1e-12", "learner__max_skipped": "1"}
    common = ["--config", str(CONFIG), *overrides(tmp_path, run__steps="8", **impossible)]
    with (
        started(["allocator", *common], tmp_path / "allocator.txt") as allocator,
        started(["learner", *common], tmp_path / "learner.txt") as learner,
        started(["producer", *common], tmp_path / "producer.txt") as producer,
    ):
        statuses = [process.wait(TIMEOUT_S) for process in (learner, allocator, producer)]
    assert statuses == [1, 1, 0]
    assert "error: learner learner cannot go on: 1 batches in a row gave no usable gradient" in (
        (tmp_path / "allocator.txt").read_text()
    )
    assert report(tmp_path)["outcome"] == "failed"


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


def test_without_the_allocator_the_others_end_soon_after_they_are_told_to(tmp_path: Path) -> None:
    given = overrides(tmp_path, run__steps="50", stream__silence_s="3")
    common = ["--config", str(CONFIG), *given]
    with (
        started(["allocator", *common], tmp_path / "allocator.txt") as allocator,
        started(["producer", *common], tmp_path / "producer.txt") as producer,
        started(["learner", *common], tmp_path / "learner.txt") as learner,
    ):
        wait_for_status(given, lambda status: status.step >= 2)
        everyone = [*descendants(producer.pid), producer.pid, *descendants(learner.pid), learner.pid]
        allocator.kill()
        producer.send_signal(signal.SIGTERM)
        learner.send_signal(signal.SIGTERM)
        assert [producer.wait(30), learner.wait(30)] == [0, 0]
        assert gone_within(everyone, 5) == []
    assert "rollouts; they count as lost" in (tmp_path / "producer.txt").read_text()
    assert complete_checkpoints(tmp_path / "run" / "checkpoints")[0].step >= 2
    for name in ("learner", "producer"):
        assert "Traceback" not in (tmp_path / f"{name}.txt").read_text()


async def train(config: Config, folder: Path, faults: Sequence[tuple[str, int]]) -> list[list[int]]:
    """Works that a synchronous run of a deterministic engine trains on, with (who is killed, at which batch)."""
    with trio.fail_after(TIMEOUT_S):
        async with (
            chaos.cluster(folder, producers=2) as running,
            open_link(config.stream, role="observer", name="test", agreed={}, patience_s=60) as link,
        ):
            for victim, step in faults:
                while (await link.status()).step < step:  # noqa: ASYNC110 (another process: no event to wait for)
                    await trio.sleep(0.02)
                running.kill(victim)
                running.start(victim, again=True)
            assert await running.wait("allocator") == 0
            await running.wait("learner")
    batches: list[list[int]] = json.loads((folder / "run" / "checkpoints" / "10.json").read_text())
    return batches


def test_a_run_trains_on_the_same_batches_whoever_is_killed(tmp_path: Path) -> None:
    batches = {}
    for name, faults in {
        "undisturbed": [],
        "killed": [("learner", 2), ("allocator", 4), ("producer-0", 6), ("learner", 7)],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        config = chaos.write_config(folder, rollouts=2560, **{"allocation.max_lag": "0"})
        batches[name] = trio.run(train, config, folder, faults)
    assert batches["killed"] == batches["undisturbed"]
    assert [len(batch) for batch in batches["killed"]] == [256] * 10
