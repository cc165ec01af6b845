"""What the policies of a simulation gained over the uniform one: by seed, summarised, and as a table for people.

Everything is compared at equal tokens: noise and bounds are multiplied with tokens over uniform's, because averaging
more steps makes up for them; the squared bias is not, because no averaging does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from gvm_stream.allocator.arrays import Floats
from gvm_stream.simulate.experiment import Result
from gvm_stream.simulate.measure import BINS

BIN_NAMES = tuple(f"{low:g}-{high:g}" for low, high in pairwise(BINS))
PIPE_WIDTH = 160
"""Columns of a table that does not go to a terminal."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy, means over seeds; None where a figure cannot be had. `over_uniform` is at equal tokens."""

    policy: str
    seeds: int
    variance_over_uniform: float | None
    """The bound, mean V / (n - offset) with true values."""
    mse_over_uniform: float | None
    """The exact mean squared error."""
    bias_share: float | None
    """Of squared bias in the mean squared error; None for a single step."""
    share_of_oracle_gain: float | None
    """What of the oracle's decrease of the bound was reached; None if uniform numbers are the best."""
    oracle_over_uniform: float | None
    tokens_per_prompt: float | None
    """In a step, whatever became of them."""
    rollouts_per_prompt: float | None
    """Those that are trained on."""
    predicted_over_uniform: float | None
    """The bound with the allocator's own estimates in place of the true values."""
    shadow_gain: float | None
    """The allocator's own measurement (`gain.py`), shadow-uniform visits over the others; above 1 is a gain."""
    resolved: dict[str, float | None]
    """Share of visits with an accepted rollout, by true acceptance rate."""
    standard_errors: dict[str, float | None]
    """Of every figure above, those of `resolved` by range; None for a single seed."""


def report(policy: str, results: Sequence[Result], uniform: Sequence[Result]) -> Report:
    """Compare a policy with the uniform one on the same seeds."""

    def of(name: str, runs: Sequence[Result] = results) -> Floats:
        return np.array([getattr(run.measured, name) for run in runs])

    error, bias2 = of("error"), of("bias_squared")
    lasting = np.nan_to_num(bias2)  # of a single step it is not known
    cost = of("tokens") / of("tokens", uniform)
    bound = cost * of("bound") / of("bound", uniform)
    oracle = np.array([run.oracle_over_uniform for run in results])
    figures: dict[str, Floats] = {
        "variance_over_uniform": bound,
        "mse_over_uniform": (cost * (error - lasting) + lasting) / of("error", uniform),
        "bias_share": bias2 / error,
        "share_of_oracle_gain": np.divide(1 - bound, 1 - oracle, out=np.full(len(bound), np.nan), where=oracle < 1),
        "oracle_over_uniform": oracle,
        "tokens_per_prompt": of("tokens"),
        "rollouts_per_prompt": np.array([run.measured.rollouts.mean() for run in results]),
        "predicted_over_uniform": cost * [run.predicted for run in results],
        "shadow_gain": np.array([run.shadow_gain for run in results], np.float64),
    }
    shares = np.array([run.measured.resolved_by_difficulty() for run in results])
    resolved = dict(zip(BIN_NAMES, shares.T, strict=True))
    return Report(
        policy=policy,
        seeds=len(results),
        **{name: _mean(values) for name, values in figures.items()},
        resolved={name: _mean(values) for name, values in resolved.items()},
        standard_errors={name: _standard_error(values) for name, values in (figures | resolved).items()},
    )


def _mean(values: Floats) -> float | None:
    """Over the seeds that have the figure."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _standard_error(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else None


def show(reports: Sequence[Report]) -> None:
    """Print two tables."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    columns = {
        "variance_over_uniform": "variance",
        "mse_over_uniform": "mse",
        "bias_share": "bias share",
        "share_of_oracle_gain": "of oracle gain",
        "tokens_per_prompt": "tokens",
        "rollouts_per_prompt": "rollouts",
        "predicted_over_uniform": "predicted",
        "shadow_gain": "shadow gain",
    }
    figures = Table("policy", *columns.values(), title="over uniform at equal tokens; per prompt and step")
    resolved = Table("policy", *BIN_NAMES, title="visits with an accepted rollout, by acceptance rate")
    for one in reports:
        figures.add_row(one.policy, *(_text(getattr(one, name), one.standard_errors[name]) for name in columns))
        resolved.add_row(one.policy, *(_text(share, one.standard_errors[name]) for name, share in one.resolved.items()))
    console.print(figures, resolved, sep="\n")


def _text(mean: float | None, standard_error: float | None) -> str:
    if mean is None:
        return "-"
    digits = 0 if mean >= 100 else 3
    number = f"{mean:.{digits}f}"
    return number if standard_error is None else f"{number} ±{standard_error:.{digits}f}"
