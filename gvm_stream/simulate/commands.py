"""`gvm-stream simulate`: compare policies in a made-up world. Heavy imports happen inside the command."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gvm_stream.errors import ConfigError

if TYPE_CHECKING:
    from gvm_stream.allocator.settings import Settings
    from gvm_stream.simulate.experiment import Result
    from gvm_stream.simulate.world import WorldSettings

DESCRIPTION = """Run allocation policies in a made-up world with known truth and compare them with the uniform policy at
equal tokens, first visits and pilots included. variance: the bound mean V / n (raft; V / (n - 1) for rloo) with true
values, V = G^2 / (p + damping/p) (raft) or p (1-p) G^2 (rloo), n = 0 taken as 1; mse: the exact error of the gradients
made with the coefficients that the library gave out. Both are multiplied with tokens over uniform's, except for the
squared bias, which averaging more steps does not reduce."""


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _pair(text: str) -> tuple[float, float]:
    first, comma, second = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"{text!r} must be two numbers with a comma between them")
    return float(first), float(second)


WORLD = (
    ("prompts", int, "512", "N", "prompts, all visited in every step"),
    ("coefficient", str, "rloo", "NAME", "gradient estimator: rloo (of p) or raft (of log p)"),
    ("acceptance", _pair, "0.5,0.8", "A,B", "Beta distribution of acceptance rates"),
    ("energy-sd", float, "0.6", "S", "log-sd of gradient norms between prompts"),
    ("energy-noise", float, "0.5", "S", "log-sd of the energies seen"),
    ("signal", float, "0.3", "X", "share of the energy that is signal"),
    ("damping", float, "0.001", "X", "alpha of raft's V = G^2 / (p + alpha/p), which the bound is of"),
    ("mean-tokens", float, "200", "N", "mean length of responses"),
    ("cost-sd", float, "0", "S", "log-sd of mean lengths between prompts; above 0 the budget is in tokens"),
    ("length-sd", float, "0.5", "S", "log-sd of lengths within a prompt"),
    ("length-bias", float, "0", "X", "correct responses are shorter by exp(-X)"),
    ("drift", float, "0", "S", "change of logit p per version, sd"),
    ("verifier-noise", float, "0", "X", "chance of a wrong verdict"),
    ("flaky", float, "0", "X", "share of prompts with random verdicts"),
    ("crashes", float, "0", "X", "chance that an attempt fails or expires"),
    ("unscorable", float, "0", "X", "chance that a response gets no verdict"),
)
"""Options for the fields of `WorldSettings`: name, type, default, what the value looks like, text."""


def add_command(parser: argparse.ArgumentParser) -> None:
    """Make `parser` that of `gvm-stream simulate`."""
    parser.description = DESCRIPTION
    parser.epilog = "any setting of the allocator: --allocation.key=value, for example --allocation.shadow_uniform=0"
    parser.add_argument(
        "--policies", type=_names, default="neyman", metavar="NAMES",
        help="names with commas between them, NAME/DESIGN for another design; uniform is always run (default: neyman)",
    )  # fmt: skip
    parser.add_argument(
        "--per-prompt", type=float, default=16.0, metavar="N", help="rollouts per prompt on average (default: 16)"
    )
    parser.add_argument(
        "--steps", type=int, default=24, metavar="N", help="batches, one policy version each (default: 24)"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="worlds to average over (default: 5)")
    parser.add_argument(
        "--slots", type=int, default=256, metavar="N", help="rollouts made at the same time (default: 256)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per policy")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw error against tokens")
    world = parser.add_argument_group("the world")
    for name, kind, default, value, text in WORLD:
        world.add_argument(f"--{name}", type=kind, default=default, metavar=value, help=f"{text} (default: {default})")
    parser.set_defaults(command=_simulate)


def _simulate(options: argparse.Namespace, overrides: list[str]) -> int:
    import msgspec
    from rich.console import Console
    from rich.progress import track

    from gvm_stream.simulate.experiment import experiment
    from gvm_stream.simulate.plot import plot_errors
    from gvm_stream.simulate.report import report, show

    if min(options.steps, options.seeds, options.slots) < 1:
        raise ConfigError("--steps, --seeds and --slots must be at least 1")
    if not 1 <= options.per_prompt < math.inf:
        raise ConfigError(f"--per-prompt = {options.per_prompt} must be a finite number of at least 1")
    if options.plot is not None and not options.plot.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {options.plot.parent}")
    world = _world(options)
    policies = {name: _settings(name, world, options, overrides) for name in ["uniform", *options.policies]}
    results: dict[str, list[Result]] = {name: [] for name in policies}
    runs: Iterable[tuple[int, str]] = [(seed, name) for seed in range(options.seeds) for name in policies]
    console = Console(stderr=True)
    if console.is_terminal:
        runs = track(runs, "simulating", console=console, transient=True)
    for seed, name in runs:
        result = experiment(policies[name], world, steps=options.steps, slots=options.slots, seed=seed)
        results[name].append(result)
    reports = [report(name, of, results["uniform"]) for name, of in results.items()]
    if options.json:
        sys.stdout.writelines(msgspec.json.encode(one).decode() + "\n" for one in reports)
    else:
        show(reports)
    if options.plot is not None:
        plot_errors({name: [result.measured for result in of] for name, of in results.items()}, options.plot)
    return 0


def _world(options: argparse.Namespace) -> WorldSettings:
    import msgspec

    from gvm_stream.simulate.world import WorldSettings

    given = {name: getattr(options, name) for name in WorldSettings.__struct_fields__}
    try:
        return msgspec.convert(given, WorldSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the world: {error}") from error


def _budget(world: WorldSettings, per_prompt: float) -> dict[str, Any]:
    """In tokens where prompts differ in cost."""
    if world.cost_sd == 0:
        return {"type": "rollouts", "rollouts": per_prompt}
    return {"type": "tokens", "rollouts": per_prompt, "tokens": per_prompt * world.mean_tokens}


def _settings(name: str, world: WorldSettings, options: argparse.Namespace, overrides: list[str]) -> Settings:
    """Of the allocator, with bounds wide enough for policies to differ."""
    import msgspec

    from gvm_stream.allocator.settings import Settings
    from gvm_stream.config_file import apply_override

    policy, _, design = name.partition("/")
    fixed = {
        "policy": policy,
        "design": design or None,
        "coefficient": world.coefficient,
        "objective": {"type": "own"},  # what errors are measured against
        "prompts_per_step": world.prompts,
        "steps": options.steps,
    }
    raw: dict[str, Any] = {
        "allocation": {
            "budget": _budget(world, options.per_prompt),
            "min_rollouts": 2 if world.coefficient == "rloo" else 1,
            "max_rollouts": round(8 * options.per_prompt),
        }
    }
    for override in overrides:
        apply_override(raw, override)
    allocation = raw.pop("allocation")
    known = [key for key in Settings.__struct_fields__ if key not in fixed]
    wrong = [*raw, *(f"allocation.{key}" for key in allocation if key not in known)]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} cannot be set here; settings of allocation are {', '.join(known)}")
    if policy == "uniform":
        allocation.pop("options", None)  # are meant for the others
    try:
        return msgspec.convert(allocation | fixed, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy {name}: {error}") from error
