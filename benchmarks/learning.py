"""Does the main job learn, and what do methods gain? Real runs of `gvm-stream run examples/arithmetic.toml`.

Every method gets the same prompts in the same order, the same optimiser, learning rate and number of updates, over the
same seeds; one optimiser update per batch of 32 prompts, whatever the number of its rollouts. Methods that take more
rollouts for an update are compared twice: after the same number of updates, and after the same number of generated
tokens (that of the method that took the fewest; between two evaluations on a straight line). Differences to
`uniform_grpo` are given per seed, and as a mean with a 95 % t-interval. One run at a time.

    python -m benchmarks.learning --json [--seeds 0,1,2] [--methods neyman,uniform_grpo] [--set section.key=value ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import finish, free_address, machine, mean_interval, parser, say

CONFIG = Path(__file__).parents[1] / "examples" / "arithmetic.toml"
BASE = "uniform_grpo"
METHODS: dict[str, tuple[str, ...]] = {
    "neyman": (),
    "neyman_variance": ("allocation.budget=variance", "allocation.relative_variance=1"),
    "uniform_grpo": ("allocation.policy=uniform", "learner.advantage=grpo"),
    "uniform_raft_pp": (
        "allocation.policy=uniform",
        "allocation.coefficient=raft",
        "learner.advantage=raft",
        "learner.loss=ppo_clip",
    ),
    "reinforce_ada_balance": ("allocation.policy=reinforce_ada_balance", "allocation.design=reference"),
    "gvm_two_stage": (
        "allocation.policy=gvm_two_stage",
        'allocation.options={"pilot" = 4}',
        "allocation.coefficient=raft",
    ),
}
"""What a method changes in the file: the default of the file; as precise as uniform with 8 rollouts, by the library's
estimates, with the fewest tokens; uniform GRPO and RAFT++; Reinforce-Ada as released, 8 to 32 rollouts a prompt; GVM's
two stages with half of the 8 rollouts in the pilot."""
SETTINGS = ("eval.every_steps=20", "eval.curve_samples=4")


def train(method: str, seed: int, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """One run; what its report says."""
    run = folder / f"{method}-{seed}"
    overrides = [f"run.seed={seed}", f"run.dir={run}", f"stream.address={free_address()}"]
    overrides += [*SETTINGS, *METHODS[method], *settings]
    command = [sys.executable, "-m", "gvm_stream", "run", str(CONFIG), "--plain", *(f"--{key}" for key in overrides)]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}")
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report


def summary(report: dict[str, Any]) -> dict[str, Any]:
    tokens = report["tokens"]
    return {
        "heldout_before": report["heldout_before"],
        "heldout_after": report["heldout_after"],
        "standard_error": report["heldout_standard_error"][1],
        "seconds": report["seconds"],
        "updates": report["policy_versions"],
        "rollouts": report["rollouts"],
        "training_tokens": tokens["generated"] - tokens["evaluation"],
        "tokens": tokens,
        "zero_signal_share": report["zero_signal_share"],
        "mean_lag": report["mean_lag"],
        "gain_over_uniform": report["allocation"]["gain_over_uniform"],
        "curve": curve(report),
    }


def curve(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Held-out accuracy by updates and by tokens generated for training until then."""
    return [
        {"step": row["step"], "accuracy": row["accuracy"], "tokens": row["generated"] - row["evaluation"]}
        for row in report["history"]["evaluations"]
    ]


def accuracy_at(run: dict[str, Any], tokens: float) -> float:
    """Held-out accuracy after so many training tokens, between evaluations on a straight line."""
    rows = run["curve"]
    return float(np.interp(tokens, [row["tokens"] for row in rows], [row["accuracy"] for row in rows]))


def compare(runs: dict[str, dict[int, dict[str, Any]]], seeds: list[int]) -> dict[str, Any]:
    fewest = min(run["curve"][-1]["tokens"] for of in runs.values() for run in of.values())
    result = {}
    for method, of in runs.items():
        found = {
            "equal_updates": [of[seed]["heldout_after"] for seed in seeds],
            "equal_tokens": [accuracy_at(of[seed], fewest) for seed in seeds],
        }
        result[method] = {
            "heldout_before": mean_interval([of[seed]["heldout_before"] for seed in seeds]),
            **{name: {"seeds": values, **mean_interval(values)} for name, values in found.items()},
            "training_tokens": mean_interval([of[seed]["training_tokens"] for seed in seeds]),
            "seconds_most": max(of[seed]["seconds"] for seed in seeds),
            "runs": {str(seed): of[seed] for seed in seeds},
        }
        if method != BASE and BASE in runs:
            base = {
                "equal_updates": [runs[BASE][seed]["heldout_after"] for seed in seeds],
                "equal_tokens": [accuracy_at(runs[BASE][seed], fewest) for seed in seeds],
            }
            for name, values in found.items():
                gains = [one - other for one, other in zip(values, base[name], strict=True)]
                result[method][name]["over_uniform_grpo"] = {"seeds": gains, **mean_interval(gains)}
    return {"equal_tokens_at": fewest, "methods": result}


def plot(runs: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Mean over seeds of held-out accuracy, by updates and by training tokens."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning"}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for method, of in runs.items():
            rows = [[(r["step"], r["tokens"] / 1e6, r["accuracy"]) for r in run["curve"]] for run in of.values()]
            steps, tokens, accuracy = np.mean(rows, axis=0).T
            left.plot(steps, accuracy, marker="o", markersize=3, label=method)
            right.plot(tokens, accuracy, marker="o", markersize=3)
        left.set(xlabel="updates", ylabel="held-out accuracy")
        right.set(xlabel="million tokens generated for training")
        left.legend(frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", default="0,1,2")
    arguments.add_argument("--methods", default=",".join(METHODS))
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    arguments.add_argument("--plot", type=Path, metavar="FILE")
    options = arguments.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    methods = options.methods.split(",")
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise SystemExit(f"unknown methods {', '.join(unknown)}; there are {', '.join(METHODS)}")
    runs: dict[str, dict[int, dict[str, Any]]] = {method: {} for method in methods}
    with tempfile.TemporaryDirectory(prefix="gvm-learning-") as folder:
        for seed in seeds:
            for method in methods:
                say(f"--- {method}, seed {seed}")
                runs[method][seed] = summary(train(method, seed, options.settings, Path(folder)))
    result: dict[str, Any] = {"benchmark": "learning", "machine": machine(), "settings": options.settings}
    result |= compare(runs, seeds)
    if options.plot is not None:
        plot(runs, options.plot)
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
