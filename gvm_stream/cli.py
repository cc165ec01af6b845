"""The command line. Heavy imports happen after the arguments are parsed, so `--help` answers at once."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gvm_stream.doctor.commands import add_command as add_doctor_command
from gvm_stream.errors import ConfigError, GvmStreamError
from gvm_stream.keys_command import add_commands as add_keys_commands
from gvm_stream.report.commands import add_command as add_report_command
from gvm_stream.simulate.commands import add_command as add_simulate_command
from gvm_stream.verify.commands import add_commands as add_verify_commands
from gvm_stream.vllm.environment import hide_unmatched
from gvm_stream.watching import add_status_command, add_top_command

if TYPE_CHECKING:
    from gvm_stream.config import Config

OVERRIDES = "any key of the configuration can be overridden by --section.key=value, for example --run.steps=50"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong configuration or data, 130 interrupted, 1 any other error."""
    hide_unmatched()
    try:
        rest, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
        options, unknown = _parser().parse_known_args(rest)
        if unknown:
            raise ConfigError(f"unknown argument {unknown[0]!r}; {OVERRIDES}")
        return int(options.command(options, overrides))
    except GvmStreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gvm-stream",
        description="Reinforcement learning with verifiable rewards: an asynchronous stream with an online allocator.",
        epilog=OVERRIDES,
    )
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = verbs.add_parser("run", help="run allocator, learner and producers on this machine", epilog=OVERRIDES)
    run.add_argument("file", nargs="?", type=Path, help="configuration, TOML")
    run.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in this directory")
    run.add_argument("--plain", action="store_true", help="plain lines instead of live progress")
    run.set_defaults(command=_run)

    for name, command, text in (
        ("allocator", _allocator, "run the allocator of a run"),
        ("learner", _learner, "run the learner of a run"),
        ("producer", _producer, "run a producer; start as many as you like"),
    ):
        verb = verbs.add_parser(name, help=text, epilog=OVERRIDES)
        verb.add_argument("--config", type=Path, required=True, metavar="FILE", help="configuration, TOML")
        if name == "producer":
            verb.add_argument("--name", default="", help="name of this producer (default: host and process id)")
        else:
            verb.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in run.dir")
        if name == "allocator":
            verb.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
        verb.set_defaults(command=command)

    evaluate = verbs.add_parser("eval", help="held-out accuracy of a checkpoint", epilog=OVERRIDES)
    evaluate.add_argument("--config", type=Path, required=True, metavar="FILE", help="configuration, TOML")
    evaluate.add_argument("--checkpoint", type=Path, metavar="DIR", help="model folder (default: model.path)")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    evaluate.set_defaults(command=_eval)

    verify = verbs.add_parser("verify", help="check golds, explain a verdict, measure a verifier", epilog=OVERRIDES)
    add_verify_commands(verify)
    add_keys_commands(verbs.add_parser("keys", help="who may join a run over a network"))
    add_simulate_command(verbs.add_parser("simulate", help="compare allocation policies in a made-up world"))
    add_doctor_command(verbs.add_parser("doctor", help="check a machine before a run costs money", epilog=OVERRIDES))

    add_status_command(verbs.add_parser("status", help="one picture of a run that is going", epilog=OVERRIDES))
    add_report_command(verbs.add_parser("report", help="one page about a run that has ended"))
    add_top_command(verbs.add_parser("top", help="watch a run as it goes", epilog=OVERRIDES))

    config = verbs.add_parser("config", help="print the resolved configuration and what it implies", epilog=OVERRIDES)
    config.add_argument("file", nargs="?", type=Path, help="configuration, TOML")
    config.add_argument("--config", type=Path, metavar="FILE", dest="config", help="the same")
    config.add_argument("--json", action="store_true", help="print one JSON object")
    config.set_defaults(command=_config)
    return parser


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """`--a.b=value` and `--a.b value` are overrides, all else is for argparse, which would take `value` for a file."""
    rest: list[str] = []
    overrides: list[str] = []
    words = iter(arguments)
    for word in words:
        key, equals, _ = word.partition("=")
        if not key.startswith("--") or "." not in key:
            rest.append(word)
        elif equals:
            overrides.append(word)
        else:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{word} has no value; {OVERRIDES}")
            overrides.append(f"{word}={value}")
    return rest, overrides


def _logging(name: str, role: str, config: Config) -> None:
    from gvm_stream.logs import set_up_logging

    set_up_logging(name, role, form=config.run.log_format)


def _run(options: argparse.Namespace, overrides: list[str]) -> int:
    from gvm_stream.config_file import load_config
    from gvm_stream.run import run

    if (options.file is None) == (options.resume is None):
        raise ConfigError("give either a configuration file, or --resume DIR with the directory of a run")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    path = options.resume / "config.json" if options.resume else options.file
    return run(load_config(path, overrides), resume=options.resume, plain=options.plain)


def _allocator(options: argparse.Namespace, overrides: list[str]) -> int:
    from gvm_stream.allocator.main import main as run_allocator
    from gvm_stream.config_file import load_config

    config = load_config(options.config, overrides)
    _logging("allocator", "allocator", config)
    run_allocator(config, resume=options.resume, supervised=options.supervised)
    return 0


def _learner(options: argparse.Namespace, overrides: list[str]) -> int:
    from gvm_stream.config_file import load_config

    config = load_config(options.config, overrides)
    _logging("learner", "learner", config)
    from gvm_stream.learner.main import main as run_learner

    run_learner(config, resume=options.resume)
    return 0


def _producer(options: argparse.Namespace, overrides: list[str]) -> int:
    from gvm_stream.config_file import load_config

    config = load_config(options.config, overrides)
    _logging(options.name or "producer", "producer", config)
    from gvm_stream.producers.main import main as run_producer

    run_producer(config, options.name)
    return 0


def _eval(options: argparse.Namespace, overrides: list[str]) -> int:
    from gvm_stream.config_file import load_config

    config = load_config(options.config, overrides)
    from gvm_stream.evaluate import evaluate

    sys.stdout.write(evaluate(config, options.checkpoint, as_json=options.json) + "\n")
    return 0


def _config(options: argparse.Namespace, overrides: list[str]) -> int:
    import msgspec

    from gvm_stream.config import derived
    from gvm_stream.config_file import documented, load_config

    path = options.file or options.config
    if path is None:
        raise ConfigError("give a configuration file")
    config = load_config(path, overrides)
    implied = msgspec.to_builtins(derived(config))
    if options.json:
        sys.stdout.write(msgspec.json.encode({"config": config, "derived": implied}).decode() + "\n")
        return 0
    sys.stdout.write(documented(config))
    sys.stdout.write("\n# What follows from it\n")
    sys.stdout.writelines(f"# {key.replace('_', ' ')}: {value}\n" for key, value in implied.items())
    return 0
