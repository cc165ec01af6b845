"""Policies that choose which prompts to train on; each gets the same number of rollouts."""

from __future__ import annotations

import numpy as np

from gvm_stream.allocator.arrays import Ints
from gvm_stream.allocator.policies.base import Outcomes, View, register
from gvm_stream.allocator.policies.planned import Uniform


@register("dapo")
class Dapo(Uniform, frozen=True, kw_only=True):
    """Dynamic sampling of DAPO (arXiv 2503.14476): a group whose rewards are all equal is left out and another prompt
    takes its place, up to `max_tries` times.

    The gradient of such a group is zero, so the mean over groups keeps its direction and grows by 1/P(kept): larger
    steps, more rollouts for them.
    """

    max_tries: int = 10

    def __post_init__(self) -> None:
        if self.max_tries < 1:
            raise ValueError(f"max_tries = {self.max_tries} must be at least 1")

    def refill(self, outcomes: Outcomes, tried: int) -> bool:
        return tried < self.max_tries and len(np.unique(outcomes.rewards)) <= 1


@register("vade")
class Vade(Uniform, frozen=True, kw_only=True):
    """VADE (arXiv 2511.18902): visit the prompts with the greatest information gain p (1-p)^2 at a draw of p from the
    posterior (Thompson sampling).

    The decay of the posterior is the allocator's two-scale memory, not the paper's. Prompts are visited unequally, so
    the objective is that of the prompts chosen: mostly those around p = 1/3.
    """

    def select(self, view: View, count: int) -> Ints:
        p = view.posterior.sample(view.rng)
        return view.prompts[np.argsort(-p * (1 - p) ** 2, kind="stable")[:count]]
