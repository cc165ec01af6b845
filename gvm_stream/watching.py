"""`gvm-stream status | top`: their options. Heavy imports happen inside the commands."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gvm_stream.errors import ConfigError

if TYPE_CHECKING:
    from gvm_stream.config import StreamSection


def add_status_command(parser: argparse.ArgumentParser) -> None:
    """Make `parser` that of `gvm-stream status`."""
    _add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_status)


def add_top_command(parser: argparse.ArgumentParser) -> None:
    """Make `parser` that of `gvm-stream top`."""
    _add_options(parser)
    parser.set_defaults(command=_top)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration: TOML, or config.json of the run")
    parser.add_argument("--address", metavar="tcp://HOST:PORT", help="allocator (default: as without a configuration)")


def _status(options: argparse.Namespace, overrides: list[str]) -> int:
    stream = stream_of(options.config, options.address, overrides)
    import msgspec

    from gvm_stream.status import fetch_status, show_status

    status = fetch_status(stream)
    if options.json:
        sys.stdout.write(msgspec.json.encode(status).decode() + "\n")
    else:
        show_status(status)
    return 0


def _top(options: argparse.Namespace, overrides: list[str]) -> int:
    stream = stream_of(options.config, options.address, overrides)
    from gvm_stream.top import watch

    watch(stream)
    return 0


def stream_of(config: Path | None, address: str | None, overrides: list[str]) -> StreamSection:
    """How to reach the allocator. Raises ConfigError."""
    from gvm_stream.config_file import apply_override, load_config, parse_config

    if config is not None and address is not None:
        raise ConfigError("give either --config FILE or --address tcp://HOST:PORT, not both")
    if config is not None:
        return load_config(config, overrides).stream
    raw: dict[str, Any] = {"model": {"path": "none"}, "data": {"train": "none"}}  # what a configuration must have
    if address is not None:
        raw["stream"] = {"address": address}
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw, "the command line").stream
