"""The allocator's process at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gvm_stream.allocator.main import SPOOL, main
from gvm_stream.errors import ConfigError, StreamError
from tests.chaos import write_config


def test_a_run_that_cannot_go_on_keeps_its_configuration(tmp_path: Path) -> None:
    """Whoever has resumed it with another one, or beside the allocator that has it, may try again without."""
    config = write_config(tmp_path, rollouts=256)
    run = Path(config.run.dir)
    (run / SPOOL).parent.mkdir(parents=True)
    (run / SPOOL).write_text("not a spool" * 100)
    (run / "config.json").write_text("as it was")
    with pytest.raises(StreamError, match="is not a database"):
        main(config, resume=True, supervised=False)
    assert (run / "config.json").read_text() == "as it was"


def test_a_run_that_was_not_written_down_is_not_begun_again_as_if_it_went_on(tmp_path: Path) -> None:
    config = write_config(tmp_path, rollouts=256, **{"stream.spool": "false"})
    with pytest.raises(ConfigError, match=r"run cannot be continued: with stream\.spool = false"):
        main(config, resume=True, supervised=False)
