"""The [allocation] section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class AllocationSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: Annotated[
        str,
        Meta(
            description="Who gets how many rollouts: uniform, neyman, gvm, raft_risk, rollout_gdro, knapsack, dapo, "
            "vade, gvm_two_stage, reinforce_ada_pos, reinforce_ada_balance, reinforce_ada_est (docs/allocator.md)."
        ),
    ] = "neyman"
    options: Annotated[
        dict[str, Any], Meta(description="Hyper-parameters of the policy; left out: the published ones.")
    ] = {}
    design: Annotated[
        Literal["auto", "planned", "sequential", "reference"],
        Meta(
            description="`planned`: numbers fixed before the first rollout; `sequential`: rounds with exact "
            "coefficients; `reference`: a published method to the letter; `auto`: the policy's own."
        ),
    ] = "auto"
    coefficient: Annotated[
        Literal["rloo", "raft"],
        Meta(
            description="Gradient estimator that the allocation is planned for. `rloo`: of the acceptance rate; "
            "`raft`: of its logarithm, from accepted rollouts only."
        ),
    ] = "rloo"
    objective: Annotated[
        Literal["own", "mean", "log", "power"],
        Meta(
            description="Weights of the prompts, from past state only: those of mean acceptance, mean log acceptance, "
            "mean acceptance ** objective_power; `own`: all 1, what the estimator estimates by itself."
        ),
    ] = "own"
    objective_power: Annotated[float, Meta(gt=0, le=1, description="Exponent of the objective `power`.")] = 0.5
    prompts_per_step: Annotated[int, Meta(ge=1, description="Prompts (groups) in a training batch.")] = 32
    rollouts_per_prompt: Annotated[
        float, Meta(ge=1, description="Mean rollouts of a prompt; times prompts_per_step it is the budget of a step.")
    ] = 8.0
    budget: Annotated[
        Literal["rollouts", "tokens", "variance", "price"],
        Meta(
            description="What limits a step: `rollouts_per_prompt`; `tokens_per_prompt`; `variance`, as few tokens as "
            "reach `relative_variance`; `price`, every rollout worth it."
        ),
    ] = "rollouts"
    tokens_per_prompt: Annotated[float, Meta(ge=0, description="Mean expected tokens of a prompt.")] = 0.0
    relative_variance: Annotated[
        float, Meta(gt=0, description="Variance aimed at, relative to rollouts_per_prompt for every prompt.")
    ] = 1.0
    price: Annotated[float, Meta(ge=0, description="Least decrease of variance per token.")] = 0.0
    min_rollouts: Annotated[int, Meta(ge=1, description="Least rollouts of a visit (leave-one-out needs 2).")] = 2
    max_rollouts: Annotated[int, Meta(ge=1, description="Most rollouts of a visit.")] = 32
    keep: Annotated[
        int, Meta(ge=0, description="Train on at most so many rollouts of a visit, without bias; 0: on all.")
    ] = 0
    shadow_uniform: Annotated[
        float,
        Meta(ge=0, lt=1, description="Share of visits allocated uniformly, by which the policy's gain is measured."),
    ] = 0.05
    memory_versions: Annotated[
        tuple[float, float],
        Meta(description="Fast and slow memory: counts of earlier visits decay by 1/e over so many policy versions."),
    ] = (16.0, 128.0)
    prior: Annotated[
        tuple[float, float], Meta(description="Beta prior (successes, failures) of acceptance rates to start with.")
    ] = (0.5, 0.5)
    learn_prior: Annotated[bool, Meta(description="Fit the prior to the prompts seen (empirical Bayes).")] = True
    change_point: Annotated[
        float,
        Meta(ge=0, description="Log Bayes factor against what was known by which a visit resets it; 0: never."),
    ] = 3.0
    retire_alpha: Annotated[
        float,
        Meta(ge=0, lt=1, description="Level of the confidence sequence that retires dead or solved prompts; 0: never."),
    ] = 0.0
    dead_below: Annotated[float, Meta(ge=0, le=1, description="Acceptance below which a prompt is dead.")] = 0.02
    solved_above: Annotated[float, Meta(ge=0, le=1, description="Acceptance above which a prompt is solved.")] = 0.98
    readmit_versions: Annotated[int, Meta(ge=1, description="Policy versions until a retired prompt comes back.")] = 200
    on_close: Annotated[
        Literal["cancel", "drain"],
        Meta(description="Rollouts still running when a visit ends early: cancelled, or used for the estimates only."),
    ] = "cancel"
    rounds_ahead: Annotated[
        int, Meta(ge=0, description="Sequential: rounds launched before they are known to be needed.")
    ] = 0
    max_lag: Annotated[
        int,
        Meta(
            ge=0,
            description="Most training batches a rollout's oldest token may be behind when it is trained on; "
            "0: sampling and training take turns.",
        ),
    ] = 1
    max_attempts: Annotated[int, Meta(ge=1, description="Attempts at one rollout before it counts as failed.")] = 5
