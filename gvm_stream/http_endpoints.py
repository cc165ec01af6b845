"""The HTTP side of a process: /metrics for Prometheus, /healthz and /readyz for whoever runs it, on one port.

Answered by threads of their own, so that a process that hangs can still say so.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from gvm_stream.health import Health

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class _Handler(WSGIRequestHandler):
    timeout = 10  # a client that connects and says nothing does not keep its thread

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds; nobody wants to read of them."""


@contextmanager
def http_endpoints(host: str, port: int, registry: CollectorRegistry, health: Health) -> Iterator[int]:
    """Serve the endpoints while the block runs; the port (of `port` 0: a free one). Raises OSError if `host` and `port`
    cannot be listened on."""
    family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

    class Server(ThreadingMixIn, WSGIServer):
        address_family = family
        daemon_threads = True

    with make_server(str(address), port, _application(registry, health), Server, _Handler) as server:
        thread = Thread(target=server.serve_forever, name="http endpoints", daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _application(registry: CollectorRegistry, health: Health) -> WSGIApplication:
    metrics: WSGIApplication = make_wsgi_app(registry)
    states: dict[str, Callable[[], str]] = {"/healthz": health.hanging, "/readyz": health.absent}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        text = [("Content-Type", "text/plain; charset=utf-8")]  # a new list: the server adds to it
        if path not in states:
            start_response("404 Not Found", text)
            return [b"there are /metrics, /healthz and /readyz\n"]
        problem = states[path]()
        start_response("503 Service Unavailable" if problem else "200 OK", text)
        return [f"{problem or 'ok'}\n".encode()]

    return answer
