"""Charts as SVG that follows the page: colours are classes, so light and dark are the style sheet's business.

Own code, because what draws well here brings scripts or fixed colours with it. A chart is 360 units wide, about as many
pixels: it is readable on a phone without being scaled down.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from markupsafe import Markup

from gvm_stream.terminal import count

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 10, 36
MOST_POINTS = 150
"""Of a curve; longer ones are drawn as means of neighbours."""
FEW_POINTS = 40
"""Up to so many are drawn as dots with error bars, too."""
MOST_ROWS = 24
"""Of the table beside a chart."""


@dataclass(frozen=True)
class Series:
    label: str
    y: Sequence[float]
    error: Sequence[float] = ()
    """Half of a bar's length, where there are error bars."""


@dataclass(frozen=True)
class Chart:
    """`svg` is empty where there is nothing to draw; `note` then says so."""

    title: str
    svg: Markup
    note: str = ""
    legend: Sequence[str] = ()
    """Labels of the series, in the order of the style sheet's colours; empty for a single one."""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    """The same as a table."""


@dataclass(frozen=True)
class Axis:
    """From data to units of the picture."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(
    title: str,
    x_label: str,
    x: Sequence[float],
    series: Sequence[Series],
    *,
    include: Sequence[float] = (),
    note: str = "",
) -> Chart:
    """Curves over a common x [N], y [N] each; NaN is a gap. The y axis covers `include`, too."""
    x, series, group = _thinned(x, series)
    if not any(math.isfinite(y) for curve in series for y in curve.y):
        return Chart(title, Markup(), note="Nothing was measured.")
    values = [*include, *(end for curve in series for end in _ends(curve))]
    across = _axis(min(x), max(x), LEFT, WIDTH - RIGHT, whole=all(map(float.is_integer, map(float, x))))
    up = _axis(min(values), max(values), HEIGHT - BOTTOM, TOP)
    svg = _canvas(title, f"{', '.join(s.label for s in series)} over {x_label}", across, up, x_label)
    for index, curve in enumerate(series):
        _draw(svg, index, x, curve, across, up, x_label)
    if group > 1:
        note = f"{note} A point is the mean of {group}.".strip()
    return Chart(
        title,
        Markup(ElementTree.tostring(svg, encoding="unicode")),
        note,
        [s.label for s in series] if len(series) > 1 else (),
        [x_label, *(s.label for s in series)],
        [[text(x[i]), *(_with_error(s, i) for s in series)] for i in range(0, len(x), math.ceil(len(x) / MOST_ROWS))],
    )


@dataclass(frozen=True)
class Bin:
    low: float
    high: float
    height: float
    """NaN: no bar."""
    cells: Sequence[str]
    """What the table says of it, `low` and `high` apart."""


def bar_chart(title: str, x_label: str, label: str, bins: Sequence[Bin], header: Sequence[str], note: str) -> Chart:
    """A bar from `low` to `high` for each bin, in ascending order without gaps."""
    heights = [b.height for b in bins if math.isfinite(b.height)]
    if not heights:
        return Chart(title, Markup(), note="Nothing was measured.")
    across = _axis(bins[0].low, bins[-1].high, LEFT, WIDTH - RIGHT)
    up = _axis(0.0, max(heights), HEIGHT - BOTTOM, TOP)
    svg = _canvas(title, f"{label} over {x_label}", across, up, x_label)
    for b in bins:
        if math.isfinite(b.height):
            left, width = across(b.low) + 1, across(b.high) - across(b.low) - 2
            bar = _add(svg, "rect", "bar", x=left, y=up(b.height), width=width, height=up(0) - up(b.height), rx=2)
            _add(bar, "title").text = f"{text(b.low)} to {text(b.high)}: {text(b.height)} {label}"
    rows = [[f"{text(b.low)} to {text(b.high)}", *b.cells] for b in bins]
    return Chart(title, Markup(ElementTree.tostring(svg, encoding="unicode")), note, (), [x_label, *header], rows)


def text(value: float) -> str:
    """A number for people: 1.23 M, 4,096, 0.0123."""
    if not math.isfinite(value):
        return "-"
    return count(value) if abs(value) >= 1000 else f"{value:.3g}"


def _short(value: float) -> str:
    """For a tick, which has little room."""
    return f"{value / 1000:g}k" if 10_000 <= abs(value) < 1e6 else text(value).replace(" ", "")


def ticks(low: float, high: float, *, about: int = 5, whole: bool = False) -> list[float]:
    """Round numbers at equal distances, about so many, the outer ones at or beyond `low` < `high`."""
    size = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next(size * m for m in (1, 2, 5, 10) if (high - low) / (size * m) <= about)
    if whole:
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _axis(low: float, high: float, start: float, end: float, *, whole: bool = False) -> Axis:
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # all the same: the value in the middle
        margin = abs(low) / 10 or 0.5
        low, high = low - margin, high + margin
    marks = ticks(low, high, whole=whole)
    return Axis(marks[0], marks[-1], start, end, marks)


def _thinned(x: Sequence[float], series: Sequence[Series]) -> tuple[Sequence[float], Sequence[Series], int]:
    """At most `MOST_POINTS` of each, means of neighbours; and of how many."""
    group = math.ceil(len(x) / MOST_POINTS)
    if group <= 1:
        return x, series, 1

    def means(values: Sequence[float]) -> list[float]:
        chunks = (values[i : i + group] for i in range(0, len(values), group))
        return [
            statistics.fmean(finite) if (finite := [v for v in chunk if math.isfinite(v)]) else math.nan
            for chunk in chunks
        ]

    return means(x), [Series(s.label, means(s.y), means(s.error)) for s in series], group


def _canvas(title: str, description: str, across: Axis, up: Axis, x_label: str) -> ElementTree.Element:
    svg = ElementTree.Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": title})
    _add(svg, "desc").text = description
    for value in up.ticks:
        _add(svg, "line", "grid", x1=LEFT, x2=WIDTH - RIGHT, y1=up(value), y2=up(value))
        _add(svg, "text", "tick y", x=LEFT - 6, y=up(value) + 3.5).text = _short(value)
    for value in across.ticks:
        _add(svg, "text", "tick x", x=across(value), y=HEIGHT - BOTTOM + 15).text = _short(value)
    _add(svg, "line", "base", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM)
    _add(svg, "text", "label", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 5).text = x_label
    return svg


def _ends(curve: Series) -> list[float]:
    """All that must be within the picture: values, and the ends of their error bars."""
    bars = [end for y, e in zip(curve.y, curve.error, strict=True) for end in (y - e, y + e)] if curve.error else []
    return [end for end in (*curve.y, *bars) if math.isfinite(end)]


def _draw(
    svg: ElementTree.Element, index: int, x: Sequence[float], curve: Series, across: Axis, up: Axis, x_label: str
) -> None:
    points = [(across(a), up(b), i) for i, (a, b) in enumerate(zip(x, curve.y, strict=True)) if math.isfinite(b)]
    colour = f"s{index}"
    few = len(points) <= FEW_POINTS
    for px, _, i in points:
        if few and curve.error and math.isfinite(curve.error[i]):
            low, high = up(curve.y[i] - curve.error[i]), up(curve.y[i] + curve.error[i])
            _add(svg, "line", f"error {colour}", x1=px, x2=px, y1=low, y2=high)
    path = "".join(
        f"{'L' if n and points[n - 1][2] == i - 1 else 'M'}{px:.1f} {py:.1f}" for n, (px, py, i) in enumerate(points)
    )
    _add(svg, "path", f"line {colour}", d=path)
    for px, py, i in points:
        dot = _add(svg, "circle", f"{'dot' if few else 'hit'} {colour}", cx=px, cy=py, r=2.5 if few else 5)
        _add(dot, "title").text = f"{x_label} {text(x[i])}: {curve.label} {_with_error(curve, i)}"


def _with_error(series: Series, i: int) -> str:
    return text(series.y[i]) + (f" ± {text(series.error[i])}" if series.error else "")


def _add(parent: ElementTree.Element, tag: str, kind: str = "", **attributes: float | str) -> ElementTree.Element:
    given = {name: value if isinstance(value, str) else f"{value:.1f}" for name, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, {**({"class": kind} if kind else {}), **given})
