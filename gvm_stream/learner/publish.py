"""Writing the weights of a policy version where producers find them."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gvm_stream.errors import WeightsError
from gvm_stream.weights import checksum, let_read
from gvm_stream.wire.messages import Canary, WeightsInfo

_PUBLISHED = re.compile(r"v(\d{8,})\.safetensors")


def publish(
    weights: dict[str, Tensor], root: Path, version: int, address: str, canary: Canary, keep: int
) -> WeightsInfo:
    """Write `root/vVERSION.safetensors` (Hugging Face names, tied tensors once); its announcement.

    The file appears complete or not at all; it is not synced, as a learner that comes back after a power cut publishes
    a new version. Of the versions before it the newest `keep` - 1 stay.
    """
    path = _path(root, version)
    partial = path.with_suffix(".partial")
    try:
        root.mkdir(parents=True, exist_ok=True)
        save_file(weights, partial)
        let_read(partial)
        # Of the bytes on disk, so that the checksum vouches for what producers will read.
        digest, size = checksum(partial), partial.stat().st_size
        os.replace(partial, path)
        _delete_before(root, version, keep - 1)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        raise WeightsError(f"weights of version {version} cannot be written to {path}: {error}") from error
    return WeightsInfo(version=version, path=str(path), size=size, checksum=digest, address=address, canary=canary)


def published_versions(root: Path) -> list[int]:
    """Versions whose weights are in `root`, oldest first."""
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for path in root.iterdir() if (match := _PUBLISHED.fullmatch(path.name)))


def _path(root: Path, version: int) -> Path:
    return root.resolve() / f"v{version:08d}.safetensors"


def _delete_before(root: Path, version: int, keep: int) -> None:
    """Never touches newer versions: those of a history that a resumed run has left may still be loading somewhere."""
    older = [found for found in published_versions(root) if found < version]
    for found in older[: max(0, len(older) - keep)]:
        _path(root, found).unlink(missing_ok=True)
