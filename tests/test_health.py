"""The endpoints as a probe meets them: over HTTP, also while the process hangs."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import trio
from prometheus_client import CollectorRegistry, Gauge

from gvm_stream.health import Health
from gvm_stream.http_endpoints import http_endpoints


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(15.0, clock)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("gvm_answer", "The answer.", registry=registry).set(42)
    return registry


@pytest.fixture
def url(registry: CollectorRegistry, health: Health) -> Iterator[str]:
    with http_endpoints("127.0.0.1", 0, registry, health) as port:
        yield f"http://127.0.0.1:{port}"


def get(url: str) -> tuple[int, str]:
    try:
        with urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_are_served(url: str) -> None:
    status, text = get(f"{url}/metrics")
    assert status == 200
    assert "gvm_answer 42.0" in text


def test_a_process_that_starts_is_well_and_not_ready(url: str) -> None:
    assert get(f"{url}/healthz") == (200, "ok\n")
    assert get(f"{url}/readyz") == (503, "waits for its own start\n")


def test_a_process_that_takes_part_is_ready_until_it_waits_for_something(url: str, health: Health) -> None:
    health.waiting_for = ""
    assert get(f"{url}/readyz") == (200, "ok\n")
    health.waiting_for = "the allocator"
    assert get(f"{url}/readyz") == (503, "waits for the allocator\n")
    assert get(f"{url}/healthz") == (200, "ok\n")


def test_a_main_loop_that_stands_still_beyond_its_bound_is_neither_well_nor_ready(
    url: str, health: Health, clock: Clock
) -> None:
    health.waiting_for = ""
    clock.now = 15.0
    assert get(f"{url}/healthz")[0] == 200
    clock.now = 42.0
    problem = "the main loop has made no turn for 42 s; at least one in 15 s was expected\n"
    assert get(f"{url}/healthz") == (503, problem)
    assert get(f"{url}/readyz") == (503, problem)
    health.turn()
    assert get(f"{url}/healthz") == (200, "ok\n")


async def test_a_blocked_event_loop_turns_healthz_red_and_a_free_one_green_again(registry: CollectorRegistry) -> None:
    health = Health(0.2)
    with http_endpoints("127.0.0.1", 0, registry, health) as port:
        url = f"http://127.0.0.1:{port}/healthz"
        async with health.turning():
            await trio.lowlevel.checkpoint()
            time.sleep(0.5)  # noqa: ASYNC251  (what must not happen in an event loop)
            assert get(url)[0] == 503
            await trio.lowlevel.checkpoint()
        async with health.turning():
            assert await trio.to_thread.run_sync(get, url) == (200, "ok\n")


def test_an_unknown_path_names_the_ones_there_are(url: str) -> None:
    status, text = get(f"{url}/health")
    assert status == 404
    assert "/healthz" in text


def test_a_client_that_says_nothing_keeps_no_other_waiting(url: str) -> None:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):
        assert get(f"{url}/healthz")[0] == 200


def test_the_port_is_free_again_when_the_block_ends(registry: CollectorRegistry, health: Health) -> None:
    with (
        http_endpoints("127.0.0.1", 0, registry, health) as port,
        pytest.raises(OSError, match="in use"),
        http_endpoints("127.0.0.1", port, registry, health),
    ):
        pass
    with http_endpoints("127.0.0.1", port, registry, health) as again:
        assert again == port


def test_ipv6_is_served(registry: CollectorRegistry, health: Health) -> None:
    with http_endpoints("::1", 0, registry, health) as port:
        assert get(f"http://[::1]:{port}/healthz")[0] == 200
