"""A whole run on three hosts, with keys, whose cable to the producer is pulled for half a minute."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gvm_stream.config_file import load_config
from gvm_stream.wire.keys import create_keys
from tests.namespaces import Hosts, hosts
from tests.stream_processes import CONFIG, ROOT, TIMEOUT_S, started

CUT_S = 30
STEPS = 12


def write_config(folder: Path, network: Hosts) -> Path:
    values = {
        "run.dir": str(folder / "run"),
        "run.steps": str(STEPS),
        "stream.address": f"tcp://{network.address('allocator')}:5710",
        "stream.weights_address": f"tcp://{network.address('learner')}:5711",
        "stream.keys": str(folder / "keys"),
        "stream.heartbeat_s": "0.5",
        "stream.silence_s": "8",
        "eval.prompts": "20",
        "eval.samples": "1",
        "eval.every_steps": "0",
        "metrics.port": "0",
    }
    config = load_config(CONFIG, [f"{key}={value}" for key, value in values.items()])
    path = folder / "config.json"
    path.write_bytes(msgspec.json.encode(config))
    return path


def status(network: Hosts, config: Path) -> dict[str, Any]:
    command = network.command(
        "allocator", sys.executable, "-m", "gvm_stream", "status", "--json", "--config", str(config)
    )
    done = subprocess.run(command, capture_output=True, cwd=ROOT, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


@pytest.mark.stream
@pytest.mark.timeout(300)
def test_a_run_on_three_hosts_survives_half_a_minute_without_a_cable(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    (tmp_path / "run" / "weights").mkdir(parents=True)
    # The producer's host does not see the learner's files: it fetches the weights.
    apart = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none {tmp_path}/run/weights && exec "$@"', "sh")
    with hosts("allocator", "learner", "producer") as network:
        config = write_config(tmp_path, network)
        given = ["--config", str(config)]
        with (
            started(["allocator", *given], tmp_path / "allocator.log", network.command("allocator")) as allocator,
            started(["learner", *given], tmp_path / "learner.log", network.command("learner")),
            started(["producer", *given], tmp_path / "producer.log", network.command("producer", *apart)),
        ):
            deadline = time.monotonic() + TIMEOUT_S
            while (found := status(network, config)).get("step", 0) < 2:
                assert time.monotonic() < deadline, found
                time.sleep(0.5)
            network.cut("producer")
            time.sleep(CUT_S)
            in_the_cut = status(network, config)
            network.mend("producer")
            assert allocator.wait(TIMEOUT_S) == 0
    assert in_the_cut["step"] < STEPS
    assert any(wait["what"] == "a producer to join" for wait in in_the_cut["waits"])
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["outcome"], report["steps"], report["ledger_conserved"]) == ("finished", STEPS, True)
    assert report["faults"]["producers_lost"] >= 1
