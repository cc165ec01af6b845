"""What a spool keeps, and for how long."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from gvm_stream.allocator.spool import Changes, MemorySpool, PayloadBytes, Spool, SqliteSpool

MIB = 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool.sqlite"


@pytest.fixture(params=["sqlite", "memory"])
def spool(request: pytest.FixtureRequest, path: Path) -> Iterator[Spool]:
    with contextlib.closing(SqliteSpool(path) if request.param == "sqlite" else MemorySpool()) as spool:
        yield spool


@contextlib.contextmanager
def opened(path: Path) -> Iterator[SqliteSpool]:
    with contextlib.closing(SqliteSpool(path)) as spool:
        yield spool


def turn(number: int, size: int = 100_000) -> Changes:
    """A turn of which every part can be told from those of others."""
    mark = str(number).encode()
    return Changes(journal=[mark], rollouts=[(number, mark.ljust(size))], settled=[(number, mark, (number,))])


def payloads_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-payloads")


def disk_use(path: Path) -> int:
    return path.stat().st_size + sum(file.stat().st_size for file in payloads_of(path).iterdir())


def turns_in_reach(spool: Spool, first: int, end: int) -> bool:
    return {work: int(payload) for work, payload in spool.rollouts(range(end)).items()} == {
        number: number for number in range(first, end)
    }


def turns_in(spool: Spool) -> int:
    """How many turns, from 0 on, are there; each must be there as a whole and nothing else."""
    saved = spool.load()
    journal = [int(entry) for entry in saved.journal]
    before = int(saved.snapshot or 0)
    assert journal == list(range(before, before + len(journal)))
    turns = before + len(journal)
    assert [spool.batch(number) for number in range(turns + 1)] == [*(str(n).encode() for n in range(turns)), None]
    payloads = spool.rollouts(range(turns + 100))
    assert sorted(payloads) == list(range(turns))
    assert all(int(payload) == number for number, payload in payloads.items())
    return turns


def test_payloads_and_batches_are_kept(spool: Spool) -> None:
    spool.commit([Changes(rollouts=[(1, b"one"), (-1, b"held out")]), Changes(settled=[(0, b"batch", (1,))])])
    assert spool.rollouts([1, -1, 7]) == {1: b"one", -1: b"held out"}
    assert (spool.batch(0), spool.batch(1)) == (b"batch", None)


def test_an_empty_spool_has_nothing(spool: Spool) -> None:
    spool.commit([])
    saved = spool.load()
    assert (saved.snapshot, saved.journal, spool.rollouts([1]), spool.batch(0)) == (None, [], {}, None)


def test_a_covered_batch_goes_with_its_rollouts_and_no_others(spool: Spool) -> None:
    spool.commit(
        [
            Changes(rollouts=[(work, b"%d" % work) for work in range(6)]),
            Changes(settled=[(0, b"first", (0, 3)), (1, b"second", (1,)), (2, b"third", (2,))]),
        ]
    )
    spool.commit([Changes(covered=2), Changes(covered=1)])
    assert spool.rollouts(range(6)) == {2: b"2", 4: b"4", 5: b"5"}
    assert (spool.batch(0), spool.batch(1), spool.batch(2)) == (None, None, b"third")


def test_a_forgotten_payload_is_gone_and_its_batch_stays(spool: Spool) -> None:
    spool.commit([Changes(rollouts=[(1, b"a"), (2, b"b")], settled=[(0, b"batch", (1, 2))])])
    spool.commit([Changes(forget=[1, 9])])
    assert (spool.rollouts([1, 2]), spool.batch(0)) == ({2: b"b"}, b"batch")


def test_what_comes_and_goes_in_one_commit_leaves_nothing(spool: Spool) -> None:
    spool.commit([Changes(rollouts=[(1, b"old")])])
    spool.commit(
        [Changes(rollouts=[(2, b"new")]), Changes(settled=[(0, b"batch", (1,))]), Changes(forget=[2], covered=1)]
    )
    assert (spool.rollouts([1, 2]), spool.batch(0)) == ({}, None)


def test_more_rollouts_than_sqlite_takes_in_one_statement(spool: Spool) -> None:
    spool.commit([Changes(rollouts=[(work, b"%d" % work) for work in range(130_000)])])
    assert spool.rollouts(range(130_001)) == {work: b"%d" % work for work in range(130_000)}


def test_memory_is_bounded_and_what_is_not_in_it_comes_from_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gvm_stream.allocator.spool._RECENT_BYTES", 10)
    with opened(path) as spool:
        payloads: dict[int, PayloadBytes] = {work: b"%04d" % work for work in range(20)}
        spool.commit([Changes(rollouts=list(payloads.items())[:15])])
        spool.commit([Changes(rollouts=list(payloads.items())[15:], forget=[19])])
        del payloads[19]
        assert spool._recent_bytes == sum(map(len, spool._recent.values())) <= 10
        assert spool.rollouts(range(20)) == payloads
        assert (spool._recent, spool._recent_bytes) == ({}, 0)  # each is asked for once
        assert spool.rollouts(range(20)) == payloads


def test_a_snapshot_replaces_the_journal_of_its_turn_and_all_before_it(path: Path) -> None:
    with opened(path) as spool:
        spool.commit([Changes(journal=[b"1"])])
        spool.commit(
            [
                Changes(journal=[b"2"], snapshot=b"of 2"),
                Changes(journal=[b"3", b"4"], snapshot=b"of 4"),
                Changes(journal=[b"5", b"6"]),
            ]
        )
        spool.commit([Changes(journal=[b"7"])])
    with opened(path) as spool:
        saved = spool.load()
    assert (saved.snapshot, saved.journal) == (b"of 4", [b"5", b"6", b"7"])


def test_size_falls_with_what_is_covered(spool: Spool) -> None:
    empty = spool.size()
    spool.commit([turn(number) for number in range(10)])
    full = spool.size()
    assert full - empty >= 10 * 100_000
    spool.commit([Changes(covered=9)])
    assert spool.size() - empty < 0.2 * (full - empty)


def test_the_file_uses_freed_room_again(path: Path) -> None:
    sizes = []
    for start in range(0, 50, 10):
        with opened(path) as spool:
            spool.commit([turn(number) for number in range(start, start + 10)])
            spool.commit([Changes(covered=start + 10)])
        sizes.append(disk_use(path))
    assert sizes[-1] < 1.2 * sizes[0]


def test_files_of_payloads_go_when_nothing_in_them_is_needed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gvm_stream.allocator.payload_files.FILE_BYTES", 3 * MIB)
    folder = payloads_of(path)
    with opened(path) as spool:
        for number in range(40):
            spool.commit([turn(number, MIB)])
            spool.commit([Changes(covered=number - 3)])
            assert disk_use(path) < 12 * MIB
        assert turns_in_reach(spool, 36, 40)
        kept = {file.name for file in folder.iterdir()}
        spool.commit([Changes(covered=40)])
        assert len(list(folder.iterdir())) <= 1 < len(kept)


def test_what_a_commit_that_did_not_end_has_left_is_gone_with_the_next_process(path: Path) -> None:
    folder = payloads_of(path)
    with opened(path) as spool:
        spool.commit([turn(0)])
    (folder / "00000007").write_bytes(b"of a commit that did not end")
    with opened(path) as spool:
        assert [file.name for file in folder.iterdir()] == ["00000001"]
        spool.commit([turn(1)])
        assert sorted(file.name for file in folder.iterdir()) == ["00000001", "00000002"]
        assert turns_in(spool) == 2


def test_the_log_beside_the_file_stays_small(path: Path) -> None:
    log = path.with_name(f"{path.name}-wal")
    with opened(path) as spool:
        for number in range(64):
            spool.commit([turn(number, MIB // 2)])
            assert log.stat().st_size < 5 * MIB
        spool.commit([turn(number, MIB // 2) for number in range(64, 96)])
        spool.commit([turn(96)])
        spool.commit([turn(97)])
        assert log.stat().st_size < 5 * MIB


def test_calls_come_from_any_thread(spool: Spool) -> None:
    for number in range(3):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(spool.commit, [turn(number)]).result()
            assert len(thread.submit(spool.rollouts, range(10)).result()) == number + 1


class Model(RuleBasedStateMachine):
    """Turns put together at random, committed in groups, and a plain picture of what must be there."""

    durable = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory() if self.durable else None
        self.spool: Spool = self.open()
        self.turn, self.turns = Changes(), list[Changes]()
        self.works = self.steps = self.entries = 0
        self.journal: list[bytes] = []
        self.snapshot: bytes | None = None
        self.payloads: dict[int, PayloadBytes] = {}
        self.batches: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    def open(self) -> Spool:
        return SqliteSpool(Path(self.folder.name) / "spool") if self.folder else MemorySpool()

    @rule()
    def note(self) -> None:
        self.entries += 1
        self.turn.journal.append(b"%d" % self.entries)

    @rule(payload=st.binary(max_size=20) | st.just(bytes(50_000)))
    def store(self, payload: bytes) -> None:
        self.works += 1
        self.turn.rollouts.append((self.works, memoryview(payload)))

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        works = data.draw(st.sets(st.integers(1, self.works), max_size=5)) if self.works else set()
        self.turn.settled.append((self.steps, b"batch %d" % self.steps, tuple(works)))
        self.steps += 1

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.turn.forget.append(data.draw(st.integers(1, self.works + 1)))

    @rule(data=st.data())
    def cover(self, data: st.DataObject) -> None:
        self.turn.covered = data.draw(st.integers(0, self.steps))

    @rule()
    def take_snapshot(self) -> None:
        self.turn.snapshot = b"after %d" % self.entries

    @rule()
    def end_turn(self) -> None:
        turn, self.turn = self.turn, Changes()
        self.turns.append(turn)
        self.journal += turn.journal
        self.payloads |= dict(turn.rollouts)
        self.batches |= {step: (content, works) for step, content, works in turn.settled}
        covered = [step for step in self.batches if step < (turn.covered or 0)]
        for work in turn.forget + [work for step in covered for work in self.batches.pop(step)[1]]:
            self.payloads.pop(work, None)
        if turn.snapshot is not None:
            self.snapshot, self.journal = turn.snapshot, []

    @rule()
    def commit(self) -> None:
        self.spool.commit(self.turns)
        self.turns = []

    @precondition(lambda self: self.folder is not None)
    @rule()
    def open_again(self) -> None:
        self.commit()
        self.spool.close()
        self.spool = self.open()

    @precondition(lambda self: not self.turns)
    @invariant()
    def is_as_modelled(self) -> None:
        saved = self.spool.load()
        assert (saved.snapshot, saved.journal) == ((self.snapshot, self.journal) if self.folder else (None, []))
        assert self.spool.rollouts(range(self.works + 2)) == self.payloads
        steps = {step: content for step, (content, _) in self.batches.items()}
        assert {step: self.spool.batch(step) for step in range(self.steps)} == dict.fromkeys(range(self.steps)) | steps
        if not self.folder:
            assert self.spool.size() == sum(map(len, self.payloads.values()))

    def teardown(self) -> None:
        self.spool.close()
        if self.folder:
            self.folder.cleanup()


class MemoryModel(Model):
    durable = False


@pytest.mark.parametrize("model", [Model, MemoryModel])
def test_any_sequence_of_turns_leaves_what_a_plain_picture_of_it_has(model: type[Model]) -> None:
    run_state_machine_as_test(
        model, settings=settings(max_examples=30, stateful_step_count=40, deadline=None, derandomize=True)
    )
