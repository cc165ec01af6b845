"""Everything that can die does, while a run goes on; `python -m benchmarks.chaos` does it for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.chaos import torment, write_config


@pytest.mark.stream
@pytest.mark.timeout(600)
def test_nothing_is_lost_and_nothing_is_trained_on_twice_whatever_dies(tmp_path: Path) -> None:
    config = write_config(tmp_path, rollouts=3000)
    outcome = trio.run(lambda: torment(config, tmp_path, every=200, seed=1, timeout_s=500))
    assert sum(outcome.faults.values()) >= 5, outcome
    assert (outcome.trained, outcome.lost, outcome.duplicated) == (outcome.planned, 0, 0), outcome
    assert outcome.conserved, outcome
