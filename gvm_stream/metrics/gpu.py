"""What a process shows of its GPU. Imported only by processes that have torch loaded anyway."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch

from gvm_stream.metrics.registry import Metrics


def watch_gpu(metrics: Metrics, device: str) -> None:
    """Show memory and, if nvidia-ml-py is installed, utilization of a CUDA device; nothing for another device."""
    if torch.device(device).type == "cuda":
        metrics.at_scrape(partial(_read, metrics, torch.device(device)))


def _read(metrics: Metrics, device: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(device)
    metrics.set("gvm_gpu_memory_used_bytes", total - free, metrics.role)
    metrics.set("gvm_gpu_memory_bytes", total, metrics.role)
    if find_spec("pynvml"):
        metrics.set("gvm_gpu_utilization", torch.cuda.utilization(device) / 100, metrics.role)
