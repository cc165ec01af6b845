"""Real `vllm serve` processes for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gvm_stream.producers.causal_lm import expected_shapes
from gvm_stream.vllm.environment import hide_unmatched
from gvm_stream.vllm.server_engine import VllmServerEngine
from tests.stream_processes import free_address
from tests.tiny_models import VOCABULARY

START_S = 170.0
FLAGS = (
    "--logprobs-mode=processed_logprobs",
    "--dtype=float32",
    "--enforce-eager",
    "--kv-cache-memory-bytes=134217728",
    "--max-num-seqs=32",
    "--skip-tokenizer-init",
    "--block-size=32",
    "--enable-scale-out",
)


@dataclass(frozen=True)
class Served:
    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """It and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def vllm_serve(
    model: Path,
    log: Path,
    *,
    dev_mode: bool = True,
    module: str = "vllm.entrypoints.openai.api_server",
    backend: str = "gvm",
) -> Iterator[Served]:
    hide_unmatched()
    address = free_address().removeprefix("tcp://")
    host, port = address.split(":")
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": str(int(dev_mode)),
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    # What `vllm serve` runs; the command itself looks for a distribution named vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", module, f"--model={model}", f"--host={host}", f"--port={port}"]
    command.append(f'--weight-transfer-config={{"backend": "{backend}"}}')
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *FLAGS], stdout=out, stderr=out, env=environment, start_new_session=True)
    served = Served(f"http://{address}", process)
    try:
        wait_until_ready(served.url, process, log)
        yield served
    finally:
        served.kill()


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"vllm serve did not start: {log.read_text()[-3000:]}")


_shared: dict[str, Served] = {}
"""Architecture -> the one server for all tests of this process; `close_shared` ends them."""
_ends = ExitStack()
_last: dict[str, VllmServerEngine] = {}
"""By URL."""


def shared_server(model: Path) -> Served:
    architecture = repr(expected_shapes(str(model)))
    if architecture not in _shared:
        folder = Path(_ends.enter_context(tempfile.TemporaryDirectory()))
        _shared[architecture] = _ends.enter_context(vllm_serve(model, folder / "log"))
    return _shared[architecture]


def shared_server_engine(
    model: Path, *, slots: int, max_length: int, end_tokens: tuple[int, ...] = ()
) -> VllmServerEngine:
    url = shared_server(model).url
    if url in _last:
        _last[url].close()
    engine = VllmServerEngine(
        [url],
        expected_shapes(str(model)),
        slots=slots,
        max_length=max_length,
        vocabulary=VOCABULARY,
        end_tokens=end_tokens,
        kv_policy="recompute",
    )
    _last[url] = engine
    engine.load_weights(model / "model.safetensors", 0)
    return engine


def close_shared() -> None:
    for engine in _last.values():
        engine.close()
    _ends.close()
