"""The deployment files say what this version understands. `ops/check.sh` has them read by the tools they are for."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gvm_stream import cli
from gvm_stream.config import Config, MetricsSection, derived
from gvm_stream.config_file import load_config
from gvm_stream.wire.keys import create_keys, load_entries, load_pair
from tests.stream_processes import TIMEOUT_S, free_address

ROOT = Path(__file__).parents[1]
OPS = ROOT / "ops"
RUN_FILES = sorted((ROOT / "examples").glob("qwen*.toml"))
MODEL_POSITIONS = 4096
"""Of Qwen2.5-Math."""
GPUS = {"1x80gb": 1, "8x80gb": 8, "16x80gb": 16}

Command = tuple[str, list[str]]
"""Where it stands, and the words after `gvm-stream`."""


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, template) of everything in Kubernetes that makes pods."""
    for path in sorted((OPS / "kubernetes").glob("*.yaml")):
        for document in documents(path):
            if document["kind"] in ("Job", "Deployment"):
                yield document["metadata"]["name"], document["spec"]["template"]


def gvm_stream_words(words: list[str]) -> list[str] | None:
    """The words after `gvm-stream` of a command; those of a learner under torchrun in the form of `gvm-stream`."""
    if "gvm_stream.learner" in words:
        file, *rest = words[words.index("gvm_stream.learner") + 1 :]
        return ["learner", "--config", file, *rest]
    return words[words.index("gvm-stream") + 1 :] if "gvm-stream" in words else None


def script_commands(path: Path, script: str) -> Iterator[Command]:
    for line in script.replace("\\\n", " ").splitlines():
        line = (
            line.split("#")[0]
            .split("||")[0]
            .replace('"${settings[@]}"', "")
            .replace('"$run_dir"', "")
            .strip()
            .removesuffix("&")
        )
        if "gvm-stream " in line or "gvm_stream.learner" in line:
            words = gvm_stream_words(shlex.split(line.replace("$(", "").replace(")", "")))
            if words:
                yield path.name, words


def commands() -> Iterator[Command]:
    for file in ("compose.yaml", "compose.gpu.yaml"):
        for service in documents(OPS / "compose" / file)[0]["services"].values():
            if "gvm_stream.learner" in service.get("entrypoint", ()):
                yield file, ["learner", "--config", *service["command"]]
            elif "command" in service and "--config.file" not in service["command"][0]:
                yield file, service["command"]
    for name, template in pods():
        (container,) = template["spec"]["containers"]
        words = [*container.get("command", ["gvm-stream"]), *container["args"]]
        yield name, gvm_stream_words(words) or []
    for path in sorted((OPS / "systemd").iterdir()):
        (line,) = re.findall(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
        yield (
            path.name,
            gvm_stream_words(["gvm-stream" if w.endswith("/gvm-stream") else w for w in line.split()]) or [],
        )
    for path in sorted((OPS / "slurm").iterdir()):
        yield from script_commands(path, path.read_text())
    sky = OPS / "skypilot" / "run.yaml"
    yield from script_commands(sky, documents(sky)[0]["run"])


def test_run_files_for_one_gpu_one_node_and_two_nodes_are_there() -> None:
    names = [path.stem for path in RUN_FILES]
    assert {name.rpartition("-")[2] for name in names} == set(GPUS)
    assert any("1.5b" in name for name in names)
    assert any("7b" in name for name in names)


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_a_run_file_implies_what_its_machine_can_do(path: Path) -> None:
    config = load_config(path)
    implied = derived(config)
    assert config.data.max_prompt_tokens + config.sampling.max_tokens <= MODEL_POSITIONS
    assert config.run.producers <= GPUS[path.stem.rpartition("-")[2]]
    assert implied.slots_that_can_fill == implied.producer_slots, "GPUs would stand still for want of work"
    assert implied.rollouts_per_step in (256, 2048)
    assert implied.worst_case_lag <= 1


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_a_run_file_has_the_published_hyper_parameters(path: Path) -> None:
    """Section 4.1 of arXiv 2505.02391."""
    config = load_config(path)
    assert (config.allocation.policy, config.allocation.coefficient) == ("gvm", "raft")
    assert config.allocation.options == {"alpha": 1e-3, "beta": 2.0}
    assert config.allocation.rollouts_per_prompt == 8
    assert (config.learner.lr, config.learner.schedule, config.learner.warmup_steps) == (1e-6, "constant", 0)
    assert (config.data.max_prompt_tokens, config.sampling.max_tokens) == (1024, 3072)
    assert (config.learner.kl_coefficient, config.learner.kl_estimator) == (1e-3, "k3")


@pytest.mark.parametrize(("place", "words"), list(commands()))
def test_a_deployed_command_is_one_of_this_version(place: str, words: list[str]) -> None:
    rest, overrides = cli.split_overrides(words)
    options, unknown = cli._parser().parse_known_args(rest)
    assert not unknown
    assert options.config is not None
    # What a deployment fills in is not known here; the keys are.
    known = [re.sub(r"\$\{?\w+(:[^}]*)?\}?|\$\(\w+\)", "x", word) for word in overrides if "address" not in word]
    assert isinstance(load_config(ROOT / "examples" / "arithmetic.toml", known), Config)


def test_every_deployment_starts_all_three_kinds_of_processes() -> None:
    started: dict[str, set[str]] = {}
    for place, words in commands():
        kind = "kubernetes" if place.startswith("gvm-") and "." not in place else place.split("-")[0]
        started.setdefault(kind, set()).add(words[0])
    roles = {"allocator", "learner", "producer"}
    assert started["compose.yaml"] == roles
    assert started["kubernetes"] == roles
    assert started["gvm"] == roles  # systemd
    assert started["one_node.sbatch"] >= roles
    assert started["two_kinds_of_nodes.sbatch"] >= roles
    assert started["producers.sbatch"] == {"producer"}
    assert started["run.yaml"] >= roles


def test_probes_ask_for_endpoints_that_exist() -> None:
    for name, template in pods():
        (container,) = template["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["http"] == MetricsSection().port, name
        paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
        assert paths == {"startup": "/readyz", "liveness": "/healthz", "readiness": "/readyz"}, name
        assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")} == {
            "http"
        }


def test_a_disruption_budget_covers_the_pods_it_is_for() -> None:
    labels = {name: template["metadata"]["labels"] for name, template in pods()}
    budgets = {
        document["metadata"]["name"]: document["spec"]["selector"]["matchLabels"]
        for path in (OPS / "kubernetes").glob("*.yaml")
        for document in documents(path)
        if document["kind"] == "PodDisruptionBudget"
    }
    assert budgets == labels


def test_all_files_of_the_kustomization_are_there_and_used() -> None:
    folder = OPS / "kubernetes"
    (kustomization,) = documents(folder / "kustomization.yaml")
    files = {*kustomization["resources"], *kustomization["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert files == {path.name for path in folder.iterdir()}
    # kustomize reads nothing outside its folder.
    assert (folder / "run.toml").read_bytes() == (ROOT / "examples" / "qwen2.5-math-7b-8x80gb.toml").read_bytes()


@pytest.mark.parametrize(("name", "template"), list(pods()), ids=lambda value: value if isinstance(value, str) else "")
def test_keys_from_a_secret_are_ones_that_a_pod_can_use(name: str, template: dict[str, Any], tmp_path: Path) -> None:
    create_keys(tmp_path / "made")
    role = name.removeprefix("gvm-")
    secret, keys = tmp_path / "secret", tmp_path / "keys"
    for folder in (secret, keys):
        folder.mkdir()
    keys.chmod(0o2777)  # as Kubernetes makes an emptyDir with fsGroup
    for file in ("public.keys", f"{role}.secret"):
        (secret / file).write_bytes((tmp_path / "made" / file).read_bytes())
        (secret / file).chmod(0o644 if file == "public.keys" else 0o440)  # as it mounts a secret with fsGroup
    (container,) = template["spec"]["initContainers"]
    *shell, script = container["command"]
    moved = script.replace("/secret/", f"{secret}/").replace("/keys/run", f"{keys}/run")
    for _ in range(2):  # an init container may run again
        subprocess.run([*shell, moved], check=True)
    run = keys / "run"
    assert load_pair(run, role).public.decode() in {entry.key for entry in load_entries(run)}  # type: ignore[arg-type]
    assert f"--stream.keys={keys}/run".replace(str(tmp_path), "") in template["spec"]["containers"][0]["args"]


def test_prometheus_looks_for_the_services_of_compose_where_they_serve() -> None:
    (prometheus,) = documents(OPS / "prometheus" / "prometheus.yml")
    (looked_for,) = prometheus["scrape_configs"][0]["dns_sd_configs"]
    services = documents(OPS / "compose" / "compose.yaml")[0]["services"]
    assert set(looked_for["names"]) == services.keys() - {"prometheus", "grafana"}
    assert looked_for["port"] == MetricsSection().port
    more = documents(OPS / "compose" / "compose.gpu.yaml")[0]["services"]
    for name in more.keys() - services.keys():
        assert more[name]["networks"]["default"]["aliases"] == ["producer"]


def test_no_two_services_of_compose_have_the_same_gpu() -> None:
    services = documents(OPS / "compose" / "compose.gpu.yaml")[0]["services"].values()
    given = [
        gpu
        for service in services
        for device in service["deploy"]["resources"]["reservations"]["devices"]
        for gpu in device["device_ids"]
    ]
    assert sorted(given) == list("01234567")


def test_grafana_is_given_the_dashboards() -> None:
    grafana = documents(OPS / "compose" / "compose.yaml")[0]["services"]["grafana"]
    (provider,) = documents(OPS / "compose" / "grafana" / "dashboards.yaml")[0]["providers"]
    mounts = [mount.split(":") for mount in grafana["volumes"] if mount.startswith(".")]
    folders = {inside: OPS / "compose" / outside for outside, inside, _ in mounts}
    assert all(path.exists() for path in folders.values())
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (folders[provider["options"]["path"]] / home.name).exists()


def test_the_image_is_made_of_what_is_there() -> None:
    dockerfile = (OPS / "compose" / "Dockerfile").read_text()
    let_in = (OPS / "compose" / "Dockerfile.dockerignore").read_text().split()
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE) for word in line.split()]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in let_in


STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
[ "$1" = allocator ] || exit 0
trap 'echo stopped >> "$LOG"; exit 0' TERM
echo up >> "$LOG"
sleep 60 & wait
"""


@pytest.mark.parametrize("script", ["one_node", "two_kinds_of_nodes"])
def test_a_slurm_job_out_of_time_ends_the_run_in_order_and_is_queued_again(script: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    for program in ("gvm-stream", "torchrun", "srun", "scontrol"):
        (tmp_path / program).write_text(STUB)
        (tmp_path / program).chmod(0o755)
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2", "RUN_FILE": "run.toml", "KEYS": "keys"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    with subprocess.Popen(
        ["bash", str(OPS / "slurm" / f"{script}.sbatch")],
        env={**os.environ, **job, "PATH": path, "LOG": str(log)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as running:
        try:
            wait_for(log, "up", running)
            running.send_signal(signal.SIGTERM)
            assert running.wait(30) == 0
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
    lines = log.read_text().splitlines()
    assert "stopped" in lines
    assert lines[-1] == "scontrol requeue 17"
    assert any("gvm_stream.learner run.toml --resume" in line for line in lines)
    assert any("producer --config run.toml" in line for line in lines)


def wait_for(log: Path, line: str, running: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen(["tail", "-n", "+1", "-F", str(log)], stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        for found in tail.stdout:
            if found.strip() == line:
                break
            assert running.poll() is None
        tail.terminate()


@pytest.mark.stream
def test_the_commands_of_compose_make_a_run(tmp_path: Path) -> None:
    services = documents(OPS / "compose" / "compose.yaml")[0]["services"]
    address = free_address()
    filled_in = {
        "${RUN_FILE:-examples/arithmetic.toml}": str(ROOT / "examples" / "arithmetic.toml"),
        "/runs/${RUN:-arithmetic}": str(tmp_path / "run"),
        "tcp://allocator:5710": address,
    }
    small = ["--metrics.port=0", "--run.steps=2", "--eval.prompts=20", "--eval.samples=1"]
    processes = []
    for role in ("allocator", "learner", "producer", "producer"):
        words = services[role]["command"]
        for there, here in filled_in.items():
            words = [word.replace(there, here) for word in words]
        command = [sys.executable, "-m", "gvm_stream", *words, *small]
        processes.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path))
    try:
        assert [process.wait(TIMEOUT_S) for process in processes] == [0, 0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert (tmp_path / "run" / "report.json").exists()
