"""Making sockets: addresses checked before anything is opened, every bound explicit.

Linger is bounded so that no process hangs at exit. The high-water mark is generous because the protocol itself bounds
what is under way: work by credits, batches and weights by requests.
"""

from __future__ import annotations

import ipaddress

import zmq

from gvm_stream.errors import ConfigError, StreamError

LINGER_MS = 2000
"""Time for the last messages (goodbyes, final results) to leave at exit."""
HIGH_WATER_MARK = 100_000
"""Messages queued per peer before a send fails; reached only by a peer that stopped reading."""


def parse_address(address: str, key: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT (IPv6 hosts in brackets). Raises ConfigError naming `key`."""
    wrong = f'{key} = "{address}" must look like tcp://HOST:PORT, with a port from 1 to 65535'
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(wrong)
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
        raise ConfigError(f"{wrong}; an IPv6 host stands in brackets, as in tcp://[::1]:5710")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: str, *, plaintext: bool, limit_mib: int
) -> zmq.Socket[bytes]:
    """A ROUTER that listens on `address` (configured as `key`).

    Raises ConfigError for a malformed address or one beyond this machine without `plaintext`, StreamError if it cannot
    be bound.
    """
    host, _ = parse_address(address, key)
    if not plaintext and not is_loopback(host):
        raise ConfigError(
            f'{key} = "{address}" would listen beyond this machine without encryption or authentication: anyone who '
            "reaches the port could join the run; use a loopback address, or set stream.allow_plaintext = true on a "
            "network that you trust"
        )
    socket = _socket(context, zmq.ROUTER, limit_mib)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        if error.errno == zmq.EADDRINUSE:
            raise StreamError(
                f'{key} = "{address}" is in use: another run (or another program) listens there; choose a free port'
            ) from error
        raise StreamError(f'{key} = "{address}" cannot be bound: {error.strerror}') from error
    return socket


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: str, *, identity: bytes, limit_mib: int
) -> zmq.Socket[bytes]:
    """A DEALER that connects to `address` whenever somebody listens there. Raises ConfigError if it is malformed."""
    parse_address(address, key)
    socket = _socket(context, zmq.DEALER, limit_mib)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f'{key} = "{address}" is not an address to connect to: {error.strerror}') from error
    return socket


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, limit_mib: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = LINGER_MS
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.setsockopt(zmq.MAXMSGSIZE, limit_mib << 20)
    socket.setsockopt(zmq.IPV6, 1)
    return socket
