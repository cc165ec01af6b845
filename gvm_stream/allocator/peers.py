"""Who takes part: producers with their credits and leases, the learner, observers. Pure; `now` comes from outside.

A lease is a work item in a producer's hands. It is renewed by progress (a heartbeat that shows new tokens), not by age:
a long response is not a dead one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gvm_stream.allocator.types import PromptId, WorkItem
from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError
from gvm_stream.wire.messages import PeerStatus, Role

UNREACHABLE_HEARTBEATS = 3
"""Heartbeats that a peer without a connection has to come back: a cut cable is not a dead process."""


@dataclass
class Lease:
    work: int
    prompt: PromptId
    attempt: int
    tokens: int
    """Tokens last heard of."""
    progress_at: float


@dataclass
class Peer:
    identity: bytes
    role: Role
    name: str
    epoch: int
    heard_at: float
    credits: int = 0
    version: int = -1
    waiting_for: str = ""
    unreachable_at: float | None = None
    """Since when messages to it cannot be sent; None: they can."""
    reported_tokens: int = 0
    """Tokens of all outcomes it has sent."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """By work."""
    owed: set[tuple[int, int]] = field(default_factory=set)
    """(work, attempt) of expired leases that it has not returned. Until it has, it gets no work: a stuck producer would
    only get stuck again, and it tells two attempts at the same work apart by order alone."""

    def take(self, item: WorkItem, now: float) -> None:
        """One credit turns into a lease."""
        if self.credits < 1:
            raise ValueError(f"{self.label} has no credit left")
        self.credits -= 1
        self.leases[item.work] = Lease(item.work, item.prompt, item.attempt, 0, now)

    def hear(self, running: dict[int, int], now: float) -> bool:
        """Renew the leases of rollouts with new tokens; True if there is one."""
        progress = False
        for work, tokens in running.items():
            lease = self.leases.get(work)
            if lease is not None and tokens > lease.tokens:
                lease.tokens, lease.progress_at = tokens, now
                progress = True
        return progress

    def stalled(self, now: float, progress_s: float) -> list[Lease]:
        return [lease for lease in self.leases.values() if now - lease.progress_at > progress_s]

    @property
    def label(self) -> str:
        return f"{self.role} {self.name}"


class PeerTable:
    """Peers by identity. A process started again under the same role and name is a new epoch and replaces the old."""

    def __init__(self) -> None:
        self._peers: dict[bytes, Peer] = {}

    def add(self, peer: Peer) -> Peer | None:
        """Take in a peer; the older epoch that it replaces comes back. Raises StreamError if *it* is the older."""
        other = next((p for p in self._peers.values() if (p.role, p.name) == (peer.role, peer.name)), None)
        if other is not None and other.epoch > peer.epoch:
            raise StreamError(f"{peer.label} has been started again since")
        same = self._peers.get(peer.identity)
        if same is not None and same is not other:
            raise StreamError(f"its socket belongs to {same.label}")
        if other is not None:
            del self._peers[other.identity]
        self._peers[peer.identity] = peer
        return other

    def get(self, identity: bytes) -> Peer | None:
        return self._peers.get(identity)

    def remove(self, identity: bytes) -> Peer | None:
        return self._peers.pop(identity, None)

    def of(self, role: Role) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.role == role]

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def dead(self, now: float, stream: StreamSection) -> list[tuple[Peer, str]]:
        """Peers taken for dead, and why. A learner in the middle of a long step cannot send heartbeats, but its
        connection stands, so for it silence counts only after `progress_s`."""
        found = []
        for peer in self._peers.values():
            limit = stream.progress_s if peer.role == "learner" else stream.silence_s
            cut = UNREACHABLE_HEARTBEATS * stream.heartbeat_s
            if peer.unreachable_at is not None and now - peer.unreachable_at > cut:
                found.append((peer, f"disconnected for {cut:g} s"))
            elif now - peer.heard_at > limit:
                found.append((peer, f"silent for {limit:g} s"))
        return found

    def status(self, now: float) -> tuple[PeerStatus, ...]:
        return tuple(
            PeerStatus(
                role=peer.role,
                name=peer.name,
                version=peer.version,
                in_flight=len(peer.leases),
                silent_s=round(now - peer.heard_at, 1),
                waiting_for=peer.waiting_for,
            )
            for peer in self._peers.values()
            if peer.role != "observer"
        )
