"""Hosts on one machine: a network namespace for each, joined by a bridge, with cables that can be cut."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

NETWORK = "10.77.0"


class Hosts:
    """Named hosts on 10.77.0.0/24. What is left running on them at the end is killed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._prefix = f"gvm{os.getpid()}"

    def address(self, name: str) -> str:
        """IPv4 address of a host."""
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def command(self, name: str, *command: str) -> tuple[str, ...]:
        """`command` as it is run on a host; with nothing but the host, the `wrapper` of `stream_processes.started`."""
        return ("ip", "netns", "exec", self._namespace(name), *command)

    def cut(self, name: str) -> None:
        """Pull the cable of a host out of the bridge. Nobody is told: packets are lost, no interface is down."""
        _ip("-n", self._namespace("bridge"), "link", "set", name, "nomaster")

    def mend(self, name: str) -> None:
        _ip("-n", self._namespace("bridge"), "link", "set", name, "master", "bridge")

    def build(self, stack: ExitStack) -> None:
        bridge = self._add("bridge", stack)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for name in self.names:
            host = self._add(name, stack)
            _ip("-n", bridge, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", bridge, "link", "set", name, "up", "master", "bridge")
            _ip("-n", host, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", host, "link", "set", interface, "up")

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _add(self, name: str, stack: ExitStack) -> str:
        namespace = self._namespace(name)
        _ip("netns", "add", namespace)
        stack.callback(_delete, namespace)
        return namespace


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Hosts for as long as the block runs. Where namespaces are not permitted, the test is skipped."""
    with ExitStack() as stack:
        built = Hosts(names)
        try:
            built.build(stack)
        except FileNotFoundError:
            pytest.skip("there is no ip command to make network namespaces with")
        except subprocess.CalledProcessError as error:
            if "not permitted" not in error.stderr and "denied" not in error.stderr:
                raise
            pytest.skip(f"network namespaces are not permitted: {error.stderr.strip()}")
        yield built


def _ip(*arguments: str) -> str:
    return subprocess.run(("ip", *arguments), capture_output=True, text=True, check=True).stdout


def _delete(namespace: str) -> None:
    for pid in _ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", namespace)
