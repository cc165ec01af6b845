"""`gvm-stream verify check | one | bench`: are the golds usable, why this verdict, how often is the verifier right.

Heavy imports happen inside the commands. Every verdict comes from a pool, so a bomb ends in a sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gvm_stream.errors import ConfigError

if TYPE_CHECKING:
    from gvm_stream.config import Config, VerifierSection
    from gvm_stream.verify.verdict import Verdict, VerifyItem

NO_RUN = ["model.path=none", "data.train=none", "verifier.kind=math"]
"""What a configuration needs, when only its verifier is asked for and no file is given."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `gvm-stream verify`."""
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace, list[str]], int], text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text, description=text, epilog=parser.epilog)
        verb.add_argument("--config", type=Path, metavar="FILE", help="configuration of a run, TOML")
        verb.add_argument("--kind", help="verifier (default: that of the configuration, or math)")
        verb.set_defaults(command=command)
        return verb

    verb = add("check", _check, "which rows of a data set cannot be used; status 1 if there are any")
    verb.add_argument(
        "file", nargs="?", type=Path, help="data (.jsonl, .parquet) or the configuration of a run (.toml)"
    )
    verb.add_argument("--prompt-column", metavar="NAME", help="column with the prompt (default: prompt)")
    verb.add_argument("--answer-column", metavar="NAME", help="column with the gold answer (default: answer)")

    verb = add("one", _one, "explain one verdict")
    verb.add_argument("--gold", required=True, type=_text, help="gold answer (--gold=-x if it begins with a dash)")
    verb.add_argument("--answer", required=True, type=_text, help="response to judge (--answer=-x, likewise)")
    verb.add_argument("--truncated", action="store_true", help="the response was cut off at the length cap")
    verb.add_argument("--json", action="store_true", help="print one JSON object")

    verb = add("bench", _bench, "compare the verifier with the verdicts expected in a case file")
    verb.add_argument("file", type=Path, help="JSON lines: id, gold, output, expected; optional: policy, category")
    verb.add_argument("--workers", type=int, metavar="N", help="verifier processes (default: 2)")
    verb.add_argument("--timeout-s", type=float, metavar="S", help="time limit of one verdict (default: 5)")
    verb.add_argument("--by-category", action="store_true", help="one line for every category")
    verb.add_argument("--json", action="store_true", help="print one JSON object")


def _text(argument: str) -> str:
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{argument!r} is not UTF-8") from None
    return argument


def _config(file: Path | None, overrides: Sequence[str], standard: Sequence[str] = ()) -> Config:
    """The configuration in `file`, or `standard` values where no file sets them."""
    from gvm_stream.config_file import apply_override, load_config, parse_config

    if file is not None:
        return load_config(file, overrides)
    raw: dict[str, object] = {}
    for override in (*NO_RUN, *standard, *overrides):
        apply_override(raw, override)
    return parse_config(raw, "the command line")


def _kind(kind: str | None) -> dict[str, object]:
    """One verifier and no other, if one is named."""
    return {} if kind is None else {"verifier.kind": kind, "verifier.weights": {}}


def _given(keys: Mapping[str, object]) -> list[str]:
    """Overrides for the options that were given. JSON's texts and numbers are TOML's, too."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in keys.items() if value is not None]


def _judge(settings: VerifierSection, items: Sequence[VerifyItem]) -> list[Verdict]:
    from gvm_stream.verify.blocking import BlockingVerifier

    with BlockingVerifier(settings) as verifier:
        return verifier.verify(items)


def _check(options: argparse.Namespace, overrides: list[str]) -> int:
    config = _config(*_data_config(options, overrides))
    from gvm_stream.verify.dataset import check_rows

    rows, refused = check_rows(config)
    for bad in refused:
        sys.stdout.write(f"{bad.split} row {bad.row}  {bad.problem}: {bad.detail}\n")
    kinds = Counter(bad.problem for bad in refused)
    counts = "".join(f", {number} {problem}" for problem, number in sorted(kinds.items()))
    sys.stdout.write(f"{rows} rows, {rows - len(refused)} usable{counts}\n")
    return 1 if refused else 0


def _data_config(options: argparse.Namespace, overrides: list[str]) -> tuple[Path | None, list[str]]:
    """Where the configuration of a data set is, and what is to be changed in it."""
    file: Path | None = options.file
    if (file is None) == (options.config is None):
        raise ConfigError("give either a data file, or --config FILE with the configuration of a run")
    keys: dict[str, object] = {
        **_kind(options.kind),
        "data.prompt_column": options.prompt_column,
        "data.answer_column": options.answer_column,
    }
    if file is None or file.suffix == ".toml":
        return file or options.config, [*overrides, *_given(keys)]
    if file.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"data file {str(file)!r} must end in .jsonl or .parquet; describe others with --config FILE")
    return None, [*_given({"data.source": file.suffix[1:], "data.train": str(file)}), *overrides, *_given(keys)]


def _one(options: argparse.Namespace, overrides: list[str]) -> int:
    import msgspec

    from gvm_stream.verify.verdict import VerdictUnscorable, VerifyItem

    overrides = [*overrides, *_given(_kind(options.kind)), "verifier.workers=1"]
    settings = _config(options.config, overrides).verifier
    item = VerifyItem(answer=options.gold, response=options.answer, truncated=options.truncated)
    (verdict,) = _judge(settings, [item])
    if options.json:
        sys.stdout.write(msgspec.json.encode(verdict).decode() + "\n")
    elif isinstance(verdict, VerdictUnscorable):
        sys.stdout.write(f"unscorable     {verdict.reason}\n")
    else:
        texts = (("extracted", verdict.extracted), ("compared with", verdict.expected), ("rule", verdict.rule))
        sys.stdout.write(f"reward         {verdict.reward:g}\n")
        sys.stdout.writelines(f"{name:<15}{text or '-'}\n" for name, text in texts)
    return 0


def _bench(options: argparse.Namespace, overrides: list[str]) -> int:
    import msgspec

    from gvm_stream.verify.case_tables import show
    from gvm_stream.verify.cases import Judged, read_cases, report
    from gvm_stream.verify.verdict import VerifyItem

    limits = {"verifier.workers": options.workers, "verifier.timeout_s": options.timeout_s}
    overrides = [*overrides, *_given(_kind(options.kind) | limits)]
    settings = _config(options.config, overrides, ["verifier.workers=2", "verifier.timeout_s=5"]).verifier
    cases = read_cases(options.file)
    verdicts = _judge(settings, [VerifyItem(answer=case.gold, response=case.output, prompt=case.id) for case in cases])
    judged = [Judged(case, verdict) for case, verdict in zip(cases, verdicts, strict=True)]
    if options.json:
        sys.stdout.write(msgspec.json.encode(report(judged)).decode() + "\n")
    else:
        show(judged, by_category=options.by_category)
    return 0
