"""The dashboards by name; here the one to see whether all is well, and the one on what allocation gains."""

from __future__ import annotations

from gvm_stream.dashboards.panels import Series, dashboard, graph, histogram, number, quantiles
from gvm_stream.dashboards.parts import ENGINES, LEARNER, STREAM
from gvm_stream.dashboards.shared import (
    DISK,
    GAIN,
    GPU_USE,
    LAG,
    LEARNER_WAIT,
    MISMATCH,
    PER_S,
    PRODUCERS_WAIT,
    PROGRESS,
    SHARE,
    SPEED,
    TOKENS_BY_FATE,
    VARIANCE,
    VERDICTS,
    ZERO_SIGNAL,
    spent,
)

OVERVIEW = dashboard(
    "overview",
    "overview",
    "Is it learning, is it healthy, where does the money go?",
    {
        "Is it learning?": [
            number("Progress", "Training batches done.", SHARE, "gvm_batches_settled / gvm_batches_planned"),
            number("Held-out accuracy", "Of the last evaluation.", SHARE, "gvm_heldout_accuracy"),
            number("Policy version", "Newest one published.", "none", "gvm_policy_version"),
            number("Producers", "Connected.", "none", "gvm_producers", bad_below=1),
            number("Ledger", "1: every attempt is accounted for.", "none", "gvm_ledger_conserved", bad_below=1),
            number(
                "Time since progress",
                "Of the allocator.",
                "s",
                'time() - gvm_last_progress_timestamp_seconds{role="allocator"}',
            ),
            graph(
                "Reward and accuracy",
                "Mean reward of the training batches (over scored rollouts), and held-out accuracy.",
                SHARE,
                Series("gvm_reward_mean", "reward"),
                Series("gvm_heldout_accuracy", "held-out"),
            ),
            graph("Gradient norm", "Before clipping.", "none", Series("gvm_grad_norm", "norm")),
            ZERO_SIGNAL,
        ],
        "Is it healthy?": [
            graph("Time since progress", "Of every process.", "s", PROGRESS),
            MISMATCH,
            LAG,
            VERDICTS,
            DISK,
            graph("Processes", "1: its metrics can be read.", "none", Series("up", "{{job}} {{instance}}")),
        ],
        "Where does the money go?": [TOKENS_BY_FATE, SPEED, GAIN, PRODUCERS_WAIT, LEARNER_WAIT, GPU_USE],
    },
)

ALLOCATION = dashboard(
    "allocation",
    "allocation",
    "Which prompts get the rollouts, and what that gains.",
    {
        "What it gains": [
            GAIN,
            VARIANCE,
            graph(
                "Predicted gradient variance",
                "Of the newest settled batch, from the energies and coefficients of its rollouts, in their unit.",
                "sci",
                Series("gvm_gradient_variance_predicted", "predicted"),
            ),
            graph(
                "Noise scale",
                "Batch size at which the noise of the gradient equals its signal (arXiv 1812.06162).",
                "suffix: tokens",
                Series("gvm_noise_scale_tokens", "noise scale"),
            ),
            graph(
                "Shadow price",
                "Decrease of variance per token of the last rollout.",
                "sci",
                Series("gvm_price", "price"),
            ),
            ZERO_SIGNAL,
        ],
        "What it spends": [
            graph(
                "Budget spent",
                "What a visit takes over what the budget gives it. Empty for what the budget does not limit.",
                SHARE,
                Series(spent("gvm_group_rollouts", "rollouts"), "rollouts"),
                Series(spent("gvm_group_tokens", "tokens"), "tokens"),
            ),
            histogram("Group size", "Rollouts of the groups that closed.", "none", "gvm_group_rollouts"),
            graph(
                "Why visits end",
                "A second.",
                "none",
                Series(f"sum by (reason) (rate(gvm_exits_total[{PER_S}]))", "{{reason}}"),
                stacked=True,
            ),
        ],
        "On whom": [
            graph(
                "Rollouts a visit, by difficulty",
                "Difficulty is the mean acceptance rate of earlier visits.",
                "none",
                Series(
                    f"sum by (acceptance) (rate(gvm_visit_rollouts_total[{PER_S}]))"
                    f" / sum by (acceptance) (rate(gvm_visits_total[{PER_S}]))",
                    "{{acceptance}}",
                ),
            ),
            graph(
                "Share of rollouts, by difficulty",
                "A share near 0 of prompts that there are many of: they are starved.",
                SHARE,
                Series(
                    f"sum by (acceptance) (rate(gvm_visit_rollouts_total[{PER_S}]))"
                    f" / ignoring (acceptance) group_left () sum(rate(gvm_visit_rollouts_total[{PER_S}]))",
                    "{{acceptance}}",
                ),
                stacked=True,
            ),
            graph(
                "Prompts, by difficulty",
                "By the mean of the posterior. They move to the right as the policy learns.",
                "none",
                Series("gvm_prompts", "{{acceptance}}"),
                stacked=True,
            ),
            histogram("Acceptance", "Share of successes in the groups that closed.", SHARE, "gvm_acceptance"),
            graph(
                "Prompts left out",
                "Retired: shown to be dead or solved, for now. Quarantined: failed too often.",
                "none",
                Series("gvm_prompts_retired", "retired"),
                Series("gvm_prompts_quarantined", "quarantined"),
            ),
            quantiles(
                "Response length", "Of all scored responses, cut-off ones included.", "none", "gvm_response_tokens"
            ),
        ],
    },
)

BOARDS = {
    "overview": OVERVIEW,
    "allocation": ALLOCATION,
    "engines": ENGINES,
    "learner": LEARNER,
    "stream": STREAM,
}
