"""Policies: how many rollouts each prompt of a step gets."""

import gvm_stream.allocator.policies.adaptive
import gvm_stream.allocator.policies.planned
import gvm_stream.allocator.policies.risk
import gvm_stream.allocator.policies.selection  # noqa: F401
from gvm_stream.allocator.planning import Plan
from gvm_stream.allocator.policies.base import (
    POLICIES,
    Coefficient,
    Design,
    Outcomes,
    Policy,
    View,
    make_policy,
    register,
)

__all__ = [
    "POLICIES",
    "Coefficient",
    "Design",
    "Outcomes",
    "Plan",
    "Policy",
    "View",
    "make_policy",
    "register",
]
