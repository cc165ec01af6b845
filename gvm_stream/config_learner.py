"""The [learner] section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Aggregate = Literal["seq_sum", "seq_mean", "seq_const", "token_mean", "delta_l"]
KlEstimator = Literal["k1", "k2", "k3"]
DEVICE = r"^(cpu|cuda(:\d+)?)$"


class LearnerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    advantage: Annotated[
        str,
        Meta(
            description="What a rollout is worth: allocated (as the allocator planned), rloo, raft, grpo, dr_grpo, "
            "opo, opob, otb, shrunken, order_stat, bnpo, reinforce_pp, or your own as module:Class."
        ),
    ] = "allocated"
    advantage_options: Annotated[
        dict[str, Any], Meta(description="Hyper-parameters of the advantage: order_stat: size, top; opob and otb: cap.")
    ] = {}
    loss: Annotated[
        str,
        Meta(
            description="Terms of the tokens: pg, ppo_clip (RAFT++ with advantage raft), cispo, gspo, holder, gvpo, "
            "delightful, r2vpo, or your own as module:Class."
        ),
    ] = "pg"
    loss_options: Annotated[
        dict[str, Any],
        Meta(
            description="Hyper-parameters of the loss; left out: the published ones. pg: weights (token, sequence, "
            "mask, none), cap, low, high; ppo_clip: low, high, dual; cispo: cap; gspo: low, high; holder: power, low, "
            "high; gvpo: beta; delightful: temperature; r2vpo: penalty."
        ),
    ] = {}
    aggregate: Annotated[
        Aggregate,
        Meta(
            description="How token terms add up: per rollout their sum (unbiased), their mean, or their sum over "
            "sampling.max_tokens; the mean over all tokens; or by lengths to the power -delta_l_power."
        ),
    ] = "seq_sum"
    delta_l_power: Annotated[float, Meta(ge=0, description="Published: 1 and 0.75.")] = 1.0
    kl_coefficient: Annotated[
        float,
        Meta(
            ge=0,
            description="Weight of the KL divergence from the start model, added to the loss token by token and "
            "aggregated like it; a frozen copy of that model is kept. 0: none.",
        ),
    ] = 0.0
    kl_estimator: Annotated[
        KlEstimator,
        Meta(
            description="What its gradient is of: k1, KL(policy || start) of whole responses, with much noise; k2, the "
            "same of each token given those before it; k3, KL(start || policy) of each token, as in GRPO."
        ),
    ] = "k2"
    entropy_bonus: Annotated[
        float,
        Meta(ge=0, description="Weight of the entropy of the policy at every token, taken off the loss; 0: none."),
    ] = 0.0
    lr: Annotated[float, Meta(gt=0, description="Learning rate of AdamW.")] = 1e-6
    betas: Annotated[tuple[float, float], Meta(description="AdamW betas.")] = (0.9, 0.95)
    weight_decay: Annotated[
        float, Meta(ge=0, description="AdamW weight decay; norms, biases and embeddings do not decay.")
    ] = 0.0
    warmup_steps: Annotated[int, Meta(ge=0, description="Optimiser steps of linear warm-up.")] = 0
    schedule: Annotated[
        Literal["constant", "cosine"],
        Meta(description="Learning rate after the warm-up: constant, or half a cosine to 0 at the end of the run."),
    ] = "constant"
    ess_scaling: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Scale the learning rate by min(1, E / this)^(1/2), E the effective sample size of the "
            "rollouts' importance weights over their number (VCPO; published: 1); 0: never.",
        ),
    ] = 0.0
    max_logprob_mismatch: Annotated[
        float,
        Meta(
            gt=0,
            description="A batch whose log-probs are further than this, in nats per token on average, from those at "
            "sampling is skipped.",
        ),
    ] = 1.0
    energies: Annotated[
        Literal["off", "lm_head"],
        Meta(
            description="Gradient energies that the allocator learns from: `off`, the producers' estimate from "
            "log-probs; `lm_head`, measured by the learner on what it trains on."
        ),
    ] = "off"
    measure_every: Annotated[
        int, Meta(ge=0, description="Batches between measurements of the gradient's variance; 0: never.")
    ] = 10
    max_grad_norm: Annotated[float, Meta(gt=0, description="Gradient norm clip; the norm is reported unclipped.")] = 1.0
    micro_batch_tokens: Annotated[
        int, Meta(ge=1, description="Most tokens, padding included, in one forward and backward pass.")
    ] = 8192
    gradient_checkpointing: Annotated[
        bool, Meta(description="Keep no activations of layers: a third more computation for far less memory.")
    ] = False
    device: Annotated[str, Meta(pattern=DEVICE, description="torch device of the learner.")] = "cpu"
    threads: Annotated[int, Meta(ge=1, description="torch threads of the learner on a CPU.")] = 1
    checkpoint_every: Annotated[int, Meta(ge=1, description="Batches between checkpoints; one is made at the end.")] = (
        50
    )
    keep_checkpoints: Annotated[
        int,
        Meta(ge=2, description="Newest checkpoints kept, in case the last one is damaged."),
    ] = 2
    max_skipped: Annotated[
        int, Meta(ge=1, description="Batches in a row without a usable gradient before training stops with the reason.")
    ] = 20
