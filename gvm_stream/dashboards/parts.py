"""A dashboard for each part of a run: to see why not all is well."""

from __future__ import annotations

from gvm_stream.dashboards.panels import Series, dashboard, graph, histogram, quantiles
from gvm_stream.dashboards.shared import (
    CPU,
    DISK,
    ESS,
    GPU,
    GPU_USE,
    LAG,
    LEARNER_WAIT,
    MEMORY,
    MISMATCH,
    PER_S,
    PRODUCERS_WAIT,
    SHARE,
    SPEED,
    TOKENS_BY_FATE,
    TOKENS_PER_S,
    VARIANCE,
    VERDICTS,
)

ENGINES = dashboard(
    "engines",
    "engines",
    "Producers: sampling, weight updates, verdicts.",
    {
        "Sampling": [
            graph(
                "Tokens a second",
                "Of every producer.",
                TOKENS_PER_S,
                Series(f"rate(gvm_engine_tokens_total[{PER_S}])", "{{instance}}"),
            ),
            graph(
                "Rollouts in the engine",
                "In generation, and in its queue.",
                "none",
                Series("gvm_engine_running", "running {{instance}}"),
                Series("gvm_engine_waiting", "waiting {{instance}}"),
            ),
            quantiles("Time of a rollout", "From order to completion.", "s", "gvm_rollout_seconds"),
            graph(
                "Key-value cache",
                "Share in use; recomputed at 1: weight updates have it computed again.",
                SHARE,
                Series("gvm_engine_cache_used", "{{instance}}"),
                Series("gvm_engine_cache_recomputed", "recomputed {{instance}}"),
            ),
            graph(
                "Preemptions a second",
                "Rollouts that the engine puts back for want of key-value memory, and computes again.",
                "none",
                Series(f"rate(gvm_engine_preemptions_total[{PER_S}])", "{{instance}}"),
            ),
            PRODUCERS_WAIT,
        ],
        "Weights": [
            quantiles("Weight update", "From announcement to in force.", "s", "gvm_weight_update_seconds"),
            quantiles("Stall", "Generation stands still for an update.", "s", "gvm_weight_stall_seconds"),
            graph(
                "Canary",
                "Mean difference of log-probs between engine and learner after an update, in nats; quarantined at 1.",
                "none",
                Series("gvm_canary_difference", "difference {{instance}}"),
                Series("gvm_engine_quarantined", "quarantined {{instance}}"),
            ),
            graph(
                "Versions behind",
                "Policy versions between the newest one published and the engine's.",
                "none",
                Series(
                    "max by (run) (gvm_policy_version) - on (run) group_right () gvm_engine_version", "{{instance}}"
                ),
            ),
        ],
        "Verdicts": [
            quantiles("Time of a verdict", "From completion to verdict.", "s", "gvm_verify_seconds"),
            graph("Verifier queue", "Responses that wait.", "none", Series("gvm_verifier_waiting", "{{instance}}")),
            VERDICTS,
            graph(
                "Unscorable a second",
                "By cause.",
                "none",
                Series(f"sum by (cause) (rate(gvm_unscorable_total[{PER_S}]))", "{{cause}}"),
                stacked=True,
            ),
            graph(
                "Verifier processes lost a second",
                "They crashed or ran into the time limit.",
                "none",
                Series(f"rate(gvm_verifier_killed_total[{PER_S}])", "{{instance}}"),
            ),
        ],
        "Machines": [CPU, MEMORY, GPU, GPU_USE],
    },
)

LEARNER = dashboard(
    "learner",
    "learner",
    "Training steps, their numbers, and how old their data is.",
    {
        "Numbers": [
            graph("Loss", "Of the last batch.", "none", Series("gvm_loss", "loss")),
            graph("Gradient norm", "Before clipping.", "none", Series("gvm_grad_norm", "norm")),
            VARIANCE,
            MISMATCH,
            ESS,
            graph(
                "Entropy and KL",
                "Per response token of the last batch; KL from the reference model.",
                "suffix: nats",
                Series("gvm_entropy", "entropy"),
                Series("gvm_kl", "KL"),
            ),
            graph(
                "Clamped tokens a second",
                "Their log-ratio was out of bounds.",
                "none",
                Series(f"rate(gvm_tokens_clamped_total[{PER_S}])", "clamped"),
            ),
        ],
        "Time": [
            quantiles("Training step", "Time of a step.", "s", "gvm_learner_step_seconds"),
            quantiles("Publishing weights", "Training stands still.", "s", "gvm_publish_seconds"),
            LEARNER_WAIT,
            SPEED,
            graph(
                "Batches a second",
                "By what was done.",
                "none",
                Series(f"sum by (result) (rate(gvm_learner_batches_total[{PER_S}]))", "{{result}}"),
                Series(f"rate(gvm_batches_repeated_total[{PER_S}])", "repeated"),
            ),
            graph(
                "Batches skipped",
                "Since the learner started, by cause.",
                "none",
                Series("gvm_learner_skips_total", "{{cause}}"),
            ),
        ],
        "Age of the data": [
            LAG,
            graph(
                "At the bound",
                "Share of trained rollouts as old as allocation.max_lag admits.",
                SHARE,
                Series(f"rate(gvm_rollouts_at_max_lag_total[{PER_S}]) / rate(gvm_lag_batches_count[{PER_S}])", "share"),
            ),
            histogram(
                "Dropped for age, by acceptance",
                "Of the group that the rollout was in. On the left only: age costs hard prompts most.",
                SHARE,
                "gvm_stale_acceptance",
            ),
            histogram(
                "Dropped for age, by length",
                "At the top only: age costs long responses most.",
                "none",
                "gvm_stale_response_tokens",
            ),
        ],
        "Machine": [CPU, GPU, GPU_USE],
    },
)

STREAM = dashboard(
    "stream",
    "stream",
    "Work on its way: attempts, messages, waits, the spool.",
    {
        "Attempts": [
            graph(
                "Ended a second",
                "Attempts, by outcome.",
                "none",
                Series(f"sum by (outcome) (rate(gvm_rollouts_total[{PER_S}]))", "{{outcome}}"),
                stacked=True,
            ),
            graph(
                "Account of attempts",
                "Issued = running + ended, always.",
                "none",
                Series("gvm_attempts_issued_total", "issued"),
                Series("gvm_rollouts_running + on (run) sum by (run) (gvm_rollouts_total)", "running + ended"),
            ),
            graph("Running", "Attempts issued and not ended.", "none", Series("gvm_rollouts_running", "running")),
            graph(
                "Rollouts by fate", "As for tokens.", "none", Series("gvm_rollouts_by_fate", "{{fate}}"), stacked=True
            ),
            graph(
                "Cut off a second",
                "Scored responses at the length cap.",
                "none",
                Series(f"sum(rate(gvm_rollouts_truncated_total[{PER_S}]))", "cut off"),
            ),
            TOKENS_BY_FATE,
        ],
        "Waits": [
            graph(
                "What the run waits for",
                "Part of the time; several at once count each.",
                SHARE,
                Series(f"sum by (reason) (rate(gvm_run_wait_seconds_total[{PER_S}]))", "{{reason}}"),
            ),
            PRODUCERS_WAIT,
            LEARNER_WAIT,
        ],
        "Messages and files": [
            graph(
                "Not used a second",
                "Messages that could not be read or used, and results that had been reported before.",
                "none",
                Series(f"rate(gvm_messages_refused_total[{PER_S}])", "refused"),
                Series(f"rate(gvm_rollouts_duplicate_total[{PER_S}])", "duplicate"),
            ),
            graph(
                "Refused a second",
                "Connections that may not join the run, by reason.",
                "none",
                Series(f"sum by (reason) (rate(gvm_connections_refused_total[{PER_S}]))", "{{reason}}"),
            ),
            graph("Spool", "Size on disk.", "bytes", Series("gvm_spool_bytes", "spool")),
            graph("Spool queue", "Turns not on disk yet.", "none", Series("gvm_spool_waiting", "turns")),
            DISK,
            MEMORY,
            graph(
                "Open files",
                "As a share of the limit.",
                SHARE,
                Series("gvm_process_open_fds / gvm_process_max_fds", "{{role}} {{instance}}"),
            ),
            graph(
                "Uptime",
                "Since the process started.",
                "s",
                Series("time() - gvm_process_start_time_seconds", "{{role}} {{instance}}"),
            ),
        ],
    },
)
