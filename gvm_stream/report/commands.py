"""`gvm-stream report RUN`: its options, and reading report.json. Heavy imports happen inside the command."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gvm_stream.errors import ConfigError, DataError

NEEDED = ("outcome", "tokens", "allocation", "history", "config")


def add_command(parser: argparse.ArgumentParser) -> None:
    """Make `parser` that of `gvm-stream report`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run that has ended")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: RUN/report.html)")
    parser.set_defaults(command=_report)


def _report(options: argparse.Namespace, overrides: list[str]) -> int:
    if overrides:
        raise ConfigError(f"{overrides[0]} has no meaning here: the run is over")
    report = load_report(options.run)
    from gvm_stream.files import write_atomically
    from gvm_stream.report.page import render

    out: Path = options.out or options.run / "report.html"
    write_atomically(out, render(report, options.run.resolve().name).encode())
    sys.stdout.write(f"{out}\n")
    return 0


def load_report(run: Path) -> dict[str, Any]:
    """The content of RUN/report.json. Raises DataError."""
    path = run / "report.json"
    if not path.exists():
        config = run / "config.json"
        if not config.exists():
            raise DataError(f"{run} is not the directory of a run: it has neither report.json nor config.json")
        raise DataError(
            f"{path} is not there yet, it is written when a run ends: watch it with gvm-stream top --config {config}, "
            f"or, if it was killed, continue it with gvm-stream run --resume {run}"
        )
    try:
        report: dict[str, Any] = json.loads(path.read_bytes())
        missing = [key for key in NEEDED if key not in report]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is not the report of a run: {error}") from error
    if missing:
        raise DataError(f"{path} is not the report of a run: it has no {', '.join(missing)}")
    return report
