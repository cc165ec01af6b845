"""What a run ran with, for its report: versions and the machine of the process that asks."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import zmq

PACKAGES = ("gvm-stream", "torch", "transformers", "vllm", "tokenizers", "numpy", "msgspec", "pyzmq", "trio")


def environment() -> dict[str, Any]:
    """Packages that are not installed are left out."""
    return {
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))} | {"libzmq": zmq.zmq_version()},
        "system": platform.platform(),
        "processors": os.cpu_count(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
