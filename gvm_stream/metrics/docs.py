"""docs/metrics.md, made from the table."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.utils import floatToGoString

from gvm_stream.metrics.table import TABLE, Spec

INTRO = """\
# Metrics

Made from `gvm_stream/metrics/table.py` by `python -m gvm_stream.metrics > docs/metrics.md`.

Every process serves its metrics as Prometheus text on `http://HOST:PORT/metrics`: `metrics.port`, or the next free port
after it; its log says which. A learner on several GPUs is one process here: rank 0 serves.

- Every series is there from the start. Counters, histograms and gauges that count something start at 0. A gauge of
  something that has to be measured first is NaN until then: a gap in a graph, and no alert fires on it.
- Labels have the values listed here and no others, so the number of series never grows.
- A counter is exposed with `_total`. A histogram has `_bucket`, `_sum` and `_count`; what is not a finite number never
  enters a sum.
- Counters start at 0 with a process, unless they continue what a resumed run has counted. Use `rate` and `increase`.
- Averages are over everything that their sentence names: response lengths over all scored responses, cut-off ones
  included; the mean reward over scored rollouts, with what is not scored counted in `gvm_rollouts_total`.

`ops/grafana/` has dashboards for them, `ops/prometheus/alerts.yml` alerts, and [runbook.md](runbook.md) says what to do
about those.
"""

TITLES = {
    "every": "Every process",
    "allocator": "Allocator",
    "producer": "Producers",
    "learner": "Learner",
}


def page() -> str:
    sections = [f"\n## {title}\n\n{_table([s for s in TABLE if s.role == role])}" for role, title in TITLES.items()]
    return INTRO + "".join(sections) + "\n## Buckets\n\n" + _buckets()


def _table(specs: Sequence[Spec]) -> str:
    head = "| name | type | unit | labels | meaning |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| `{spec.exposed}` | {spec.kind} | {spec.unit} | {_label(spec)} | {_cell(spec.help)} |\n" for spec in specs
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _label(spec: Spec) -> str:
    return f"`{spec.label}`: {', '.join(spec.values)}" if spec.label else ""


def _buckets() -> str:
    histograms = [spec for spec in TABLE if spec.kind == "histogram"]
    names: dict[tuple[float, ...], list[str]] = {}
    for spec in histograms:
        names.setdefault(spec.buckets, []).append(f"`{spec.name}`")
    return "".join(f"- {', '.join(n)}: {', '.join(map(floatToGoString, b))}, +Inf\n" for b, n in names.items())
