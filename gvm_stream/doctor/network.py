"""Checks of addresses (those that are this machine's must be free, others must be within reach), keys and the hub."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from gvm_stream.config import MetricsSection, StreamSection
from gvm_stream.doctor.finding import Finding
from gvm_stream.errors import ConfigError
from gvm_stream.wire.keys import MEMBERS, fingerprint, load_entries, load_pair, secret_path
from gvm_stream.wire.sockets import is_loopback, parse_address

PATIENCE_S = 2.0


def address(key: str, value: str) -> Finding:
    """tcp://HOST:PORT of the configuration's `key`. Raises ConfigError if it is malformed."""
    host, port = parse_address(value, key)
    name = f'{key} = "{value}"'
    try:
        family, _, _, _, where = socket.getaddrinfo(
            None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        return Finding("fail", f"{name}: host not known ({error.strerror})", "correct the name, or add it to DNS")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return within_reach(name, host, port)
            if error.errno == errno.EADDRINUSE:
                advice = "choose a free port, or end the run that listens there (gvm-stream status asks it)"
                return Finding("fail", f"{name} is in use on this machine", advice)
            return Finding("fail", f"{name} cannot be listened on: {error.strerror}", "choose a port above 1023")
    return Finding("ok", f"{name} is this machine's, and free")


def within_reach(name: str, host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), PATIENCE_S).close()
    except ConnectionRefusedError:
        return Finding("ok", f"{name}: the host answers, nothing listens there yet")
    except OSError as error:
        reason = error.strerror or f"no answer within {PATIENCE_S:g} s"
        return Finding("fail", f"{name} is out of reach: {reason}", f"let TCP port {port} through the firewall")
    return Finding("ok", f"{name} answers")


def metrics_port(metrics: MetricsSection) -> Finding:
    """The endpoints take the next free port, so one in use is no failure; a scraper that expects the first looks in
    vain."""
    name = f"metrics.port = {metrics.port}"
    if not metrics.port:
        return Finding("warn", f"{name}: no metrics, no health endpoints", "set a port to see what the run does")
    try:
        family, _, _, _, where = socket.getaddrinfo(metrics.host, metrics.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Finding("warn", f"{name} is in use: the next free port will be taken", "choose one for each run")
        name = f'metrics.host = "{metrics.host}"'
        return Finding("fail", f"{name} cannot be listened on: {error.strerror}", "name an interface of this machine")
    return Finding("ok", f"{name} of {metrics.host} is free")


def keys(stream: StreamSection) -> Finding:
    """The keys that are on this host, and whether they are on the list of who may join."""
    if not stream.keys:
        return _no_keys(stream)
    folder = Path(stream.keys)
    try:
        entries = load_entries(folder)
        pairs = {role: load_pair(folder, role) for role in MEMBERS if secret_path(folder, role).exists()}
    except ConfigError as error:
        return Finding("fail", str(error), "gvm-stream keys --help")
    listed = {entry.key.encode() for entry in entries}
    found = f'stream.keys = "{folder}": {len(entries)} may join; here are keys of ' + (
        ", ".join(f"{role} ({fingerprint(pair.public)})" for role, pair in pairs.items()) or "nobody"
    )
    strangers = [role for role, pair in pairs.items() if pair.public not in listed]
    if strangers:
        return Finding("fail", f"{found}; not on the list: {', '.join(strangers)}", "copy public.keys here again")
    if not pairs:
        return Finding("fail", found, "copy ROLE.secret of what runs on this host from where the keys were made")
    return Finding("ok", found)


def _no_keys(stream: StreamSection) -> Finding:
    addresses = {
        "stream.address": stream.address,
        "stream.weights_address": stream.weights_address,
        "stream.nccl_address": stream.nccl_address,
    }
    beyond = [
        f'{key} = "{value}"'
        for key, value in addresses.items()
        if value and not is_loopback(parse_address(value, key)[0])
    ]
    if not beyond:
        return Finding("ok", "none, and none needed: only processes of this machine can join")
    found = f"none, and {' and '.join(beyond)} is beyond this machine: anyone who reaches the port can join"
    advice = "gvm-stream keys create DIR, and stream.keys"
    return Finding("warn", found, advice) if stream.allow_plaintext else Finding("fail", found, advice)


def hub() -> Finding:
    """Whether the Hugging Face hub answers, through a proxy if the environment names one. If not, this process goes on
    with what is in the cache, as one with HF_HUB_OFFLINE=1 does; otherwise every library tries again for a minute.

    To be called before transformers and datasets are imported.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Finding("ok", "HF_HUB_OFFLINE is set: model and data come from this host's cache")
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE_S).close()
    except HTTPError:
        pass  # it answers
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        found = f"{constants.ENDPOINT} does not answer ({error}): only what is in this host's cache can be used"
        return Finding("warn", found, "download model and data before, and set HF_HUB_OFFLINE=1 for the run")
    return Finding("ok", f"{constants.ENDPOINT} answers")
