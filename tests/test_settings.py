from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gvm_stream.allocator import Price, Rollouts, Settings, Tokens, Variance
from gvm_stream.allocator.policies import POLICIES

NAN, INF = float("nan"), float("inf")

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"policy": "nobody"}, "policy 'nobody' is unknown; there are dapo"),
    ({"options": {"round_sise": 4}}, "options of policy 'neyman': .*round_sise"),
    ({"options": {"round_size": 1}}, "round_size = 1 must be at least 2"),
    ({"options": {"round_size": "many"}}, "options of policy 'neyman'"),
    ({"policy": "gvm", "design": "sequential"}, "'gvm' has no design 'sequential', only planned"),
    ({"min_rollouts": 1}, r"min_rollouts = 1 \(at least 2 with rloo\)"),
    ({"coefficient": "raft", "min_rollouts": 0}, r"min_rollouts = 0 \(at least 1 with raft\)"),
    ({"budget": Rollouts(rollouts=1.5)}, "min_rollouts = 2 .* budget.rollouts = 1.5 and max_rollouts = 32 must be"),
    ({"max_rollouts": 7}, "budget.rollouts = 8 and max_rollouts = 7 must be in this order"),
    ({"budget": Rollouts(rollouts=NAN)}, "rollouts budget: rollouts = nan must be a finite number above 0"),
    ({"budget": Tokens(rollouts=8.0, tokens=0.0)}, "tokens budget: tokens = 0.0 must be"),
    ({"budget": Price(rollouts=8.0, price=-1.0)}, "price budget: price = -1.0 must be"),
    ({"budget": Variance(rollouts=8.0, relative=INF)}, "variance budget: relative = inf must be"),
    ({"budget": Variance(rollouts=8.0, relative=0.1)}, "0.1 times the variance of 8 rollouts each is out of reach"),
    ({"prompts_per_step": 0}, "prompts_per_step = 0 must be at least 1"),
    ({"max_attempts": 0}, "max_attempts = 0 must be at least 1"),
    ({"max_lag": -1}, "max_lag = -1 must be at least 0"),
    ({"rounds_ahead": -1}, "rounds_ahead = -1 must be at least 0"),
    ({"readmit_versions": 0}, "readmit_versions = 0 must be at least 1"),
    ({"change_point": -1.0}, "change_point = -1.0 must be at least 0"),
    ({"change_point": NAN}, "change_point = nan must be at least 0"),
    ({"keep": 0}, "keep = 0 must be at least 2"),
    ({"keep": 1}, "keep = 1 must be at least 2"),
    ({"max_tokens": 0}, "max_tokens = 0 must be at least 1"),
    ({"steps": 0}, "steps = 0 must be at least 1"),
    ({"shadow_uniform": 1.0}, "shadow_uniform = 1.0 must be from 0 to below 1"),
    ({"retire_alpha": -0.1}, "retire_alpha = -0.1 must be from 0 to below 1"),
    ({"dead_below": 0.6, "solved_above": 0.4}, "dead_below = 0.6 and solved_above = 0.4: 0 to 1, in order"),
    ({"memory_versions": (128.0, 16.0)}, r"memory_versions = \(128.0, 16.0\) must rise from above 0"),
    ({"memory_versions": (NAN, 16.0)}, r"memory_versions = \(nan, 16.0\) must rise from above 0"),
    ({"prior": (0.0, 1.0)}, r"prior = \(0.0, 1.0\) must be finite numbers above 0"),
    ({"prior": (1.0, INF)}, r"prior = \(1.0, inf\) must be finite numbers above 0"),
    ({"reward_range": (1.0, 0.0)}, r"reward_range = \(1.0, 0.0\) must rise"),
    # What only the policy knows:
    ({"design": "sequential", "coefficient": "raft"}, "neyman stops rloo visits only"),
    ({"design": "sequential", "max_rollouts": 9, "options": {"round_size": 10}}, "round_size = 10 must be from 2 to 9"),
    ({"policy": "raft_risk"}, "raft_risk allocates rollouts for the coefficient raft, not for rloo"),
    ({"policy": "gvm_two_stage"}, "a pilot of 8 leaves nothing of 8 rollouts per prompt"),
    ({"policy": "reinforce_ada_pos", "max_rollouts": 16}, "max_rounds = 4 of round_size = 8 exceed 16 rollouts"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_settings_that_do_not_fit_are_refused_before_anything_begins(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Settings(**wrong)


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(ValueError, match="keep = 1 must be at least 2"):
        msgspec.structs.replace(Settings(), keep=1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(
    "budget",
    [
        Rollouts(rollouts=12.0),
        Tokens(rollouts=12.0, tokens=9000.0),
        Variance(rollouts=12.0),
        Price(rollouts=12.0, price=1.0),
    ],
    ids=["rollouts", "tokens", "variance", "price"],
)
def test_every_policy_comes_with_every_budget(policy: str, budget: Rollouts) -> None:
    coefficient: Any = "raft" if policy == "raft_risk" else "rloo"
    assert Settings(policy=policy, budget=budget, coefficient=coefficient).make_policy() == POLICIES[policy]()
