"""Payloads in files that only grow, beside the database that knows what is where.

In the database each byte would be written twice, into the log and from there into pages, and go through a checksum of
SQLite's on the way. A file goes when nothing in it is needed any more.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

FILE_BYTES = 64 * 2**20
"""The next commit after this begins a new file. What is deleted frees room in such portions."""
_BUFFERS = 1024
"""Of one `pwritev`; Linux takes no more."""


class Place(NamedTuple):
    """Of a payload."""

    file: int
    start: int
    length: int


class PayloadFiles:
    """One process at a time. The calls raise `OSError`."""

    def __init__(self, folder: Path, live: dict[int, int]) -> None:
        """`live`: file -> payloads in it that are needed; what else is in `folder` is deleted. What was written by
        another process is only read."""
        self._folder = folder
        self._live = Counter(live)
        self._open: dict[int, int] = {}
        """File -> descriptor."""
        self._newest = max(live, default=0)
        self._end = FILE_BYTES
        """Of the newest file; full: the next commit begins another."""
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if not (path.name.isdigit() and int(path.name) in live):
                path.unlink()

    def append(self, payloads: Sequence[bytes | memoryview]) -> list[Place]:
        """Write them to the disk. They are kept only if `keep` is called, and given up by the next `append` if not."""
        if not payloads:
            return []
        if self._end >= FILE_BYTES:
            self._begin_file()
        end, places = self._end, []
        for payload in payloads:
            places.append(Place(self._newest, end, len(payload)))
            end += len(payload)
        file = self._open[self._newest]
        try:
            _write(file, payloads, self._end)
            os.fdatasync(file)
        except OSError:
            os.ftruncate(file, self._end)  # there may be no room for anything else
            raise
        return places

    def keep(self, places: Sequence[Place]) -> None:
        """These are needed from now on."""
        if places:
            self._live[self._newest] += len(places)
            self._end = places[-1].start + places[-1].length

    def forget(self, files: Iterable[int]) -> None:
        """One payload in each of these is not needed any more; a file may come several times."""
        for file, number in Counter(files).items():
            self._live[file] -= number
            if not self._live[file] and (file != self._newest or self._end >= FILE_BYTES):
                self._delete(file)

    def read(self, place: Place) -> bytes:
        """Shorter than it should be if the file has been cut."""
        if place.file not in self._open:
            self._open[place.file] = os.open(self._path(place.file), os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._open[place.file], place.length, place.start)

    def size(self, file: int) -> int:
        """Bytes of a file; 0 if it is not there."""
        try:
            return self._path(file).stat().st_size
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def _begin_file(self) -> None:
        full, self._newest, self._end = self._newest, self._newest + 1, 0
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._open[self._newest] = os.open(self._path(self._newest), flags, 0o600)
        folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        if full in self._open and not self._live[full]:
            self._delete(full)

    def _delete(self, file: int) -> None:
        del self._live[file]
        if file in self._open:
            os.close(self._open.pop(file))
        try:
            self._path(file).unlink(missing_ok=True)
        except OSError as error:  # nothing depends on it, and the next process tries again
            log.warning("a file of payloads that are not needed any more cannot be deleted: %s", error)

    def _path(self, file: int) -> Path:
        return self._folder / f"{file:08d}"


def _write(file: int, payloads: Sequence[bytes | memoryview], start: int) -> None:
    """All of them from `start` on, one after the other."""
    for first in range(0, len(payloads), _BUFFERS):
        part = payloads[first : first + _BUFFERS]
        missing = sum(map(len, part))
        written = os.pwritev(file, part, start)
        if written < missing:  # a full disk takes what it can, and says why only when asked for the rest
            rest = memoryview(b"".join(part))
            while written < missing:
                written += os.pwrite(file, rest[written:], start + written)
        start += missing
