"""Making sockets: addresses and keys checked before anything is opened, every bound explicit.

Linger is bounded so that no process hangs at exit. The high-water mark is generous because the protocol itself bounds
what is under way: work by credits, batches and weights by requests.
"""

from __future__ import annotations

import ipaddress
import random
from pathlib import Path

import zmq

from gvm_stream.config import StreamSection
from gvm_stream.errors import ConfigError, StreamError
from gvm_stream.wire.handshake import Explanation, HandshakeWatch
from gvm_stream.wire.keys import Server, fingerprint, load_pair, secret_path, server_key
from gvm_stream.wire.messages import Role

LINGER_MS = 2000
"""Time for the last messages (goodbyes, final results) to leave at exit."""
HIGH_WATER_MARK = 100_000
"""Messages queued per peer before a send fails; reached only by a peer that stopped reading."""
HANDSHAKE_MS = 10_000
"""For a stranger who connects and says nothing, and for a server that is stopped."""
CONNECT_MS = 3000
"""Far below the system's minutes: after a cut, the next attempt must not be long in coming."""
RECONNECT_MS = (100, 300)
"""First pause before connecting again; each process draws its own, so that a thousand do not come back at once."""
RECONNECT_GROWTH = 16
"""The longest pause, in first pauses."""
ZAP_DOMAIN = b"gvm-stream"


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
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: str, *, stream: StreamSection, server: Server
) -> zmq.Socket[bytes]:
    """A ROUTER that listens on `address` (configured as `key`), with the keys of `server` if there are any.

    With keys, nobody gets through while no ZAP handler answers in this context: see `zap.listening`. Raises ConfigError
    for a malformed address, one beyond this machine without keys or `stream.allow_plaintext`, and for keys that cannot
    be used; StreamError if the address cannot be bound.
    """
    host, _ = parse_address(address, key)
    if not stream.keys and not stream.allow_plaintext and not is_loopback(host):
        raise ConfigError(
            f'{key} = "{address}" would listen beyond this machine without encryption or authentication: anyone who '
            "reaches the port could join the run; make keys with gvm-stream keys create and name their folder as "
            "stream.keys, or set stream.allow_plaintext = true on a network that you trust"
        )
    secret = load_pair(Path(stream.keys), server).secret if stream.keys else None
    socket = _socket(context, zmq.ROUTER, stream)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A peer that was cut off and is back must not wait until its old connection is known to be dead.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if secret is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
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
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    key: str,
    *,
    stream: StreamSection,
    role: Role,
    identity: bytes,
    server: Server = "allocator",
) -> tuple[zmq.Socket[bytes], HandshakeWatch]:
    """A DEALER that connects to `server` at `address` whenever it listens there, and what tells whether it is refused.

    Raises ConfigError for a malformed address, and for keys that cannot be used.
    """
    parse_address(address, key)
    pair = load_pair(Path(stream.keys), role) if stream.keys else None
    servers_key = server_key(Path(stream.keys), server) if stream.keys else b""
    socket = _socket(context, zmq.DEALER, stream)
    socket.setsockopt(zmq.IDENTITY, identity)
    pause_ms = random.randint(*RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, pause_ms)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_GROWTH * pause_ms)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    if pair is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, servers_key)
    watch = HandshakeWatch(socket, _explanation(address, stream.keys, role, server), stream.silence_s)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        watch.close()
        socket.close()
        raise ConfigError(f'{key} = "{address}" is not an address to connect to: {error.strerror}') from error
    return socket, watch


def _explanation(address: str, keys: str, role: Role, server: Server) -> Explanation:
    there = f"the {server} at {address}"
    if not keys:  # then whoever hangs up may be a tunnel whose other end is not there yet
        return Explanation(
            key=f"{there} refuses this process",
            mechanism=f"{there} demands a key, and this process has none: name their folder as stream.keys",
            hung_up="",
        )
    path = secret_path(Path(keys), role)
    ours = fingerprint(load_pair(Path(keys), role).public)
    return Explanation(
        key=f"{there} does not accept the key of this process ({ours}, in {path}): see gvm-stream keys list there",
        mechanism=f'{there} does without keys, and stream.keys = "{keys}" here: all processes of a run, or none',
        hung_up=f"{there} closes every connection at once: its key is not the one in {keys}, or a tunnel ends nowhere",
    )


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, stream: StreamSection) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = LINGER_MS
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.setsockopt(zmq.MAXMSGSIZE, stream.max_message_mib << 20)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    # After a cut, TCP alone may take as long again to come back. Giving a connection up loses what is on its way, so it
    # is left until both ends have long taken each other for dead, and will say everything again.
    silence_ms = int(1000 * stream.silence_s)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, silence_ms // 3))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * silence_ms)
    return socket
