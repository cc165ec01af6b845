from __future__ import annotations

import math
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gvm_stream.config import MetricsSection
from gvm_stream.health import Health
from gvm_stream.metrics import PORTS_TRIED, TABLE, Metrics, Role
from gvm_stream.metrics.gpu import watch_gpu
from gvm_stream.metrics.table import ACCEPTANCE, ROLES, SECONDS, TOKENS, by_acceptance


@contextmanager
def occupied(count: int = 1) -> Iterator[int]:
    """The first of `count` ports in a row that are taken, and a free one after them."""
    for first in range(20_000, 30_000, 7):
        servers: list[socket.socket] = []
        try:
            servers = [socket.create_server(("127.0.0.1", first + i)) for i in range(count + 1)]
        except OSError:
            for server in servers:
                server.close()
            continue
        servers.pop().close()
        yield first
        for server in servers:
            server.close()
        return
    raise AssertionError("no free ports")


def answered(port: int, path: str) -> str:
    with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
        return str(answer.read().decode())


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


def test_names_are_unique_and_say_their_unit() -> None:
    names = [spec.name for spec in TABLE]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"gvm_[a-z_]+", name) for name in names)
    assert all(spec.help.endswith(".") for spec in TABLE)
    assert {spec.role for spec in TABLE} == {*ROLES, "every"}
    for spec in TABLE:
        for unit in ("seconds", "bytes"):
            assert (spec.unit == unit) == spec.name.endswith(f"_{unit}"), spec.name


def test_labels_come_from_closed_sets() -> None:
    assert all(bool(spec.label) == bool(spec.values) for spec in TABLE)
    assert all(bool(spec.buckets) == (spec.kind == "histogram") for spec in TABLE)
    assert all(not spec.label for spec in TABLE if spec.kind == "histogram")
    assert max(len(spec.values) for spec in TABLE) <= 16


@pytest.mark.parametrize("role", ROLES)
def test_every_series_of_a_role_exists_from_the_start_and_no_other(role: Role) -> None:
    found = samples(Metrics(role))
    declared = [spec for spec in TABLE if spec.role in (role, "every")]
    for spec in declared:
        name = f"{spec.name}_count" if spec.kind == "histogram" else spec.exposed
        for value in (role,) if spec.role == "every" else spec.values or ("",):
            at_start = found[name, ((spec.label, value),) if spec.label else ()]
            if spec.role != "every":
                assert at_start == spec.start or (math.isnan(at_start) and math.isnan(spec.start))
    families = {family.name for family in Metrics(role).registry.collect()}
    assert families == {spec.name for spec in declared}


def test_what_is_not_a_number_never_enters_a_counter_or_a_sum() -> None:
    metrics = Metrics("learner")
    for amount in (math.nan, math.inf, -1.0, 2.0):
        metrics.count("gvm_learner_tokens", amount)
        metrics.count("gvm_learner_batches", amount, label="skipped")
    for value in (math.nan, -math.inf, 2.0):
        metrics.observe("gvm_learner_step_seconds", value)
    value_of = metrics.registry.get_sample_value
    assert value_of("gvm_learner_tokens_total") == 2
    assert value_of("gvm_learner_batches_total", {"result": "skipped"}) == 2
    assert value_of("gvm_learner_step_seconds_sum") == 2
    assert value_of("gvm_learner_step_seconds_count") == 1


@given(st.lists(st.integers(0, 20), max_size=40))
def test_values_that_are_counted_first_are_as_one_after_the_other(values: list[int]) -> None:
    together, apart = Metrics("learner"), Metrics("learner")
    together.observe_counts("gvm_lag_batches", Counter(values))
    for value in values:
        apart.observe("gvm_lag_batches", value)
    lags = [family for family in apart.registry.collect() if family.name == "gvm_lag_batches"]
    assert lags == [family for family in together.registry.collect() if family.name == "gvm_lag_batches"]


def test_a_gauge_of_something_unmeasured_is_not_a_number() -> None:
    metrics = Metrics("learner")
    value_of = metrics.registry.get_sample_value
    assert math.isnan(value_of("gvm_loss") or 0.0)
    metrics.set("gvm_loss", 0.5)
    assert value_of("gvm_loss") == 0.5


@pytest.mark.parametrize("name", ["gvm_losses", "gvm_learner_tokens_total", "gvm_rollouts", "gvm_loss"])
def test_a_counter_that_is_not_declared_for_the_process_is_an_error(name: str) -> None:
    with pytest.raises(KeyError):
        Metrics("learner").count(name)


def test_a_label_that_is_not_declared_is_an_error() -> None:
    metrics = Metrics("allocator")
    for change in (metrics.count, metrics.total):
        with pytest.raises(KeyError):
            change("gvm_rollouts", 1, label="train-17")
    with pytest.raises(KeyError, match="no gvm_tokens with label 'lost' for role allocator"):
        metrics.set("gvm_tokens", 1, label="lost")


def test_a_counter_may_follow_a_sum_kept_elsewhere() -> None:
    metrics = Metrics("producer")
    for generated in (5, 12):
        metrics.total("gvm_engine_tokens", generated)
    assert metrics.registry.get_sample_value("gvm_engine_tokens_total") == 12


def test_the_number_of_series_stays_small_and_constant() -> None:
    metrics = Metrics("producer")
    before = set(samples(metrics))
    for i in range(20_000):
        metrics.count("gvm_verdicts", label=("right", "wrong", "unscorable")[i % 3])
        metrics.observe("gvm_rollout_seconds", i / 7)
    assert set(samples(metrics)) == before
    assert len(before) < 1000


def test_buckets_count_values_up_to_their_bound() -> None:
    metrics = Metrics("learner")
    for lag in (0, 1, 1, 2, 17):
        metrics.observe("gvm_lag_batches", lag)
    bucket = {
        bound: metrics.registry.get_sample_value("gvm_lag_batches_bucket", {"le": bound})
        for bound in ("0.0", "1.0", "2.0", "16.0", "+Inf")
    }
    assert bucket == {"0.0": 1, "1.0": 3, "2.0": 4, "16.0": 4, "+Inf": 5}


@pytest.mark.parametrize(
    ("name", "low", "high", "bounds"),
    [("gvm_rollout_seconds", 1.0, 1500.0, SECONDS), ("gvm_response_tokens", 16.0, 32768.0, TOKENS)],
)
def test_quantiles_of_long_rollouts_can_be_read_from_the_buckets(
    name: str, low: float, high: float, bounds: tuple[float, ...]
) -> None:
    """As Prometheus reads them: linear within a bucket."""
    chance = Random(0)
    values = sorted(low * (high / low) ** chance.random() for _ in range(5000))
    metrics = Metrics("producer")
    for value in values:
        metrics.observe(name, value)
    counts = [metrics.registry.get_sample_value(f"{name}_bucket", {"le": str(float(bound))}) or 0.0 for bound in bounds]
    assert counts[-1] == len(values)
    for share in (0.1, 0.5, 0.9, 0.99):
        rank = share * len(values)
        i = next(i for i, count in enumerate(counts) if count >= rank)
        below, start = (counts[i - 1], bounds[i - 1]) if i else (0.0, 0.0)
        read = start + (bounds[i] - start) * (rank - below) / (counts[i] - below)
        assert read == pytest.approx(values[int(rank)], rel=0.3)


def test_process_basics_are_read_at_every_scrape() -> None:
    value_of = Metrics("learner").registry.get_sample_value
    assert (value_of("gvm_process_resident_memory_bytes", {"role": "learner"}) or 0) > 1e6
    first = value_of("gvm_process_cpu_seconds_total", {"role": "learner"}) or 0
    while os.times().user + os.times().system < first + 0.05:
        pass
    assert (value_of("gvm_process_cpu_seconds_total", {"role": "learner"}) or 0) > first


def test_progress_is_dated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    metrics = Metrics("producer")
    progress = ("gvm_last_progress_timestamp_seconds", {"role": "producer"})
    assert metrics.registry.get_sample_value(*progress) == 1000
    monkeypatch.setattr("time.time", lambda: 1060.0)
    assert metrics.registry.get_sample_value(*progress) == 1000
    metrics.progress()
    assert metrics.registry.get_sample_value(*progress) == 1060


def test_free_space_of_the_folder_is_shown(tmp_path: Path) -> None:
    metrics = Metrics("allocator")
    labels = {"role": "allocator"}
    assert math.isnan(metrics.registry.get_sample_value("gvm_disk_free_bytes", labels) or 0)
    metrics.watch_disk(tmp_path)
    status = os.statvfs(tmp_path)
    total = status.f_blocks * status.f_frsize
    assert 0 < (metrics.registry.get_sample_value("gvm_disk_free_bytes", labels) or 0) <= total


def test_a_process_on_a_cpu_has_no_gpu_to_show() -> None:
    metrics = Metrics("learner")
    watch_gpu(metrics, "cpu")
    assert math.isnan(metrics.registry.get_sample_value("gvm_gpu_memory_bytes", {"role": "learner"}) or 0)


def test_trackers_get_what_is_known_under_the_same_names() -> None:
    metrics = Metrics("learner")
    metrics.set("gvm_loss", 0.25)
    metrics.count("gvm_learner_batches", label="trained")
    metrics.observe("gvm_lag_batches", 2)
    scalars = metrics.scalars()
    assert scalars["gvm_loss"] == 0.25
    assert scalars["gvm_learner_batches_total/trained"] == 1
    assert (scalars["gvm_lag_batches_sum"], scalars["gvm_lag_batches_count"]) == (2, 1)
    assert "gvm_grad_norm" not in scalars


@pytest.mark.parametrize(
    ("rate", "label"), [(0.0, "0-0.1"), (0.1, "0.1-0.3"), (0.5, "0.3-0.7"), (0.7, "0.7-0.9"), (1.0, "0.9-1")]
)
def test_every_acceptance_rate_has_a_label(rate: float, label: str) -> None:
    assert by_acceptance(np.array([rate])) == dict.fromkeys(ACCEPTANCE, 0) | {label: 1}
    assert by_acceptance(np.array([rate, rate]), [2, 3])[label] == 5


def test_two_processes_and_one_made_twice_do_not_meet() -> None:
    first, second = Metrics("learner"), Metrics("learner")
    first.count("gvm_learner_tokens", 3)
    assert second.registry.get_sample_value("gvm_learner_tokens_total") == 0


def test_the_endpoint_answers_and_its_port_is_free_afterwards() -> None:
    metrics = Metrics("producer")
    with occupied(0) as first:
        with metrics.serve(MetricsSection(port=first), Health(60)) as port:
            assert port == first
            metrics.count("gvm_engine_tokens", 5)
            families = {family.name: family for family in text_string_to_metric_families(answered(port, "metrics"))}
            assert families["gvm_engine_tokens"].samples[0].value == 5
        with closing(socket.create_server(("127.0.0.1", port))):
            pass


def test_health_is_served_beside_the_metrics() -> None:
    health = Health(60)
    with occupied(0) as first, Metrics("learner").serve(MetricsSection(port=first), health) as port:
        assert answered(port, "healthz") == "ok\n"
        with pytest.raises(HTTPError, match="503") as refused:
            answered(port, "readyz")
        refused.value.close()
        health.waiting_for = ""
        assert answered(port, "readyz") == "ok\n"


def test_an_occupied_port_is_passed_over() -> None:
    with occupied(2) as first, Metrics("learner").serve(MetricsSection(port=first), Health(60)) as port:
        assert port == first + 2
        assert "gvm_loss NaN" in answered(port, "metrics")


def test_no_endpoint_is_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    with Metrics("learner").serve(MetricsSection(port=0), Health(60)) as port:
        assert port == 0
    assert caplog.messages == []
    with occupied(PORTS_TRIED) as first, Metrics("learner").serve(MetricsSection(port=first), Health(60)) as port:
        assert port == 0
        assert caplog.messages == [f"no metrics: ports {first} to {first + PORTS_TRIED - 1} are all in use"]
    with Metrics("learner").serve(MetricsSection(host="203.0.113.1"), Health(60)) as port:
        assert port == 0
    assert "metrics.host = '203.0.113.1' cannot be used" in caplog.messages[-1]
