"""Experiment trackers that people use already: what `Metrics.scalars` gives, under the names that Prometheus has.

Every process has a tracker run of its own, named by its role, in the group of its run. Nothing leaves the machine: W&B
writes offline (`wandb sync` uploads it), trackio into its local folder (`trackio show`), TensorBoard into the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gvm_stream.errors import ConfigError

TrackerName = Literal["tensorboard", "wandb", "trackio"]
Log = Callable[[int, Mapping[str, float]], None]
"""(training batches done, value by name). Does not wait for a disk or a network."""

PROJECT = "gvm-stream"


class Tracked(NamedTuple):
    """What a tracker is told of the process."""

    folder: Path
    """Of the run."""
    role: str
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.folder.name}-{self.role}"


@contextmanager
def open_trackers(names: Sequence[TrackerName], tracked: Tracked) -> Iterator[Log]:
    """Log to these trackers while the block runs. Raises ConfigError for one that is not installed."""
    with ExitStack() as stack:
        logs = []
        for name in names:
            try:
                logs.append(stack.enter_context(_OPEN[name](tracked)))
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f'metrics.trackers names "{name}", but {error.name} is not installed: '
                    f"pip install 'gvm-stream[{name}]'"
                ) from error

        def log(step: int, scalars: Mapping[str, float]) -> None:
            for each in logs:
                each(step, scalars)

        yield log


@contextmanager
def _tensorboard(tracked: Tracked) -> Iterator[Log]:
    writer = import_module("tensorboard.summary").Writer(str(tracked.folder / "tensorboard" / tracked.role))

    def log(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step=step)

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _wandb(tracked: Tracked) -> Iterator[Log]:
    wandb = import_module("wandb")
    run = wandb.init(
        project=PROJECT,
        name=tracked.name,
        group=tracked.folder.name,
        job_type=tracked.role,
        dir=str(tracked.folder),
        config=dict(tracked.config),
        mode="offline",
        settings=wandb.Settings(silent=True, console="off"),  # standard output and error are the process's own
    )
    try:
        yield lambda step, scalars: run.log(dict(scalars), step=step)
    finally:
        run.finish()


@contextmanager
def _trackio(tracked: Tracked) -> Iterator[Log]:
    run = import_module("trackio").init(
        project=PROJECT,
        name=tracked.name,
        group=tracked.folder.name,
        config=dict(tracked.config),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    try:
        yield lambda step, scalars: run.log(dict(scalars), step=step)
    finally:
        run.finish()


_OPEN: Mapping[TrackerName, Callable[[Tracked], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
