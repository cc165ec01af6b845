"""Leases and who holds them. The clock is the test's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator.peers import Lease, Peer, PeerTable, absent_producer
from gvm_stream.allocator.types import WorkItem
from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError
from gvm_stream.wire.link import identity_of
from gvm_stream.wire.messages import Role

STREAM = StreamSection(heartbeat_s=1, silence_s=10, progress_s=60)


def peer(role: Role = "producer", name: str = "p", epoch: int = 1, *, joined_at: float | None = 0.0) -> Peer:
    return Peer(
        identity_of(role, name, epoch), role, name, epoch, heard_at=0.0, joined_at=joined_at, slots=8, version=0
    )


def item(work: int, attempt: int = 0) -> WorkItem:
    return WorkItem(
        work=work, attempt=attempt, group=0, prompt="train-1", index=0, step=0, min_version=0, reason="test"
    )


def with_work(*works: int) -> Peer:
    made = peer()
    for work in works:
        made.take(item(work), 0.0)
    return made


def works(leases: list[Lease]) -> list[int]:
    return [lease.work for lease in leases]


# --- leases ---


def test_progress_renews_a_lease_and_mere_presence_does_not() -> None:
    p = with_work(1, 2)
    assert p.hear({1: 5, 2: 5, 99: 1}, 30.0)
    assert not p.hear({1: 5, 2: 4, 99: 2}, 55.0)
    assert p.hear({1: 6, 2: 5}, 60.0)
    assert works(p.stalled(95.0, 60.0)) == [2]


def test_work_that_its_owner_does_not_name_has_gone_astray() -> None:
    p = with_work(1, 2)
    p.hear({1: 0}, 9.0)
    assert p.astray(10.0, 10.0) == []
    assert works(p.astray(10.5, 10.0)) == [2]


def test_an_expired_lease_is_owed_until_it_is_returned_or_no_longer_in_hand() -> None:
    p = with_work(1, 2, 3)
    for work in (1, 2):
        p.lose(p.leases[work])
    assert (p.credits, p.takes_work) == (5, False)
    p.returned(1, 0)
    assert not p.takes_work
    p.hear({2: 9, 3: 9}, 1.0)
    assert not p.takes_work
    p.hear({3: 9}, 2.0)
    assert (p.owed, p.takes_work, p.credits) == (set(), True, 7)


def test_an_older_attempt_that_is_returned_does_not_end_the_newer_one() -> None:
    p = with_work(1)
    p.take(item(1, attempt=2), 1.0)
    p.returned(1, 0)
    assert p.leases[1].attempt == 2


def test_work_is_for_those_who_have_said_hello_loaded_weights_and_have_room() -> None:
    assert peer().takes_work
    assert not peer(joined_at=None).takes_work
    without_weights, full = peer(), with_work(*range(8))
    without_weights.version = -1
    assert not without_weights.takes_work
    assert (full.credits, full.takes_work) == (0, False)


@given(st.dictionaries(st.integers(1, 9), st.integers(0, 2)), st.dictionaries(st.integers(1, 9), st.integers(0, 2)))
def test_after_a_hello_leases_and_work_in_hand_agree(leased: dict[int, int], in_hand: dict[int, int]) -> None:
    p = peer()
    for work, attempt in leased.items():
        p.take(item(work, attempt), 0.0)
    lost, foreign = p.reconcile(in_hand, 5.0)
    agreed = leased.items() & in_hand.items()
    assert {(lease.work, lease.attempt) for lease in lost} == leased.items() - agreed
    assert p.owed == in_hand.items() - agreed
    assert set(foreign) == {work for work, _ in p.owed}
    assert all(lease.progress_at == lease.listed_at == 5.0 for lease in p.leases.values())


# --- the table ---


def test_a_newer_epoch_replaces_an_older_one_and_never_the_other_way_round() -> None:
    table, old, new = PeerTable(), peer(epoch=1), peer(epoch=2)
    assert table.add(old) is None
    assert table.add(new) is old
    assert (table.get(old.identity), table.get(new.identity)) == (None, new)
    with pytest.raises(StreamError, match="producer p has been started again since"):
        table.add(peer(epoch=1))
    assert table.all() == [new]
    assert table.add(again := peer(epoch=2)) is new
    assert table.all() == [again]


def test_the_same_name_in_another_role_is_somebody_else() -> None:
    table = PeerTable()
    for role in ("producer", "learner", "observer"):
        assert table.add(peer(role, "a")) is None
    assert len(table.all()) == 3


def test_who_has_not_said_hello_does_not_take_part() -> None:
    table = PeerTable()
    table.add(peer(name="here"))
    table.add(absent_producer("producer/a/b/1f", {3: 1}, 0.0))
    assert [p.name for p in table.of("producer")] == ["here"]
    absent = table.get(b"producer/a/b/1f")
    assert absent is not None
    assert (absent.name, absent.epoch, absent.leases[3].attempt) == ("a/b", 31, 1)
    assert [status.connected for status in table.status(1.0, 0)] == [True, False]


def test_silence_is_death_for_a_producer_sooner_than_for_a_learner_and_a_lost_connection_soonest() -> None:
    table = PeerTable()
    for role, name in (("producer", "silent"), ("producer", "cut"), ("learner", "l"), ("observer", "o")):
        table.add(peer(role, name))  # type: ignore[arg-type]
    cut = table.get(identity_of("producer", "cut", 1))
    assert cut is not None
    cut.unreachable_at = 5.0

    def dead(now: float) -> dict[str, str]:
        return {p.name: why for p, why in table.dead(now, STREAM)}

    assert dead(8.0) == {}
    assert dead(8.5) == {"cut": "disconnected for 3 s"}
    assert dead(10.5) == {"cut": "disconnected for 3 s", "silent": "silent for 10 s", "o": "silent for 10 s"}
    assert dead(61.0)["l"] == "silent for 60 s"
