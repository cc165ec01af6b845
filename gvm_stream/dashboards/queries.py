"""The queries that dashboards and alerts ask of Prometheus, read from their files. Needs no Grafana SDK."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

_SELECTOR = re.compile(r"\b(gvm_[a-z_]+|up\b)(?:\{([^}]*)\})?")
_LABEL = re.compile(r'([a-z_]+)=(~?)"([^"]*)"')


class Query(NamedTuple):
    source: str
    """Where it stands, for people."""
    expr: str


class Selector(NamedTuple):
    """One metric in a query, with the labels asked for."""

    metric: str
    labels: dict[str, str]
    text: str


class Alert(msgspec.Struct, frozen=True):
    alert: str
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]


class _Group(msgspec.Struct, frozen=True):
    rules: list[Alert]


class _Rules(msgspec.Struct, frozen=True):
    groups: list[_Group]


def of_dashboards(folder: Path) -> list[Query]:
    """All queries of the dashboards in a folder. `$run` stands for every run, as it does at first in Grafana."""
    found = []
    for path in sorted(folder.glob("*.json")):
        for panel in _panels(json.loads(path.read_text())):
            for target in panel.get("targets", ()):
                found.append(Query(f"{path.name}: {panel['title']}", target["expr"].replace("$run", ".*")))
    return found


def alerts(path: Path) -> list[Alert]:
    rules = msgspec.yaml.decode(path.read_bytes(), type=_Rules)
    return [rule for group in rules.groups for rule in group.rules]


def selectors(expr: str) -> list[Selector]:
    """Labels that are asked for with a pattern are left out of `labels`: they may have any value."""
    return [
        Selector(match[1], {k: v for k, tilde, v in _LABEL.findall(match[2] or "") if not tilde}, match[0])
        for match in _SELECTOR.finditer(expr)
    ]


def _panels(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in node["panels"]:
        yield panel
        if panel["type"] == "row":
            yield from _panels(panel)
