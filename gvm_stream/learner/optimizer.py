"""AdamW, its learning rate, and the clip of the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gvm_stream.config import LearnerSection


def make_optimizer(model: nn.Module, learner: LearnerSection) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, fused. Norms, biases (whatever has one dimension) and embeddings, tied or
    not, do not decay.

    The moments are there from the start: a lack of memory shows at once, and a checkpoint of any step holds the same
    tensors.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (others if parameter.ndim < 2 or id(parameter) in embeddings else decaying).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=learner.lr,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
        fused=True,
    )
    for parameter in [*decaying, *others]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def learning_rate(learner: LearnerSection, step: int, steps: int) -> float:
    """Of optimiser step `step` (from 0; skipped batches do not count) in a run of `steps` batches: linear warm-up, then
    constant, or half a cosine that reaches 0 at the end."""
    warmup = learner.warmup_steps
    if step < warmup:
        return learner.lr * (step + 1) / warmup
    if learner.schedule == "constant":
        return learner.lr
    return learner.lr * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))) / 2


def clip_gradient(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scale the gradient to a norm of at most `most`; the norm before that. One that is not finite stays as it is."""
    parameters = list(parameters)
    total: Tensor = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(total, DTensor):  # of all ranks
        total = total.full_tensor()
    norm = float(total)
    if math.isfinite(norm):
        clip_grads_with_norm_(parameters, most, total)
    return norm
