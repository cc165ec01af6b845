"""The allocator. The library (`OnlineAllocator` and what it is made of) needs only numpy and msgspec; `service.py` and
`main.py` put it behind a socket."""

from gvm_stream.allocator.ledger import Reception
from gvm_stream.allocator.online import Explanation, OnlineAllocator, Settings, Told
from gvm_stream.allocator.stopping import Rule, implied_objective
from gvm_stream.allocator.types import (
    Cancelled,
    ClosedGroup,
    Expired,
    Failed,
    Fate,
    Member,
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
    "Member",
    "OnlineAllocator",
    "Reception",
    "Rule",
    "Scored",
    "Settings",
    "Told",
    "Unscorable",
    "WorkItem",
    "implied_objective",
]
