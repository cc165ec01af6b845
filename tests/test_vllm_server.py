"""External vLLM servers beyond the contract: replicas, servers that cannot be trained with, servers that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gvm_stream.errors import ModelError, WeightsError
from gvm_stream.producers.causal_lm import expected_shapes
from gvm_stream.producers.engine import Request
from gvm_stream.vllm import server_client, server_engine
from gvm_stream.vllm.server_engine import VllmServerEngine
from tests.stream_processes import CONFIG, free_address
from tests.tiny_models import LONGEST, VOCABULARY, random_prompts, requests_for, run, save_tiny_model
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


def engine_for(model: Path, *servers: str, slots: int = 8, max_length: int = LONGEST) -> VllmServerEngine:
    return VllmServerEngine(
        servers,
        expected_shapes(str(model)),
        slots=slots,
        max_length=max_length,
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


def test_a_temperature_that_vllm_would_change_or_refuse_ends_that_request_only(model: Path) -> None:
    engine = engine_for(model, shared_server(model).url)
    try:
        requests = [
            Request(id=id, prompt_tokens=random_prompts(1)[0], max_tokens=4, temperature=temperature)
            for id, temperature in enumerate([0.001, 0.01, 2.0, 2.5])
        ]
        completions = run(engine, requests)
        assert [completions[id].finish for id in range(4)] == ["error", "length", "length", "error"]
        assert "temperature = 2.5; vLLM samples at 0.01 .. 2" in completions[3].error
    finally:
        engine.close()


def test_an_update_that_the_server_refuses_leaves_it_running_with_what_it_had(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no tensors")
    engine = engine_for(model, shared_server(model).url)
    try:
        engine.load_weights(model / "model.safetensors", 1)
        engine.submit(requests_for(random_prompts(1), max_tokens=200)[0])
        while engine.progress()[0] == 0:
            engine.step()
        with monkeypatch.context() as patched:  # as if the server saw another file than the producer
            patched.setattr(server_engine, "check_weights_file", lambda shapes, path: None)
            with pytest.raises(WeightsError, match="answers update_weights with status 500"):
                engine.load_weights(broken, 2)
        assert engine.version == 1
        assert run(engine, [])[0].spans == ((1, 0, 200),)
        engine.load_weights(model / "model.safetensors", 3)
        assert run(engine, requests_for(random_prompts(1)))[0].spans == ((3, 0, 12),)
    finally:
        engine.close()


def test_a_server_whose_producer_was_killed_during_an_update_serves_the_next_one(model: Path) -> None:
    url = shared_server(model).url
    for route in ("pause?mode=keep", "start_weight_update"):
        urllib.request.urlopen(f"{url}/{route}", data=b"", timeout=30).close()
    engine = engine_for(model, url)
    try:
        engine.load_weights(model / "model.safetensors", 1)
        assert run(engine, requests_for(random_prompts(1)))[0].spans == ((1, 0, 12),)
    finally:
        engine.close()


def test_a_server_that_stands_still_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "ANSWER_S", 3.0)
    served = shared_server(model)
    engine = engine_for(model, served.url)
    os.killpg(served.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ModelError, match=f"the server {served.url} is not to be reached: ReadTimeout"):
            run(engine, requests_for(random_prompts(2)))
    finally:
        os.killpg(served.process.pid, signal.SIGCONT)
        engine.close()


def test_a_server_with_too_short_sequences_is_refused(model: Path) -> None:
    with pytest.raises(ModelError, match=r"at most 6000 tokens, 6001 are needed: .*--max-model-len"):
        engine_for(model, shared_server(model).url, max_length=LONGEST + 1)


def test_a_server_without_the_routes_for_training_is_refused_with_what_it_lacks(model: Path, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with vllm_serve(model, tmp_path / "log", dev_mode=False) as served:
        with pytest.raises(ModelError, match=f"the server {served.url} has no route .*VLLM_SERVER_DEV_MODE=1"):
            engine_for(model, served.url)
        assert not [thread for thread in set(threading.enumerate()) - threads if thread.name == "vllm-servers"]
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
