"""How long a vLLM stands still for new weights, from the learner's GPU by NCCL and from the learner's file.

Needs two GPUs, and vLLM: the sender is on the first, vLLM on the second. The model is one of `gpu_learner`'s, with
random weights in bfloat16; its versions differ in every tensor. After every update the canary's log-probs are compared
with those of a plain forward pass, as a producer does. Without two GPUs, `--ways file --size tiny` tries the rest.

    python -m benchmarks.gpu_nccl --json [--size 0.5b|1.5b|7b|tiny] [--ways nccl file] [--updates 5]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from benchmarks.gpu_learner import SIZES, make_model
from benchmarks.report import finish, free_address, machine, parser, say
from gvm_stream.config import StreamSection
from gvm_stream.learner.beside import beside
from gvm_stream.learner.canary import canary_of
from gvm_stream.learner.publish import publish
from gvm_stream.producers.causal_lm import expected_shapes
from gvm_stream.producers.engine_thread import difference_from
from gvm_stream.vllm import environment
from gvm_stream.wire.messages import WeightsInfo

Way = Literal["file", "nccl"]
MAX_LENGTH = 2048


def published(model_path: Path, size: str, folder: Path, count: int) -> list[WeightsInfo]:
    """Saves the model, too."""
    model = make_model(size, "cpu")
    torch.nn.Module.to(model, torch.bfloat16)  # in place; the override of transformers is not typed
    model.save_pretrained(model_path)
    infos = []
    for version in range(count):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 0.02 * (version % 2))
        weights = {name: weight.detach() for name, weight in model.state_dict().items()}
        infos.append(publish(weights, folder, version, "", canary=canary_of(model, weights), keep=count))
        say(f"version {version} written: {infos[-1].size / 1e9:.2f} GB")
    return infos


@contextmanager
def visible(gpu: str) -> Iterator[None]:
    """To processes that start meanwhile."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def measure(way: Way, model_path: Path, folder: Path, infos: Sequence[WeightsInfo]) -> dict[str, Any]:
    from gvm_stream.vllm.engine import VllmEngine, nccl_weights, start_vllm

    stream = StreamSection(nccl_address=free_address())
    section = msgspec.json.encode(stream).decode()
    with visible("0"):
        sender = (
            beside("gvm_stream.vllm.nccl_sender", str(folder), section, "cuda:0") if way == "nccl" else nullcontext()
        )
        sender.__enter__()
    try:
        options = {"gpu_memory_utilization": 0.5} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 1 << 28}
        shapes = expected_shapes(str(model_path))
        llm = start_vllm(
            str(model_path), slots=8, max_length=MAX_LENGTH, dtype="bfloat16", seed=0, options=options, weights=way
        )
        pull = nccl_weights(llm, stream, "benchmark", shapes).pull if way == "nccl" else None
        engine = VllmEngine(
            llm, shapes, slots=8, max_length=MAX_LENGTH, end_tokens=(), kv_policy="recompute", pull=pull
        )
        seconds, differences = [], []
        for info in infos:
            started = time.perf_counter()
            engine.load_weights(Path(info.path), info.version)
            seconds.append(time.perf_counter() - started)
            differences.append(difference_from(info.canary, engine))
            say(f"{way}: version {info.version} in {seconds[-1]:.2f} s, canary off by {differences[-1]:.2g} nats")
        engine.close()
    finally:
        sender.__exit__(None, None, None)
    return {
        "first_seconds": seconds[0],
        "seconds": statistics.median(seconds[1:]),
        "gigabytes_per_second": infos[0].size / 1e9 / statistics.median(seconds[1:]),
        "largest_canary_difference": max(found for found in differences if found is not None),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--size", choices=sorted(SIZES), default="1.5b")
    arguments.add_argument("--ways", nargs="+", choices=("nccl", "file"), default=["nccl", "file"])
    arguments.add_argument("--updates", type=int, default=5, help="after the first, which also joins the group")
    options = arguments.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "1")  # of this process: the sender has the first
    environment.prepare()
    result: dict[str, Any] = {"size": options.size, "torch": torch.__version__} | machine()
    if torch.cuda.is_available():
        result["device"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as work:
        model_path, folder = Path(work) / "model", Path(work) / "weights"
        infos = published(model_path, options.size, folder, options.updates + 1)
        result |= {way: measure(way, model_path, folder, infos) for way in options.ways}
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
