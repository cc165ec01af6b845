"""Files of weights: checked against their announcement, and read by others than those who write them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gvm_stream.errors import WeightsError
from gvm_stream.wire.messages import WeightsInfo


def checksum(path: Path) -> str:
    """Hex blake2b-128 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def let_read(path: Path) -> None:
    """Whoever may list the folder of `path` may read the file: safetensors makes it for its owner alone, but producers
    may be other users."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def verify_weights(info: WeightsInfo, path: Path) -> None:
    """Raise `WeightsError` unless the file at `path` holds exactly the bytes that `info` announces."""
    try:
        size = path.stat().st_size
        # The size first: a file that is still being copied is found out without reading it.
        found = checksum(path) if size == info.size else ""
    except OSError as error:
        raise WeightsError(f"weights of version {info.version} at {path} cannot be read: {error.strerror}") from error
    if size != info.size:
        raise WeightsError(f"weights of version {info.version} at {path} have {size} bytes, expected {info.size}")
    if found != info.checksum:
        raise WeightsError(
            f"weights of version {info.version} at {path} have checksum {found}, expected {info.checksum}"
        )
