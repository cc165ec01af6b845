"""Property tests have no deadline: a test that takes long on a busy machine has not failed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from gvm_stream.vllm.environment import hide_unmatched

hide_unmatched()
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM warns of things in itself and below."""
    for item in items:
        if "vllm" in item.keywords:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session", autouse=True)
def servers_end_with_the_tests() -> Iterator[None]:
    yield
    if module := sys.modules.get("tests.vllm_server_process"):
        module.close_shared()
