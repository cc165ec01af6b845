"""What is declared is set: every metric of the table moves in a real run, or when what it counts happens."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

import gvm_stream
from gvm_stream.metrics import TABLE
from gvm_stream.metrics.table import Spec
from tests.stream_processes import CONFIG, TIMEOUT_S, overrides, started, wait_for_status
from tests.test_metrics import occupied

DID_NOT_HAPPEN = {
    "gvm_batches_repeated": "the learner came back",
    "gvm_connections_refused": "a stranger knocks",
    "gvm_gpu_memory_bytes": "there is a GPU",
    "gvm_gpu_memory_used_bytes": "there is a GPU",
    "gvm_engine_preemptions": "the key-value cache is full",
    "gvm_engine_quarantined": "an engine computes with wrong weights",
    "gvm_gpu_utilization": "there is a GPU",
    "gvm_ledger_conserved": "a bug",
    "gvm_learner_skips": "a batch is skipped",
    "gvm_messages_refused": "a peer breaks the protocol",
    "gvm_prompts_quarantined": "a prompt fails too often",
    "gvm_prompts_retired": "a prompt is shown to be dead or solved",
    "gvm_rollouts_duplicate": "a producer says something twice",
    "gvm_spool_waiting": "the disk is slow",
    "gvm_stale_acceptance": "rollouts are too old",
    "gvm_stale_response_tokens": "rollouts are too old",
    "gvm_tokens_clamped": "log-ratios are beyond reason",
    "gvm_unscorable": "a verifier fails",
    "gvm_verifier_killed": "a verifier fails",
    "gvm_verifier_waiting": "verification is slow",
}
"""What is still at its start in a healthy run on a CPU, and what would change it."""


def moved(text: str) -> set[str]:
    """The metrics that are not at their start any more."""
    specs = {spec.name: spec for spec in TABLE}
    return {
        family.name
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if _differs(specs[family.name], sample.value)
    }


def _differs(spec: Spec, value: float) -> bool:
    return not math.isnan(value) if math.isnan(spec.start) else value != spec.start


@pytest.mark.parametrize("name", sorted(DID_NOT_HAPPEN))
def test_what_did_not_happen_would_be_counted(name: str) -> None:
    package = Path(gvm_stream.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py") if path.parent.name != "dashboards"]
    assert sum(f'"{name}"' in text for text in sources) >= 2, "declared in the table, and set by somebody"


@pytest.mark.stream
def test_every_metric_is_set_in_a_run_but_for_what_did_not_happen(tmp_path: Path) -> None:
    settings = {
        "run__steps": "100000",
        "allocation__shadow_uniform": "0.3",
        "eval__prompts": "50",
        "learner__kl_coefficient": "0.001",
        "learner__measure_every": "2",
        "producer__slots": "64",
        "sampling__max_tokens": "30",  # some responses are cut off
    }
    wanted = {spec.name for spec in TABLE} - DID_NOT_HAPPEN.keys()
    with occupied(2) as port:
        given = overrides(tmp_path, metrics__port=str(port), **settings)
        ports = (port + 2, port + 3, port + 4)
        with started(["run", str(CONFIG), "--plain", *given], tmp_path / "out.txt") as run:
            wait_for_status(given, lambda status: status.step >= 3)
            seen: set[str] = set()
            deadline = time.monotonic() + TIMEOUT_S
            while wanted - seen and time.monotonic() < deadline:
                for each in ports:
                    with urlopen(f"http://127.0.0.1:{each}/metrics", timeout=5) as answer:
                        seen |= moved(answer.read().decode())
                time.sleep(0.2)
            run.send_signal(signal.SIGINT)
            assert run.wait(TIMEOUT_S) == 130, (tmp_path / "out.txt").read_text()
    assert wanted - seen == set()
