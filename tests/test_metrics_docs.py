from __future__ import annotations

from pathlib import Path

from gvm_stream.metrics import TABLE
from gvm_stream.metrics.docs import page

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"


def test_the_page_of_metrics_is_that_of_the_table() -> None:
    assert DOCS.read_text() == page(), "run: python -m gvm_stream.metrics > docs/metrics.md"


def test_every_metric_has_a_row_with_its_labels() -> None:
    rows = {line.split("`")[1]: line for line in page().splitlines() if line.startswith("| `gvm_")}
    assert set(rows) == {spec.exposed for spec in TABLE}
    for spec in TABLE:
        assert rows[spec.exposed].count(" | ") == 4
        assert all(value in rows[spec.exposed] for value in spec.values)
