"""From report.json to one page of HTML that needs nothing else: no scripts, no fonts, no network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from gvm_stream.allocator.types import Fate
from gvm_stream.config import Config
from gvm_stream.errors import DataError
from gvm_stream.report import charts
from gvm_stream.report.charts import Bin, Chart, Series
from gvm_stream.report.objective import POINTS, implied
from gvm_stream.report.verdicts import Z95, verdicts
from gvm_stream.terminal import count, duration, share

ENDS = {
    "expired": "attempts whose process died or got stuck",
    "failed": "attempts that failed in an engine",
    "cancelled": "attempts cancelled",
    "unscorable": "responses without a verdict",
    "duplicates": "outcomes reported twice",
}
"""Of attempts other than a scored rollout."""


def render(report: dict[str, Any], name: str) -> str:
    """The page of the run `name`. Raises DataError for the report of another version."""
    try:
        config = msgspec.convert(report["config"], Config)
        return _template().render(
            name=name,
            report=report,
            tiles=_tiles(report),
            verdicts=verdicts(report),
            curves=_curves(report),
            tokens=_tokens(report),
            difficulty=_difficulty(report),
            objective=_objective(report, config),
            faults=_faults(report),
            settings=_settings(report["config"]),
            environment=_flat(report["environment"]),
        )
    except (msgspec.ValidationError, KeyError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"report.json of {name} is of another version of gvm-stream: {what}") from error


def _template() -> jinja2.Template:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("gvm_stream.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html")


def _tiles(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the figures at the top."""
    accuracies = [row["accuracy"] for row in report["history"]["evaluations"] if row["accuracy"] is not None]
    per_second = report["tokens_per_second"]
    return [
        (
            "held-out accuracy",
            share(accuracies[-1]) if accuracies else "-",
            f"from {share(accuracies[0])}" if len(accuracies) > 1 else "",
        ),
        ("batches", f"{report['steps']:,}", f"of {report['steps_planned']:,}"),
        ("tokens", count(report["tokens"]["generated"]), f"{count(report['rollouts'])} rollouts"),
        ("time", duration(report["seconds"]), f"{count(per_second)} tokens/s" if per_second else ""),
    ]


def _curves(report: dict[str, Any]) -> list[Chart]:
    steps, evaluations = report["history"]["steps"], report["history"]["evaluations"]
    accuracy = Series(
        "accuracy", _column(evaluations, "accuracy"), [Z95 * e for e in _column(evaluations, "standard_error")]
    )
    batch = [row["step"] + 1 for row in steps]
    variance, signal, error = (
        _column(steps, "stats", "noise", key) for key in ("variance", "signal", "standard_error")
    )
    measured = [i for i, value in enumerate(variance) if math.isfinite(value)]
    measured_batch = [batch[i] for i in measured]

    def curve(title: str, *series: tuple[str, str], **options: Any) -> Chart:  # noqa: ANN401
        drawn = [Series(label, _column(steps, "stats", key)) for label, key in series]
        return charts.line_chart(title, "batches", batch, drawn, **options)

    return [
        charts.line_chart(
            "Held-out accuracy by tokens", "tokens generated", _column(evaluations, "generated"), [accuracy],
            note="Bars: 95 % intervals.",
        ),
        charts.line_chart("Held-out accuracy by updates", "batches", _column(evaluations, "step"), [accuracy]),
        curve("Training reward", ("mean reward", "reward_mean")),
        curve("Loss", ("loss", "loss")),
        curve("Gradient norm", ("norm", "grad_norm"), note="Before clipping."),
        curve("Effective sample size", ("share", "effective_sample_size"), note="1 is on-policy."),
        curve("Mismatch", ("nats", "mismatch"), note="Mean |log-prob of the learner - log-prob at sampling|."),
        curve("Lag", ("mean", "mean_lag"), ("most", "max_lag"), note="Batches, by the oldest token."),
        charts.line_chart(
            "Gradient variance", "batches", measured_batch,
            [Series("trace of the covariance", [variance[i] for i in measured], [Z95 * error[i] for i in measured])],
        ),
        charts.line_chart(
            "Noise scale", "batches", measured_batch,
            [Series("variance / signal", [variance[i] / signal[i] if signal[i] > 0 else math.nan for i in measured])],
            note="Batches to average for as much signal as noise. A gap: the signal is lost in the noise.",
        ),
        curve("Time of a batch", ("training", "seconds"), ("waiting for rollouts", "wait_seconds"), note="Seconds."),
    ]  # fmt: skip


def _column(rows: list[dict[str, Any]], *path: str) -> list[float]:
    """A value of every row by its keys; NaN where it, or what it is in, was not a number."""
    found = []
    for row in rows:
        value: Any = row
        for key in path:
            value = value[key] if value is not None else None
        found.append(math.nan if value is None else float(value))
    return found


def _tokens(report: dict[str, Any]) -> list[tuple[str, int, float]]:
    """(fate, tokens, share) of the fates that have any, in the order in which they are declared."""
    tokens = report["tokens"]
    return [(fate, tokens[fate], tokens[fate] / tokens["generated"]) for fate in Fate if tokens[fate]]


def _difficulty(report: dict[str, Any]) -> Chart:
    """What a visit got, by the acceptance rate expected before it: that is what the policy went by."""

    def bin_of(row: dict[str, Any]) -> Bin:
        visits, scored = row["visits"], max(row["rollouts"], 1)
        mean = row["rollouts"] / visits if visits else math.nan
        tokens = row["tokens"] / visits if visits else math.nan
        cells = [f"{visits:,}", charts.text(mean), charts.text(tokens), share(row["accepted"] / scored)]
        return Bin(row["low"], row["high"], mean, cells)

    return charts.bar_chart(
        "Rollouts of a visit by difficulty",
        "acceptance rate expected before the visit",
        "rollouts a visit",
        [bin_of(row) for row in report["allocation"].get("by_acceptance", [])],
        ["visits", "rollouts a visit", "tokens a visit", "accepted"],
        "Shadow-uniform visits left out.",
    )


def _objective(report: dict[str, Any], config: Config) -> Chart:
    values, text = implied(config, report["allocation"]["design"])
    if not values:
        return Chart("Implied objective", Markup(), text)
    return charts.line_chart(
        "Implied objective",
        "acceptance rate of a prompt",
        POINTS.tolist(),
        [Series("weight of its gradient", values)],
        include=(0.0, 2.0),
        note=text,
    )


def _faults(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What went wrong on the way, whether it mattered or not."""
    attempts = report["attempts"]
    rows = [
        *((label, attempts.get(end, 0)) for end, label in ENDS.items()),
        *((kind.replace("_", " "), n) for kind, n in report.get("faults", {}).items()),
        ("batches skipped", sum(not row["trained"] for row in report["history"]["steps"])),
        ("tokens of engines that nobody reported", report["engine_tokens_unaccounted"]),
        ("prompts quarantined", len(report["quarantined_prompts"])),
        ("prompts with flaky verdicts", len(report["flaky_prompts"])),
    ]
    return [(label, f"{n:,}") for label, n in rows if n]


class Setting(msgspec.Struct, frozen=True):
    key: str
    value: str
    default: str
    changed: bool


def _settings(config: dict[str, Any]) -> list[Setting]:
    """Every key of the configuration, those that are not as by default first."""
    required = {"model": {"path": config["model"]["path"]}, "data": {"train": config["data"]["train"] or "-"}}
    defaults = _flat(msgspec.to_builtins(msgspec.convert(required, Config)))
    given = ("model.path", "data.train")
    rows = [
        Setting(
            key, value, "" if key in given else defaults.get(key, ""), key in given or value != defaults.get(key, "")
        )
        for key, value in _flat(config).items()
    ]
    return sorted(rows, key=lambda row: not row.changed)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as JSON; texts without quotes."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return flat
