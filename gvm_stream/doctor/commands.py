"""`gvm-stream doctor`: look at a machine and a configuration before a run costs money. Heavy imports happen inside."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gvm_stream.config import Config
    from gvm_stream.doctor.finding import Finding

DESCRIPTION = """Check this machine, and with --config what a run in it would need. Run it on every host: of an address
that is another host's it is checked that it can be reached. Exit status 1 if a check fails."""

Check = Callable[[], "Finding"]


def add_command(parser: argparse.ArgumentParser) -> None:
    """Make `parser` that of `gvm-stream doctor`."""
    parser.description = DESCRIPTION
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration, TOML")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_doctor)


def checks(config: Config | None) -> Mapping[str, Check]:
    """All checks by name; without a configuration those of the machine."""
    from gvm_stream.config_verifier import used_kinds
    from gvm_stream.doctor import content, engines, machine, network

    devices = (config.learner.device, config.producer.device) if config else ()
    runs_programs = config is not None and "code" in used_kinds(config.verifier)
    table: dict[str, Check] = {
        "packages": machine.packages,
        "gpus": lambda: machine.gpus(devices),
        "shared memory": machine.shared_memory,
        "open files": machine.open_files,
        "clock": machine.clock,
        "sandbox": lambda: machine.sandbox(needed=runs_programs),
    }
    if config is None:
        return table
    stream, run = config.stream, config.run
    threads = config.learner.threads + run.producers * config.producer.threads
    if content.uses_hub(config):
        table["hub"] = network.hub  # before model and data: their libraries are not imported yet
    table |= {
        "processors": lambda: machine.processors(threads),
        "allocator": lambda: network.address("stream.address", stream.address),
        "keys": lambda: network.keys(stream),
        "metrics": lambda: network.metrics_port(config.metrics),
        "engine": lambda: engines.engine(config.producer),
        "model": lambda: content.model(config.model.path),
        "memory": lambda: content.memory(config),
        "disk": lambda: machine.run_folder(Path(run.dir), content.disk_needed(config)),
        "data": lambda: content.data(config),
    }
    if stream.weights_address:
        table["weights"] = lambda: network.address("stream.weights_address", stream.weights_address)
    if stream.nccl_address:
        table["nccl sender"] = lambda: network.address("stream.nccl_address", stream.nccl_address)
    return table


def _doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    import msgspec

    from gvm_stream.config_file import load_config

    config = load_config(options.config, overrides) if options.config else None
    findings: dict[str, Finding] = {}
    for name, check in checks(config).items():
        findings[name] = check()
        if not options.json:
            sys.stdout.writelines(_lines(name, findings[name]))
            sys.stdout.flush()
    results = Counter(finding.result for finding in findings.values())
    if options.json:
        answer = {"ok": not results["fail"], "checks": findings}
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    else:
        counts = f"{results['fail']} failed, {results['warn']} to look at"
        sys.stdout.write(f"{len(findings)} checks, {counts}\n")
    return 1 if results["fail"] else 0


def _lines(name: str, finding: Finding) -> Iterator[str]:
    yield f"{finding.result:<5} {name:<14} {finding.found}\n"
    if finding.advice:
        yield f"{'':<20} -> {finding.advice}\n"
