"""Who takes part: producers with their credits and leases, the learner, observers. Pure; `now` comes from outside.

A lease is a work item in a producer's hands. It is renewed by progress (a heartbeat that shows new tokens), not by age:
a long response is not a dead one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from gvm_stream.allocator.types import WorkItem
from gvm_stream.config import StreamSection
from gvm_stream.errors import StreamError
from gvm_stream.wire.messages import PeerStatus, Role, Rollout

UNREACHABLE_HEARTBEATS = 3
"""Heartbeats that a peer without a connection has to come back: a cut cable is not a dead process."""


@dataclass(slots=True)
class Lease:
    work: int
    attempt: int
    tokens: int
    """Tokens last heard of."""
    progress_at: float
    """When there was a new one."""
    listed_at: float
    """When its owner last said that it has it, or was given it."""


@dataclass
class Peer:
    identity: bytes
    role: Role
    name: str
    epoch: int
    heard_at: float
    joined_at: float | None = None
    """None: it has not said hello since the allocator was started again, or since its connection was lost."""
    slots: int = 0
    """Most work items that it takes."""
    version: int = -1
    waiting_for: str = ""
    unreachable_at: float | None = None
    """Since when messages to it cannot be sent; None: they can."""
    heard: int = 0
    """Number of its newest message of rollouts."""
    reports: list[Rollout] = field(default_factory=list)
    """Rollouts from it that have not been looked at."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """By work."""
    owed: set[tuple[int, int]] = field(default_factory=set)
    """(work, attempt) of expired leases that it has not returned. Until it has, it gets no work: a stuck producer would
    only get stuck again, and it tells two attempts at the same work apart by order alone."""

    def take(self, item: WorkItem, now: float) -> None:
        self.leases[item.work] = Lease(item.work, item.attempt, 0, now, now)

    def returned(self, work: int, attempt: int) -> None:
        lease = self.leases.get(work)
        if lease is not None and lease.attempt == attempt:
            del self.leases[work]
        if self.owed:
            self.owed.discard((work, attempt))

    def lose(self, lease: Lease) -> None:
        """Its lease has expired."""
        del self.leases[lease.work]
        self.owed.add((lease.work, lease.attempt))

    def hear(self, running: dict[int, int], now: float) -> bool:
        """Renew the leases of rollouts with new tokens; True if there is one. `running`: all that it has in hand."""
        self.owed = {(work, attempt) for work, attempt in self.owed if work in running}
        progress = False
        for work, tokens in running.items():
            lease = self.leases.get(work)
            if lease is None:
                continue
            lease.listed_at = now
            if tokens > lease.tokens:
                lease.tokens, lease.progress_at = tokens, now
                progress = True
        return progress

    def stalled(self, now: float, progress_s: float) -> list[Lease]:
        return [lease for lease in self.leases.values() if now - lease.progress_at > progress_s]

    def astray(self, now: float, silence_s: float) -> list[Lease]:
        """Leases of work that it does not have: the order was lost with a connection."""
        return [lease for lease in self.leases.values() if now - lease.listed_at > silence_s]

    def reconcile(self, in_hand: dict[int, int], now: float) -> tuple[list[Lease], list[int]]:
        """After a hello: the leases of work that it does not have, and the work in its hands that is not its own (any
        more)."""
        lost = []
        for lease in self.leases.values():
            lease.listed_at = lease.progress_at = now
            if in_hand.get(lease.work) != lease.attempt:
                lost.append(lease)
        mine = {work: lease.attempt for work, lease in self.leases.items()}
        foreign = {work: attempt for work, attempt in in_hand.items() if mine.get(work) != attempt}
        self.owed = set(foreign.items())
        return lost, list(foreign)

    @property
    def credits(self) -> int:
        """Further items that it could take."""
        return max(0, self.slots - len(self.leases) - len(self.owed))

    @property
    def takes_work(self) -> bool:
        return self.joined_at is not None and self.version >= 0 and not self.owed and self.credits > 0

    @cached_property
    def key(self) -> str:
        """Its identity as text, the owner of its leases in the journal."""
        return self.identity.decode()

    @property
    def label(self) -> str:
        return f"{self.role} {self.name}"


def absent_producer(key: str, works: dict[int, int], now: float) -> Peer:
    """A producer that had `works` (work -> attempt) before the allocator was started again. It has the time of a
    silent one to say hello."""
    _, _, rest = key.partition("/")
    name, _, epoch = rest.rpartition("/")
    leases = {work: Lease(work, attempt, 0, now, now) for work, attempt in works.items()}
    return Peer(key.encode(), "producer", name, int(epoch, 16), heard_at=now, leases=leases)


class PeerTable:
    """Peers by identity. A process started again under the same role and name is a new epoch and replaces the old."""

    def __init__(self) -> None:
        self._peers: dict[bytes, Peer] = {}

    def add(self, peer: Peer) -> Peer | None:
        """Take in a peer; the older epoch that it replaces comes back. Raises StreamError if *it* is the older."""
        other = next((p for p in self._peers.values() if (p.role, p.name) == (peer.role, peer.name)), None)
        if other is not None and other.epoch > peer.epoch:
            raise StreamError(f"{peer.label} has been started again since")
        if other is not None:
            del self._peers[other.identity]
        self._peers[peer.identity] = peer
        return other

    def get(self, identity: bytes) -> Peer | None:
        return self._peers.get(identity)

    def remove(self, identity: bytes) -> Peer | None:
        return self._peers.pop(identity, None)

    def of(self, role: Role) -> list[Peer]:
        """Those that take part."""
        return [peer for peer in self._peers.values() if peer.role == role and peer.joined_at is not None]

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

    def status(self, now: float, version: int) -> tuple[PeerStatus, ...]:
        """`version`: the newest published."""
        return tuple(
            PeerStatus(
                role=peer.role,
                name=peer.name,
                version=peer.version,
                versions_behind=max(0, version - peer.version) if peer.version >= 0 else 0,
                in_flight=len(peer.leases),
                credits=peer.credits,
                oldest_s=round(max((now - lease.progress_at for lease in peer.leases.values()), default=0.0), 1),
                silent_s=round(now - peer.heard_at, 1),
                joined_s=0.0 if peer.joined_at is None else round(now - peer.joined_at, 1),
                connected=peer.joined_at is not None,
            )
            for peer in self._peers.values()
            if peer.role != "observer"
        )
