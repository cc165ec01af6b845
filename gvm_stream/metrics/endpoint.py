"""The port on which a process serves its endpoints."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prometheus_client import CollectorRegistry

from gvm_stream.config import MetricsSection
from gvm_stream.health import Health
from gvm_stream.http_endpoints import http_endpoints

log = logging.getLogger(__name__)

PORTS_TRIED = 50
"""Ports after `metrics.port` that a process tries before it gives up and says so."""


@contextmanager
def serve(config: MetricsSection, registry: CollectorRegistry, health: Health) -> Iterator[int]:
    """Serve while the block runs, on the first free port; 0: not served."""
    with ExitStack() as stack:
        port = _listen(config, registry, health, stack)
        if port:
            log.info("metrics on http://%s:%d/metrics", config.host, port)
        yield port


def _listen(config: MetricsSection, registry: CollectorRegistry, health: Health, stack: ExitStack) -> int:
    if config.port == 0:
        return 0
    for port in range(config.port, config.port + PORTS_TRIED):
        try:
            return stack.enter_context(http_endpoints(config.host, port, registry, health))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                log.warning("no metrics: metrics.host = %r cannot be used: %s", config.host, error.strerror)
                return 0
    log.warning("no metrics: ports %d to %d are all in use", config.port, config.port + PORTS_TRIED - 1)
    return 0
