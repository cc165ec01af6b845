"""Checks of model and data, and of whether the model fits."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal

from gvm_stream.config import Config
from gvm_stream.config_verifier import used_kinds
from gvm_stream.data.check import Problem, read_gold, read_messages
from gvm_stream.data.sources import Split, read_rows
from gvm_stream.doctor.finding import Finding, gib
from gvm_stream.errors import GvmStreamError, ModelError
from gvm_stream.wire.sockets import is_loopback, parse_address

ROWS = 1000
"""Rows looked at per split; `gvm-stream verify check` looks at all of them."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
TRAINING_BYTES = 16
"""Per parameter in the learner: master, gradient and AdamW's two moments in float32."""
REFERENCE_BYTES = 4
"""Per parameter of the frozen start model that learner.kl_coefficient asks for."""
CHECKPOINT_BYTES = 12
"""Per parameter in a checkpoint: master and moments."""
PUBLISHED = 4
"""Weight files that are kept at a time."""


def uses_hub(config: Config) -> bool:
    """Whether model or data are hub names, not folders."""
    data = config.data
    return not Path(config.model.path).is_dir() or (data.source == "hub" and not Path(data.train).is_dir())


def model(path: str) -> Finding:
    """Configuration, tokenizer and weights, without loading the weights."""
    from gvm_stream.data.encode import end_token_ids
    from gvm_stream.data.prepare import load_tokenizer

    try:
        count = parameters(path)
        end_token_ids(load_tokenizer(path), path)
    except GvmStreamError as error:
        return Finding("fail", str(error), "model.path must be a checkpoint folder or a hub name")
    found = f"{path}: {count / 1e6:,.3g} M parameters"
    weights = _weights(path)
    if weights == "missing":
        return Finding("fail", f"{found}, but no *.safetensors file is there", "save the model with its weights")
    if weights == "remote":
        advice = "download it to every host before: the first start of each process would wait for that"
        return Finding("warn", f"{found}, weights not in this host's cache", advice)
    return Finding("ok", found)


@cache
def parameters(path: str) -> int:
    """Parameters of the model at `path`, tied ones once. Raises ModelError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"model.path = {path!r} is no causal language model that can be loaded: {reason}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def _weights(path: str) -> Literal["local", "remote", "missing"]:
    from huggingface_hub import try_to_load_from_cache

    if Path(path).is_dir():
        return "local" if any(Path(path).glob("*.safetensors")) else "missing"
    names = ("model.safetensors", "model.safetensors.index.json")
    return "local" if any(isinstance(try_to_load_from_cache(path, name), str) for name in names) else "remote"


def memory(config: Config) -> Finding:
    """Whether the learner's weights, gradients and moments fit into its device or, under torchrun, into all of them.

    Too little memory is a failure only where all processes are on this machine; else the learner may be on another.
    """
    try:
        count = parameters(config.model.path)
    except ModelError:
        return Finding("warn", "not known: the model cannot be loaded", "see the model")
    training = count * (TRAINING_BYTES + (REFERENCE_BYTES if config.learner.kl_coefficient else 0))
    sampling = count * DTYPE_BYTES[config.model.dtype]
    need = (
        f"the learner needs {gib(training)} for weights, gradients and AdamW, before activations; a producer "
        f"{gib(sampling)} before its key-value cache"
    )
    host, _ = parse_address(config.stream.address, "stream.address")
    too_small: Literal["fail", "warn"] = "fail" if is_loopback(host) else "warn"
    if not config.learner.device.startswith("cuda"):
        free = available_memory()
        found = f"{need}; {gib(free)} of memory are available"
        return Finding(too_small, found, "a smaller model, or more memory") if training > free else Finding("ok", found)
    totals = gpu_memory()
    if not totals:
        return Finding("warn", f"{need}; there is no GPU to compare with", "see the GPUs")
    found = f"{need}; the GPUs of this host have {gib(max(totals))} each, {gib(sum(totals))} in all"
    if len(totals) == 1 and config.producer.device.startswith("cuda") and training + sampling > totals[0]:
        return Finding(too_small, found, "one GPU is too small for learner and producer: take more, or larger ones")
    if training > sum(totals):
        return Finding(too_small, found, "more GPUs: torchrun divides the model among those of all its hosts")
    if training > max(totals):
        ranks = int(training // max(totals)) + 1
        return Finding("warn", found, f"start the learner under torchrun with at least {ranks} processes")
    return Finding("ok", found)


def gpu_memory() -> list[int]:
    """Bytes of each GPU."""
    import torch

    return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be had without swapping."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def disk_needed(config: Config) -> float:
    """Bytes that `run.dir` takes in the course of the run: checkpoints, one more while it is written, and published
    weights; 0 if the model is not known."""
    try:
        count = parameters(config.model.path)
    except ModelError:
        return 0.0
    checkpoints = (config.learner.keep_checkpoints + 1) * CHECKPOINT_BYTES
    return float(count * (checkpoints + PUBLISHED * DTYPE_BYTES[config.model.dtype]))


def data(config: Config) -> Finding:
    """The first rows of each split, as the allocator would read them."""
    splits: list[Split] = ["train"]
    if config.data.heldout or config.data.source == "reasoning_gym":
        splits.append("heldout")
    found, usable, refused = [], [], 0
    try:
        for split in splits:
            rows, problems = _first_rows(config, split)
            usable.append(rows - problems.total())
            refused += problems.total()
            bad = "".join(f", {number} {problem}" for problem, number in sorted(problems.items()))
            part = "the first" if rows == ROWS else "all"
            found.append(f"{split}: {usable[-1]:,} of {part} {rows:,} rows usable{bad}")
    except GvmStreamError as error:
        return Finding("fail", str(error), "correct the [data] section")
    text, advice = "; ".join(found), "gvm-stream verify check --config FILE names the rows"
    if not all(usable):
        return Finding("fail", text, advice)
    return Finding("warn", text, advice) if refused else Finding("ok", text)


def _first_rows(config: Config, split: Split) -> tuple[int, Counter[str]]:
    """(rows looked at, those that cannot be used by problem)"""
    by_task = "reasoning_gym" in used_kinds(config.verifier)
    rows, problems = 0, Counter[str]()
    for rows, row in enumerate(islice(read_rows(config.data, split, entries=by_task), ROWS), 1):  # noqa: B007
        messages = read_messages(row.prompt, chat=config.data.format == "chat")
        problem = messages if isinstance(messages, Problem) else read_gold(row, config.verifier)
        if isinstance(problem, Problem):
            problems[problem.problem] += 1
    return rows, problems
