from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import get_args
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gvm_stream.config import MetricsSection
from gvm_stream.metrics import PORTS_TRIED, TABLE, Metrics, Role

ROLES: tuple[Role, ...] = get_args(Role)


@contextmanager
def occupied(count: int = 1) -> Iterator[int]:
    """The first of `count` ports in a row that are taken, and a free one after them."""
    for first in range(20_000, 30_000, 7):
        servers: list[socket.socket] = []
        try:
            servers = [socket.create_server(("127.0.0.1", first + i)) for i in range(count + 1)]
        except OSError:
            continue
        servers.pop().close()
        yield first
        for server in servers:
            server.close()
        return
    raise AssertionError("no free ports")


def scraped(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_names_are_unique_and_say_whose_they_are() -> None:
    names = [spec.name for spec in TABLE]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"gvm_[a-z_]+", name) for name in names)
    assert all(spec.help.endswith(".") for spec in TABLE)
    assert {spec.role for spec in TABLE} == set(ROLES)


def test_labels_come_from_closed_sets() -> None:
    assert all(bool(spec.label) == bool(spec.values) for spec in TABLE)
    assert {spec.label for spec in TABLE if spec.label} == {"outcome", "fate", "result", "verdict", "bound"}


@pytest.mark.parametrize("role", ROLES)
def test_every_series_of_a_role_exists_from_the_start_at_zero_and_no_other(role: Role) -> None:
    registry = Metrics(role).registry
    for spec in TABLE:
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[spec.kind]
        for value in spec.values or ("",):
            labels = {spec.label: value} if spec.label else {}
            expected = 0.0 if spec.role == role else None
            assert registry.get_sample_value(spec.name + suffix, labels) == expected


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


def test_the_endpoint_answers_and_its_port_is_free_afterwards() -> None:
    metrics = Metrics("producer")
    with occupied(0) as first:
        with metrics.serve(MetricsSection(port=first)) as port:
            assert port == first
            metrics.count("gvm_engine_tokens", 5)
            families = {family.name: family for family in text_string_to_metric_families(scraped(port))}
            assert families["gvm_engine_tokens"].samples[0].value == 5
        with closing(socket.create_server(("127.0.0.1", port))):
            pass


def test_an_occupied_port_is_passed_over() -> None:
    with occupied(2) as first, Metrics("learner").serve(MetricsSection(port=first)) as port:
        assert port == first + 2
        assert "gvm_loss 0.0" in scraped(port)


def test_no_endpoint_is_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    with Metrics("learner").serve(MetricsSection(port=0)) as port:
        assert port == 0
    assert caplog.messages == []
    with occupied(PORTS_TRIED) as first, Metrics("learner").serve(MetricsSection(port=first)) as port:
        assert port == 0
        assert caplog.messages == [f"no metrics: ports {first} to {first + PORTS_TRIED - 1} are all in use"]
    with Metrics("learner").serve(MetricsSection(host="203.0.113.1")) as port:
        assert port == 0
    assert "metrics.host = '203.0.113.1' cannot be used" in caplog.messages[-1]
