"""The protocol: every message there is, MessagePack, tagged, typed. Fields are only ever appended.

All peers talk to the allocator's ROUTER socket from a DEALER. Token ids and log-probs travel as raw little-endian
int32 and float32 bytes. `PROTOCOL` changes when an old peer could misread a new one; a mismatch is refused in the
handshake with both numbers in the message.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from gvm_stream.allocator.types import Cancelled, Failed, Scored, Unscorable

PROTOCOL = 4

Role = Literal["producer", "learner", "observer"]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    pass


# --- any peer -> allocator ---------------------------------------------------------------------------------------


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """First message of a process. `epoch` is new for every start of it: frames of an older one are dropped."""

    protocol: int
    role: Role
    name: str
    epoch: int
    agreed: dict[str, str]
    """Configuration values that must be the same everywhere (`config_file.agreed_values`)."""
    checkpoints: tuple[int, ...] = ()
    """Learner: training batches behind each complete checkpoint it could start from."""
    step: int | None = None
    """Learner: training batches behind the model that it has in memory; None: it is about to load one."""
    in_hand: dict[int, int] = {}
    """Producer: work -> attempt of every item in hand."""


class Goodbye(Message, tag="goodbye", frozen=True, kw_only=True):
    """The peer ends by itself. Producers have returned every item before."""

    reason: str
    failed: bool = False
    """True: it ends because of an error that would only come again; a run cannot go on without this learner."""
    generated_tokens: int = 0


class Heartbeat(Message, tag="heartbeat", frozen=True, kw_only=True):
    waiting_for: str = ""
    """What the process waits for right now; empty: it works."""
    running: dict[int, int] = {}
    """Producers: tokens so far of every item in hand, those included whose rollouts have not been `Received` yet.
    Renews their leases."""


class StatusRequest(Message, tag="status?", frozen=True, kw_only=True):
    pass


# --- producer -> allocator ---------------------------------------------------------------------------------------


class Ask(Message, tag="ask", frozen=True, kw_only=True):
    """Work is welcome. Also said when the number of slots changes, and after every hello."""

    slots: int
    """Most items that the producer has in hand at once: its credit is this number less those in its hands."""
    version: int
    """Policy version the engine would sample with now."""


class Loaded(Message, tag="loaded", frozen=True, kw_only=True):
    """The engine samples with this policy version from now on."""

    version: int


class Rollout(Message, tag="rollout", frozen=True, kw_only=True):
    """The end of one work item in a producer."""

    work: int
    attempt: int
    outcome: Scored | Unscorable | Cancelled | Failed
    payload: memoryview = memoryview(b"")
    """What a learner needs of it, as `wire.payload.pack` makes it; empty unless scored. A view: it passes through the
    allocator without being copied."""


class Rollouts(Message, tag="rollouts", frozen=True, kw_only=True):
    """Finished items. A producer keeps them in hand until they are `Received`."""

    seq: int
    """1, 2, 3, ... in the life of a producer: what is sent again after a loss is recognised."""
    rollouts: tuple[Rollout, ...]


# --- learner -> allocator ----------------------------------------------------------------------------------------


class Canary(Message, frozen=True, kw_only=True):
    """What weights must give: an engine that has loaded them right finds the same log-probs."""

    tokens: bytes
    """Token ids, int32 [T]."""
    logprobs: bytes
    """Log-probs of tokens 1 .. T - 1, each after those before it, at temperature 1, float32 [T - 1]."""


class WeightsInfo(Message, frozen=True, kw_only=True):
    """Published weights of one policy version."""

    version: int
    path: str
    """Safetensors file on the learner's host; never changed once announced."""
    size: int
    """Bytes."""
    checksum: str
    """Hex blake2b-128 of the file."""
    address: str
    """Where the same bytes are served to other hosts; empty: nowhere."""
    canary: Canary | None = None


class Published(Message, tag="published", frozen=True, kw_only=True):
    weights: WeightsInfo
    step: int
    """Training batches behind these weights."""


class BatchRequest(Message, tag="batch?", frozen=True, kw_only=True):
    step: int


class NoiseStats(Message, frozen=True, kw_only=True):
    """How noisy the gradient of a batch was, before clipping (learner/variance.py)."""

    variance: float
    """Trace of its covariance."""
    standard_error: float
    """Of `variance`, by the jackknife over parts: 10 % too large for 8 of them, and rough where few groups make up most
    of the gradient."""
    signal: float
    """Squared norm of its expectation, without bias: may come out below 0."""
    tokens: int
    """Response tokens of the batch."""
    allocated: float | None
    """Variance times tokens of the groups that the policy allocated, scaled to the whole batch; their number does not
    matter to it. None without any."""
    shadow: float | None
    """The same of shadow-uniform groups. Averages over batches of `shadow` and `allocated` compare the two."""

    @property
    def variance_tokens(self) -> float:
        """What a batch costs at equal precision: to halve the variance takes twice the tokens."""
        return self.variance * self.tokens

    @property
    def snr(self) -> float:
        """Signal-to-noise ratio; infinite without noise."""
        return self.signal / self.variance if self.variance > 0 else math.inf

    @property
    def noise_scale(self) -> float:
        """Tokens in a batch at which signal and noise would be equal, tr(Sigma)/|G|^2 of McCandlish et al. (arXiv
        1812.06162, appendix A); infinite where there is no signal to be seen. Over several batches: average variance
        times tokens and signal apart, then divide."""
        return self.variance_tokens / self.signal if self.signal > 0 else math.inf


class StepStats(Message, frozen=True, kw_only=True):
    """What the learner saw in one training batch. Log-probs in nats, norms before clipping."""

    loss: float
    grad_norm: float
    reward_mean: float
    """Over scored rollouts."""
    zero_signal_groups: int
    groups: int
    mean_lag: float
    """Batches, over the rollouts' oldest tokens."""
    max_lag: int
    mismatch: float
    """Mean of |log-prob here - log-prob at sampling| over the response tokens trained on."""
    effective_sample_size: float
    """(sum w)^2 / sum w^2 of the importance weights over their number, in (0, 1]."""
    seconds: float
    """Of the training step."""
    padding_share: float
    wait_seconds: float = 0.0
    """Time the learner waited for this batch."""
    noise: NoiseStats | None = None
    """On the batches on which it is measured."""
    entropy: float = 0.0
    """Of the policy, per response token trained on."""
    kl: float = 0.0
    """KL(policy || reference) per response token trained on; 0 without a reference."""


class StepDone(Message, tag="step", frozen=True, kw_only=True):
    """Batch `step` is behind the learner. `version` is the policy version now (the same as before if skipped)."""

    step: int
    version: int
    trained: bool
    reason: str
    """Why it was skipped, if it was."""
    fates: dict[str, tuple[int, ...]]
    """Fate -> work ids: trained, zero_signal or stale, each rollout of the batch once."""
    energies: dict[int, float] = {}
    """Work id -> squared gradient norm, where the learner measures it."""
    stats: StepStats


class Checkpointed(Message, tag="checkpointed", frozen=True, kw_only=True):
    """A checkpoint is complete: the allocator may forget the batches that no checkpoint needs any more."""

    steps: tuple[int, ...]
    """Training batches behind each complete checkpoint there is, this one included."""


# --- allocator -> peers ------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    run: str
    next_step: int
    """Learner: the training batch that it gets next. It starts from the checkpoint behind so many batches."""
    settled: int
    """Training batches that are settled. Those from `next_step` on have been trained on before, by a learner that died;
    they are handed out again, and nothing is published before they are behind."""
    weights: WeightsInfo | None
    """Newest weights; None until the learner has published."""


class Unknown(Message, tag="unknown", frozen=True, kw_only=True):
    """The allocator does not know the sender (it has been started again, or took the sender for dead): say hello again,
    then send again whatever it has not acknowledged."""


class Received(Message, tag="received", frozen=True, kw_only=True):
    """All `Rollouts` of this producer up to `seq` are safe."""

    seq: int


class Settled(Message, tag="settled", frozen=True, kw_only=True):
    """`StepDone` of this batch is safe."""

    step: int


class Refused(Message, tag="refused", frozen=True, kw_only=True):
    """Said once, then the peer is not listened to."""

    reason: str


class Alive(Message, tag="alive", frozen=True, kw_only=True):
    """The allocator's heartbeat."""


class WorkOrder(Message, frozen=True, kw_only=True):
    """A work item with what a producer needs to do it."""

    work: int
    attempt: int
    prompt: str
    prompt_tokens: bytes
    """Prompt token ids, int32 [P], template and BOS applied once when the data was prepared."""
    answer: str
    """Gold answer, for the verifier."""
    verifier: str = ""
    """Verifier of this prompt; empty: the configured one."""


class Work(Message, tag="work", frozen=True, kw_only=True):
    orders: tuple[WorkOrder, ...]


class Cancel(Message, tag="cancel", frozen=True, kw_only=True):
    works: tuple[int, ...]
    reason: str


class NewWeights(Message, tag="weights", frozen=True, kw_only=True):
    weights: WeightsInfo


class TrainRollout(Message, frozen=True, kw_only=True):
    work: int
    reward: float
    tokens: bytes
    logprobs: bytes
    spans: tuple[tuple[int, int, int], ...]
    truncated: bool
    lag: int
    """Training batches between the policy that sampled its oldest token and the one that its batch was made for."""
    coefficient: float
    """c_j of the allocator: the prompt's gradient estimate is sum_j c_j grad log pi(y_j) over the group."""


class TrainGroup(Message, frozen=True, kw_only=True):
    """All scored rollouts of one visit to a prompt, in launch order. Sizes differ from group to group."""

    group: int
    prompt: str
    prompt_tokens: bytes
    weight: float
    prior: tuple[float, float]
    """Beta (successes, failures) of the prompt's acceptance rate, from earlier visits only."""
    shadow: bool = False
    """It got as many rollouts as every shadow-uniform visit, whatever the policy says."""
    rollouts: tuple[TrainRollout, ...]


class Batch(Message, tag="batch", frozen=True, kw_only=True):
    step: int
    groups: tuple[TrainGroup, ...]


class Stop(Message, tag="stop", frozen=True, kw_only=True):
    """The run ends: finish what cannot be interrupted, save, say goodbye."""

    reason: str
    final: bool
    """True: all steps are done. False: interrupted, or something failed."""


class Wait(Message, frozen=True, kw_only=True):
    """Something that the run, or a process of it, waits for."""

    who: str
    """Who waits: "run", or a process as in "producer p0"."""
    what: str
    """In words, with whom or what it waits for."""
    seconds: float
    """Since when."""


class PeerStatus(Message, frozen=True, kw_only=True):
    role: str
    name: str
    version: int
    """Policy version it samples with (producers); -1: none yet."""
    versions_behind: int
    in_flight: int
    """Rollouts in its hands."""
    credits: int
    """Further rollouts that it could take."""
    oldest_s: float
    """Time since the last new token of the rollout that has made none for longest; 0 without any."""
    silent_s: float
    joined_s: float
    """Time since it joined."""
    connected: bool
    """False: its connection is gone; its work goes back to others if it does not return."""


class Status(Message, tag="status", frozen=True, kw_only=True):
    """A picture of the run for people and the supervisor."""

    run: str
    phase: str
    step: int
    """Training batches settled."""
    steps: int
    version: int
    seconds: float
    """Since the run began, earlier processes of it included."""
    rollouts: int
    """Training rollouts that the learner is done with."""
    tokens: dict[str, int]
    """Fate -> tokens, and `generated`, their sum."""
    running: int
    """Rollouts in the hands of producers."""
    scored: int
    """Rollouts that wait to be trained on."""
    max_lag: int
    conserved: bool
    """Attempts: issued = running + ended; tokens: reported = the sum of the fates."""
    refused: int
    """Messages that could not be used."""
    duplicates: int
    """Outcomes that had been reported before."""
    expired: int
    """Attempts whose owner died or got stuck."""
    spool_bytes: int
    spool_waiting: int
    """Turns of the allocator that are not on disk yet."""
    price: float | None
    """Decrease of variance per token of the last rollout granted."""
    gain: float | None
    """Measured gain over uniform."""
    gain_interval: tuple[float, float] | None
    accuracy: tuple[tuple[int, float], ...]
    """(step, held-out accuracy)."""
    last_step: StepStats | None
    peers: tuple[PeerStatus, ...]
    waits: tuple[Wait, ...]


ToAllocator = (
    Hello
    | Goodbye
    | Heartbeat
    | StatusRequest
    | Ask
    | Loaded
    | Rollouts
    | Published
    | BatchRequest
    | StepDone
    | Checkpointed
)
ToPeer = Welcome | Unknown | Refused | Alive | Work | Received | Cancel | NewWeights | Batch | Settled | Stop | Status
