"""One program in a jail: run as a script by `code.py`, never imported. Standard library only, so that it starts fast.

    python -I -S jail.py SPECIFICATION

This process supervises: it makes the namespaces, starts the program in
them, ends it at the deadline with all it has started, and reports how it ended as one line of JSON on its output.
Its own end, or that of the process that started it, ends the program too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, SYS_MOUNT_SETATTR = -100, 0x8000, 1, 442
NOBODY = 65534
PROCESSES = 64
"""Most processes of a program in namespaces."""
WATCH_S = 0.02
FEWEST_PIDS = 320
"""Most process ids of a program where the user is root; the kernel allows no limit below 301."""
SCRATCH_MIB = 16
OPEN_FILES = 64


class ParentGone(Exception):
    """The process that wanted the result has ended."""


def main() -> None:
    run = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, parent_is_gone)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != run["parent"]:
        return
    if run["isolate"]:
        isolate(run["scratch"])
    program = os.fork()
    if program == 0:
        become_program(run)
    try:
        stopped = watch(program, run)
        _, status = os.waitpid(program, 0)
        report = {"exit": os.waitstatus_to_exitcode(status), "stopped": stopped}
    except ParentGone:
        os.kill(program, signal.SIGKILL)
        return
    finally:
        end_descendants()
    sys.stdout.write(json.dumps(report))


def watch(program: int, run: dict[str, Any]) -> str:
    """Wait for the program's end; kill it and say why if it, or all it has started together, use too much."""
    end = time.monotonic() + run["wall_s"]
    ended = select.poll()
    ended.register(os.pidfd_open(program), select.POLLIN)
    reason = ""
    while not reason and not ended.poll(1000 * WATCH_S):
        processes, cpu_s = usage() if run["isolate"] else (0, 0.0)
        if time.monotonic() > end:
            reason = "out of time"
        elif processes > PROCESSES:
            reason = "too many processes"
        elif cpu_s > run["cpu_s"]:
            reason = "out of CPU time"
    if reason:
        os.kill(program, signal.SIGKILL)
    return reason


def usage() -> tuple[int, float]:
    """Processes in the namespace and the CPU seconds of them and of those they have waited for."""
    processes, ticks = 0, 0
    if os.path.exists("/proc/self/stat"):  # of this process, which is outside: the program's is not mounted yet
        return 0, 0.0
    for process in os.listdir("/proc"):
        if process.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                processes += 1
                ticks += sum(map(int, fields[11:15]))
    return processes, ticks / os.sysconf("SC_CLK_TCK")


def parent_is_gone(*_: object) -> None:
    raise ParentGone


def isolate(scratch: str) -> None:
    """Namespaces of its own for users, processes, network, mounts and IPC.

    Afterwards the file system is read-only but for an empty `scratch` in memory, and no network device is up.
    """
    user, group = os.getuid(), os.getgid()
    namespaces = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC
    check(LIBC.unshare(namespaces), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    mount("none", "/", "none", MS_REC | MS_PRIVATE, "")
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    result = LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), size)
    check(result, "read-only file system")
    mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, f"size={SCRATCH_MIB}m,nr_inodes=1024,mode=700")


def become_program(run: dict[str, Any]) -> NoReturn:
    """What fails here is a failure of the jail: it goes to the supervisor's error output, and nothing is run."""
    errors = os.dup(2)  # closed by exec
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if run["isolate"]:
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "")
            limit_processes()
        Path("/proc/self/oom_score_adj").write_text("1000")
        os.chdir(run["scratch"])
        for standard, file in enumerate(run["files"]):
            os.dup2(file, standard)
            os.set_inheritable(file, False)
        cpu_s = math.ceil(run["cpu_s"])
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (run["memory"], run["memory"]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (run["file_size"], run["file_size"]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.execve(sys.executable, [sys.executable, "-I", "-S", run["program"]], {"LANG": "C.UTF-8"})
    except (OSError, ValueError) as error:
        os.write(errors, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(1)


def limit_processes() -> None:
    """By user, which root is exempt from, and by the ids of the namespace where the kernel (6.14) has such a limit."""
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
    with contextlib.suppress(PermissionError, OSError):
        Path("/proc/sys/kernel/pid_max").write_text(str(FEWEST_PIDS))


def end_descendants() -> None:
    """Kill and reap until none is left: those whose parents have ended are children of this process now."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for children in Path("/proc/self/task").glob("*/children"):
                for child in children.read_text().split():
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def prctl(option: int, value: int) -> None:
    check(LIBC.prctl(option, value, 0, 0, 0), "prctl")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    check(LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
