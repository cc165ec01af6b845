"""What the [allocation] section tells the library."""

from __future__ import annotations

from gvm_stream.allocator.budget import AnyBudget, Price, Rollouts, Tokens, Variance
from gvm_stream.allocator.objectives import Log, Mean, Objective, Own, Power
from gvm_stream.allocator.settings import Settings
from gvm_stream.config_allocation import AllocationSection


def allocator_settings(section: AllocationSection, *, max_tokens: int, steps: int) -> Settings:
    """Raises ValueError for values that do not fit together."""
    return Settings(
        policy=section.policy,
        options=section.options,
        design=None if section.design == "auto" else section.design,
        coefficient=section.coefficient,
        objective=_objective(section),
        budget=_budget(section),
        prompts_per_step=section.prompts_per_step,
        min_rollouts=section.min_rollouts,
        max_rollouts=section.max_rollouts,
        keep=section.keep or None,
        shadow_uniform=section.shadow_uniform,
        memory_versions=section.memory_versions,
        prior=section.prior,
        learn_prior=section.learn_prior,
        change_point=section.change_point,
        max_tokens=max_tokens,
        retire_alpha=section.retire_alpha,
        dead_below=section.dead_below,
        solved_above=section.solved_above,
        readmit_versions=section.readmit_versions,
        on_close=section.on_close,
        rounds_ahead=section.rounds_ahead,
        max_lag=section.max_lag,
        max_attempts=section.max_attempts,
        steps=steps,
    )


def _objective(section: AllocationSection) -> Objective:
    match section.objective:
        case "own":
            return Own()
        case "mean":
            return Mean()
        case "log":
            return Log()
        case "power":
            return Power(a=section.objective_power)


def _budget(section: AllocationSection) -> AnyBudget:
    rollouts = section.rollouts_per_prompt
    match section.budget:
        case "rollouts":
            return Rollouts(rollouts=rollouts)
        case "tokens":
            return Tokens(rollouts=rollouts, tokens=section.tokens_per_prompt)
        case "variance":
            return Variance(rollouts=rollouts, relative=section.relative_variance)
        case "price":
            return Price(rollouts=rollouts, price=section.price)
