"""The log of a process: one line an event, for people or as JSON, with the process, its role and its policy version.

What repeats is thinned out: a loop that warns about every message must not fill a disk, nor hide the one line that
matters.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

Format = Literal["human", "json"]

BURST = 10
"""Lines from one place in the code that are written in `WINDOW_S` seconds; the others are counted."""
WINDOW_S = 10.0
NOISY = ("httpx", "datasets", "transformers", "matplotlib")
"""Libraries that say at INFO what nobody asks for."""


class _Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the JSON log."""

    time: str
    """ISO 8601, UTC."""
    level: str
    process: str
    role: str
    version: int | None
    """Policy version; null before there is one."""
    logger: str
    message: str
    left_out: int = 0
    """Lines from the same place that were not written since the last one."""
    error: str = ""
    """Traceback."""


class ProcessLog(logging.StreamHandler[Any]):
    """Writes the records of one process to standard error."""

    def __init__(self, process: str, role: str, form: Format) -> None:
        super().__init__(sys.stderr)
        self.version: int | None = None
        self._process, self._role, self._form = process, role, form
        self._written: dict[tuple[str, int], _Place] = {}

    def emit(self, record: logging.LogRecord) -> None:
        place = self._written.setdefault((record.pathname, record.lineno), _Place())
        if place.admits(record):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        left_out = self._written[record.pathname, record.lineno].take_left_out()
        error = "".join(traceback.format_exception(record.exc_info[1])) if record.exc_info else ""
        if self._form == "json":
            event = _Event(
                time=datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
                level=record.levelname.lower(),
                process=self._process,
                role=self._role,
                version=self.version,
                logger=record.name,
                message=record.getMessage(),
                left_out=left_out,
                error=error,
            )
            return msgspec.json.encode(event).decode()
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        version = "" if self.version is None else f" v{self.version}"
        more = f" ({left_out} like it left out)" if left_out else ""
        line = f"{clock} {self._process}{version} {record.levelname[0]} {record.getMessage()}{more}"
        return f"{line}\n{error.rstrip()}" if error else line

    def close(self) -> None:
        """At the end of the process: say what was left out since."""
        if count := sum(place.take_left_out() for place in self._written.values()):
            text = "%d lines that repeated others were left out"
            self.handle(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count,), None))
        super().close()


class _Place:
    """A place in the code that logs."""

    __slots__ = ("_left_out", "_number", "_since")

    def __init__(self) -> None:
        self._since, self._number, self._left_out = 0.0, 0, 0

    def admits(self, record: logging.LogRecord) -> bool:
        if record.created - self._since >= WINDOW_S:
            self._since, self._number = record.created, 0
        self._number += 1
        admitted = self._number <= BURST
        self._left_out += not admitted
        return admitted

    def take_left_out(self) -> int:
        count, self._left_out = self._left_out, 0
        return count


def set_up_logging(process: str, role: str, *, form: Format = "human", verbose: bool = False) -> None:
    """Log to standard error from now on, instead of whatever was set up before."""
    handler = ProcessLog(process, role, form)
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def set_version(version: int) -> None:
    """The process has another policy version from now on: its lines say which."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ProcessLog):
            handler.version = version
