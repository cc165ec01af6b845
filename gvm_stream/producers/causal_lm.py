"""Loading a Hugging Face causal LM for the engine, and replacing its weights in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from gvm_stream.errors import ModelError, WeightsError

FLOATING = ("F64", "F32", "F16", "BF16")


def load_causal_lm(path: str, *, dtype: torch.dtype, device: torch.device, max_length: int) -> PreTrainedModel:
    """Load the checkpoint folder or hub name `path` for inference on sequences of up to `max_length` tokens."""
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as problem:
        reason = " ".join(str(problem).split())
        raise ModelError(f"model.path = {path!r} cannot be loaded as a causal language model: {reason}") from problem
    model, info = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    missing = info["missing_keys"]
    if missing:  # transformers would go on with random numbers
        raise ModelError(f"the checkpoint {path!r} lacks {_some(missing)}; all weights of the model were expected")
    _check_attention(model.config.get_text_config(decoder=True), path, max_length)
    model.requires_grad_(False)
    nn.Module.to(model, device)  # in place; the override of transformers is not typed
    return model


def copy_weights(model: PreTrainedModel, path: Path) -> None:
    """Overwrite the weights of `model` by those of a safetensors file, cast to its dtype. All or nothing: see
    `check_weights_file`."""
    weights = model.state_dict(keep_vars=True)
    check_weights_file(shapes_of(model), path)
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                weights[name].copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as problem:
        raise WeightsError(f"the weights file {path} cannot be read as safetensors: {problem}") from problem


@dataclass(frozen=True)
class Shapes:
    """What a file with all weights of a model must hold."""

    shapes: dict[str, tuple[int, ...]]
    tied: list[frozenset[str]]
    """Names of the same tensor; one of each is enough. Every name is in one of these."""


def shapes_of(model: PreTrainedModel) -> Shapes:
    weights = model.state_dict(keep_vars=True)
    same: dict[int, set[str]] = {}
    for name, weight in weights.items():
        same.setdefault(id(weight), set()).add(name)
    return Shapes({name: tuple(weight.shape) for name, weight in weights.items()}, [*map(frozenset, same.values())])


def expected_shapes(path: str) -> Shapes:
    """Of the model of a checkpoint folder or hub name, without loading its weights. Raises `ModelError`."""
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, RuntimeError, ImportError) as problem:
        reason = " ".join(str(problem).split())
        raise ModelError(f"model.path = {path!r} cannot be loaded as a causal language model: {reason}") from problem
    return shapes_of(model)


def check_weights_file(expected: Shapes, path: Path) -> None:
    """Raise `WeightsError` unless a safetensors file holds exactly the expected names (of tied weights, one name is
    enough) in the expected shapes."""
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (OSError, SafetensorError) as problem:
        raise WeightsError(f"the weights file {path} cannot be read as safetensors: {problem}") from problem
    check_tensors(expected, found, f"the weights file {path}")


def check_tensors(expected: Shapes, found: Mapping[str, tuple[str, tuple[int, ...]]], where: str) -> None:
    """The same of tensors by name, each as (dtype as safetensors calls it, shape), that are found `where`."""
    missing = [min(same) for same in expected.tied if not same & found.keys()]
    if missing:
        raise WeightsError(f"{where} lacks {_some(missing)}; all weights of the model were expected")
    unknown = found.keys() - expected.shapes.keys()
    if unknown:
        raise WeightsError(f"{where} holds {_some(unknown)}, which the model does not have")
    for name, (kind, shape) in found.items():
        if shape != expected.shapes[name] or kind not in FLOATING:
            raise WeightsError(
                f"{name} in {where} is {kind} {list(shape)}; "
                f"a floating-point tensor {list(expected.shapes[name])} was expected"
            )


def _check_attention(config: PreTrainedConfig, path: str, max_length: int) -> None:
    """Refuse what would run and be wrong: the engine's mask is causal attention to the whole prefix, and no more."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < max_length:
        raise ModelError(f"the model {path!r} has {positions} positions; at least max_length = {max_length} expected")
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"]
    if "sliding_attention" in kinds and window is not None and window < max_length:
        raise ModelError(
            f"the model {path!r} attends to a window of {window} tokens; the transformers engine needs a window of at "
            f"least max_length = {max_length}"
        )
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other:
        raise ModelError(f"the model {path!r} has layers of type {', '.join(other)}; only full attention is supported")


def _some(names: set[str] | list[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
