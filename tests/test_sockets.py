"""Addresses, IPv6, and what reaches a port that is open to strangers: everybody else goes on."""

from __future__ import annotations

import ast
import errno
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

import gvm_stream
from gvm_stream.config import StreamSection
from gvm_stream.errors import ConfigError, StreamError, WireError
from gvm_stream.wire import codec
from gvm_stream.wire.handshake import HandshakeWatch
from gvm_stream.wire.sockets import RECONNECT_MS, bind_router, connect_dealer, is_loopback, parse_address
from tests.strangers import GREETING, STRANGERS, PickleBomb
from tests.stream_processes import free_address

Context = zmq.Context[zmq.Socket[bytes]]

PLAIN = StreamSection(max_message_mib=1)


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        yield context


def bind(context: Context, address: str, stream: StreamSection = PLAIN) -> zmq.Socket[bytes]:
    return bind_router(context, address, "k", stream=stream, server="allocator")


def connect(context: Context, address: str, name: str = "p") -> tuple[zmq.Socket[bytes], HandshakeWatch]:
    identity = f"producer/{name}/1".encode()
    dealer, watch = connect_dealer(context, address, "k", stream=PLAIN, role="producer", identity=identity)
    dealer.linger = 0
    return dealer, watch


def assert_heard(router: zmq.Socket[bytes], dealer: zmq.Socket[bytes], text: bytes) -> None:
    """Whatever else arrives: without keys, garbage may be taken for a message of ZMTP 1.0, though not of ours."""
    dealer.send(text)
    content = None
    while content is None:
        assert router.poll(10_000)
        identity, *frames = router.recv_multipart()
        content = frames if identity.startswith(b"producer/") else None
    assert content == [text]


# --- addresses ---


@given(
    st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(lambda ip: f"[{ip}]") | st.just("node-3.cluster"),
    st.integers(1, 65535),
)
def test_addresses_are_read_as_they_are_written(host: str, port: int) -> None:
    assert parse_address(f"tcp://{host}:{port}", "k") == (host.strip("[]"), port)


@given(st.text(max_size=20) | st.text("tcp:/[]*0123456789-+.", max_size=20).map("tcp://".__add__))
def test_any_other_text_is_an_address_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        host, port = parse_address(text, "stream.address")
        assert text.startswith("tcp://")
        assert host
        assert 1 <= port <= 65535


@pytest.mark.parametrize(
    "address",
    [
        "tcp://::1:5710",
        "tcp://[::1:5710",
        "tcp://h",
        "tcp://h:",
        "tcp://h:*",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://h:70000",
        "tcp://h:+1",
        "tcp://h:\N{SUPERSCRIPT TWO}",
        "ipc:///run/socket",
    ],
)
def test_a_malformed_address_is_a_config_error_that_names_the_key(address: str, context: Context) -> None:
    for refuse in (bind, connect):
        with pytest.raises(ConfigError, match=r"^k = .* must look like tcp://HOST:PORT") as caught:
            refuse(context, address)
        assert ("brackets" in str(caught.value)) == ("::1" in address)


def test_loopback_is_this_machine_only() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]))
    beyond = ["0.0.0.0", "::", "*", "10.0.0.1", "eth0", "localhost.example.org", "::ffff:10.0.0.1", "fe80::1%eth0"]
    assert not any(map(is_loopback, beyond))


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]", "10.1.2.3", "lo", "[::ffff:10.0.0.1]"])
def test_nobody_listens_beyond_this_machine_without_keys(host: str, context: Context) -> None:
    address = f"tcp://{host}:5710"
    with pytest.raises(ConfigError, match=r"gvm-stream keys create .* stream.keys, or set stream.allow_plaintext") as e:
        bind(context, address)
    assert f'k = "{address}"' in str(e.value)


def test_binding_says_what_is_wrong_with_the_address(context: Context) -> None:
    address = free_address()
    trusted = StreamSection(allow_plaintext=True)
    with bind(context, address):
        with pytest.raises(StreamError, match=f'k = "{address}" is in use'):
            bind(context, address)
        with pytest.raises(StreamError, match="cannot be bound"):
            bind(context, "tcp://203.0.113.1:5710", trusted)
        with pytest.raises(StreamError, match="cannot be bound"):
            bind(context, "tcp://no-such-interface:5710", trusted)


def test_a_star_is_for_listening_and_no_place_to_connect_to(context: Context) -> None:
    with pytest.raises(ConfigError, match=r'k = "tcp://\*:5710" is not an address to connect to'):
        connect(context, "tcp://*:5710")


def free_port(family: socket.AddressFamily = socket.AF_INET) -> int:
    with socket.socket(family) as probe:
        try:
            probe.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            pytest.skip(f"this machine has no IPv6: {error.strerror}")
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("listen", "connects"),
    [
        ("localhost", "localhost"),
        ("127.0.0.1", "[::ffff:127.0.0.1]"),
        ("[::ffff:127.0.0.1]", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
    ],
)
def test_ways_to_write_a_host(listen: str, connects: str, context: Context) -> None:
    port = free_port()
    dealer, watch = connect(context, f"tcp://{connects}:{port}")
    with bind(context, f"tcp://{listen}:{port}", StreamSection(allow_plaintext=True)) as router, dealer, watch:
        assert_heard(router, dealer, b"hello")


@pytest.mark.parametrize(
    ("listen", "connects"), [("[::1]", "[::1]"), ("[::]", "[::1]"), ("[::]", "127.0.0.1"), ("*", "[::1]")]
)
def test_ipv6(listen: str, connects: str, context: Context) -> None:
    port = free_port(socket.AF_INET6)
    dealer, watch = connect(context, f"tcp://{connects}:{port}")
    with bind(context, f"tcp://{listen}:{port}", StreamSection(allow_plaintext=True)) as router, dealer, watch:
        assert_heard(router, dealer, b"hello")


def test_processes_do_not_all_come_back_at_the_same_moment(context: Context) -> None:
    pauses: set[int] = set()
    for _ in range(10):
        dealer, watch = connect(context, "tcp://127.0.0.1:5710")
        with dealer, watch:
            pauses.add(int(dealer.getsockopt(zmq.RECONNECT_IVL)))
    assert len(pauses) > 1
    assert min(pauses) >= RECONNECT_MS[0]


# --- strangers ---


@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS)
def test_what_strangers_send_disturbs_nobody(sent: bytes, context: Context) -> None:
    """While they stay connected, and after."""
    address = free_address()
    dealer, watch = connect(context, address)
    with bind(context, address) as router, dealer, watch:
        assert_heard(router, dealer, b"before")
        with socket.create_connection(parse_address(address, "k")) as stranger:
            with suppress(ConnectionError):  # they may be cut off half way
                stranger.sendall(sent)
            assert_heard(router, dealer, b"while")
        assert_heard(router, dealer, b"after")


def test_a_pickle_is_a_message_that_cannot_be_read(context: Context, tmp_path: Path) -> None:
    bomb = PickleBomb(tmp_path / "marker")
    address = free_address()
    dealer, watch = connect(context, address)
    with bind(context, address) as router, dealer, watch:
        bomb.throw_at(address)
        assert_heard(router, dealer, bomb.message())
    for decode in (
        codec.decode_to_allocator,
        codec.decode_to_peer,
        codec.decode_to_weight_server,
        codec.decode_from_weight_server,
    ):
        with pytest.raises(WireError):
            decode([bomb.message()])
    bomb.assert_harmless()


RUNS_CODE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
"""Modules that run what they read, or read with one that does."""


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Where a module reads bytes in a way that can run code."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.partition(".")[0] in RUNS_CODE)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in RUNS_CODE:
                yield module
            case ast.Attribute(attr="recv_pyobj" | "send_pyobj" as name):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr="load"), keywords=keywords):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
                safe = {"torch": given.get("weights_only") == "True", "np": given.get("allow_pickle") != "True"}
                if not safe.get(module, True):
                    yield ast.unparse(node)
            case _:
                pass


def test_nothing_in_the_package_reads_bytes_in_a_way_that_can_run_code() -> None:
    package = Path(gvm_stream.__file__).parent
    found = {path.name: list(unsafe(ast.parse(path.read_text()))) for path in package.rglob("*.py")}
    assert len(found) > 50
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing.connection import Client",
        "x = s.recv_pyobj()",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_and_what_does_would_be_found(source: str) -> None:
    assert list(unsafe(ast.parse(source)))


def test_a_flood_of_connections_disturbs_nobody(context: Context) -> None:
    address = free_address()
    dealer, watch = connect(context, address)
    with bind(context, address) as router, dealer, watch:
        assert_heard(router, dealer, b"before")
        strangers = [socket.create_connection(parse_address(address, "k")) for _ in range(200)]
        for stranger in strangers[::2]:
            stranger.sendall(GREETING[:20])
        assert_heard(router, dealer, b"while")
        for stranger in strangers:
            stranger.close()
        assert_heard(router, dealer, b"after")


def test_a_message_over_the_limit_ends_its_connection_and_no_other(context: Context) -> None:
    address = free_address()
    (big, big_watch), (small, small_watch) = connect(context, address, "b"), connect(context, address, "s")
    with bind(context, address) as router, big, big_watch, small, small_watch:
        big.send(bytes((1 << 20) + 1))
        big.send(b"lost with it")
        for _ in range(2):
            small.send(bytes(1 << 20))
            assert router.poll(5000)
            assert router.recv_multipart() == [b"producer/s/1", bytes(1 << 20)]
        assert not router.poll(0)


def test_a_peer_that_comes_back_takes_its_place_again(context: Context) -> None:
    """After a cut, its old connection may still look alive to the server."""
    address = free_address()
    with bind(context, address) as router:
        old, old_watch = connect(context, address)
        with closing(old), closing(old_watch):
            assert_heard(router, old, b"old")
            new, new_watch = connect(context, address)
            with closing(new), closing(new_watch):
                assert_heard(router, new, b"new")
                router.send_multipart([b"producer/p/1", b"answer"])
                assert new.poll(5000)
                assert not old.poll(0)
