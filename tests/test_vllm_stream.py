"""The whole stream with vLLM in the producer: real processes, from the command line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.stream_processes import (
    CONFIG,
    TIMEOUT_S,
    assert_account_sums,
    descendants,
    find,
    gone_within,
    overrides,
    report,
    started,
    wait_for_status,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def given(folder: Path, **settings: str) -> list[str]:
    return overrides(folder, producer__engine="vllm", **{"run__steps": "6", **settings})


def test_a_run_with_vllm_accounts_for_every_token_and_leaves_no_process(tmp_path: Path) -> None:
    arguments = given(tmp_path)
    with started(["run", str(CONFIG), *arguments], tmp_path / "out") as run:
        wait_for_status(arguments, lambda status: status.step >= 1)
        processes = descendants(run.pid)
        assert run.wait(TIMEOUT_S) == 0
        assert gone_within(processes, 5) == []
    content = report(tmp_path)
    assert_account_sums(content)
    assert (content["final_version"], content["ledger_conserved"]) == (6, True)
    assert content["max_lag"] <= 1
    assert "quarantined" not in (tmp_path / "run" / "logs" / "producer-0.log").read_text()


def test_rollouts_that_a_closed_visit_does_not_need_are_cancelled_in_flight_and_their_tokens_known(
    tmp_path: Path,
) -> None:
    arguments = given(
        tmp_path, allocation__policy="neyman", allocation__design="sequential", allocation__rounds_ahead="1"
    )
    with started(["run", str(CONFIG), *arguments], tmp_path / "out") as run:
        assert run.wait(TIMEOUT_S) == 0, (tmp_path / "out").read_text()[-3000:]
    content = report(tmp_path)
    assert_account_sums(content)
    assert content["rollouts_by_fate"]["cancelled"] > 0
    assert content["tokens"]["cancelled"] > 0


def test_a_producer_with_vllm_hands_its_work_back_when_asked_to_leave_and_another_takes_it(tmp_path: Path) -> None:
    arguments = given(tmp_path, run__steps="20")
    with started(["run", str(CONFIG), *arguments], tmp_path / "out") as run:
        wait_for_status(arguments, lambda status: status.step >= 1)
        producer = find(run.pid, "producer")
        family = [producer, *descendants(producer)]
        os.kill(producer, signal.SIGTERM)
        assert gone_within(family, 15) == []
        config = str(tmp_path / "run" / "config.json")
        with started(["producer", "--config", config, "--name", "another"], tmp_path / "another"):
            assert run.wait(TIMEOUT_S) == 0, (tmp_path / "out").read_text()[-3000:]
    content = report(tmp_path)
    assert (content["final_version"], content["ledger_conserved"]) == (20, True)
    assert "ends: producer leaves" in (tmp_path / "run" / "logs" / "producer-0.log").read_text()


def test_a_producer_with_vllm_that_is_killed_is_started_again(tmp_path: Path) -> None:
    arguments = given(tmp_path, run__steps="20")
    with started(["run", str(CONFIG), *arguments], tmp_path / "out") as run:
        wait_for_status(arguments, lambda status: status.step >= 1)
        producer = find(run.pid, "producer")
        family = [producer, *descendants(producer)]
        os.kill(producer, signal.SIGKILL)
        assert gone_within(family, 15) == []
        assert run.wait(TIMEOUT_S) == 0, (tmp_path / "out").read_text()[-3000:]
    content = report(tmp_path)
    assert (content["final_version"], content["ledger_conserved"]) == (20, True)
