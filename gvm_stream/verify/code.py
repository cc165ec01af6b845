"""Programs as answers: the program in a response is run against the tests in the gold answer, in a sandbox.

Gold answers are JSON, either {"tests": [{"stdin": "...", "stdout": "..."}, ...]}: what the program prints for each
input, compared line by line without trailing blanks; or {"asserts": "...", "entry": "name"}: test code that is run
after the program in the same interpreter. If it defines `check`, `check` is called with what the program calls `entry`.

Contained, on a Linux that lets users make namespaces (all of it needs no privilege): CPU and wall time, memory of a
process, size of files and output, open files, the number of processes (64), every process that was started (none
survives), the network (there is none), signals and /proc (it sees its own processes only),
writing (only in a scratch folder in memory), the environment (empty).
Not contained: reading files that the user may read, the sum of the memory of all processes of a program (the kernel's
out-of-memory killer takes them first), attacks on the kernel. With `asserts`, a program that ends early fails, but one
that looks for the test code in its own interpreter can pass.
Where the kernel refuses namespaces, a warning is logged and only times, sizes, memory and open files are limited and
descendants killed: run producers as a user of their own, in a container.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from gvm_stream.config import CodeSection
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable

JAIL = Path(__file__).with_name("jail.py")
GRACE_S = 2.0
"""What the supervisor in the jail may take beyond the time of the program."""
SHOWN = 500
"""Characters of program, output and error that a verdict carries."""

_PYTHON = ("python", "python3", "py")
_RUNNER = """\
import os, sys
def read(name):
    with open(name, encoding="utf-8") as file:
        return file.read()
scope = {{"__name__": "program"}}
exec(compile(read({program!r}), "program.py", "exec"), scope)
entry = scope[{entry!r}] if {entry!r} else None
exec(compile(read({asserts!r}), "asserts.py", "exec"), scope)
if "check" in scope and entry is not None:
    scope["check"](entry)
sys.stdout.flush()
os.write(1, {token!r})
"""

log = logging.getLogger(__name__)


class Case(msgspec.Struct, frozen=True):
    """One run of the program."""

    stdin: str
    stdout: str


class CodeGold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tests: list[Case] = []
    asserts: str = ""
    entry: str = ""

    def __post_init__(self) -> None:
        if bool(self.tests) == bool(self.asserts):
            raise ValueError("either tests or asserts are needed")


class Ended(msgspec.Struct, frozen=True):
    """How a program ended."""

    failure: str
    """In words; empty: status 0 within its limits."""
    stdout: bytes


class SandboxError(Exception):
    """The sandbox did not work; nothing is known about the program."""


def readable_gold(gold: str) -> str:
    """What is wrong with a gold answer, in words; empty if nothing is."""
    try:
        msgspec.json.decode(gold, type=CodeGold)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        return f"not the tests of a program: {error}"
    return ""


def verify_code(gold: str, response: str, settings: CodeSection) -> Verdict:
    """1 if the last Python block of the response (all of it if there is none) passes all tests, else 0.

    `settings` limits one program over all of its tests. A sandbox that fails is Unscorable.
    """
    problem = readable_gold(gold)
    if problem:
        return VerdictUnscorable(f"unreadable gold: {problem}", "unreadable_gold")
    tests = msgspec.json.decode(gold, type=CodeGold)
    program = extract_program(response)
    if not program.strip():
        return VerdictScored(0.0, rule="code: no program")
    try:
        with tempfile.TemporaryDirectory(prefix="gvm-stream-code-") as folder:
            sandbox = Sandbox(Path(folder), settings)
            (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace")
            return _run_asserts(tests, program, sandbox) if tests.asserts else _run_cases(tests, program, sandbox)
    except (OSError, SandboxError) as error:
        return VerdictUnscorable(f"sandbox failed: {error}", "sandbox")


def extract_program(response: str) -> str:
    """The last fenced block that says Python, else the last that says nothing, else the whole response."""
    found: dict[bool, str] = {}
    language, block = None, ""
    for line in [*response.splitlines(keepends=True), "```"]:
        fence = line.strip()
        if not fence.startswith("```"):
            block += line
            continue
        if language is not None and (not language or language in _PYTHON):
            found[language in _PYTHON] = block
        opens = language is None or fence != "```"  # a block that says what it is opens even if the last is not closed
        language, block = (fence[3:].strip().lower() if opens else None), ""
    return found.get(True, found.get(False, response))


def _run_cases(gold: CodeGold, program: str, sandbox: Sandbox) -> Verdict:
    for number, case in enumerate(gold.tests, 1):
        ended = sandbox.run("program.py", case.stdin)
        got = ended.stdout.decode("utf-8", errors="replace")
        failure = ended.failure or ("" if _lines(got) == _lines(case.stdout) else f"printed {got[:SHOWN]!r}")
        if failure:
            rule = f"code: test {number} of {len(gold.tests)} failed: {failure}"
            return VerdictScored(0.0, program[:SHOWN], case.stdout[:SHOWN], rule)
    return VerdictScored(1.0, program[:SHOWN], rule=f"code: passed {len(gold.tests)} tests")


def _run_asserts(gold: CodeGold, program: str, sandbox: Sandbox) -> Verdict:
    token = secrets.token_bytes(16)  # only a run that reached the end prints it
    files = {name: str(sandbox.folder / f"{name}.py") for name in ("program", "asserts")}
    Path(files["asserts"]).write_text(gold.asserts, encoding="utf-8", errors="replace")
    (sandbox.folder / "runner.py").write_text(_RUNNER.format(entry=gold.entry, token=token, **files), encoding="utf-8")
    ended = sandbox.run("runner.py", "")
    failure = ended.failure or ("" if ended.stdout.endswith(token) else "the program ended before its tests")
    if failure:
        return VerdictScored(0.0, program[:SHOWN], gold.asserts[:SHOWN], f"code: {failure}")
    return VerdictScored(1.0, program[:SHOWN], rule="code: passed its tests")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


class Sandbox:
    """Runs the programs in `folder`, one at a time, within what is left of the limits."""

    def __init__(self, folder: Path, settings: CodeSection, *, isolate: bool | None = None) -> None:
        self.folder = folder
        self._settings = settings
        self._isolate = isolation_works() if isolate is None else isolate
        self._deadline = time.monotonic() + settings.wall_s
        self._cpu_end = _children_cpu_s() + settings.cpu_s
        (folder / "scratch").mkdir()

    def run(self, name: str, stdin: str) -> Ended:
        wall_s, cpu_s = self._deadline - time.monotonic(), self._cpu_end - _children_cpu_s()
        if wall_s <= 0 or cpu_s <= 0:
            return Ended("out of time", b"")
        size = self._settings.output_kib << 10
        files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
        try:
            with open(files[0], "wb", closefd=False) as file:
                file.write(stdin.encode("utf-8", errors="replace"))
            os.lseek(files[0], 0, os.SEEK_SET)
            how = {
                "parent": os.getpid(),
                "isolate": self._isolate,
                "scratch": str(self.folder / "scratch"),
                "program": str(self.folder / name),
                "files": files,
                "wall_s": wall_s,
                "cpu_s": cpu_s,
                "memory": self._settings.memory_mib << 20,
                "file_size": size,
            }
            report = _supervise(how, wall_s + GRACE_S, files)
            stdout, stderr = (os.pread(file, size, 0) for file in files[1:])
        finally:
            for descriptor in files:
                os.close(descriptor)
        failure = _failure(
            report, stderr.decode("utf-8", errors="replace"), flooded=max(len(stdout), len(stderr)) >= size
        )
        return Ended(failure, stdout)


def _supervise(how: dict[str, object], patience_s: float, files: list[int]) -> dict[str, int | str]:
    """Exit status of one run, or why it was stopped."""
    try:
        jail = subprocess.run(
            [sys.executable, "-I", "-S", str(JAIL), json.dumps(how)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=files,
            start_new_session=True,
            timeout=patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired:  # killed, and so are all in the jail; a fork bomb may leave it no time to report
        return {"stopped": "out of time"}
    if jail.returncode != 0 or jail.stderr or not jail.stdout:
        lines = jail.stderr.decode(errors="replace").strip().splitlines()
        raise SandboxError(lines[-1] if lines else f"its supervisor ended with status {jail.returncode}")
    report: dict[str, int | str] = json.loads(jail.stdout)
    return report


def _failure(report: dict[str, int | str], stderr: str, *, flooded: bool) -> str:
    if report["stopped"]:
        return str(report["stopped"])
    if flooded:
        return "too much output"
    status = int(report["exit"])
    if status < 0:
        return "out of CPU time or killed" if status == -signal.SIGKILL else f"ended by signal {-status}"
    if status > 0:
        lines = stderr.strip().splitlines()
        return lines[-1][:SHOWN] if lines else f"exit status {status}"
    return ""


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@functools.cache
def isolation_works() -> bool:
    """Whether this kernel lets this user make the namespaces of the sandbox; tried once per process."""
    with tempfile.TemporaryDirectory(prefix="gvm-stream-code-") as folder:
        (Path(folder) / "nothing.py").touch()
        try:
            Sandbox(Path(folder), CodeSection(), isolate=True).run("nothing.py", "")
        except SandboxError as error:
            log.warning("programs are run without namespaces, with their limits only: %s", error)
            return False
    return True
