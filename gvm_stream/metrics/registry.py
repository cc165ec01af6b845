"""The metrics of one process: plain numbers that its loops add to, and a collector that reads them at a scrape."""

from __future__ import annotations

import math
import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gvm_stream.config import MetricsSection
from gvm_stream.health import Health
from gvm_stream.metrics.endpoint import serve
from gvm_stream.metrics.table import TABLE, Role, Spec

PROGRESS = "gvm_last_progress_timestamp_seconds"


class _Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it): Prometheus counts them cumulatively."""
        return list(zip(map(floatToGoString, (*self.bounds, math.inf)), accumulate(self.counts), strict=True))


class Metrics(Collector):
    """The metrics of one process, in a registry of its own. Every series of its role is there from the start.

    Counting takes no lock and no object of the client library: one thread writes a series, the thread of a scrape reads
    it. Unknown names and labels raise KeyError.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self._specs = [spec for spec in TABLE if spec.role in (role, "every")]
        self._counters: dict[tuple[str, str], float] = {}
        self._gauges: dict[tuple[str, str], float] = {}
        self._histograms: dict[str, _Histogram] = {}
        self._process = ProcessCollector("gvm", registry=None)
        self._readers: list[Callable[[], None]] = [self._read_process]
        for spec in self._specs:
            if spec.kind == "histogram":
                self._histograms[spec.name] = _Histogram(spec.buckets)
            else:
                series = self._counters if spec.kind == "counter" else self._gauges
                series.update({(spec.name, value): spec.start for value in self._values(spec)})
        self.progress()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def count(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a counter; what is not a finite number of at least 0 is left out."""
        if 0 <= amount < math.inf:
            self._counters[name, label] += amount

    def total(self, name: str, value: float, label: str = "") -> None:
        """Set a counter to a sum that is kept elsewhere and only grows."""
        self._put(self._counters, name, label, value)

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge; NaN where its value is not known."""
        self._put(self._gauges, name, label, value)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram; what is not a finite number is left out, for its sum would never be one again."""
        if math.isfinite(value):
            histogram = self._histograms[name]
            histogram.counts[bisect_left(histogram.bounds, value)] += 1
            histogram.sum += value

    def observe_counts(self, name: str, counts: Mapping[int, int] | Mapping[float, int]) -> None:
        """Value -> how often it has come, all finite: `observe` for what comes often."""
        histogram = self._histograms[name]
        for value, number in counts.items():
            histogram.counts[bisect_left(histogram.bounds, value)] += number
            histogram.sum += value * number

    def progress(self, seconds_ago: float = 0.0) -> None:
        """The process has got something done, just now or so long ago."""
        self._gauges[PROGRESS, self.role] = time.time() - seconds_ago

    def at_scrape(self, read: Callable[[], None]) -> None:
        """Call `read` before every scrape, in its thread, to set what nobody else sets. It must be quick."""
        self._readers.append(read)

    def watch_disk(self, folder: Path) -> None:
        """Show the free space of the file system that `folder` is on; it must exist."""
        self.at_scrape(lambda: self.set("gvm_disk_free_bytes", shutil.disk_usage(folder).free, self.role))

    def scalars(self) -> dict[str, float]:
        """What is known, under the names that Prometheus has: `name` or `name/label` -> value of counters and gauges,
        `_sum` and `_count` of histograms."""
        self._read()
        exposed = {spec.name: spec.exposed for spec in self._specs}
        found = {}
        for (name, label), value in (*self._counters.items(), *self._gauges.items()):
            if math.isfinite(value):
                found[f"{exposed[name]}/{label}" if label else exposed[name]] = float(value)
        for name, histogram in self._histograms.items():
            found[f"{name}_sum"], found[f"{name}_count"] = histogram.sum, float(sum(histogram.counts))
        return found

    def collect(self) -> Iterator[Metric]:
        self._read()
        yield from map(self._family, self._specs)

    def serve(self, config: MetricsSection, health: Health) -> AbstractContextManager[int]:
        """Serve /metrics, and /healthz and /readyz of `health`, while the block runs, on the first free port; 0: not
        served."""
        return serve(config, self.registry, health)

    def _put(self, series: dict[tuple[str, str], float], name: str, label: str, value: float) -> None:
        if (name, label) not in series:
            raise KeyError(f"gvm_stream.metrics.TABLE has no {name} with label {label!r} for role {self.role}")
        series[name, label] = value

    def _read(self) -> None:
        for read in self._readers:
            read()

    def _read_process(self) -> None:
        for family in self._process.collect():
            key, value = (family.name, self.role), family.samples[0].value
            for series in (self._counters, self._gauges):
                if key in series:
                    series[key] = value

    def _family(self, spec: Spec) -> Metric:
        labels = (spec.label,) if spec.label else ()
        if spec.kind == "histogram":
            histogram = self._histograms[spec.name]
            family = HistogramMetricFamily(spec.name, spec.help)
            family.add_metric((), histogram.buckets(), histogram.sum)
            return family
        made: CounterMetricFamily | GaugeMetricFamily
        if spec.kind == "counter":
            made, series = CounterMetricFamily(spec.name, spec.help, labels=labels), self._counters
        else:
            made, series = GaugeMetricFamily(spec.name, spec.help, labels=labels), self._gauges
        for value in self._values(spec):
            made.add_metric((value,) if labels else (), series[spec.name, value])
        return made

    def _values(self, spec: Spec) -> tuple[str, ...]:
        return (self.role,) if spec.role == "every" else spec.values or ("",)
