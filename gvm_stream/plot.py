"""The learning curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_run(report: dict[str, Any], path: Path) -> None:
    """Held-out accuracy (with two standard errors) and training reward against generated tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    history = report["history"]
    evaluations = [row for row in history["evaluations"] if row["accuracy"] is not None]
    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    steps = history["steps"]
    axis.plot(
        [row["generated"] for row in steps],
        [row["stats"]["reward_mean"] for row in steps],
        color="0.7",
        linewidth=0.8,
        label="training reward, per batch",
    )
    axis.errorbar(
        [row["generated"] for row in evaluations],
        [row["accuracy"] for row in evaluations],
        [2 * row["standard_error"] for row in evaluations],
        marker="o",
        capsize=3,
        label="held-out accuracy (bars: two standard errors)",
    )
    axis.set_xlabel("generated tokens, evaluation included")
    axis.set_ylabel("mean reward")
    axis.set_ylim(0, 1)
    config = report["config"]
    axis.set_title(
        f"{config['allocation']['policy']} allocation, {config['learner']['advantage']}, {report['outcome']}"
    )
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
