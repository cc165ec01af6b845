"""The spool: what of an allocator survives kill -9.

An allocator is a deterministic state machine. Its newest snapshot and the journal of what came after bring it back;
payloads of scored rollouts and the batches made of them stay until a learner checkpoint covers them. What is written
comes in turns, each there as a whole or not at all; a commit has reached the disk when it returns. SQLite says what
there is; the payloads themselves lie in files beside it.

The calls block and come from worker threads, never two at once.
"""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from gvm_stream.allocator.payload_files import PayloadFiles, Place
from gvm_stream.errors import StreamError

_FORMAT = 2
"""Of the tables below; it grows when they change."""

# Works of a batch are a list in its row: a column of `rollout` would have rows written again when their batch is
# settled. A row of the journal is the entries of a commit. SQLite has no checksums: each BLOB begins with its own, and
# that of a payload is in its row.
_SCHEMA = """
CREATE TABLE snapshot(id INTEGER PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE journal(id INTEGER PRIMARY KEY, entries BLOB NOT NULL);
CREATE TABLE rollout(
    work INTEGER PRIMARY KEY, seal BLOB NOT NULL, file INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL
);
CREATE TABLE batch(step INTEGER PRIMARY KEY, works TEXT NOT NULL, content BLOB NOT NULL);
"""

_PAGE_BYTES = 16 * 2**10

_WAL_BYTES = 4 * 2**20
"""The write-ahead log goes into the main file at this size, so it never has more than this and one commit: the larger,
the longer the commit in which it does."""

_ROWS = 1000
"""Of an INSERT; SQLite takes 32,766 values in a statement."""

_RECENT_BYTES = 256 * 2**20
"""Newest payloads kept in memory as well: most are asked for soon after they came, and once."""

_SEAL_BYTES = 8

_FORGET = "DELETE FROM rollout WHERE work IN ({works}) RETURNING file, length"
_COVERED = "SELECT value FROM batch, json_each(works) WHERE step < ?"

_entries = msgspec.msgpack.Decoder(list[bytes])


def _sealed(content: bytes) -> bytes:
    return xxhash.xxh3_64_digest(content) + content


PayloadBytes = bytes | memoryview
"""Those that have just come are views of the message that they came in."""


class Changes(msgspec.Struct, kw_only=True):
    """What one turn of the allocator changes, in this order."""

    journal: list[bytes] = []
    """Entries, appended."""
    rollouts: list[tuple[int, PayloadBytes]] = []
    """Payload of each work."""
    settled: list[tuple[int, bytes, tuple[int, ...]]] = []
    """Step, batch without payloads, works of its rollouts. Steps grow."""
    forget: list[int] = []
    """Works whose payload nobody will ask for."""
    covered: int | None = None
    """Batches before this step go, with their rollouts."""
    snapshot: bytes | None = None
    """Of the state after this turn: replaces the older one and the whole journal, this turn's entries included."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Where an allocator goes on."""

    snapshot: bytes | None
    journal: list[bytes]
    """Entries since the snapshot, oldest first."""


class Spool(Protocol):
    def load(self) -> Saved: ...

    def commit(self, turns: Sequence[Changes]) -> None:
        """All of them or, with an error, none."""

    def rollouts(self, works: Sequence[int]) -> dict[int, PayloadBytes]:
        """Payloads of those works that have one."""

    def batch(self, step: int) -> bytes | None:
        """A settled batch; None if it is covered or was never settled."""

    def size(self) -> int:
        """Bytes in use."""

    def close(self) -> None: ...


class MemorySpool:
    """Keeps payloads and batches for as long as the process lives, and nothing to start again from. Never blocks."""

    def __init__(self) -> None:
        self._rollouts: dict[int, PayloadBytes] = {}
        self._batches: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._size = 0

    def load(self) -> Saved:
        return Saved(snapshot=None, journal=[])

    def commit(self, turns: Sequence[Changes]) -> None:
        for turn in turns:
            for work, payload in turn.rollouts:
                self._size += len(payload) - len(self._rollouts.get(work, b""))
                self._rollouts[work] = payload
            self._batches.update((step, (content, works)) for step, content, works in turn.settled)
            self._forget(turn.forget)
            if turn.covered is not None:
                for step in [step for step in self._batches if step < turn.covered]:
                    self._forget(self._batches.pop(step)[1])

    def rollouts(self, works: Sequence[int]) -> dict[int, PayloadBytes]:
        return {work: self._rollouts[work] for work in works if work in self._rollouts}

    def batch(self, step: int) -> bytes | None:
        return self._batches[step][0] if step in self._batches else None

    def size(self) -> int:
        """Bytes of payloads."""
        return self._size

    def close(self) -> None:
        pass

    def _forget(self, works: Sequence[int]) -> None:
        for work in works:
            self._size -= len(self._rollouts.pop(work, b""))


class SqliteSpool:
    """A SQLite file, and beside it the write-ahead log (`-wal`) and the folder of payloads (`-payloads`) that belong to
    it, owned by one process at a time.

    Every method raises `StreamError` if the file cannot be read or written; then nothing has changed, and the call can
    be made again.
    """

    def __init__(self, path: Path) -> None:
        """Open or create `path`.

        Raises `StreamError` if another process has it, if it is damaged, of another format or cannot be opened.
        """
        self._path = path
        self._recent: dict[int, PayloadBytes] = {}
        self._recent_bytes = 0
        self._payload_bytes = 0
        """Of the payloads that are needed."""
        with self._failing("opened"):
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            self._db.text_factory = bytes  # a damaged BLOB may pass for text
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def load(self) -> Saved:
        with self._failing("read"):
            snapshot = self._content("SELECT content FROM snapshot")
            rows = self._db.execute("SELECT entries FROM journal ORDER BY id").fetchall()
            journal = [entry for (row,) in rows for entry in _entries.decode(self._unsealed(row))]
        return Saved(snapshot=snapshot, journal=journal)

    def commit(self, turns: Sequence[Changes]) -> None:
        journal: list[bytes] = []
        snapshot: bytes | None = None
        covered = 0
        stored: dict[int, PayloadBytes] = {}
        forgotten: list[int] = []
        batches: list[tuple[int, str, bytes]] = []
        for turn in turns:
            journal += turn.journal
            if turn.snapshot is not None:
                snapshot, journal = turn.snapshot, []
            stored.update(turn.rollouts)
            for work in turn.forget:
                stored.pop(work, None)
            forgotten += turn.forget
            batches += [(step, json.dumps(works), _sealed(content)) for step, content, works in turn.settled]
            covered = max(covered, turn.covered or 0)
        with self._failing("written"), self._db as db:
            places = self._files.append(list(stored.values()))
            gone: list[tuple[int, int]] = []
            db.execute("BEGIN IMMEDIATE")
            if forgotten:
                works = "SELECT value FROM json_each(?)"
                gone += db.execute(_FORGET.format(works=works), [json.dumps(forgotten)]).fetchall()
            self._store(stored, places)
            db.executemany("REPLACE INTO batch VALUES (?, ?, ?)", batches)
            if covered:
                forgotten += [work for (work,) in db.execute(_COVERED, [covered]).fetchall()]
                gone += db.execute(_FORGET.format(works=_COVERED), [covered]).fetchall()
                db.execute("DELETE FROM batch WHERE step < ?", [covered])
            if snapshot is not None:
                db.execute("DELETE FROM journal")
                db.execute("REPLACE INTO snapshot VALUES (0, ?)", [_sealed(snapshot)])
            if journal:
                db.execute("INSERT INTO journal(entries) VALUES (?)", [_sealed(msgspec.msgpack.encode(journal))])
        with self._failing("written"):
            self._files.keep(places)
            self._files.forget(file for file, _ in gone)
        self._payload_bytes += sum(place.length for place in places) - sum(length for _, length in gone)
        self._remember(stored, forgotten)

    def rollouts(self, works: Sequence[int]) -> dict[int, PayloadBytes]:
        found = {work: self._recent[work] for work in works if work in self._recent}
        self._forget_recent(found)
        if len(found) < len(works):
            with self._failing("read"):
                rows = self._db.execute(
                    "SELECT work, seal, file, start, length FROM rollout"
                    " WHERE work IN (SELECT value FROM json_each(?))",
                    [json.dumps([work for work in works if work not in found])],
                ).fetchall()
                for work, seal, *place in rows:
                    found[work] = self._checked(self._files.read(Place(*place)), seal)
        return found

    def batch(self, step: int) -> bytes | None:
        with self._failing("read"):
            return self._content("SELECT content FROM batch WHERE step = ?", step)

    def size(self) -> int:
        """Bytes of the pages and payloads in use. The database does not shrink, its free pages are used again; files of
        payloads go as a whole."""
        with self._failing("read"):
            return self._payload_bytes + self._number(
                "SELECT (page_count - freelist_count) * page_size"
                " FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
            )

    def close(self) -> None:
        self._files.close()
        self._db.close()

    def _open(self) -> None:
        for setting in (
            # The lock of a process that is killed goes with it, and processes it has started do not inherit it.
            "locking_mode = EXCLUSIVE",
            f"page_size = {_PAGE_BYTES}",
            "journal_mode = WAL",
            "synchronous = FULL",
            f"wal_autocheckpoint = {_WAL_BYTES // _PAGE_BYTES}",
            f"journal_size_limit = {_WAL_BYTES}",
            # Some systems have it on; then what is deleted is written once more, as zeros (12 times as long).
            "secure_delete = OFF",
        ):
            self._db.execute(f"PRAGMA {setting}")
        found = self._number("PRAGMA user_version")
        if found == 0 and self._number("SELECT count(*) FROM sqlite_schema") == 0:
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_FORMAT}; COMMIT;")
        elif found != _FORMAT:
            raise StreamError(f"spool {self._path} cannot be opened: it has format {found}, expected {_FORMAT}")
        # Reads the whole file: better now than in the middle of the run. Bytes changed within a BLOB or a payload are
        # noticed when it is read.
        ((damage,),) = self._db.execute("PRAGMA quick_check(1)").fetchall()
        if damage != b"ok":
            what = " ".join(damage.decode(errors="replace").split())
            raise StreamError(f"spool {self._path} cannot be opened: it is damaged ({what})")
        found_files = self._db.execute(
            "SELECT file, count(*), max(start + length), sum(length) FROM rollout GROUP BY file"
        ).fetchall()
        self._files = PayloadFiles(
            self._path.with_name(f"{self._path.name}-payloads"), {file: count for file, count, _, _ in found_files}
        )
        for file, _, end, length in found_files:
            self._payload_bytes += length
            if (size := self._files.size(file)) < end:
                raise StreamError(
                    f"spool {self._path} cannot be opened: it is damaged (file {file} of its payloads has {size} "
                    f"bytes, expected {end})"
                )

    def _store(self, stored: dict[int, PayloadBytes], places: list[Place]) -> None:
        # Few statements of many rows: at each step of a statement this thread gives up the GIL, and has to wait for it
        # while the event loop is busy.
        rows = [
            (work, xxhash.xxh3_64_digest(p), *place) for (work, p), place in zip(stored.items(), places, strict=True)
        ]
        for first in range(0, len(rows), _ROWS):
            part = rows[first : first + _ROWS]
            self._db.execute(
                f"REPLACE INTO rollout VALUES {','.join(['(?,?,?,?,?)'] * len(part))}", list(chain.from_iterable(part))
            )

    def _content(self, query: str, *parameters: int) -> bytes | None:
        row: tuple[bytes] | None = self._db.execute(query, parameters).fetchone()
        return self._unsealed(row[0]) if row else None

    def _unsealed(self, sealed: bytes) -> bytes:
        return self._checked(sealed[_SEAL_BYTES:], sealed[:_SEAL_BYTES])

    def _checked(self, content: bytes, seal: bytes) -> bytes:
        if xxhash.xxh3_64_digest(content) != seal:
            raise StreamError(f"spool {self._path} cannot be read: it is damaged (a checksum is wrong)")
        return content

    def _remember(self, stored: dict[int, PayloadBytes], forgotten: Sequence[int]) -> None:
        self._forget_recent(stored)
        self._recent.update(stored)
        self._recent_bytes += sum(map(len, stored.values()))
        self._forget_recent(forgotten)
        while self._recent_bytes > _RECENT_BYTES:
            self._forget_recent([next(iter(self._recent))])

    def _forget_recent(self, works: Iterable[int]) -> None:
        for work in works:
            self._recent_bytes -= len(self._recent.pop(work, b""))

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    @contextmanager
    def _failing(self, done: str) -> Iterator[None]:
        """Errors of SQLite and of the files as `StreamError`."""
        try:
            yield
        except OSError as error:
            cause = str(error.strerror)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                cause += self._room()
            raise StreamError(f"spool {self._path} cannot be {done}: {cause}") from error
        except sqlite3.DatabaseError as error:
            cause = str(error)
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                cause = "another process has it open"
            elif error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                cause += self._room()
            raise StreamError(f"spool {self._path} cannot be {done}: {cause}") from error

    def _room(self) -> str:
        return f" ({shutil.disk_usage(self._path.parent).free / 2**20:.0f} MiB free there)"
