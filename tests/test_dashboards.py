from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from gvm_stream.dashboards.queries import Query, Selector, of_dashboards, selectors
from gvm_stream.metrics import TABLE
from gvm_stream.metrics.table import Spec

FOLDER = Path(__file__).parents[1] / "ops" / "grafana"
EXPOSED: dict[str, Spec] = {
    spec.exposed + suffix: spec
    for spec in TABLE
    for suffix in (("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",))
}
QUERIES = of_dashboards(FOLDER)


def unknown_parts(expr: str) -> list[str]:
    """The metrics of a query that do not exist, and the labels that they never have."""
    found = []
    for metric, labels, text in selectors(expr):
        if metric == "up":
            continue
        spec = EXPOSED.get(metric)
        if spec is None or any(name != spec.label or value not in spec.values for name, value in labels.items()):
            found.append(text)
    return found


def test_there_is_a_dashboard_for_every_part() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {"overview", "allocation", "engines", "learner", "stream"}


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.source)
def test_every_query_asks_for_metrics_and_labels_that_exist(query: Query) -> None:
    assert selectors(query.expr)
    assert unknown_parts(query.expr) == []


def test_what_does_not_exist_is_found() -> None:
    assert unknown_parts('rate(gvm_rollouts[1m]) + gvm_tokens{fate="lost"} + gvm_tokens{prompt="train-1"}') == [
        "gvm_rollouts",
        'gvm_tokens{fate="lost"}',
        'gvm_tokens{prompt="train-1"}',
    ]


def test_selectors_are_read_from_a_query() -> None:
    expr = 'sum(rate(gvm_rollouts_total{outcome="failed", run=~".*"}[1m])) > on (run) up'
    assert selectors(expr) == [
        Selector("gvm_rollouts_total", {"outcome": "failed"}, 'gvm_rollouts_total{outcome="failed", run=~".*"}'),
        Selector("up", {}, "up"),
    ]


def test_every_metric_of_the_table_is_on_a_dashboard() -> None:
    shown = {EXPOSED[metric].name for query in QUERIES for metric, _, _ in selectors(query.expr) if metric != "up"}
    assert {spec.name for spec in TABLE} - shown == set()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_panels_do_not_cover_each_other(path: Path) -> None:
    cells = Counter(
        (x, y)
        for place in (panel["gridPos"] for panel in json.loads(path.read_text())["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert max(x for x, _ in cells) == 23
    assert max(cells.values()) == 1


def test_the_checked_in_dashboards_are_those_of_the_code() -> None:
    from gvm_stream.dashboards.boards import BOARDS
    from gvm_stream.dashboards.panels import to_json

    assert set(BOARDS) == {path.stem for path in FOLDER.glob("*.json")}
    for name, board in BOARDS.items():
        assert (FOLDER / f"{name}.json").read_text() == to_json(board), "run: python -m gvm_stream.dashboards"
