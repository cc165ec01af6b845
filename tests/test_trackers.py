"""Each with the tracker's own reader, in a process of its own: they keep threads and global state."""

from __future__ import annotations

import json
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from gvm_stream.errors import ConfigError
from gvm_stream.metrics import Metrics
from gvm_stream.trackers import Tracked, TrackerName, open_trackers

WRITE = """
import json, sys
from pathlib import Path
from gvm_stream.metrics import Metrics
from gvm_stream.trackers import Tracked, open_trackers

metrics = Metrics("learner")
metrics.count("gvm_learner_batches", label="trained")
with open_trackers([sys.argv[1]], Tracked(Path(sys.argv[2]), "learner", {"learner": {"lr": 3e-4}})) as log:
    for step, loss in ((1, 0.5), (2, 0.25)):
        metrics.set("gvm_loss", loss)
        log(step, metrics.scalars())
"""


def read_tensorboard(folder: Path) -> list[tuple[int, float]]:
    loader = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    events = loader(str(folder / "tensorboard" / "learner"))
    events.Reload()
    assert "gvm_learner_batches_total/trained" in events.Tags()["tensors"]
    return [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("gvm_loss")]


def read_wandb(folder: Path) -> list[tuple[int, float]]:
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in wandb_records(path.read_bytes()):
        record = import_module("wandb.proto.wandb_internal_pb2").Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            assert items["gvm_learner_batches_total/trained"] == 1
            rows.append((items["_step"], items["gvm_loss"]))
    return rows


def wandb_records(data: bytes, at: int = 7, block: int = 32768) -> Iterator[bytes]:
    """LevelDB's log format behind seven bytes of its own: checksum, length, kind (1 whole, 2 to 4 its parts)."""
    record = b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_trackio(folder: Path) -> list[tuple[int, float]]:
    with closing(sqlite3.connect(folder / "trackio" / "gvm-stream.db")) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    values = [(step, json.loads(metrics)) for step, metrics in rows]
    assert all(value["gvm_learner_batches_total/trained"] == 1 for _, value in values)
    return [(step, value["gvm_loss"]) for step, value in values]


READ = {"tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio}


@pytest.mark.parametrize("name", get_args(TrackerName))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_metrics_are_there_under_their_names_afterwards(
    name: TrackerName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name, reason=f"needs the extra {name}")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    subprocess.run([sys.executable, "-c", WRITE, name, str(tmp_path)], check=True, timeout=60)
    assert READ[name](tmp_path) == [(1, 0.5), (2, 0.25)]


def test_none_is_fine(tmp_path: Path) -> None:
    with open_trackers([], Tracked(tmp_path, "learner", {})) as log:
        log(1, Metrics("learner").scalars())
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_not_installed_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(ConfigError, match=r'metrics.trackers names "wandb".*pip install .gvm-stream\[wandb\]'),
        open_trackers(["wandb"], Tracked(tmp_path, "learner", {})),
    ):
        pass
