"""Advantages: what every rollout of a batch is worth, over groups of any size.

One of your own subclasses `Advantage` and is named in the configuration by its import path, `module:Class`:

    class Half(Advantage, frozen=True, kw_only=True):
        share: float = 0.5                                          # a hyper-parameter

        def of_group(self, group: Group) -> Floats:
            return group.rewards - self.share * group.rewards.mean()

RAFT++ (arXiv 2504.11343) is `raft` with the loss `ppo_clip`; Reinforce-Ada (arXiv 2510.04996) is a policy of the
allocator with `allocated`. docs/estimators.md says when to use which.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from gvm_stream.allocator.arrays import Floats
from gvm_stream.allocator.coefficients import SAME_REWARD
from gvm_stream.allocator.estimates import SUCCESS_REWARD
from gvm_stream.errors import TrainingError
from gvm_stream.learner.registry import Registry

LEAST_ENERGY = 1e-200
"""Responses that the policy is certain of have none, up to rounding."""


@dataclass(frozen=True, eq=False)
class Group:
    """The rollouts of a prompt that can be trained on: n >= 1, in launch order. Arrays are [n]."""

    rewards: Floats
    """Finite."""
    lengths: Floats
    """Response tokens, at least 1."""
    coefficients: Floats
    """c_j of the allocator: its estimate of the prompt's gradient is sum_j c_j grad log pi(y_j)."""
    size: int
    """Rollouts that the allocator closed the group with, those that are too old to be trained on included."""
    prior: tuple[float, float]
    """Beta (successes, failures) of the acceptance rate, from earlier visits only."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What a forward pass of the learner's policy shows of the rollouts of a group, in their order."""

    log_ratios: Sequence[Floats]
    """[T_j] each: log-probs of the learner minus those at sampling, in nats."""
    energies: Sequence[Floats]
    """[1] each: squared norm of the gradient of the response's log-prob in the lm_head; or [T_j] each: of the tokens'
    log-probs in the logits (`Advantage.measured`)."""


class Advantage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class; fields are hyper-parameters. Override `of_group`, or `of_batch` if groups depend on each other."""

    compares: ClassVar[bool] = False
    """Rewards are compared with each other: where they do not differ, rounding apart, advantages are exactly 0."""
    measured: ClassVar[Literal["", "response", "token"]] = ""
    """`of_measured` has the last word, with energies of whole responses or of tokens, for groups in which `of_group`
    finds an advantage. This takes a forward pass over them beforehand."""

    def of_group(self, group: Group) -> Floats:
        """Advantages [n]. If it `compares` it is asked for groups of n >= 2 rewards that differ only."""
        raise NotImplementedError

    def of_batch(self, groups: Sequence[Group]) -> list[Floats]:
        """Advantages [n] of each group."""
        return [np.zeros_like(g.rewards) if self.compares and _same(g.rewards) else self.of_group(g) for g in groups]

    def of_measured(self, group: Group, measured: Measured) -> list[Floats]:
        """Advantages of each rollout, [1] or by token [T_j]. Only asked for if they are `measured`."""
        raise NotImplementedError


ADVANTAGES = Registry(
    "learner.advantage",
    Advantage,
    {
        "raft_pp": 'RAFT++ is learner.advantage = "raft" with learner.loss = "ppo_clip"',
        "stratified": 'the path-count estimator is "allocated", with allocation.design = "sequential"',
        "reinforce_ada": 'it is "allocated", with allocation.policy = "reinforce_ada_balance", "_pos" or "_est"',
    },
)


@ADVANTAGES.register("allocated")
class Allocated(Advantage, frozen=True):
    """size c_j: whatever estimator the allocator planned for, unbiased under its design. `rloo` for a planned visit,
    the path-count estimator for a sequential one, size/s on s accepted rollouts for `allocation.coefficient = "raft"`.
    """

    def of_group(self, group: Group) -> Floats:
        return group.size * group.coefficients


@ADVANTAGES.register("raft")
class Raft(Advantage, frozen=True):
    """1 for an accepted rollout (reward >= 0.5), else 0. Source: RAFT, arXiv 2304.06767.

    There is no baseline, so a group in which everything was accepted keeps its 1s: leaving such groups out would scale
    the gradient of a prompt by 1 - p^(n-1), its weight in the objective by its difficulty.
    """

    def of_group(self, group: Group) -> Floats:
        return (group.rewards >= SUCCESS_REWARD).astype(np.float64)


@ADVANTAGES.register("grpo")
class Grpo(Advantage, frozen=True):
    """(r - mean) / (std + 1e-6) with Bessel's correction. Source: GRPO, arXiv 2402.03300."""

    compares: ClassVar[bool] = True

    def of_group(self, group: Group) -> Floats:
        r = group.rewards
        return np.asarray((r - r.mean()) / (r.std(ddof=1) + 1e-6))


@ADVANTAGES.register("dr_grpo")
class DrGrpo(Advantage, frozen=True):
    """r - mean, which shrinks the gradient by 1 - 1/n. Source: Dr. GRPO, arXiv 2503.20783."""

    compares: ClassVar[bool] = True

    def of_group(self, group: Group) -> Floats:
        return np.asarray(group.rewards - group.rewards.mean())


@ADVANTAGES.register("rloo")
class Rloo(Advantage, frozen=True):
    """r - mean of the others = n/(n-1) (r - mean). Unbiased for n known beforehand. Source: RLOO, arXiv 2402.14740."""

    compares: ClassVar[bool] = True

    def of_group(self, group: Group) -> Floats:
        n = len(group.rewards)
        return np.asarray((group.rewards - group.rewards.mean()) * (n / (n - 1)))


@ADVANTAGES.register("opo")
class Opo(Advantage, frozen=True):
    """r - mean of the others weighted by their lengths: the baseline of least variance if ||grad log pi||^2 grows in
    proportion to length. Source: OPO, arXiv 2505.23585, in the leave-one-out form, which is unbiased (the paper's
    baseline includes the rollout itself)."""

    compares: ClassVar[bool] = True

    def of_group(self, group: Group) -> Floats:
        r, tokens = group.rewards, group.lengths
        return np.asarray(r - ((tokens * r).sum() - tokens * r) / (tokens.sum() - tokens))


@ADVANTAGES.register("opob")
class Opob(Rloo, frozen=True):
    """r - mean of the others weighted by w^2 ||grad log pi||^2, w = min(product of the ratios over the response, cap):
    the baseline of least variance for the loss `pg` with `weights = "sequence"` and this cap. Gradients are those in
    the lm_head. Source: VCPO, arXiv 2602.17616, in the leave-one-out form, unbiased but for the truncation (the paper's
    baseline includes the rollout itself). With equal weights it is `rloo`, on policy with energies in proportion to
    length `opo`."""

    measured: ClassVar[Literal["", "response", "token"]] = "response"

    cap: Annotated[float, Meta(gt=0)] = 2.0

    def of_measured(self, group: Group, measured: Measured) -> list[Floats]:
        log_weights = np.minimum([ratios.sum() for ratios in measured.log_ratios], math.log(self.cap))
        # As logarithms, for ratios of long responses underflow; without any energy all count the same.
        log_weights = 2 * log_weights + np.log(np.maximum(np.concatenate(measured.energies), LEAST_ENERGY))
        others = np.where(np.eye(len(log_weights), dtype=bool), -np.inf, log_weights)
        others = np.exp(others - others.max(1, keepdims=True))
        return list((group.rewards - others @ group.rewards / others.sum(1))[:, None])


@ADVANTAGES.register("otb")
class Otb(Rloo, frozen=True):
    """Of token t: r - mean over the others that have a token t, weighted by their energy so far, sum over s <= t of
    w_s^2 ||e(y_s) - pi_s||^2 with w = min(ratio of the token, cap), that of the loss. Past the last token of the others
    their last baseline stays. Source: the optimal token baseline, arXiv 2602.07078, in the leave-one-out form, which is
    unbiased (the paper's baseline includes the rollout itself)."""

    measured: ClassVar[Literal["", "response", "token"]] = "token"

    cap: Annotated[float, Meta(gt=0)] = 2.0

    def of_measured(self, group: Group, measured: Measured) -> list[Floats]:
        lengths = group.lengths.astype(int)
        so_far = np.zeros((len(lengths), lengths.max()))
        for row, ratios, energies in zip(so_far, measured.log_ratios, measured.energies, strict=True):
            weights = np.exp(2 * np.minimum(ratios, math.log(self.cap)))
            row[: len(ratios)] = np.maximum((weights * energies).cumsum(), LEAST_ENERGY)
        others = 1 - np.eye(len(lengths))
        total = others @ so_far
        baselines = others @ (so_far * group.rewards[:, None]) / np.where(total > 0, total, 1.0)
        ends = (total > 0).sum(1)
        return [
            reward - baseline[np.arange(length).clip(max=end - 1)]
            for reward, baseline, length, end in zip(group.rewards, baselines, lengths, ends, strict=True)
        ]


@ADVANTAGES.register("shrunken")
class Shrunken(Advantage, frozen=True):
    """r_j - (a + S - r_j) / (a + b + n - 1), S the sum of the rewards and (a, b) the Beta prior from earlier visits.

    The baseline is the posterior mean given all rollouts but the one it is for: unbiased whatever the prior, and a
    signal even where n = 1 or all rewards are equal. For rewards of 0 and 1. Source: empirical Bayes (Efron and Morris
    1975); the strength a + b of the prior is the ratio of the variances within and between prompts.
    """

    def of_group(self, group: Group) -> Floats:
        r, (a, b) = group.rewards, group.prior
        return np.asarray(r - (a + r.sum() - r) / (a + b + len(r) - 1))


@ADVANTAGES.register("order_stat")
class OrderStat(Advantage, frozen=True):
    """Of the objective E[mean of the `top` best of `size` rollouts]: n (U - U without j), U the mean of that over all
    subsets of the group. `size` = 1 is `rloo`; `top` = 1 is max@k, with rewards of 0 and 1 pass@k.

    Unbiased for n known beforehand. A group of no more than `size` rollouts takes part with size n - 1. Source:
    OrderGrad, arXiv 2606.06096, whose include-one minus leave-one-out is n/size (U - U without j).
    """

    compares: ClassVar[bool] = True

    size: Annotated[int, Meta(ge=1)] = 4
    top: Annotated[int, Meta(ge=1)] = 1

    def of_group(self, group: Group) -> Floats:
        n = len(group.rewards)
        order = group.rewards.argsort(kind="stable")
        x = group.rewards[order]
        size = min(self.size, n - 1)
        rest = rank_weights(n - 1, size, min(self.top, size))
        below = np.concatenate([[0.0], (rest * x[:-1]).cumsum()])
        above = np.concatenate([(rest * x[1:])[::-1].cumsum()[::-1], [0.0]])
        advantages = np.empty(n)
        advantages[order] = n * (rank_weights(n, size, min(self.top, size)) @ x - below - above)
        return advantages


@ADVANTAGES.register("bnpo")
class Bnpo(Advantage, frozen=True):
    """(r - p) / f(p), p the group's mean reward and f the density of Beta(1 + a/3, 1 + b/3), both parameters at least
    1, with (a, b) fitted to the means of the batch by their moments; 1/f is at most 1e6. Rewards are in [0, 1].

    Source: BNPO, arXiv 2506.02864, whose fit takes the binomial noise of the means for differences between prompts.
    Where the means cannot be fitted (fewer than two, or all equal), f is 1. Raises TrainingError for other rewards.
    """

    compares: ClassVar[bool] = True

    def of_batch(self, groups: Sequence[Group]) -> list[Floats]:
        for r in (g.rewards for g in groups):
            if r.min() < 0 or r.max() > 1:
                raise TrainingError(f'learner.advantage = "bnpo" takes rewards from 0 to 1, got {r.tolist()}')
        means = np.array([g.rewards.mean() for g in groups])
        a, b = _beta_by_moments(means)
        alpha, beta = max(1.0, 1 + a / 3), max(1.0, 1 + b / 3)
        log_norm = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
        advantages: list[Floats] = []
        for group, p in zip(groups, means.tolist(), strict=True):
            if _same(group.rewards):
                advantages.append(np.zeros_like(group.rewards))
                continue
            log_density = (alpha - 1) * math.log(p) + (beta - 1) * math.log1p(-p) - log_norm
            advantages.append((group.rewards - p) * math.exp(min(-log_density, math.log(1e6))))
        return advantages


@ADVANTAGES.register("reinforce_pp")
class ReinforcePp(Advantage, frozen=True):
    """(r - mean) / sqrt(var + 1e-8) over all response tokens of the batch, with Bessel's correction. There is no
    baseline per prompt: rollouts of easy prompts are pushed up, those of hard ones down. Source: REINFORCE++, arXiv
    2501.03262, for a reward at the end, without KL or discount."""

    compares: ClassVar[bool] = True

    def of_batch(self, groups: Sequence[Group]) -> list[Floats]:
        rewards = np.concatenate([g.rewards for g in groups])
        tokens = np.concatenate([g.lengths for g in groups])
        if _same(rewards):
            return [np.zeros_like(g.rewards) for g in groups]
        mean = np.average(rewards, weights=tokens)
        variance = (tokens * (rewards - mean) ** 2).sum() / (tokens.sum() - 1)
        return [(g.rewards - mean) / math.sqrt(variance + 1e-8) for g in groups]


@functools.cache
def rank_weights(n: int, size: int, top: int) -> Floats:
    """Weights [n] of sorted rewards, ascending, in the mean of the `top` largest of `size` of them, averaged over all
    subsets of that size: rank m is j-th of C(m-1, j-1) C(n-m, size-j) of the C(n, size) subsets."""
    best = range(size - top + 1, size + 1)
    subsets = [sum(math.comb(m - 1, j - 1) * math.comb(n - m, size - j) for j in best) for m in range(1, n + 1)]
    return np.array([s / (top * math.comb(n, size)) for s in subsets])


def _same(r: Floats) -> bool:
    """True for rewards without a difference: one, or equal up to rounding, as the float mean of equal numbers need not
    be theirs."""
    return bool(np.ptp(r) <= SAME_REWARD * np.abs(r).max())


def _beta_by_moments(means: Floats) -> tuple[float, float]:
    """(a, b) of the Beta distribution with the mean and variance (Bessel) of `means`; (0, 0) without a variance."""
    if len(means) < 2 or _same(means):
        return 0.0, 0.0
    mean = float(means.mean())
    strength = mean * (1 - mean) / float(means.var(ddof=1)) - 1
    return strength * mean, strength * (1 - mean)
