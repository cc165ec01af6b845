"""Every metric there is, in one table, and the endpoint that serves a process's own.

Labels come from closed sets only: never a prompt, a request or a version. Series exist from the start, at zero.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Literal, NamedTuple
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from gvm_stream.allocator.types import Fate
from gvm_stream.config import MetricsSection

log = logging.getLogger(__name__)

Role = Literal["allocator", "producer", "learner"]

PORTS_TRIED = 50
"""Ports after `metrics.port` that a process tries before it gives up and says so."""

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
TOKENS = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0)
LAGS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
FATES = tuple(fate.value for fate in Fate)
OUTCOMES = ("scored", "unscorable", "cancelled", "failed", "expired")


class Spec(NamedTuple):
    role: Role
    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


TABLE: tuple[Spec, ...] = (
    Spec("allocator", "counter", "gvm_rollouts", "Attempts that ended, by outcome.", "outcome", OUTCOMES),
    Spec("allocator", "gauge", "gvm_tokens", "Generated tokens of this run, by fate; their sum is all.", "fate", FATES),
    Spec("allocator", "gauge", "gvm_rollouts_running", "Attempts issued and not ended."),
    Spec("allocator", "counter", "gvm_messages_refused", "Messages that could not be read or used."),
    Spec("allocator", "counter", "gvm_rollouts_duplicate", "Results for attempts that had ended before."),
    Spec("allocator", "gauge", "gvm_ledger_conserved", "1 while issued = running + ended, else 0."),
    Spec("allocator", "gauge", "gvm_producers", "Producers connected."),
    Spec("allocator", "gauge", "gvm_batches_settled", "Training batches done."),
    Spec("allocator", "gauge", "gvm_policy_version", "Newest policy version published."),
    Spec("allocator", "gauge", "gvm_heldout_accuracy", "Mean reward of the last held-out evaluation."),
    Spec(
        "allocator",
        "gauge",
        "gvm_allocator_gain",
        "Error x tokens of the shadow-uniform visits over that of the others, with its 95 % interval.",
        "bound",
        ("estimate", "low", "high"),
    ),
    Spec("allocator", "gauge", "gvm_price", "Decrease of variance per token of the last rollout granted."),
    Spec("allocator", "gauge", "gvm_prompts_retired", "Prompts shown to be dead or solved, not visited for now."),
    Spec("allocator", "histogram", "gvm_group_rollouts", "Rollouts of a closed group.", buckets=TOKENS[:6]),
    Spec("allocator", "histogram", "gvm_response_tokens", "Response length.", buckets=TOKENS),
    Spec("producer", "counter", "gvm_engine_tokens", "Tokens sampled by the engine."),
    Spec("producer", "gauge", "gvm_engine_running", "Rollouts in the engine."),
    Spec("producer", "gauge", "gvm_engine_version", "Policy version the engine samples with."),
    Spec("producer", "histogram", "gvm_rollout_seconds", "From order to completion.", buckets=SECONDS),
    Spec("producer", "histogram", "gvm_verify_seconds", "From completion to verdict.", buckets=SECONDS),
    Spec("producer", "counter", "gvm_verdicts", "Verdicts.", "verdict", ("right", "wrong", "unscorable")),
    Spec("producer", "gauge", "gvm_verifier_waiting", "Responses that wait for a verifier process."),
    Spec("producer", "counter", "gvm_verifier_killed", "Verifier processes that ended over a response."),
    Spec(
        "producer", "histogram", "gvm_weight_update_seconds", "Generation stands still for an update.", buckets=SECONDS
    ),
    Spec("learner", "counter", "gvm_learner_tokens", "Response tokens trained on."),
    Spec("learner", "counter", "gvm_learner_batches", "Batches, by what was done.", "result", ("trained", "skipped")),
    Spec("learner", "counter", "gvm_learner_wait_seconds", "Time waited for a batch."),
    Spec("learner", "histogram", "gvm_learner_step_seconds", "Time of a training step.", buckets=SECONDS),
    Spec("learner", "histogram", "gvm_lag_batches", "Lag of trained rollouts, by their oldest token.", buckets=LAGS),
    Spec("learner", "gauge", "gvm_loss", "Loss of the last batch."),
    Spec("learner", "gauge", "gvm_grad_norm", "Gradient norm of the last batch, before clipping."),
    Spec("learner", "gauge", "gvm_gradient_variance", "Trace of the covariance of the gradient, when last measured."),
    Spec("learner", "gauge", "gvm_gradient_signal", "Squared norm of the expected gradient, when last measured."),
    Spec("learner", "gauge", "gvm_reward_mean", "Mean reward of the last batch, over scored rollouts."),
    Spec("learner", "gauge", "gvm_zero_signal_share", "Share of groups of the last batch without a gradient."),
    Spec("learner", "gauge", "gvm_logprob_mismatch", "Mean |log-prob here - at sampling| of the last batch."),
    Spec("learner", "gauge", "gvm_effective_sample_size", "Of the importance weights, as a share."),
)


class Metrics:
    """The metrics of one process, in a registry of its own."""

    def __init__(self, role: Role) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        for spec in TABLE:
            if spec.role != role:
                continue
            labels = (spec.label,) if spec.label else ()
            metric: Counter | Gauge | Histogram
            if spec.kind == "histogram":
                metric = Histogram(spec.name, spec.help, labels, registry=self.registry, buckets=spec.buckets)
            elif spec.kind == "counter":
                metric = Counter(spec.name, spec.help, labels, registry=self.registry)
            else:
                metric = Gauge(spec.name, spec.help, labels, registry=self.registry)
            for value in spec.values:
                metric.labels(value)
            self._metrics[spec.name] = metric

    def count(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a counter; what is not a finite number of at least 0 is left out."""
        metric = self._metrics[name]
        assert isinstance(metric, Counter), name
        if math.isfinite(amount) and amount >= 0:
            (metric.labels(label) if label else metric).inc(amount)

    def set(self, name: str, value: float, label: str = "") -> None:
        metric = self._metrics[name]
        assert isinstance(metric, Gauge), name
        (metric.labels(label) if label else metric).set(value)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram; what is not a finite number is left out, for its sum would never be one again."""
        metric = self._metrics[name]
        assert isinstance(metric, Histogram), name
        if math.isfinite(value):
            metric.observe(value)

    @contextmanager
    def serve(self, config: MetricsSection) -> Iterator[int]:
        """Serve the registry while the block runs, on the first free port; 0: not served."""
        started = _start(config, self.registry)
        if started is None:
            yield 0
            return
        port, stop = started
        log.info("metrics on http://%s:%d/metrics", config.host, port)
        try:
            yield port
        finally:
            stop()


def _start(config: MetricsSection, registry: CollectorRegistry) -> tuple[int, Callable[[], None]] | None:
    if config.port == 0:
        return None
    for port in range(config.port, config.port + PORTS_TRIED):
        try:
            server, thread = start_http_server(port, config.host, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            log.warning("no metrics: metrics.host = %r cannot be used: %s", config.host, error.strerror)
            return None

        return port, partial(_stop, server, thread)
    log.warning("no metrics: ports %d to %d are all in use", config.port, config.port + PORTS_TRIED - 1)
    return None


def _stop(server: WSGIServer, thread: Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()
