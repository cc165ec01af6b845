"""Every metric there is: name, type, unit, labels, buckets, and the process that serves it. In docs/metrics.md, too.

Labels come from closed sets only: never a prompt, a request, a version or the text of an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.types import Exit, Fate
from gvm_stream.allocator.waits import Reason
from gvm_stream.learner.figures import SkipCause
from gvm_stream.verify.verdict import Cause

Role = Literal["allocator", "producer", "learner"]
ROLES: tuple[Role, ...] = get_args(Role)

UNKNOWN = math.nan
"""Start of a gauge for what has to be measured first: 0 would be a statement, and an absent series looks like a typing
error in a query. Comparisons with NaN are false, so no alert fires on it."""

SECONDS = tuple(round(m * 10.0**e, 6) for e in range(-2, 4) for m in (1, 1.5, 2, 3, 5, 7))
"""10 ms to two hours. Six steps a decade: a quantile read from them is off by less than 30 %."""
TOKENS = tuple(2**e * m // 2 for e in range(3, 17) for m in (2, 3))[:-1]
ROLLOUTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
LAGS = (0, 1, 2, 3, 4, 6, 8, 16)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)

FATES = tuple(fate.value for fate in Fate)
OUTCOMES = ("scored", "unscorable", "cancelled", "failed", "expired")
ACCEPTANCE = ("0-0.1", "0.1-0.3", "0.3-0.7", "0.7-0.9", "0.9-1")
"""Bins of the acceptance rate of a prompt: hard ones first."""
ACCEPTANCE_BOUNDS = (0.1, 0.3, 0.7, 0.9)


class Spec(NamedTuple):
    role: Role | Literal["every"]
    """The process that serves it. Those of every process have its role as label."""
    kind: Literal["counter", "gauge", "histogram"]
    name: str
    """As in the code; a counter is exposed as `name_total`."""
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    """All that the label can have."""
    buckets: tuple[float, ...] = ()
    unit: str = ""
    """Empty: a plain number."""
    start: float = 0.0

    @property
    def exposed(self) -> str:
        """The name in Prometheus; a histogram has `_bucket`, `_sum` and `_count` behind it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _every(kind: Literal["counter", "gauge"], name: str, text: str, unit: str = "", start: float = 0.0) -> Spec:
    return Spec("every", kind, name, text, "role", ROLES, unit=unit, start=start)


TABLE: tuple[Spec, ...] = (
    _every(
        "gauge",
        "gvm_last_progress_timestamp_seconds",
        "When the process last got something done (allocator: any news of progress, producer: a token, learner: a "
        "micro-batch) or started; Unix time.",
        unit="seconds",
    ),
    _every("gauge", "gvm_process_start_time_seconds", "When the process started; Unix time.", unit="seconds"),
    _every("counter", "gvm_process_cpu_seconds", "CPU time of the process.", unit="seconds"),
    _every("gauge", "gvm_process_resident_memory_bytes", "Resident memory of the process.", unit="bytes"),
    _every("gauge", "gvm_process_open_fds", "Open file descriptors."),
    _every("gauge", "gvm_process_max_fds", "Most file descriptors that may be open."),
    _every(
        "gauge", "gvm_disk_free_bytes", "Free space where the process writes its files.", unit="bytes", start=UNKNOWN
    ),
    _every("gauge", "gvm_gpu_memory_used_bytes", "Memory in use on its GPU, by all processes.", "bytes", UNKNOWN),
    _every("gauge", "gvm_gpu_memory_bytes", "Memory of its GPU.", "bytes", UNKNOWN),
    _every("gauge", "gvm_gpu_utilization", "Share of time in which its GPU computes; needs nvidia-ml-py.", "", UNKNOWN),
    # --- allocator ---
    Spec("allocator", "counter", "gvm_attempts_issued", "Attempts handed out, those made again included."),
    Spec("allocator", "counter", "gvm_rollouts", "Attempts that ended, by outcome.", "outcome", OUTCOMES),
    Spec("allocator", "gauge", "gvm_rollouts_running", "Attempts issued and not ended."),
    Spec("allocator", "gauge", "gvm_ledger_conserved", "1 while issued = running + ended, else 0.", start=1.0),
    Spec("allocator", "counter", "gvm_messages_refused", "Messages that could not be read or used."),
    Spec(
        "allocator",
        "counter",
        "gvm_connections_refused",
        "Connections, and messages on them, that may not join the run.",
        "reason",
        ("key", "revoked", "role", "handshake"),
    ),
    Spec("allocator", "counter", "gvm_rollouts_duplicate", "Results for attempts that had ended before."),
    Spec("allocator", "counter", "gvm_batches_repeated", "Batches trained on again by a learner that came back."),
    Spec(
        "allocator",
        "histogram",
        "gvm_stale_acceptance",
        "Rollouts dropped for their age, by the share of successes in their group: whether hard prompts suffer.",
        buckets=SHARES,
    ),
    Spec(
        "allocator",
        "histogram",
        "gvm_stale_response_tokens",
        "Rollouts dropped for their age, by length: whether long responses suffer.",
        buckets=TOKENS,
        unit="tokens",
    ),
    Spec(
        "allocator",
        "gauge",
        "gvm_tokens",
        "Generated tokens of this run, by fate; their sum is all.",
        "fate",
        FATES,
        unit="tokens",
    ),
    Spec("allocator", "gauge", "gvm_rollouts_by_fate", "Rollouts of this run, by the fate of tokens.", "fate", FATES),
    Spec("allocator", "gauge", "gvm_producers", "Producers connected."),
    Spec("allocator", "gauge", "gvm_batches_settled", "Training batches done.", unit="batches"),
    Spec("allocator", "gauge", "gvm_batches_planned", "Training batches of the whole run.", unit="batches"),
    Spec("allocator", "gauge", "gvm_policy_version", "Newest policy version published."),
    Spec("allocator", "gauge", "gvm_heldout_accuracy", "Mean reward of the last held-out evaluation.", start=UNKNOWN),
    Spec(
        "allocator",
        "gauge",
        "gvm_allocator_gain",
        "Error x tokens of the shadow-uniform visits over that of the others, with its 95 % interval.",
        "bound",
        ("estimate", "low", "high"),
        start=UNKNOWN,
    ),
    Spec(
        "allocator",
        "gauge",
        "gvm_price",
        "Shadow price: decrease of variance per token of the last rollout granted.",
        unit="variance per token",
        start=UNKNOWN,
    ),
    Spec(
        "allocator",
        "gauge",
        "gvm_gradient_variance_predicted",
        "Variance of the mean gradient of the newest settled batch that its energies predict, in their unit.",
        start=UNKNOWN,
    ),
    Spec(
        "allocator",
        "gauge",
        "gvm_budget_per_prompt",
        "What a visit may cost on average; NaN for what the budget does not limit.",
        "limit",
        ("rollouts", "tokens"),
        start=UNKNOWN,
    ),
    Spec("allocator", "histogram", "gvm_group_rollouts", "Rollouts of a closed group.", buckets=ROLLOUTS),
    Spec(
        "allocator", "histogram", "gvm_group_tokens", "Tokens that a closed group took.", buckets=TOKENS, unit="tokens"
    ),
    Spec("allocator", "histogram", "gvm_acceptance", "Share of successes in a closed group.", buckets=SHARES),
    Spec("allocator", "counter", "gvm_exits", "Visits that ended, by reason.", "reason", get_args(Exit)),
    Spec(
        "allocator",
        "gauge",
        "gvm_prompts",
        "Prompts in use, by the mean of their posterior.",
        "acceptance",
        ACCEPTANCE,
    ),
    Spec(
        "allocator",
        "counter",
        "gvm_visits",
        "Visits of settled batches, by the mean of their prior (earlier visits only); shadow-uniform ones left out.",
        "acceptance",
        ACCEPTANCE,
    ),
    Spec(
        "allocator",
        "counter",
        "gvm_visit_rollouts",
        "Rollouts of these visits.",
        "acceptance",
        ACCEPTANCE,
    ),
    Spec("allocator", "gauge", "gvm_prompts_retired", "Prompts shown to be dead or solved, not visited for now."),
    Spec("allocator", "gauge", "gvm_prompts_quarantined", "Prompts that failed too often, not visited any more."),
    Spec(
        "allocator",
        "counter",
        "gvm_run_wait_seconds",
        "Time the run has waited, by what for; what it waits for at once counts each.",
        "reason",
        get_args(Reason),
        unit="seconds",
    ),
    Spec("allocator", "gauge", "gvm_spool_bytes", "Size of the spool on disk.", unit="bytes"),
    Spec("allocator", "gauge", "gvm_spool_waiting", "Turns of the allocator that are not on disk yet."),
    # --- producer ---
    Spec("producer", "counter", "gvm_engine_tokens", "Tokens sampled by the engine.", unit="tokens"),
    Spec("producer", "gauge", "gvm_engine_running", "Rollouts in generation."),
    Spec("producer", "gauge", "gvm_engine_waiting", "Rollouts in the engine's queue."),
    Spec("producer", "gauge", "gvm_engine_cache_used", "Share of the key-value cache in use."),
    Spec(
        "producer",
        "counter",
        "gvm_engine_preemptions",
        "Running rollouts that the engine has put back for want of key-value memory.",
    ),
    Spec(
        "producer",
        "gauge",
        "gvm_engine_cache_recomputed",
        "1: a weight update has the key-value cache of running rollouts computed again; 0: it is kept.",
    ),
    Spec(
        "producer",
        "gauge",
        "gvm_engine_quarantined",
        "1: the engine's log-probs of the canary are not the learner's, and no work is taken.",
    ),
    Spec(
        "producer",
        "gauge",
        "gvm_canary_difference",
        "Mean difference of the canary's log-probs between engine and learner, in nats, after the last update.",
        start=UNKNOWN,
    ),
    Spec("producer", "gauge", "gvm_engine_version", "Policy version the engine samples with.", start=UNKNOWN),
    Spec("producer", "histogram", "gvm_rollout_seconds", "From order to completion.", buckets=SECONDS, unit="seconds"),
    Spec("producer", "histogram", "gvm_verify_seconds", "From completion to verdict.", buckets=SECONDS, unit="seconds"),
    Spec("producer", "histogram", "gvm_response_tokens", "Length of scored responses.", buckets=TOKENS, unit="tokens"),
    Spec("producer", "counter", "gvm_rollouts_truncated", "Scored responses that were cut off at the length cap."),
    Spec("producer", "counter", "gvm_verdicts", "Verdicts.", "verdict", ("right", "wrong", "unscorable")),
    Spec("producer", "counter", "gvm_unscorable", "Responses without a verdict, by cause.", "cause", get_args(Cause)),
    Spec("producer", "gauge", "gvm_verifier_waiting", "Responses that wait for a verifier process."),
    Spec("producer", "counter", "gvm_verifier_killed", "Verifier processes that ended over a response."),
    Spec(
        "producer",
        "histogram",
        "gvm_weight_update_seconds",
        "From the announcement of weights until the engine samples with them.",
        buckets=SECONDS,
        unit="seconds",
    ),
    Spec(
        "producer",
        "histogram",
        "gvm_weight_stall_seconds",
        "Generation stands still for a weight update.",
        buckets=SECONDS,
        unit="seconds",
    ),
    Spec(
        "producer",
        "counter",
        "gvm_producer_wait_seconds",
        "Time the producer had nothing to do, by what it waited for.",
        "reason",
        ("weights", "work", "verdicts"),
        unit="seconds",
    ),
    # --- learner ---
    Spec("learner", "counter", "gvm_learner_tokens", "Response tokens trained on.", unit="tokens"),
    Spec("learner", "counter", "gvm_learner_batches", "Batches, by what was done.", "result", ("trained", "skipped")),
    Spec("learner", "counter", "gvm_learner_skips", "Batches skipped, by cause.", "cause", get_args(SkipCause)),
    Spec("learner", "counter", "gvm_learner_wait_seconds", "Time waited for a batch.", unit="seconds"),
    Spec(
        "learner", "histogram", "gvm_learner_step_seconds", "Time of a training step.", buckets=SECONDS, unit="seconds"
    ),
    Spec(
        "learner",
        "histogram",
        "gvm_publish_seconds",
        "Time to gather, write and announce weights; training stands still.",
        buckets=SECONDS,
        unit="seconds",
    ),
    Spec(
        "learner",
        "histogram",
        "gvm_lag_batches",
        "Lag of trained rollouts, by their oldest token.",
        buckets=LAGS,
        unit="batches",
    ),
    Spec("learner", "counter", "gvm_rollouts_at_max_lag", "Trained rollouts as old as `allocation.max_lag` admits."),
    Spec("learner", "counter", "gvm_tokens_clamped", "Tokens whose log-ratio was clamped.", unit="tokens"),
    Spec("learner", "gauge", "gvm_loss", "Loss of the last batch.", start=UNKNOWN),
    Spec("learner", "gauge", "gvm_grad_norm", "Gradient norm of the last batch, before clipping.", start=UNKNOWN),
    Spec(
        "learner",
        "gauge",
        "gvm_gradient_variance",
        "Trace of the covariance of the gradient, when last measured.",
        start=UNKNOWN,
    ),
    Spec(
        "learner",
        "gauge",
        "gvm_gradient_signal",
        "Squared norm of the expected gradient, when last measured; may come out below 0.",
        start=UNKNOWN,
    ),
    Spec(
        "learner",
        "gauge",
        "gvm_noise_scale_tokens",
        "Batch size at which noise equals signal: variance x tokens / signal (McCandlish et al., arXiv 1812.06162).",
        unit="tokens",
        start=UNKNOWN,
    ),
    Spec("learner", "gauge", "gvm_reward_mean", "Mean reward of the last batch, over scored rollouts.", start=UNKNOWN),
    Spec(
        "learner",
        "gauge",
        "gvm_zero_signal_share",
        "Share of groups of the last batch without a gradient.",
        start=UNKNOWN,
    ),
    Spec(
        "learner",
        "gauge",
        "gvm_logprob_mismatch",
        "Mean |log-prob here - at sampling| of the last batch.",
        unit="nats",
        start=UNKNOWN,
    ),
    Spec(
        "learner", "gauge", "gvm_entropy", "Entropy per response token of the last batch.", unit="nats", start=UNKNOWN
    ),
    Spec(
        "learner",
        "gauge",
        "gvm_kl",
        "KL from the reference per response token of the last batch.",
        unit="nats",
        start=UNKNOWN,
    ),
    Spec(
        "learner",
        "gauge",
        "gvm_effective_sample_size",
        "Of the importance weights, as a share of the rollouts.",
        start=UNKNOWN,
    ),
)


def by_acceptance(rates: Floats, amounts: Sequence[float] | None = None) -> dict[str, float]:
    """Label of acceptance -> how many of the rates [N] it holds, or the sum of their amounts [N]."""
    bins = np.searchsorted(ACCEPTANCE_BOUNDS, rates, side="right")
    return dict(zip(ACCEPTANCE, np.bincount(bins, amounts, len(ACCEPTANCE)).tolist(), strict=True))
