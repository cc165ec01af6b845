from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from gvm_stream.config import CodeSection, VerifierSection
from gvm_stream.verify.code import Sandbox, extract_program, isolation_works, readable_gold, verify_code
from gvm_stream.verify.pool import VerifierPool
from gvm_stream.verify.verdict import VerdictScored, VerdictUnscorable, VerifyItem
from tests.test_verify_pool import descendants

LIMITS = CodeSection(cpu_s=1.0, wall_s=5.0, memory_mib=256, output_kib=64)
DOUBLE = json.dumps({"tests": [{"stdin": "3\n", "stdout": "6\n"}, {"stdin": "-1\n", "stdout": "-2\n"}]})
ASSERTS = json.dumps({"asserts": "assert f(2) == 4\ndef check(candidate):\n    assert candidate(0) == 0", "entry": "f"})
DAEMON = "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass\n"

isolated = pytest.mark.skipif(not isolation_works(), reason="this kernel lets this user make no namespaces")


def failure(program: str, gold: str = DOUBLE, limits: CodeSection = LIMITS) -> str:
    """Why a program is wrong; empty if it is right. Whatever it does, no process of it is left."""
    before = descendants(os.getpid())
    verdict = verify_code(gold, program, limits)
    assert descendants(os.getpid()) == before
    assert isinstance(verdict, VerdictScored), verdict
    assert verdict.reward in (0.0, 1.0)
    assert verdict.extracted == program[:500]
    return "" if verdict.reward else verdict.rule


def test_a_program_is_right_if_it_prints_what_every_test_expects() -> None:
    assert failure("print(int(input()) * 2)") == ""
    assert failure("print(int(input()) * 2, end='  \\n\\n')") == ""  # blanks at the ends of lines do not count
    assert failure("print(abs(int(input())) * 2)") == "code: test 2 of 2 failed: printed '2\\n'"
    assert failure("print(int(input()) * 2); print()  ; print(0)").startswith("code: test 1 of 2 failed: printed")


def test_a_program_that_fails_is_wrong_with_its_reason() -> None:
    assert failure("print(1 / 0)") == "code: test 1 of 2 failed: ZeroDivisionError: division by zero"
    assert failure("if") == "code: test 1 of 2 failed: SyntaxError: invalid syntax"
    assert failure("print(int(input()) * 2); raise SystemExit(3)") == "code: test 1 of 2 failed: exit status 3"
    assert "ended by signal" in failure("import os; os.abort()")


def test_asserts_run_after_the_program_and_must_be_reached() -> None:
    assert failure("def f(x):\n    return 2 * x", ASSERTS) == ""
    assert failure("def f(x):\n    print('noise')\n    return 2 * x", ASSERTS) == ""
    assert failure("def f(x):\n    return x + 2", ASSERTS) == "code: AssertionError"
    assert failure("def g(x):\n    return 2 * x", ASSERTS) == "code: KeyError: 'f'"
    for way_out in ("raise SystemExit", "import os; os._exit(0)"):
        assert failure(way_out, ASSERTS) == "code: the program ended before its tests"


def test_the_program_is_the_last_python_block_of_the_response() -> None:
    response = "First\n```python\na\n```\nno:\n```py\nb\n```\nprints\n```text\n4\n```\n"
    assert extract_program(response) == "b\n"
    assert extract_program("```\nprint(1)\n```") == "print(1)\n"
    assert extract_program("```python\nprint(1)\n```\nprints\n```\n1\n```") == "print(1)\n"
    assert extract_program("```\nnot closed\n```python\nprint(1)\n```\n") == "print(1)\n"
    assert extract_program("print(1)") == "print(1)"
    assert extract_program("```python\nprint(1)") == "print(1)"  # a fence that the length cap cut off
    assert verify_code(DOUBLE, "```python\n\n```", LIMITS) == VerdictScored(0.0, rule="code: no program")


@pytest.mark.parametrize("gold", ["", "4", "{}", '{"tests": []}', '{"tests": [{"stdin": 3}]}', '{"assert": "x"}'])
def test_a_gold_answer_that_is_no_set_of_tests_is_unscorable(gold: str) -> None:
    assert readable_gold(gold)
    assert isinstance(verify_code(gold, "print(1)", LIMITS), VerdictUnscorable)


def test_readable_golds_say_nothing() -> None:
    assert readable_gold(DOUBLE) == readable_gold(ASSERTS) == ""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: pass", "out of CPU time"),
        ("import time; time.sleep(1000)", "out of time"),
        ("bytearray(10 << 30)", "MemoryError"),
        ("f = open('f', 'wb')\nfor _ in range(1024): f.write(bytes(1 << 20))", "File too large"),
        ("while True: print('x' * 1000)", "too much output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "too much output"),
        ("files = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
    ],
)
def test_using_too_much_costs_a_program_its_own_verdict(program: str, reason: str) -> None:
    assert reason in failure(program)


@isolated
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", "processes|time"),
        ("import os\nfor _ in range(5): os.fork()\nwhile True: pass", "out of CPU time"),
        (f"{DAEMON}raise SystemExit(1)", "exit status 1"),
        ("for n in range(1000): open(str(n), 'wb').write(bytes(60 << 10))", "No space left"),
    ],
    ids=["fork bomb", "many at work", "daemon", "many files"],
)
def test_processes_and_files_end_with_the_program(program: str, reason: str) -> None:
    said = failure(program)
    assert any(each in said for each in reason.split("|")), said


@isolated
def test_a_program_sees_and_signals_only_its_own_processes() -> None:
    gold = json.dumps({"tests": [{"stdin": "", "stdout": "['1']\n['1']"}]})
    see = "print([name for name in os.listdir('/proc') if name.isdigit()])"
    program = f"import os\n{see}\ntry: os.kill(-1, 9)\nexcept ProcessLookupError: {see}"
    assert failure(program, gold) == ""
    assert "ProcessLookupError" in failure(f"import os; os.kill({os.getpid()}, 9)")


@isolated
def test_a_program_has_no_network_not_even_to_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert "Network is unreachable" in failure(program)


@isolated
def test_a_program_writes_nowhere_but_in_its_scratch_folder(tmp_path: Path) -> None:
    assert "Read-only file system" in failure(f"open({str(tmp_path / 'file')!r}, 'w')")
    gold = json.dumps({"tests": [{"stdin": "", "stdout": "{'LANG': 'C.UTF-8'} [] 3"}]})
    program = "import os; print(dict(os.environ), os.listdir(), end=' ')\nprint(open('file', 'w').write('abc'))"
    assert failure(program, gold) == ""
    remount = "import ctypes; raise SystemExit(ctypes.CDLL(None).mount(b'', b'/', None, 4128, None) == 0 or 7)"
    assert failure(remount) == "code: test 1 of 2 failed: exit status 7"


def test_without_namespaces_a_program_still_ends_with_all_that_it_started(tmp_path: Path) -> None:
    before = descendants(os.getpid())
    (tmp_path / "daemon.py").write_text(DAEMON)
    sandbox = Sandbox(tmp_path, LIMITS, isolate=False)
    assert sandbox.run("daemon.py", "").failure == ""
    assert descendants(os.getpid()) == before


def test_a_sandbox_that_fails_is_unscorable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gvm_stream.verify.code.JAIL", tmp_path / "none.py")
    assert isinstance(verify_code(DOUBLE, "print(1)", LIMITS), VerdictUnscorable)


def test_the_limits_are_for_all_tests_of_a_program_together() -> None:
    gold = json.dumps({"tests": [{"stdin": "", "stdout": ""}] * 20})
    rule = failure("import time; time.sleep(0.2)", gold, CodeSection(wall_s=1.0))
    assert "out of time" in rule
    assert "test 1 of" not in rule


def test_a_program_ends_with_the_process_that_judges_it() -> None:
    async def main() -> None:
        section = VerifierSection(kind="code", timeout_s=1.0, code=CodeSection(wall_s=1000.0, cpu_s=1000.0))
        async with VerifierPool(section) as pool:
            items = [VerifyItem(answer=DOUBLE, response="while True: pass")] * 2
            assert await pool.verify(items) == [VerdictUnscorable("verifier timeout", "timeout")] * 2

    before = running("gvm-stream-code-")
    anyio.run(main)
    assert running("gvm-stream-code-") <= before


def running(what: str) -> set[str]:
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return {line for line in listed.splitlines() if what in line and "python" in line}


def test_a_program_uses_the_interpreter_of_the_trainer() -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    gold = json.dumps({"tests": [{"stdin": "", "stdout": version}]})
    assert failure("import platform; print(platform.python_version())", gold) == ""
