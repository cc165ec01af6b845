from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gvm_stream.dashboards.queries import Alert, alerts
from tests.test_dashboards import unknown_parts

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "ops" / "prometheus"
ALERTS = alerts(FOLDER / "alerts.yml")
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "runbook.md").read_text(), flags=re.MULTILINE)[1:]
NAMES = [alert.alert for alert in ALERTS]

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_every_alert_asks_for_metrics_and_labels_that_exist(alert: Alert) -> None:
    assert unknown_parts(alert.expr) == []


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_every_alert_has_a_section_in_the_runbook_and_links_to_it(alert: Alert) -> None:
    (section,) = [text for text in SECTIONS if text.startswith(f"{alert.alert}\n")]
    parts = re.findall(r"^\*\*(.+?)\.\*\*", section, re.MULTILINE)
    assert parts == ["What it means", "Likely causes", "What to look at", "What to do"]
    assert alert.annotations["runbook_url"] == f"docs/runbook.md#{alert.alert.lower()}"
    assert alert.labels["severity"] in ("critical", "warning")


def test_the_runbook_has_no_section_without_an_alert() -> None:
    assert [section.split("\n")[0] for section in SECTIONS] == NAMES


def test_panels_that_the_runbook_names_exist() -> None:
    titles = {
        path.stem: {panel["title"] for panel in msgspec.json.decode(path.read_bytes())["panels"]}
        for path in (ROOT / "ops" / "grafana").glob("*.json")
    }
    text = "\n".join(SECTIONS).replace("\n", " ")
    named = re.findall(r"\*(\w+) / ([^*]+)\*", text)
    assert len(named) > 15
    for board, panel in named:
        assert panel in titles[board], f"{board} / {panel}"


def test_every_alert_is_shown_firing_and_silent() -> None:
    tests: list[dict[str, Any]] = msgspec.yaml.decode((FOLDER / "alerts.test.yml").read_bytes())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for name in NAMES:
        mine = [case for case in cases if case["alertname"] == name]
        assert any(case.get("exp_alerts") for case in mine), f"{name} is never shown firing"
        assert any(not case.get("exp_alerts") for case in mine), f"{name} is never shown silent"


@needs_promtool
@pytest.mark.parametrize(
    "arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts.test.yml")], ids=" ".join
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
