from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.producers.credits import Credits
from gvm_stream.producers.engine import EngineLoad


def load(running: int, preemptions: int) -> EngineLoad:
    return EngineLoad(running=running, waiting=0, cache_used=0.5, preemptions=preemptions)


def test_a_calm_engine_is_asked_to_fill_its_slots_and_an_eighth_more() -> None:
    credits = Credits(256)
    assert credits.orders == 256 + 32
    assert not credits.look(load(256, 0))


def test_what_was_put_back_takes_the_orders_down_to_what_runs_and_calm_brings_them_back() -> None:
    credits = Credits(64)
    assert credits.look(load(running=20, preemptions=5))
    assert credits.orders == 20 + 3
    found = []
    while credits.look(load(running=20, preemptions=5)):
        found.append(credits.orders)
    assert found == [27, 32, 36, 41, 45, 50, 54, 59, 63, 68, 72]


@given(st.integers(1, 300), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), max_size=30))
def test_there_is_always_at_least_one_order_and_never_more_than_the_slots_allow(
    slots: int, looks: list[tuple[int, int]]
) -> None:
    credits, preemptions = Credits(slots), 0
    most = credits.orders
    for running, more in looks:
        before, preemptions = credits.orders, preemptions + more
        changed = credits.look(load(running, preemptions))
        assert 1 < credits.orders <= most
        assert changed == (credits.orders != before) or slots < 8
        assert credits.orders <= before or more == 0
