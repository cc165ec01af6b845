"""Files that are whole or not there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gvm_stream.errors import StreamError


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` under a temporary name beside `path`, flush it to disk, then rename. On failure (disk full, no
    permission) nothing is left and StreamError says why."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # what stopped the writing may stop this, too; then nothing was written
            temporary.unlink()
        raise StreamError(f"{path} cannot be written: {error.strerror}") from error
