"""A spool under kill -9, a second process, a full disk and damage: turns are whole, and what fails says why."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gvm_stream.allocator.spool import Changes, Spool, SqliteSpool
from gvm_stream.errors import StreamError
from tests.test_spool import MIB, opened, payloads_of, turn, turns_in

ROOT = Path(__file__).parents[1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool.sqlite"


WRITER = """
import sys
from pathlib import Path
from gvm_stream.allocator.spool import Changes, SqliteSpool
from tests.test_spool import turn, turns_in

spool = SqliteSpool(Path(sys.argv[1]))
done = turns_in(spool)
print(done, flush=True)
while True:
    turns = [turn(number) for number in range(done, done + 1 + done % 7)]
    done += len(turns)
    if done % 3 == 0:
        turns[-1].snapshot = str(done).encode()
    spool.commit(turns)
    print(done, flush=True)
"""
"""Commits turns until it is killed, and says after each commit how many there are."""


@contextlib.contextmanager
def writer(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has opened the spool and commits; it is killed with -9 at the end."""
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_what_was_committed_survives_kill_9_in_turns_that_are_whole(path: Path) -> None:
    for commits in (1, 8, 3, 20):
        with writer(path) as process:
            assert process.stdout
            said = [process.stdout.readline() for _ in range(commits)]
            process.kill()
            acknowledged = int([*said, *process.stdout][-1])
        with opened(path) as spool:
            assert turns_in(spool) >= acknowledged > 0


def test_a_second_process_is_told_at_once_and_may_follow_one_that_was_killed(path: Path) -> None:
    with (
        writer(path),
        pytest.raises(StreamError, match=rf"^spool {path} cannot be opened: another process has it open$"),
    ):
        SqliteSpool(path)
    with opened(path) as spool:
        spool.commit([turn(turns_in(spool))])


def test_a_commit_that_fails_leaves_nothing_of_its_turns(path: Path) -> None:
    with opened(path) as spool:
        spool.commit([turn(0)])
        with pytest.raises(OverflowError):
            spool.commit([turn(1), Changes(covered=2**63)])
        assert turns_in(spool) == 1
        spool.commit([turn(1)])
        assert turns_in(spool) == 2


def fill_up(path: Path, cause: str, make_room: Callable[[], None]) -> None:
    """Commit until there is no more room, then go on."""
    done = 0

    def commit_for_ever(spool: Spool) -> None:
        nonlocal done
        while True:
            spool.commit([turn(done), turn(done + 1)])
            done += 2

    with opened(path) as spool:
        with pytest.raises(StreamError, match=rf"^spool {path} cannot be written: ({cause}) \(\d+ MiB free there\)$"):
            commit_for_ever(spool)
        assert turns_in(spool) == done > 10
        make_room()
        spool.commit([turn(done)])
    with opened(path) as spool:
        assert turns_in(spool) == done + 1


@pytest.mark.parametrize("most", [3 * MIB, 9 * MIB])  # before and after the log went into the main file
def test_an_error_of_the_disk_leaves_the_last_good_state_and_the_spool_goes_on_after_it(path: Path, most: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        fill_up(path, "disk I/O error|File too large", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FULL_DISK = """
from pathlib import Path
from tests.test_spool_faults import fill_up

ballast = Path("{disk}/ballast")
ballast.write_bytes(bytes(2 ** 21))
fill_up(Path("{disk}/spool"), "database or disk is full|No space left on device", ballast.unlink)
"""

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode != 0,
    reason="no mount namespaces here",
)
@pytest.mark.parametrize("size", [6 * MIB, 15 * MIB])
def test_a_full_disk_leaves_the_last_good_state_and_the_spool_goes_on_once_there_is_room(
    tmp_path: Path, size: int
) -> None:
    mount = f'mount -t tmpfs -o size={size} tmpfs "{tmp_path}" && exec "$@"'
    code = FULL_DISK.format(disk=tmp_path)
    subprocess.run([*NAMESPACE, "sh", "-c", mount, "sh", sys.executable, "-c", code], check=True, cwd=ROOT)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda path: path.write_text("This is a note, not a spool." * 100), "file is not a database"),
        (lambda path: overwrite(path, 0, bytes(100)), "file is not a database"),
        (lambda path: overwrite(path, 100, b"\xff" * 16_000), "malformed"),
        (lambda path: overwrite(path, path.stat().st_size // 2, b"\x5a" * 65_536), "damaged"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "malformed|damaged"),
    ],
    ids=["not-sqlite", "header", "first-page", "page", "cut"],  # of the database
)
def test_a_damaged_file_is_refused_at_the_start(path: Path, damage: Callable[[Path], object], cause: str) -> None:
    with opened(path) as spool:
        spool.commit([Changes(journal=[bytes(5000)], settled=[(n, bytes(100_000), (n,))]) for n in range(20)])
    damage(path)
    for _ in range(2):  # the first attempt leaves nothing open
        with pytest.raises(StreamError, match=rf"^spool {path} cannot be opened: .*({cause})"):
            SqliteSpool(path)


@pytest.mark.parametrize(
    ("damage", "found"),
    [(lambda file: os.truncate(file, 1_999_999), 1_999_999), (Path.unlink, 0)],
    ids=["cut", "missing"],
)
def test_a_damaged_file_of_payloads_is_refused_at_the_start(
    path: Path, damage: Callable[[Path], object], found: int
) -> None:
    with opened(path) as spool:
        spool.commit([turn(number) for number in range(20)])
    (file,) = payloads_of(path).iterdir()
    damage(file)
    what = rf"damaged \(file 1 of its payloads has {found} bytes, expected 2000000\)$"
    for _ in range(2):
        with pytest.raises(StreamError, match=rf"^spool {path} cannot be opened: it is {what}"):
            SqliteSpool(path)


def test_a_byte_that_has_changed_within_a_row_is_noticed_when_it_is_read(path: Path) -> None:
    snapshot, payload, entry, batch = (letter * 5000 for letter in (b"s", b"p", b"j", b"b"))
    with opened(path) as spool:
        spool.commit([Changes(snapshot=snapshot), Changes(rollouts=[(1, payload)], settled=[(0, batch, (1,))])])
        spool.commit([Changes(journal=[entry])])
    (payloads,) = payloads_of(path).iterdir()
    reads: list[tuple[bytes, Callable[[Spool], object]]] = [
        (snapshot, lambda spool: spool.load()),
        (entry, lambda spool: spool.load()),
        (payload, lambda spool: spool.rollouts([1])),
        (batch, lambda spool: spool.batch(0)),
    ]
    for row, read in reads:
        damaged = payloads if row is payload else path
        whole = damaged.read_bytes()
        overwrite(damaged, whole.index(row) + 2500, b"?")
        with opened(path) as spool, pytest.raises(StreamError, match=rf"^spool {path} cannot be read: it is damaged"):
            read(spool)
        damaged.write_bytes(whole)


@pytest.mark.parametrize(
    ("statement", "found"),
    [("PRAGMA user_version = 9", 9), ("CREATE TABLE other(id INTEGER)", 0)],
    ids=["newer", "other"],
)
def test_another_format_is_refused_and_left_as_it_is(path: Path, statement: str, found: int) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(statement)
    with pytest.raises(StreamError, match=rf"^spool {path} cannot be opened: it has format {found}, expected 2$"):
        SqliteSpool(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'rollout'").fetchone() == (0,)


def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="unable to open database file"):
        SqliteSpool(tmp_path / "missing" / "spool")
