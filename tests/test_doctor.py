"""What the doctor says of faults that are really there."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from gvm_stream.config import Config, MetricsSection, ProducerSection, StreamSection
from gvm_stream.config_file import load_config
from gvm_stream.doctor import content, engines, machine, network
from gvm_stream.errors import ConfigError
from gvm_stream.wire.keys import create_keys, fingerprint, load_pair
from tests.doubles import mounted
from tests.stream_processes import free_address

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.toml"


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(EXAMPLE, [f"stream.address={free_address()}"])


def changed(*overrides: str) -> Config:
    return load_config(EXAMPLE, overrides)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def doctor(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gvm_stream", "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_a_machine_that_can_run_the_example_passes(config: Config, tmp_path: Path) -> None:
    done = doctor("--config", EXAMPLE, f"--stream.address={free_address()}", f"--run.dir={tmp_path}", "--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert {"packages", "gpus", "allocator", "model", "memory", "disk", "data"} <= report["checks"].keys()
    assert "0.148 M parameters" in report["checks"]["model"]["found"]


def test_failures_are_shown_with_what_to_do_and_the_exit_status_is_1(taken: int, tmp_path: Path) -> None:
    done = doctor(
        "--config",
        EXAMPLE,
        f"--stream.address=tcp://127.0.0.1:{taken}",
        f"--model.path={tmp_path}",
        "--learner.device=cuda",
    )
    assert done.returncode == 1
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("fail ")]
    assert failed == ["gpus", "allocator", "model"]
    assert "-> choose a free port" in done.stdout
    assert "3 failed" in done.stdout.splitlines()[-1]


def test_without_a_configuration_the_machine_is_checked() -> None:
    done = doctor("--json")
    assert done.returncode == 0, done.stdout
    assert "model" not in json.loads(done.stdout)["checks"]


def test_a_wrong_configuration_is_one_sentence() -> None:
    done = doctor("--config", EXAMPLE, "--run.stepz=1")
    assert done.returncode == 2
    assert "did you mean" in done.stderr


def test_what_is_installed_is_what_is_required() -> None:
    finding = machine.packages()
    assert finding.result == "ok"
    assert "with CURVE" in finding.found


def test_a_port_in_use_fails(taken: int) -> None:
    finding = network.address("stream.address", f"tcp://127.0.0.1:{taken}")
    assert finding.result == "fail"
    assert f'stream.address = "tcp://127.0.0.1:{taken}" is in use' in finding.found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "*", "0.0.0.0", "[::1]"])
def test_a_free_port_of_this_machine_is_well(host: str, taken: int) -> None:
    port = int(free_address().rpartition(":")[2])
    assert network.address("stream.address", f"tcp://{host}:{port}").result == "ok"


def test_a_host_that_has_no_name_fails() -> None:
    finding = network.address("stream.weights_address", "tcp://no-such-host.invalid:5711")
    assert finding.result == "fail"
    assert "host not known" in finding.found


def test_another_host_is_well_when_it_answers_or_refuses(taken: int) -> None:
    assert network.within_reach("x", "127.0.0.1", taken).found == "x answers"
    free = int(free_address().rpartition(":")[2])
    finding = network.within_reach("x", "127.0.0.1", free)
    assert finding.result == "ok"
    assert "nothing listens there yet" in finding.found


def test_another_host_that_does_not_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        for _ in range(2):  # more than its queue holds: the system says nothing to the next
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        finding = network.within_reach("x", *server.getsockname())
    assert finding.result == "fail"
    assert "out of reach" in finding.found


def test_a_malformed_address_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"stream\.address"):
        network.address("stream.address", "localhost:5710")


def test_keys_that_fit_are_named_by_role_and_fingerprint(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    finding = network.keys(StreamSection(keys=str(tmp_path / "keys")))
    assert finding.result == "ok"
    assert fingerprint(load_pair(tmp_path / "keys", "learner").public) in finding.found


def test_keys_of_another_run_fail(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        create_keys(tmp_path / name)
    (tmp_path / "other" / "producer.secret").replace(tmp_path / "mine" / "producer.secret")
    finding = network.keys(StreamSection(keys=str(tmp_path / "mine")))
    assert finding.result == "fail"
    assert "not on the list: producer" in finding.found


def test_keys_that_others_can_read_fail(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    (tmp_path / "keys" / "learner.secret").chmod(0o644)
    assert network.keys(StreamSection(keys=str(tmp_path / "keys"))).result == "fail"
    assert network.keys(StreamSection(keys=str(tmp_path / "nothing"))).result == "fail"


@pytest.mark.parametrize(
    ("address", "allow_plaintext", "result"),
    [
        ("tcp://127.0.0.1:5710", False, "ok"),
        ("tcp://*:5710", False, "fail"),
        ("tcp://node17:5710", True, "warn"),
    ],
)
def test_without_keys_only_this_machine_is_safe(address: str, allow_plaintext: bool, result: str) -> None:
    assert network.keys(StreamSection(address=address, allow_plaintext=allow_plaintext)).result == result


def test_a_hub_out_of_reach_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{free_address().removeprefix('tcp://')}")
    assert network.hub().result == "warn"
    assert constants.HF_HUB_OFFLINE
    assert "HF_HUB_OFFLINE is set" in network.hub().found


def test_a_metrics_port_in_use_is_worth_a_look(taken: int) -> None:
    assert network.metrics_port(MetricsSection(port=taken)).result == "warn"
    assert network.metrics_port(MetricsSection(port=0)).result == "warn"


def test_metrics_on_an_interface_that_is_not_here_fail() -> None:
    finding = network.metrics_port(MetricsSection(host="203.0.113.1"))
    assert finding.result == "fail"
    assert 'metrics.host = "203.0.113.1"' in finding.found


def test_gpus_that_are_configured_and_not_there_fail() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    finding = machine.gpus(["cuda", "cpu"])
    assert finding.result == "fail"
    assert "names cuda;" in finding.found
    assert machine.gpus(["cpu"]).result == "ok"


def test_more_threads_than_processors_are_worth_a_look() -> None:
    cpus = machine.usable_cpus()
    assert machine.processors(int(cpus) + 1).result == "warn"
    assert machine.processors(int(cpus)).result == "ok"


def test_shared_memory_that_is_nearly_full_fails(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=128m"):
        assert machine.shared_memory(tmp_path).result == "warn"
        (tmp_path / "left behind").write_bytes(bytes(100 << 20))
        finding = machine.shared_memory(tmp_path)
        assert finding.result == "fail"
        assert "28 MiB free of 128 MiB" in finding.found


def test_a_kernel_without_namespaces_matters_to_those_who_verify_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gvm_stream.verify.code.isolation_works", lambda: False)
    assert machine.sandbox(needed=True).result == "warn"
    assert machine.sandbox(needed=False).result == "ok"


def test_a_low_limit_of_open_files_is_worth_a_look() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        assert machine.open_files().result == "warn"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_run_folder_on_a_full_disk_fails(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=1m"):
        assert machine.run_folder(tmp_path / "run", needed=2 << 20).result == "fail"
        (tmp_path / "full").write_bytes(bytes(1 << 20))
        finding = machine.run_folder(tmp_path / "run", needed=0)
        assert finding.result == "fail"
        assert "No space left" in finding.found


def test_a_run_folder_that_is_read_only_fails(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=1m,ro"):
        finding = machine.run_folder(tmp_path / "run", needed=0)
        assert finding.result == "fail"
        assert "Read-only" in finding.found


def test_a_run_folder_is_not_made_by_looking_at_it(tmp_path: Path) -> None:
    assert machine.run_folder(tmp_path / "a" / "run", needed=0).result in ("ok", "warn")
    assert not any(tmp_path.iterdir())


def test_the_disk_must_hold_checkpoints_and_weights(config: Config) -> None:
    count = content.parameters(config.model.path)
    assert content.disk_needed(config) == count * (3 * 12 + 4 * 4)


def test_a_missing_model_fails_and_is_not_counted(tmp_path: Path) -> None:
    finding = content.model(str(tmp_path))
    assert finding.result == "fail"
    assert str(tmp_path) in finding.found
    assert content.memory(changed(f"model.path={tmp_path}")).result == "warn"


def test_a_model_without_its_weights_fails(config: Config, tmp_path: Path) -> None:
    for path in Path(config.model.path).iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).symlink_to(path)
    finding = content.model(str(tmp_path))
    assert finding.result == "fail"
    assert "no *.safetensors" in finding.found


def test_a_model_too_large_for_the_memory_fails(tmp_path: Path, config: Config) -> None:
    source = Path(config.model.path)
    settings = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"vocab_size": 1 << 33}))
    finding = content.memory(changed(f"model.path={tmp_path}"))
    assert finding.result == "fail"
    assert "GiB of memory are available" in finding.found


GPU = 80 << 30
SMALL, LARGE = 2 * 10**9, 7 * 10**9
"""Parameters."""


@pytest.mark.parametrize(
    ("count", "gpus", "address", "result", "advice"),
    [
        (SMALL, 1, "tcp://127.0.0.1:5710", "ok", ""),
        (LARGE, 1, "tcp://127.0.0.1:5710", "fail", "one GPU is too small"),
        (LARGE, 1, "tcp://10.0.0.1:5710", "warn", "one GPU is too small"),
        (LARGE, 8, "tcp://127.0.0.1:5710", "warn", "at least 2 processes"),
        (10 * LARGE, 8, "tcp://127.0.0.1:5710", "fail", "more GPUs"),
        (LARGE, 0, "tcp://127.0.0.1:5710", "warn", "see the GPUs"),
    ],
)
def test_a_model_is_compared_with_the_gpus(
    count: int, gpus: int, address: str, result: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "parameters", lambda path: count)
    monkeypatch.setattr(content, "gpu_memory", lambda: [GPU] * gpus)
    finding = content.memory(changed("learner.device=cuda", "producer.device=cuda", f"stream.address={address}"))
    assert (finding.result, advice in finding.advice) == (result, True)


def test_rows_that_cannot_be_used_are_counted(tmp_path: Path, config: Config) -> None:
    rows = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "", "answer": "3"}, {"prompt": "2 + 2?", "answer": None}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finding = content.data(changed(f"data.train={file}"))
    assert finding.result == "warn"
    assert "train: 1 of all 3 rows usable" in finding.found
    assert "heldout: 400 of all 400 rows usable" in finding.found


@pytest.mark.parametrize("rows", ["", '{"prompt": "", "answer": "3"}\n'])
def test_data_without_a_usable_row_fails(rows: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(rows)
    assert content.data(changed(f"data.train={file}")).result == "fail"


def test_data_that_is_not_there_fails(tmp_path: Path) -> None:
    finding = content.data(changed(f"data.train={tmp_path / 'missing.jsonl'}"))
    assert finding.result == "fail"
    assert "missing.jsonl" in finding.found


def test_a_long_data_set_is_looked_at_in_part(config: Config) -> None:
    assert "train: 1,000 of the first 1,000 rows usable" in content.data(config).found


def test_an_engine_that_is_not_installed_fails_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(engines, "version", missing)
    finding = engines.engine(ProducerSection(engine="vllm"))
    assert (finding.result, finding.found) == ("fail", 'producer.engine = "vllm", and vLLM is not installed')
    assert "gvm-stream[vllm]" in finding.advice
    assert engines.engine(ProducerSection()).result == "ok"


def test_servers_that_do_not_answer_or_are_something_else_are_named(taken: int) -> None:
    nobody = free_address().replace("tcp", "http")
    finding = engines.engine(ProducerSection(engine="vllm-server", servers=(nobody, f"http://127.0.0.1:{taken}")))
    assert finding.result == "fail"
    assert f"no vLLM at {nobody} (" in finding.found
    assert f", http://127.0.0.1:{taken} (" in finding.found
