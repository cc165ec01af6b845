"""What the benchmarks share: their command line, statistics, and one JSON object last on standard output."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import statistics
import sys
from collections.abc import Sequence
from typing import Any


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print one JSON object last")
    return made


def machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}


def free_address() -> str:
    """A loopback address nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def mean_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and half-width of its 95 % t-interval (None for a single value)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "half_width": None}
    t95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
    t = t95.get(len(values), 2.262)  # beyond the table the value for ten: a little too wide
    return {"mean": mean, "half_width": t * statistics.stdev(values) / math.sqrt(len(values))}


def say(text: str) -> None:
    """Progress, on standard error: standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


def finish(result: dict[str, Any], *, as_json: bool) -> None:
    print(json.dumps(result) if as_json else json.dumps(result, indent=2))
