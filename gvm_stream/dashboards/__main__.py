"""`python -m gvm_stream.dashboards [FOLDER]`: write one JSON file for every dashboard."""

from __future__ import annotations

import sys
from pathlib import Path

from gvm_stream.dashboards.boards import BOARDS
from gvm_stream.dashboards.panels import to_json

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "ops/grafana")
folder.mkdir(parents=True, exist_ok=True)
for name, board in BOARDS.items():
    (folder / f"{name}.json").write_text(to_json(board))
