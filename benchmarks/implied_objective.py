"""Which objective does an estimator follow? By enumeration: the factor c(p) by which it scales the gradient of a prompt
with success probability p. Draws `docs/implied_objective.svg`.

    python -m benchmarks.implied_objective [--json]
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.report import finish, parser
from gvm_stream.allocator.stopping import (
    Counts,
    Rule,
    StoppingRule,
    Weights,
    class_conditional,
    implied_objective,
    leave_one_out,
    pool_baseline,
)

PICTURE = Path(__file__).parents[1] / "docs" / "implied_objective.svg"
BALANCED, POSITIVE = Rule(8, 4, 2, 2), Rule(8, 4, 1, 0)
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)


def standardised(rule: StoppingRule, counts: Counts) -> tuple[float, float]:
    """GRPO, arXiv 2402.03300: mean over the rollouts of (reward - mean) / standard deviation times the score."""
    s, f = counts
    n = s + f
    weight = s * f / n**2 / np.sqrt(s * f / (n * (n - 1))) if min(counts) > 0 else 0.0
    return weight, weight


class Curve(NamedTuple):
    label: str
    rule: Rule
    weights: Weights
    color: str
    dashes: str = "-"


CURVES = (
    Curve("Reinforce-Ada, balanced, as released", BALANCED, pool_baseline(4), "#d55e00"),
    Curve("Reinforce-Ada, positive, as released", POSITIVE, pool_baseline(4), "#cc79a7"),
    Curve("GRPO: 8 rollouts, divided by their standard deviation", Rule(8), standardised, "#e69f00"),
    Curve("balanced rule, leave-one-out over the pool", BALANCED, leave_one_out, "#56b4e9"),
    Curve("planned: 8 rollouts, leave-one-out", Rule(8), leave_one_out, "black"),
    Curve("sequential: balanced rule, class-conditional", BALANCED, class_conditional, "#009e73", "--"),
)


def draw(path: Path) -> None:
    mpl.use("Agg")
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "gvm-stream"}
    )  # text stays text; same input, same file
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    ps = 1 / (1 + np.exp(-np.linspace(-4.6, 4.6, 185)))
    for curve in CURVES:
        cs = [implied_objective(curve.rule, p, curve.weights) for p in ps]
        axis.plot(ps, cs, color=curve.color, linestyle=curve.dashes, linewidth=2, label=curve.label)
    axis.set_xscale("logit")
    axis.set_yscale("log")
    axis.set_xlim(0.01, 0.99)
    axis.set_ylim(0.85, 9)
    axis.set_xticks(TICKS, [f"{p:g}" for p in TICKS])
    axis.set_yticks([1, 2, 3, 5, 8], ["1", "2", "3", "5", "8"])
    axis.minorticks_off()
    axis.grid(color="0.9")
    axis.set_xlabel("success probability p of the prompt")
    axis.set_ylabel("weight c(p) of the prompt's gradient")
    axis.set_title("The objective an estimator follows (1 everywhere: the mean reward)")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    options = parser(__doc__).parse_args()
    draw(PICTURE)
    table = {
        curve.label: {f"{p:g}": round(float(implied_objective(curve.rule, p, curve.weights)), 3) for p in TICKS}
        for curve in CURVES
    }
    finish({"benchmark": "implied_objective", "weights": table}, as_json=options.json)


if __name__ == "__main__":
    main()
