"""The few kinds of panels that the dashboards are made of. Needs the Grafana Foundation SDK (extra `ops`)."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import NamedTuple, TypeAlias

from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.common import VizTooltipOptions as Tooltip
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.heatmap import Panel as Heatmap
from grafana_foundation_sdk.builders.heatmap import YAxisConfig
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_SELECTOR = re.compile(r"\b(gvm_[a-z_]+)(?:\{([^}]*)\})?")
WIDTH = {"stat": 4, "graph": 8}
HEIGHT = {"stat": 4, "graph": 8}


class Series(NamedTuple):
    """A query, and the name of what comes of it; `{{label}}` stands for the value of a label."""

    expr: str
    legend: str


Panel: TypeAlias = Timeseries | Stat | Heatmap


def scoped(expr: str) -> str:
    """The same for the run chosen at the top of the dashboard."""

    def with_run(match: re.Match[str]) -> str:
        labels = f"{match[2]}, " if match[2] else ""
        return f'{match[1]}{{{labels}run=~"$run"}}'

    return _SELECTOR.sub(with_run, expr)


def graph(title: str, about: str, unit: str, *series: Series, stacked: bool = False) -> Timeseries:
    panel = (
        Timeseries()
        .title(title)
        .description(about)
        .unit(unit)
        .datasource(SOURCE)
        .span(WIDTH["graph"])
        .height(HEIGHT["graph"])
        .fill_opacity(40 if stacked else 0)
        .show_points(VisibilityMode.NEVER)
        .legend(
            VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
        )
        .tooltip(Tooltip().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL).group("A"))
    for each in series:
        panel.with_target(_query(each))
    return panel


def number(title: str, about: str, unit: str, expr: str, *, bad_below: float | None = None) -> Stat:
    """The last value; red below `bad_below`."""
    colors = [Threshold(color="green", value=None)]
    if bad_below is not None:
        colors = [Threshold(color="red", value=None), Threshold(color="green", value=bad_below)]
    return (
        Stat()
        .title(title)
        .description(about)
        .unit(unit)
        .datasource(SOURCE)
        .span(WIDTH["stat"])
        .height(HEIGHT["stat"])
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(colors))
        .with_target(_query(Series(expr, "")))
    )


def histogram(title: str, about: str, unit: str, metric: str) -> Heatmap:
    """How the values of a histogram metric spread, over time."""
    expr = f"sum by (le) (increase({metric}_bucket[$__rate_interval]))"
    return (
        Heatmap()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(WIDTH["graph"])
        .height(HEIGHT["graph"])
        .calculate(False)
        .y_axis(YAxisConfig().unit(unit))
        .with_target(_query(Series(expr, "{{le}}")).format(PromQueryFormat.HEATMAP))
    )


def quantiles(title: str, about: str, unit: str, metric: str) -> Timeseries:
    """The median and the slow end of a histogram metric."""
    rates = f"sum by (le) (rate({metric}_bucket[$__rate_interval]))"
    series = [Series(f"histogram_quantile({q}, {rates})", f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)]
    return graph(title, about, unit, *series)


def dashboard(name: str, title: str, about: str, rows: dict[str, list[Panel]]) -> Dashboard:
    board = (
        Dashboard(f"gvm-stream / {title}")
        .uid(f"gvm-{name}")
        .description(about)
        .tags(["gvm-stream"])
        .readonly()
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            QueryVariable("run")
            .label("run")
            .datasource(SOURCE)
            .query("label_values(gvm_policy_version, run)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(False)
            .include_all(True)
            .all_value(".*")
        )
    )
    for row, panels in rows.items():
        board.with_row(Row(row))
        for panel in panels:
            board.with_panel(deepcopy(panel))  # it is given its place, and may be on other dashboards, too
    return board


def to_json(board: Dashboard) -> str:
    return str(JSONEncoder(sort_keys=True, indent=2).encode(board.build())) + "\n"


def _query(series: Series) -> Dataquery:
    return Dataquery().expr(scoped(series.expr)).legend_format(series.legend).datasource(SOURCE).range()
