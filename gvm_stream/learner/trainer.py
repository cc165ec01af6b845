"""One training batch: choose rows, accumulate the gradient over micro-batches, step or say why not."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from gvm_stream.allocator.types import Fate
from gvm_stream.config import Config
from gvm_stream.learner.batch import BatchPlan, MicroBatch, pack, padding_share, plan_batch
from gvm_stream.learner.model import response_logprobs
from gvm_stream.learner.objective import token_terms
from gvm_stream.wire.messages import StepStats, TrainGroup

log = logging.getLogger(__name__)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one training batch; `messages.StepDone` without the version."""

    trained: bool
    reason: str
    """Why the step was skipped; empty if it was not."""
    fates: dict[str, tuple[int, ...]]
    """Fate -> work ids. Rollouts of a step skipped for its numbers count as zero_signal: they moved nothing."""
    stats: StepStats
    clamped_tokens: int
    """Tokens whose log-ratio was beyond `objective.MAX_LOG_RATIO`."""


class _Sums:
    """Running totals over the micro-batches of a step."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.tokens = 0
        self.clamped = 0
        self.mismatch = 0.0
        self.ratio = 0.0
        self.ratio_squared = 0.0

    @property
    def effective_sample_size(self) -> float:
        return self.ratio**2 / (self.ratio_squared * self.tokens) if self.ratio_squared else 1.0


class Trainer:
    """Own the optimizer of `model`. Not thread-safe; everything happens on the device of the model.

    With `model.dtype = "bfloat16"` and a model loaded in float32, passes run under bfloat16 autocast and the float32
    weights are the masters.
    """

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        self._config = config
        self._model = model
        self._device = next(model.parameters()).device
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learner.lr,
            betas=config.learner.betas,
            weight_decay=config.learner.weight_decay,
            fused=self._device.type in ("cpu", "cuda"),
        )
        self.trained_steps = 0
        self.skipped_in_a_row = 0

    def train(
        self, step: int, groups: Sequence[TrainGroup], version_now: int, on_progress: Callable[[], None]
    ) -> StepResult:
        """Train on batch `step`; `version_now` is the policy version of the weights as they are.

        A skipped step leaves parameters, optimizer and warm-up untouched, bit for bit. `on_progress` is called after
        every micro-batch. Raises `TrainingError` for groups that break the protocol.
        """
        started = time.monotonic()
        learner = self._config.learner
        plan = plan_batch(groups, learner, self._config.allocation.max_lag, version_now)
        micro_batches = pack(plan.rows, learner.micro_batch_tokens, self._device)
        sums, norm = _Sums(), 0.0
        try:
            reason = self._accumulate(micro_batches, sums, on_progress) if plan.rows else _nothing_usable(plan)
            if not reason:
                norm, reason = self._step(micro_batches)
        finally:
            self._optimizer.zero_grad()
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if reason else 0
        if reason:
            log.warning("batch %d skipped: %s", step, reason)
        if sums.clamped:
            log.warning("batch %d: the log-ratio of %d of %d tokens was clamped", step, sums.clamped, sums.tokens)
        rewards = [r.reward for g in groups for r in g.rollouts]
        stats = StepStats(
            loss=sums.loss,
            grad_norm=norm,
            reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
            zero_signal_groups=plan.zero_signal_groups,
            groups=len(groups),
            mean_lag=sum(plan.lags) / len(plan.lags) if plan.lags else 0.0,
            max_lag=max(plan.lags, default=0),
            mismatch=sums.mismatch / sums.tokens if sums.tokens else 0.0,
            effective_sample_size=sums.effective_sample_size,
            seconds=time.monotonic() - started,
            padding_share=padding_share(plan.rows, micro_batches),
        )
        fates = _nothing_trained(plan.fates) if reason else plan.fates
        return StepResult(trained=not reason, reason=reason, fates=fates, stats=stats, clamped_tokens=sums.clamped)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and counters, fit for `torch.load(weights_only=True)`."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "trained_steps": self.trained_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self.trained_steps = state["trained_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]

    def _accumulate(self, micro_batches: Sequence[MicroBatch], sums: _Sums, on_progress: Callable[[], None]) -> str:
        """Add up gradients; the reason to skip the step, or nothing."""
        for micro_batch in micro_batches:
            loss = self._backward(micro_batch, sums)
            on_progress()
            if not math.isfinite(loss):
                return f"the loss is {loss} in the micro-batch of {_named_groups([micro_batch])}"
        return ""

    def _backward(self, batch: MicroBatch, sums: _Sums) -> float:
        learner, temperature = self._config.learner, self._config.sampling.temperature
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.model.dtype == "bfloat16"):
            logprobs = response_logprobs(self._model, batch, temperature)
        terms = token_terms(learner, logprobs, batch.logprobs, batch.advantages)
        loss = (terms.losses * batch.coefficients)[batch.mask].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        ratio = terms.ratio[batch.mask].double()
        distance = (logprobs.detach() - batch.logprobs).abs()[batch.mask].double()
        # One transfer for all figures of the micro-batch.
        value, mismatch, total, squares, clamped = torch.stack(
            [loss.detach().double(), distance.sum(), ratio.sum(), ratio.square().sum(), terms.clamped.sum().double()]
        ).tolist()
        sums.loss += value
        sums.mismatch += mismatch
        sums.ratio += total
        sums.ratio_squared += squares
        sums.clamped += int(clamped)
        sums.tokens += ratio.numel()
        return float(value)

    def _step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, str]:
        """Clip and step: (gradient norm before clipping, the reason to skip, or nothing)."""
        learner = self._config.learner
        total = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        norm = float(total)
        if not math.isfinite(norm):
            return norm, f"the gradient norm is {norm} over the micro-batches of {_named_groups(micro_batches)}"
        clip_grads_with_norm_(self._parameters, learner.max_grad_norm, total)
        warm = min(1.0, (self.trained_steps + 1) / learner.warmup_steps) if learner.warmup_steps else 1.0
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = learner.lr * warm
        self._optimizer.step()
        self.trained_steps += 1
        return norm, ""


def _nothing_usable(plan: BatchPlan) -> str:
    stale, silent = len(plan.fates[Fate.STALE]), len(plan.fates[Fate.ZERO_SIGNAL])
    return f"no usable token: of {stale + silent} rollouts {stale} are stale and {silent} give no signal"


def _nothing_trained(fates: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    silent = fates[Fate.ZERO_SIGNAL] + fates[Fate.TRAINED]
    return {**fates, str(Fate.TRAINED): (), str(Fate.ZERO_SIGNAL): silent}


def _named_groups(micro_batches: Sequence[MicroBatch], most: int = 20) -> str:
    groups = sorted({group for m in micro_batches for group in m.groups})
    more = f" and {len(groups) - most} more" if len(groups) > most else ""
    return f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups[:most]))}{more}"
