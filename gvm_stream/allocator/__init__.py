"""The allocator. The library (`OnlineAllocator` and what it is made of) needs only numpy and msgspec; `service.py` and
`main.py` put it behind a socket."""

from gvm_stream.allocator.budget import Price, Rollouts, Tokens, Variance
from gvm_stream.allocator.explain import Explanation
from gvm_stream.allocator.fixed_n import Finished, FixedGroups
from gvm_stream.allocator.gain import Gain
from gvm_stream.allocator.ledger import Reception
from gvm_stream.allocator.objectives import Log, Mean, Own, Power
from gvm_stream.allocator.online import OnlineAllocator, Told
from gvm_stream.allocator.policies import Outcomes, Plan, Policy, View, register
from gvm_stream.allocator.settings import Settings
from gvm_stream.allocator.stopping import PosteriorRule, Rule, StoppingRule, implied_objective
from gvm_stream.allocator.types import (
    Cancelled,
    ClosedGroup,
    Expired,
    Failed,
    Fate,
    Member,
    Outcome,
    Scored,
    Unscorable,
    WorkItem,
)

__all__ = [
    "Cancelled",
    "ClosedGroup",
    "Expired",
    "Explanation",
    "Failed",
    "Fate",
    "Finished",
    "FixedGroups",
    "Gain",
    "Log",
    "Mean",
    "Member",
    "OnlineAllocator",
    "Outcome",
    "Outcomes",
    "Own",
    "Plan",
    "Policy",
    "PosteriorRule",
    "Power",
    "Price",
    "Reception",
    "Rollouts",
    "Rule",
    "Scored",
    "Settings",
    "StoppingRule",
    "Tokens",
    "Told",
    "Unscorable",
    "Variance",
    "View",
    "WorkItem",
    "implied_objective",
    "register",
]
