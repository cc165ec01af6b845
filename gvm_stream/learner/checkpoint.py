"""Checkpoints that are complete or not there.

`root/step-000123/` is a Hugging Face folder (model and tokenizer) with three files more: `trainer.pt` (optimizer and
counters), `state.json` (step and version) and `manifest.json` (size and blake2b-128 of every other file). It is
written under a hidden name beside its place, synced, and renamed; older checkpoints go only after that.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel

from gvm_stream.errors import ModelError
from gvm_stream.weights import checksum

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial-"
_MANIFEST = "manifest.json"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    step: int
    """Training batches behind it."""
    version: int
    """Policy version of its weights."""


class _State(msgspec.Struct, frozen=True):
    step: int
    version: int


class _File(msgspec.Struct, frozen=True):
    size: int
    blake2b: str


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, _File]


def save_checkpoint(
    root: Path,
    step: int,
    version: int,
    model: PreTrainedModel,
    tokenizer_source: str,
    trainer_state: dict[str, Any],
    keep: int,
) -> Path:
    """Write `root/step-STEP`, then delete all but the newest `keep` - 1 of those before it; return its path.

    `tokenizer_source` is a folder or a hub name. Raises `ModelError` if it cannot be written, leaving what was there.
    """
    final = root / f"step-{step:06d}"
    partial = root / f"{_PARTIAL}{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
        partial.mkdir()
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(tokenizer_source).save_pretrained(partial)
        with (partial / "trainer.pt").open("wb") as file:  # a file of Python's, so that a failure has an errno
            torch.save(trainer_state, file)
        (partial / "state.json").write_bytes(msgspec.json.encode(_State(step, version)))
        files = {str(p.relative_to(partial)): p for p in sorted(partial.rglob("*")) if p.is_file()}
        manifest = _Manifest({name: _File(p.stat().st_size, checksum(p)) for name, p in files.items()})
        (partial / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        _sync([*files.values(), partial / _MANIFEST, partial])
        if final.exists():  # damaged, or of a history that a resumed run has left
            final.rename(root / f"{_PARTIAL}replaced")
        partial.rename(final)
        _sync([root])
        shutil.rmtree(root / f"{_PARTIAL}replaced", ignore_errors=True)
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: torch.save wraps an OSError in it
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelError(f"checkpoint of step {step} cannot be saved in {root}: {_cause(error, root)}") from error
    older = [path for found, path in _steps(root) if found < step]
    for path in older[: max(0, len(older) - keep + 1)]:
        shutil.rmtree(path, ignore_errors=True)
    return final


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


def load_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given as `trainer_state`, tensors on the CPU."""
    state: dict[str, Any] = torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True)
    return state


def _steps(root: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders by step, oldest first, damaged ones included."""
    if not root.is_dir():
        return []
    return sorted((int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)))


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


def _cause(error: Exception, root: Path) -> str:
    origin = error if isinstance(error, OSError) else error.__context__
    text = origin.strerror if isinstance(origin, OSError) and origin.strerror else str(error).partition("\n")[0]
    free = shutil.disk_usage(root if root.is_dir() else root.anchor or ".").free
    return f"{text} ({free / 2**20:.0f} MiB free there)"
