"""Panels that more than one dashboard shows."""

from __future__ import annotations

from gvm_stream.dashboards.panels import Series, graph, histogram

PER_S = "$__rate_interval"
TOKENS_PER_S = "suffix: tokens/s"
SHARE = "percentunit"


def spent(metric: str, limit: str) -> str:
    """The mean of a histogram metric over a budget."""
    mean = f"sum by (run) (rate({metric}_sum[{PER_S}])) / sum by (run) (rate({metric}_count[{PER_S}]))"
    return f'{mean} / on (run) group_right () gvm_budget_per_prompt{{limit="{limit}"}}'


PROGRESS = Series("time() - gvm_last_progress_timestamp_seconds", "{{role}} {{instance}}")
TOKENS_BY_FATE = graph(
    "Tokens by fate",
    "Every generated token has one fate; the height is all that was generated. The trained ones are the aim.",
    "short",
    Series("sum by (fate) (gvm_tokens)", "{{fate}}"),
    stacked=True,
)
SPEED = graph(
    "Tokens a second",
    "Sampled by the engines, and trained on. The gap is what tokens by fate explains.",
    TOKENS_PER_S,
    Series(f"sum(rate(gvm_engine_tokens_total[{PER_S}]))", "sampled"),
    Series(f"sum(rate(gvm_learner_tokens_total[{PER_S}]))", "trained"),
)
GAIN = graph(
    "Gain of the allocation",
    "Error x tokens of shadow-uniform visits over that of the others, with its 95 % interval. Around 1: none is shown.",
    "none",
    Series("gvm_allocator_gain", "{{bound}}"),
)
ZERO_SIGNAL = graph(
    "Groups without a gradient",
    "Share of the groups of a batch in which all rollouts have the same reward.",
    SHARE,
    Series("gvm_zero_signal_share", "share"),
)
MISMATCH = graph(
    "Log-prob mismatch",
    "Mean distance between the learner's log-probs and those at sampling. Large: not the same weights.",
    "suffix: nats",
    Series("gvm_logprob_mismatch", "mismatch"),
)
ESS = graph(
    "Effective sample size",
    "Of the importance weights, as a share of the rollouts. Low: the batch is too far from the policy.",
    SHARE,
    Series("gvm_effective_sample_size", "share"),
)
VARIANCE = graph(
    "Gradient variance",
    "Measured by the learner: trace of the covariance, and the squared norm of the expected gradient.",
    "sci",
    Series("gvm_gradient_variance", "variance"),
    Series("gvm_gradient_signal", "signal"),
)
DISK = graph(
    "Free disk space",
    "Where each process writes its files.",
    "bytes",
    Series("gvm_disk_free_bytes", "{{role}} {{instance}}"),
)
MEMORY = graph(
    "Resident memory",
    "Of every process.",
    "bytes",
    Series("gvm_process_resident_memory_bytes", "{{role}} {{instance}}"),
)
CPU = graph(
    "CPU",
    "Cores in use by every process.",
    "none",
    Series(f"rate(gvm_process_cpu_seconds_total[{PER_S}])", "{{role}} {{instance}}"),
)
GPU = graph(
    "GPU memory",
    "In use, as a share. Empty without a GPU.",
    SHARE,
    Series("gvm_gpu_memory_used_bytes / gvm_gpu_memory_bytes", "{{role}} {{instance}}"),
)
GPU_USE = graph(
    "GPU utilization",
    "Share of time in which it computes. Empty without a GPU or without nvidia-ml-py.",
    SHARE,
    Series("gvm_gpu_utilization", "{{role}} {{instance}}"),
)
LAG = histogram("Lag", "Of trained rollouts, by their oldest token.", "suffix: batches", "gvm_lag_batches")
VERDICTS = graph(
    "Verdicts a second",
    "Unscorable is a failure of the verifier, never a wrong answer.",
    "none",
    Series(f"sum by (verdict) (rate(gvm_verdicts_total[{PER_S}]))", "{{verdict}}"),
    stacked=True,
)
PRODUCERS_WAIT = graph(
    "Producers' idle share",
    "Part of the time in which a producer had nothing to do, by what it waited for. Work: the learner is slower.",
    SHARE,
    Series(f"avg by (reason) (rate(gvm_producer_wait_seconds_total[{PER_S}]))", "{{reason}}"),
)
LEARNER_WAIT = graph(
    "Learner's idle share",
    "Part of the time in which the learner waited for a batch: sampling is the bottleneck.",
    SHARE,
    Series(f"rate(gvm_learner_wait_seconds_total[{PER_S}])", "batch"),
)
