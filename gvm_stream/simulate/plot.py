"""The error of policies against the tokens they spent, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gvm_stream.simulate.measure import Measured


def plot_errors(measured: Mapping[str, Sequence[Measured]], path: Path) -> None:
    """Mean squared error of the mean of all gradients so far, against all tokens so far; mean over seeds.

    With both axes logarithmic the horizontal distance of two curves is the factor of tokens that one saves.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for policy, seeds in measured.items():
        tokens = np.mean([seed.generated for seed in seeds], axis=0)
        error = np.mean([seed.error_so_far() for seed in seeds], axis=0)
        axis.loglog(tokens, error, marker=".", label=policy)
    axis.set_xlabel("tokens per prompt, whatever became of them")
    axis.set_ylabel("mean squared error of the mean gradient")
    axis.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
