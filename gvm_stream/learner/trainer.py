"""One training batch: choose rows, accumulate the gradient over micro-batches, step or say why not."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gvm_stream.allocator.types import Fate
from gvm_stream.config import Config
from gvm_stream.learner import random_states
from gvm_stream.learner.batch import BatchPlan, Comparison, MicroBatch, Row, pack, padding_share, plan_batch
from gvm_stream.learner.distributed import Ranks, balance
from gvm_stream.learner.figures import COLUMNS, Figures, Skip, SkipCause, named
from gvm_stream.learner.losses import MAX_LOG_RATIO, Responses, clamped_log_ratio, kl_terms
from gvm_stream.learner.model import (
    logprobs_and_entropies,
    response_energies,
    response_logprobs,
    response_states,
    response_token_energies,
)
from gvm_stream.learner.objective import Objective
from gvm_stream.learner.optimizer import clip_gradient, learning_rate, make_optimizer
from gvm_stream.learner.reference import load_reference
from gvm_stream.learner.survey import Seen, means_of_peers, measured_advantages, with_advantages, with_peers
from gvm_stream.learner.variance import GradientNoise, random_parts
from gvm_stream.wire.messages import StepStats, TrainGroup

log = logging.getLogger(__name__)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one training batch; `messages.StepDone` without the version."""

    trained: bool
    reason: str
    """Why the step was skipped; empty if it was not."""
    cause: SkipCause | None
    """The kind of `reason`."""
    fates: dict[str, tuple[int, ...]]
    """Fate -> work ids. Rollouts of a step skipped for its numbers count as zero_signal: they moved nothing."""
    energies: dict[int, float]
    """Work id -> gradient energy in the lm_head, of the rollouts trained on; empty if `learner.energies` is off."""
    stats: StepStats
    clamped_tokens: int
    """Tokens whose log-ratio was beyond `losses.MAX_LOG_RATIO`."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Whole groups, all of which make up a step."""

    rows: list[Row]
    share: float
    """Of the weight of the prompts in the step."""
    tokens: int
    shadow: bool


class Trainer:
    """Own the optimizer of `model`. Not thread-safe; everything happens on the device of the model.

    With `model.dtype = "bfloat16"` and a model loaded in float32, passes run under bfloat16 autocast and the float32
    weights are the masters. On several ranks each calls the same methods with the same groups, and `model` is sharded
    beforehand. With a KL penalty the reference model is loaded, too. Raises ConfigError for an advantage or a loss that
    means nothing.
    """

    def __init__(self, config: Config, model: PreTrainedModel, ranks: Ranks | None = None) -> None:
        self._config = config
        self._objective = Objective.of(config)
        self._model = model
        self._ranks = ranks or Ranks()
        self._reference = load_reference(config, self._ranks) if config.learner.kl_coefficient else None
        self._device = next(model.parameters()).device
        self._optimizer = make_optimizer(model, config.learner)
        self.trained_steps = 0
        self.skipped_in_a_row = 0

    def train(self, step: int, groups: Sequence[TrainGroup], on_progress: Callable[[], None]) -> StepResult:
        """Train on batch `step`.

        A skipped step leaves parameters, optimizer and warm-up untouched, bit for bit. `on_progress` is called after
        every micro-batch. Raises `TrainingError` for groups that break the protocol.
        """
        started = time.monotonic()
        plan = plan_batch(groups, self._objective, self._config.allocation.max_lag)
        parts = self._parts(step, groups, plan)
        rows = [balance(part.rows, self._ranks) for part in parts]
        micro_batches = [pack(part, self._config.learner.micro_batch_tokens, self._device) for part in rows]
        noise = GradientNoise(self._model.parameters(), seed=step) if len(parts) > 2 else None
        figures, norm, skipped = Figures.of([]), 0.0, _nothing_usable(plan, groups)
        try:
            if plan.rows:
                figures = self._accumulate(plan, micro_batches, parts, noise, on_progress)
                skipped = figures.problem(self._config.learner.max_logprob_mismatch)
            if not skipped:
                norm, skipped = self._step(figures)
        finally:
            self._optimizer.zero_grad()
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        clamped, tokens = int(figures.clamped.sum()), int(figures.tokens.sum())
        if skipped:
            log.warning("batch %d skipped: %s", step, skipped.reason)
        if clamped:
            log.warning("batch %d: the log-ratio of %d of %d tokens was clamped", step, clamped, tokens)
        rewards = [r.reward for g in groups for r in g.rollouts]
        stats = StepStats(
            loss=figures.total_loss,
            grad_norm=norm,
            reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
            zero_signal_groups=plan.zero_signal_groups,
            groups=len(groups),
            mean_lag=sum(plan.lags) / len(plan.lags) if plan.lags else 0.0,
            max_lag=max(plan.lags, default=0),
            mismatch=figures.mismatch,
            effective_sample_size=figures.effective_sample_size,
            seconds=time.monotonic() - started,
            padding_share=padding_share(
                [r for part in rows for r in part], [m for part in micro_batches for m in part]
            ),
            noise=noise.result() if noise and not skipped else None,
            entropy=figures.entropy,
            kl=figures.kl,
        )
        energies = {}
        if self._config.learner.energies == "lm_head" and not skipped:
            energies = dict(zip(figures.work.astype(int).tolist(), figures.energy.tolist(), strict=True))
        fates = _nothing_trained(plan.fates) if skipped else plan.fates
        return StepResult(
            trained=not skipped,
            reason=skipped.reason if skipped else "",
            cause=skipped.cause if skipped else None,
            fates=fates,
            energies=energies,
            stats=stats,
            clamped_tokens=clamped,
        )

    def state_dict(self) -> dict[str, Any]:
        """Moments (the very tensors), counters (the learning rate follows from them) and random states of this rank."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return {
            "optimizer": {names[id(parameter)]: state for parameter, state in self._optimizer.state.items()},
            "trained_steps": self.trained_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            f"random_{self._ranks.rank}": random_states.capture(self._device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A rank that was not there when the state was saved keeps its random states."""
        for name, parameter in self._model.named_parameters():
            for key, value in state["optimizer"].get(name, {}).items():
                self._optimizer.state[parameter][key].copy_(value)
        self.trained_steps = state["trained_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if content := state.get(f"random_{self._ranks.rank}"):
            random_states.restore(content, self._device)

    def _parts(self, step: int, groups: Sequence[TrainGroup], plan: BatchPlan) -> list[_Part]:
        """One part, or many on a step whose gradient noise is measured."""
        kept = [group for group in groups if group.group in plan.shares]
        every = self._config.learner.measure_every
        measured = every and step % every == 0 and plan.rows
        dealt = random_parts([g.shadow for g in kept], seed=step) if measured else [list(range(len(kept)))]
        parts = []
        for members in dealt:
            part = {kept[i].group: kept[i] for i in members}
            parts.append(
                _Part(
                    rows=[row for row in plan.rows if row.group in part],
                    share=sum(plan.shares[group] for group in part),
                    tokens=sum(len(r.tokens) // 4 for g in part.values() for r in g.rollouts),
                    shadow=any(g.shadow for g in part.values()),
                )
            )
        return parts

    def _accumulate(
        self,
        plan: BatchPlan,
        micro_batches: list[list[MicroBatch]],
        parts: Sequence[_Part],
        noise: GradientNoise | None,
        on_progress: Callable[[], None],
    ) -> Figures:
        """Add up the gradient of the batch, part by part. In each, every rank makes as many passes as the one with the
        most micro-batches, on a row without weight if it has no more of its own: the collectives in them never depend
        on the data."""
        shortest = min((row for part in parts for row in part.rows), key=lambda row: row.tokens.size)
        (idle,) = pack([replace(shortest, coefficient=0.0)], 1, self._device)
        counts = self._ranks.gather([len(part) for part in micro_batches])
        passes = [max(of_part) for of_part in zip(*counts, strict=True)]
        padded = [part + [idle] * (n - len(part)) for part, n in zip(micro_batches, passes, strict=True)]
        if self._objective.surveys:
            padded = self._survey(padded, idle, plan.compared, on_progress)
        tables = []
        for part, batches in zip(parts, padded, strict=True):
            for batch in batches:
                seen = self._backward(batch)
                if batch is not idle:
                    tables.append(seen)
                on_progress()
            if noise:
                noise.part(part.share, part.tokens, part.shadow)
        ids = [group for part in micro_batches for m in part for group in m.groups]
        # One transfer for all figures of the step.
        table = torch.cat(tables).cpu().numpy() if tables else np.zeros((0, COLUMNS))
        return Figures.of(self._ranks.gather((ids, table)))

    def _survey(
        self,
        padded: list[list[MicroBatch]],
        idle: MicroBatch,
        compared: dict[int, Comparison],
        on_progress: Callable[[], None],
    ) -> list[list[MicroBatch]]:
        """`padded` with what takes a forward pass over the whole batch to know."""
        mine: dict[int, Seen] = {}
        for batch in [m for part in padded for m in part]:
            seen = self._seen(batch)
            if batch is not idle:
                mine |= seen
            on_progress()
        everywhere = {work: seen for part in self._ranks.gather(mine) for work, seen in part.items()}
        advantage = self._objective.advantage
        peers = means_of_peers(everywhere) if self._objective.loss.peers else None
        advantages = measured_advantages(advantage, compared.values(), everywhere) if advantage.measured else None

        def informed(batch: MicroBatch) -> MicroBatch:
            if batch is idle:
                return batch
            if peers is not None:
                batch = with_peers(batch, peers)
            return batch if advantages is None else with_advantages(batch, advantages)

        return [[informed(batch) for batch in part] for part in padded]

    @torch.no_grad()
    def _seen(self, batch: MicroBatch) -> dict[int, Seen]:
        temperature = self._config.sampling.temperature
        lengths = batch.mask.sum(1).tolist()
        energies, sizes = torch.zeros(len(lengths), 0), [0] * len(lengths)
        with self._autocast():
            states = response_states(self._model, batch)
            logprobs, _ = logprobs_and_entropies(self._model, batch, states, temperature)
            if self._objective.advantage.measured == "token":
                energies, sizes = response_token_energies(self._model, batch, states, temperature), lengths
            elif self._objective.advantage.measured == "response":
                energies = response_energies(self._model, batch, states, temperature, seed=self.trained_steps)[:, None]
                sizes = [1] * len(lengths)
        ratios = clamped_log_ratio(logprobs, batch.logprobs).double().cpu().numpy()
        rows = zip(batch.works, batch.groups, ratios, lengths, energies.double().cpu().numpy(), sizes, strict=True)
        return {work: Seen(group, ratio[:length], energy[:size]) for work, group, ratio, length, energy, size in rows}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.model.dtype == "bfloat16")

    def _backward(self, batch: MicroBatch) -> Tensor:
        """The figures of its rows, float64 [B, COLUMNS], in the order of `Figures`."""
        temperature = self._config.sampling.temperature
        reference = None
        with self._autocast():
            if self._reference is not None:
                with torch.no_grad():
                    reference = response_logprobs(self._reference, batch, temperature)
            states = response_states(self._model, batch)
            energies = states.new_full((len(batch.groups),), torch.nan)
            if self._config.learner.energies == "lm_head":
                energies = response_energies(self._model, batch, states, temperature, seed=self.trained_steps)
            logprobs, entropies = logprobs_and_entropies(self._model, batch, states, temperature)
        responses = Responses.of(logprobs, batch.logprobs, batch.mask, batch.advantages, batch.peers)
        terms = self._objective.terms(responses, reference, entropies) * batch.coefficients
        terms.sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            works = torch.tensor(batch.works, device=self._device)
            distance = (responses.logprobs - batch.logprobs).abs().double()
            ratio = responses.ratio.double().where(batch.mask, 0.0)
            kl = torch.zeros_like(terms) if reference is None else kl_terms(responses, reference, "k3")
            columns = (terms, batch.mask, distance, responses.log_ratio, ratio, ratio**2, distance > MAX_LOG_RATIO)
            sums = [column.double().sum(1) for column in (*columns, entropies, kl)]
            return torch.stack([*sums, energies.double(), works.double()], 1)

    def _step(self, figures: Figures) -> tuple[float, Skip | None]:
        """Clip and step: (gradient norm before clipping, why it was skipped if it was).

        `learner.ess_scaling`: VCPO, arXiv 2602.17616.
        """
        learner = self._config.learner
        norm = clip_gradient(self._model.parameters(), learner.max_grad_norm)
        if not math.isfinite(norm) or not norm:  # momentum and weight decay would move the weights without one
            cause: SkipCause = "not_finite" if norm else "zero_gradient"
            return norm, Skip(cause, f"the gradient norm is {norm} over {named(figures.groups)}")
        rate = learning_rate(learner, self.trained_steps, self._config.run.steps)
        if learner.ess_scaling:
            rate *= min(1.0, figures.effective_rollouts / learner.ess_scaling) ** 0.5
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = rate
        self._optimizer.step()
        self.trained_steps += 1
        return norm, None


def _nothing_usable(plan: BatchPlan, groups: Sequence[TrainGroup]) -> Skip | None:
    """A batch without a row is skipped."""
    if plan.rows:
        return None
    stale, silent = len(plan.fates[Fate.STALE]), len(plan.fates[Fate.ZERO_SIGNAL])
    which = f" ({named([g.group for g in groups])})" if groups else ""
    return Skip(
        "no_signal",
        f"no usable token: of {stale + silent} rollouts {stale} are stale and {silent} give no signal{which}",
    )


def _nothing_trained(fates: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    silent = fates[Fate.ZERO_SIGNAL] + fates[Fate.TRAINED]
    return {**fates, str(Fate.TRAINED): (), str(Fate.ZERO_SIGNAL): silent}
