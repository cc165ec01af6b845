"""External vLLM servers beyond the contract: replicas, servers that cannot be trained with, servers that die."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gvm_stream.errors import ModelError
from gvm_stream.producers.causal_lm import expected_shapes
from gvm_stream.producers.engine import Request
from gvm_stream.vllm.server_engine import VllmServerEngine
from tests.stream_processes import CONFIG, free_address
from tests.tiny_models import VOCABULARY, random_prompts, requests_for, run, save_tiny_model
from tests.vllm_server_process import Served, shared_server, vllm_serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

ARITHMETIC = CONFIG.parent / "arithmetic" / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "one-head", seed=0)


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with vllm_serve(ARITHMETIC, tmp_path_factory.mktemp("serve") / "log") as served:
        yield served


def engine_for(model: Path, *servers: str, slots: int = 8) -> VllmServerEngine:
    return VllmServerEngine(
        servers,
        expected_shapes(str(model)),
        slots=slots,
        max_length=300,
        vocabulary=VOCABULARY,
        end_tokens=(),
        kv_policy="recompute",
    )


def test_replicas_share_the_work_and_all_take_the_weights(model: Path, tmp_path: Path) -> None:
    url = shared_server(model).url
    other = save_tiny_model(tmp_path / "other", "one-head", seed=1)
    engine = engine_for(model, url, url.replace("127.0.0.1", "localhost"))
    try:
        engine.load_weights(other / "model.safetensors", 1)
        requests = requests_for(random_prompts(16), max_tokens=100)
        for request in requests:
            engine.submit(request)
        engine.step()
        servers = [sent.server for sent in engine._sent.values()]
        assert abs(servers.count(0) - servers.count(1)) <= 1
        assert set(servers) == {0, 1}
        completions = run(engine, [])
        assert {completion.spans for completion in completions.values()} == {((1, 0, 100),)}
        scores = engine.score(random_prompts(1, shortest=20)[0])
        assert scores.shape[0] == 2
        np.testing.assert_array_equal(scores[0], scores[1])
    finally:
        engine.close()


def test_siblings_of_a_prompt_go_to_the_same_replica_while_it_is_not_fuller(model: Path) -> None:
    url = shared_server(model).url
    engine = engine_for(model, url, url.replace("127.0.0.1", "localhost"), slots=8)
    try:
        first, second = random_prompts(2, shortest=10)
        for id, tokens in enumerate([first, second, first, second, first]):
            engine.submit(Request(id=id, prompt_tokens=tokens, max_tokens=200, temperature=1.0))
        engine.step()
        assert [sent.server for sent in engine._sent.values()] == [0, 1, 0, 1, 0]
    finally:
        engine.close()


def test_a_server_without_the_routes_for_training_is_refused_with_what_it_lacks(model: Path, tmp_path: Path) -> None:
    threads = threading.active_count()
    with vllm_serve(model, tmp_path / "log", dev_mode=False) as served:
        with pytest.raises(ModelError, match=f"the server {served.url} has no route .*VLLM_SERVER_DEV_MODE=1"):
            engine_for(model, served.url)
        assert threading.active_count() == threads
        served.kill()
        with pytest.raises(ModelError, match=f"the server {served.url} is not to be reached"):
            engine_for(model, served.url)


def test_the_whole_stream_learns_through_a_server_and_ends_with_a_sentence_when_it_dies(
    arithmetic: Served, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        *("-m", "gvm_stream", "run", str(CONFIG), "--plain", "--eval.prompts=8", "--eval.every_steps=0"),
        *("--producer.engine=vllm-server", f'--producer.servers=["{arithmetic.url}"]', "--producer.slots=32"),
        *("--allocation.prompts_per_step=8", f"--stream.address={free_address()}", "--metrics.port=0"),
    ]
    done = subprocess.run(
        [*command, f"--run.dir={tmp_path / 'run'}", "--run.steps=3"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["final_version"], report["ledger_conserved"]) == (3, True)

    endless = [*command, f"--run.dir={tmp_path / 'cut'}", "--run.steps=1000000", "--run.restarts=0"]
    running = subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    for line in running.stdout:
        if "batch 2/" in line or "batch 3/" in line or "version 2" in line:
            break
    arithmetic.kill()
    deadline = time.monotonic() + 100
    rest = running.communicate(timeout=deadline - time.monotonic())[0]
    assert running.returncode == 1
    assert f"the server {arithmetic.url} " in rest + "".join(
        path.read_text() for path in (tmp_path / "cut" / "logs").iterdir()
    )
