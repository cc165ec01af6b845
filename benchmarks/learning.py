"""Does the main job learn, and what does allocation add? Real runs of `gvm-stream run examples/arithmetic.toml`.

Policies are compared at equal rollouts and equal updates: the same batches, prompts, budget and optimiser, over the
same seeds. The difference to `uniform` is given per seed and as a mean with a 95 % t-interval. One run at a time.

    python -m benchmarks.learning --json [--seeds 0,1,2] [--policies neyman,uniform] [--set section.key=value ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import finish, free_address, machine, mean_interval, parser, say

CONFIG = Path(__file__).parents[1] / "examples" / "arithmetic.toml"


def train(policy: str, seed: int, settings: list[str], folder: Path) -> dict[str, Any]:
    """One run; what its report says."""
    run = folder / f"{policy}-{seed}"
    overrides = [
        f"--allocation.policy={policy}",
        f"--run.seed={seed}",
        f"--run.dir={run}",
        f"--stream.address={free_address()}",
    ]
    overrides += [f"--{setting}" for setting in settings]
    command = [sys.executable, "-m", "gvm_stream", "run", str(CONFIG), "--plain", *overrides]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}")
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report


def summary(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "heldout_before": report["heldout_before"],
        "heldout_after": report["heldout_after"],
        "standard_error": report["heldout_standard_error"][1],
        "seconds": report["seconds"],
        "updates": report["policy_versions"],
        "rollouts": report["rollouts"],
        "tokens": report["tokens"],
        "zero_signal_share": report["zero_signal_share"],
        "mean_lag": report["mean_lag"],
        "curve": [
            {"step": row["step"], "accuracy": row["accuracy"], "generated": row["generated"]}
            for row in report["history"]["evaluations"]
        ],
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", default="0,1,2")
    arguments.add_argument("--policies", default="neyman,uniform")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    options = arguments.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    policies = options.policies.split(",")
    runs: dict[str, dict[int, dict[str, Any]]] = {policy: {} for policy in policies}
    with tempfile.TemporaryDirectory(prefix="gvm-learning-") as folder:
        for seed in seeds:
            for policy in policies:
                say(f"--- {policy}, seed {seed}")
                runs[policy][seed] = summary(train(policy, seed, options.settings, Path(folder)))
    result: dict[str, Any] = {
        "benchmark": "learning",
        "machine": machine(),
        "settings": options.settings,
        "policies": {},
    }
    for policy in policies:
        after = [runs[policy][seed]["heldout_after"] for seed in seeds]
        result["policies"][policy] = {
            "heldout_before": mean_interval([runs[policy][seed]["heldout_before"] for seed in seeds]),
            "heldout_after": mean_interval(after),
            "heldout_after_least": min(after),
            "seconds_most": max(runs[policy][seed]["seconds"] for seed in seeds),
            "seeds": {str(seed): runs[policy][seed] for seed in seeds},
        }
        if policy != "uniform" and "uniform" in policies:
            gains = [runs[policy][s]["heldout_after"] - runs["uniform"][s]["heldout_after"] for s in seeds]
            result["policies"][policy]["gain_over_uniform"] = {"seeds": gains, **mean_interval(gains)}
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
