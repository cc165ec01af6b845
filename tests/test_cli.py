"""The command as people run it: a process, its exit status, what it prints, and what it leaves behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.doubles import mounted
from tests.stream_processes import free_address

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.toml"
VERBS = ("run", "allocator", "learner", "producer", "eval", "config")
PATIENCE_S = 90


def gvm(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command with no terminal, one thread, and a limit: nothing here may hang."""
    return subprocess.run(
        [sys.executable, "-m", "gvm_stream", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def error_of(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The one sentence on stderr."""
    assert done.returncode == status, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def processes_about(text: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            if text in command:
                found.append(command)
    return found


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`gvm-stream run` of the example into `folder`, on a free port; an override given here wins."""
    quiet = ["--metrics.port=0", f"--stream.address={free_address()}", f"--run.dir={folder}"]
    return gvm("run", EXAMPLE, *quiet, *overrides)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "size=1m"):
        yield folder


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_says_how_keys_are_overridden(verb: str) -> None:
    done = gvm(verb, "--help")
    assert done.returncode == 0
    assert "--section.key=value" in done.stdout


@pytest.mark.parametrize("arguments", [(), ("frobnicate",), ("eval",), ("producer", "--config")])
def test_a_wrong_command_line_is_one_sentence(arguments: tuple[str, ...]) -> None:
    assert "--help" in error_of(gvm(*arguments), 2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("missing.toml",), ["missing.toml", "does not exist"]),
        (("bad.toml",), ["bad.toml", "line 1"]),
        ((EXAMPLE, "--run.stepz=1"), ['"run.stepz"', 'did you mean "run.steps"?']),
        ((EXAMPLE, "--frob"), ["unknown argument '--frob'"]),
        ((EXAMPLE, "frob"), ["unknown argument 'frob'"]),
        ((EXAMPLE, "--run.steps=-1"), ["run.steps = -1", "arithmetic.toml", ">= 1"]),
        ((EXAMPLE, "--run.steps"), ["--run.steps has no value"]),
        ((), ["give", "configuration file"]),
    ],
)
@pytest.mark.parametrize("verb", ["config", "run"])
def test_a_wrong_configuration_is_one_sentence(
    tmp_path: Path, verb: str, arguments: tuple[str | Path, ...], parts: list[str]
) -> None:
    (tmp_path / "bad.toml").write_text("[run\n")
    sentence = error_of(gvm(verb, *arguments, cwd=tmp_path), 2)
    for part in parts:
        assert part in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


def test_resuming_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    assert "config.json does not exist" in error_of(gvm("run", "--resume", tmp_path), 2)
    assert list(tmp_path.iterdir()) == []


def test_config_prints_every_key_and_what_follows_and_overrides_stand_anywhere(tmp_path: Path) -> None:
    done = gvm("config", "--run.steps", "9", EXAMPLE, "--data.system=two words")
    assert done.returncode == 0
    assert "steps = 9\n" in done.stdout
    assert 'system = "two words"\n' in done.stdout
    assert "# rollouts per step: 256\n" in done.stdout
    again = tmp_path / "again.toml"
    again.write_text(done.stdout)
    assert gvm("config", again).stdout == done.stdout


def test_config_as_json_is_one_object() -> None:
    printed = json.loads(gvm("config", "--config", EXAMPLE, "--json", "--run.steps=9").stdout)
    assert printed["config"]["run"]["steps"] == 9
    assert printed["derived"]["most_in_flight"] == 512


@pytest.mark.parametrize(
    "address",
    [
        "tcp://::1:5710",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1",
        "127.0.0.1:5710",
        "ipc://x",
        "",
    ],
)
def test_a_malformed_address_is_one_sentence_and_nothing_is_begun(tmp_path: Path, address: str) -> None:
    sentence = error_of(run(tmp_path / "run", f"--stream.address={address}"), 2)
    assert f'stream.address = "{address}"' in sentence
    assert "tcp://HOST:PORT" in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5710", "tcp://*:5710", "tcp://[::]:5710"])
def test_listening_beyond_this_machine_must_be_asked_for(tmp_path: Path, address: str) -> None:
    sentence = error_of(run(tmp_path / "run", f"--stream.address={address}"), 2)
    assert "allow_plaintext" in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["run", "allocator"])
def test_an_occupied_port_is_one_sentence_and_nothing_is_begun(tmp_path: Path, verb: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        file = [EXAMPLE] if verb == "run" else ["--config", EXAMPLE]
        done = gvm(verb, *file, f"--stream.address={address}", f"--run.dir={tmp_path / 'run'}", "--metrics.port=0")
    assert f'stream.address = "{address}" is in use' in error_of(done, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_is_a_file_or_below_one_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "cannot be used as a folder" in error_of(run(tmp_path / "file"), 2)
    assert "cannot be written: Not a directory" in error_of(run(tmp_path / "file" / "run"), 1)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_at_the_start_is_one_sentence_and_leaves_nothing_half_written(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(2 << 20))
    assert "No space left on device" in error_of(run(small_disk / "run"), 1)
    assert [path for path in small_disk.rglob("*") if path.is_file()] == [small_disk / "filler"]


@pytest.mark.stream
@pytest.mark.parametrize(
    ("key", "value", "status"), [("model.path", "/nowhere/model", 1), ("data.train", "/nowhere/train.jsonl", 2)]
)
def test_a_run_without_its_model_or_data_says_so_and_leaves_no_process(
    tmp_path: Path, key: str, value: str, status: int
) -> None:
    sentence = error_of(run(tmp_path / "run", f"--{key}={value}"), status)
    assert key in sentence
    assert value in sentence
    assert processes_about(str(tmp_path)) == []
    assert [path for path in tmp_path.rglob(".*") if path.is_file()] == []


@pytest.mark.stream
def test_a_disk_that_fills_up_ends_the_run_with_the_reason_and_no_process_left(small_disk: Path) -> None:
    small = ["--eval.prompts=8", "--eval.samples=1", "--allocation.prompts_per_step=4"]
    sentence = error_of(run(small_disk / "run", *small), 1)  # there is room for the weights of one version
    assert "No space left on device" in sentence or "disk is full" in sentence  # learner or allocator, who comes first
    assert processes_about(str(small_disk)) == []
    left = {path.name for path in small_disk.rglob("*") if path.is_file()}
    assert not [name for name in left if name.startswith(".") or name.endswith((".partial", ".part", ".tmp"))]


@pytest.mark.stream
def test_eval_measures_the_shipped_model() -> None:
    done = gvm("eval", "--config", EXAMPLE, "--eval.prompts=20", "--eval.samples=1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["prompts"] == result["samples"] == 20
    assert result["unscorable"] == 0
    assert 0.1 <= result["accuracy"] <= 0.9  # pretrained to between a quarter and a half of the answers
    assert result["standard_error"] == pytest.approx((result["accuracy"] * (1 - result["accuracy"]) / 20) ** 0.5)
