"""Checkpoints that are complete or not there.

`root/step-000123/` is a Hugging Face folder (model and tokenizer) with three things more: `trainer/` (moments,
counters, random states, as torch.distributed.checkpoint has them: every rank writes its part, any number of ranks can
read it), `state.json` (step and version) and `manifest.json` (size and blake2b-128 of every other file). It is written
under a hidden name beside its place, synced, and renamed; only then older checkpoints go, and only when they are gone
it is announced. All ranks see `root`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map_only
from transformers import AutoTokenizer, PreTrainedModel

from gvm_stream.errors import ModelError
from gvm_stream.learner.distributed import Ranks, gather_weights, weights_of
from gvm_stream.weights import checksum, let_read

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial-"
_MANIFEST = "manifest.json"
_TRAINER = "trainer"

# By torch.distributed.checkpoint, where there is one rank. For good: filters of a thread are those of all.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    step: int
    """Training batches behind it."""
    version: int
    """Newest policy version of that moment."""


class _State(msgspec.Struct, frozen=True):
    step: int
    version: int


class _File(msgspec.Struct, frozen=True):
    size: int
    blake2b: str


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, _File]


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """What a checkpoint is made of, copied: the training may go on while it is written."""

    state: _State
    weights: dict[str, Tensor]
    trainer: dict[str, Any]


class Saver:
    """Writes the checkpoints of a run in a thread, one at a time. Every rank has one and calls it alike."""

    def __init__(
        self,
        root: Path,
        model: PreTrainedModel,
        tokenizer_source: str,
        keep: int,
        ranks: Ranks,
        *,
        complete: Iterable[int],
        announce: Callable[[tuple[int, ...]], None],
    ) -> None:
        """`tokenizer_source` is a folder or a hub name, `complete` are the steps of the checkpoints that the run goes
        on from. `announce` is called in the thread, on rank 0, with the steps of all that are kept,
        and 0 while they are fewer than `keep`."""
        self._root, self._model, self._tokenizer_source = root, model, tokenizer_source
        self._keep, self._ranks, self._announce = keep, ranks, announce
        self._complete = set(complete)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def save(self, step: int, version: int, trainer_state: dict[str, Any]) -> Path:
        """Begin to write `root/step-STEP`, of which there is nothing until it is complete; then the newest `keep` that
        are complete stay, and nothing else.

        Waits for the save before. Raises `ModelError` if that cannot be written, leaving what was there.
        """
        self.wait()
        final = self._root / f"step-{step:06d}"
        if self._ranks.first:
            for left in [*self._root.glob(f"{_PARTIAL}*"), final]:  # of a killed save; damaged or of a history left
                shutil.rmtree(left, ignore_errors=True)
        copied = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), trainer_state)
        snapshot = _Snapshot(_State(step, version), gather_weights(weights_of(self._model), self._ranks), copied)
        self._writing = self._thread.submit(self._write, final, snapshot)
        return final

    def wait(self) -> None:
        """Until the last save is complete. Raises `ModelError` if it cannot be written."""
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, final: Path, snapshot: _Snapshot) -> None:
        partial = self._root / f"{_PARTIAL}{final.name}"
        try:
            partial.mkdir(parents=True, exist_ok=True)
            save(snapshot.trainer, checkpoint_id=partial / _TRAINER, process_group=self._ranks.save)
            if self._ranks.first:
                self._model.save_pretrained(partial, state_dict=snapshot.weights)
                for file in partial.glob("*.safetensors"):
                    let_read(file)
                AutoTokenizer.from_pretrained(self._tokenizer_source).save_pretrained(partial)
                (partial / "state.json").write_bytes(msgspec.json.encode(snapshot.state))
                _seal(partial)
                partial.rename(final)
                _sync([self._root])
        except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
            shutil.rmtree(partial, ignore_errors=True)
            step = snapshot.state.step
            raise ModelError(
                f"checkpoint of step {step} cannot be saved in {self._root}: {_cause(error, self._root)}"
            ) from error
        if self._ranks.first:
            log.info("checkpoint %s", final)
            self._complete = set(sorted({*self._complete, snapshot.state.step})[-self._keep :])
            for step, path in _steps(self._root):
                if step not in self._complete:
                    shutil.rmtree(path, ignore_errors=True)
            # As long as there are fewer, the base model is one of those to begin with.
            base = {0} if len(self._complete) < self._keep else set()
            self._announce(tuple(sorted({*self._complete, *base})))


def complete_checkpoints(root: Path) -> list[Checkpoint]:
    """The checkpoints whose files are all what the manifest says, newest first; each byte of them is read.

    Damaged ones are passed over with a warning.
    """
    found = []
    for step, path in reversed(_steps(root)):
        if damage := _damage(path):
            log.warning("checkpoint %s is passed over: %s", path, damage)
        else:
            state = msgspec.json.decode((path / "state.json").read_bytes(), type=_State)
            found.append(Checkpoint(path=path, step=step, version=state.version))
    return found


def set_aside(checkpoints: Iterable[Checkpoint]) -> None:
    """Rename those of a history that the run does not go on from, so that no later start takes them for its own."""
    for checkpoint in checkpoints:
        place = checkpoint.path.with_name(f"left-{checkpoint.path.name}")
        shutil.rmtree(place, ignore_errors=True)
        checkpoint.path.rename(place)
        log.warning("the run goes on from before checkpoint %s: it is now %s", checkpoint.path, place.name)


def read_trainer_state(checkpoint: Path, state: dict[str, Any], ranks: Ranks) -> None:
    """Replace the values of `state`, which has the keys of what `Saver.save` was given; tensors in place. Keys of a
    rank that there was not when it was saved go."""
    reader = FileSystemReader(checkpoint / _TRAINER)
    saved = {key.partition(".")[0] for key in reader.read_metadata().state_dict_metadata}
    for key in [key for key in state if key not in saved]:
        del state[key]
    load(state, storage_reader=reader, process_group=ranks.talk)


def _steps(root: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders by step, oldest first, damaged ones included."""
    if not root.is_dir():
        return []
    return sorted((int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)))


def _seal(folder: Path) -> None:
    """Write the manifest and bring everything to the disk."""
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    manifest = _Manifest({name: _File(p.stat().st_size, checksum(p)) for name, p in files.items()})
    (folder / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    _sync([*files.values(), folder / _MANIFEST, folder / _TRAINER, folder])


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint folder; empty if it is intact."""
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=_Manifest)
        for name, file in manifest.files.items():
            size = (path / name).stat().st_size
            if size != file.size:
                return f"{name} has {size} bytes, expected {file.size}"
            if checksum(path / name) != file.blake2b:
                return f"{name} has another checksum than its manifest says"
    except OSError as error:
        return f"{Path(error.filename).name if error.filename else path.name}: {error.strerror}"
    except msgspec.MsgspecError as error:
        return f"{_MANIFEST} cannot be read: {error}"
    return "" if "state.json" in manifest.files else f"{_MANIFEST} does not list state.json"


def _sync(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _cause(error: BaseException, root: Path) -> str:
    """In a few words: of an error that torch has wrapped, what it has wrapped."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    origin = error if isinstance(error, OSError) else error.__context__
    text = origin.strerror if isinstance(origin, OSError) and origin.strerror else str(error).partition("\n")[0]
    free = shutil.disk_usage(root if root.is_dir() else root.anchor or ".").free
    return f"{text} ({free / 2**20:.0f} MiB free there)"
