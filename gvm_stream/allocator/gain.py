"""What the policy gains over uniform, measured while it runs.

A random share of visits (shadow-uniform) gets the same number of rollouts whatever the policy says. Of every visit two
numbers are taken: the error x = w^2 sum_j c_j^2 e_j that its rollouts leave in the gradient (c_j coefficients, e_j
energies: the noise of independent terms) and its tokens t. Averaging more visits makes up for a noisier one, so what
counts is error times tokens:

    gain = mean(x) mean(t) of the uniform visits / mean(x) mean(t) of the others,

above 1 when the policy saves. The interval is that of the delta method on log gain. It compares noise: what an
estimator without any accepted rollout leaves out (RAFT) is not in it.
"""

from __future__ import annotations

import math

import msgspec

Z95 = 1.96
LEAST_VISITS = 8
"""Per arm, before an interval is given."""


class Gain(msgspec.Struct, frozen=True):
    """Estimate with its 95 % interval; all None while there are too few visits."""

    gain: float | None
    low: float | None
    high: float | None
    uniform_visits: int
    allocated_visits: int


class Arm(msgspec.Struct):
    """Sums over the visits of one arm."""

    visits: int = 0
    x: float = 0.0
    t: float = 0.0
    xx: float = 0.0
    tt: float = 0.0
    xt: float = 0.0

    def observe(self, error: float, tokens: float) -> None:
        self.visits += 1
        self.x += error
        self.t += tokens
        self.xx += error * error
        self.tt += tokens * tokens
        self.xt += error * tokens

    def log_product(self) -> tuple[float, float]:
        """log(mean x mean t) and its variance: that of x / mean x + t / mean t, over the number of visits."""
        n, x, t = self.visits, self.x / self.visits, self.t / self.visits
        second = self.xx / n / (x * x) + self.tt / n / (t * t) + 2 * self.xt / n / (x * t)
        return math.log(x * t), max(0.0, second - 4) / (n - 1)


class GainMeter(msgspec.Struct):
    uniform: Arm = msgspec.field(default_factory=Arm)
    allocated: Arm = msgspec.field(default_factory=Arm)

    def observe(self, shadow: bool, error: float, tokens: float) -> None:
        """One visit: `error` in units of weight^2 energy, `tokens` spent on it, all of them."""
        (self.uniform if shadow else self.allocated).observe(error, tokens)

    def estimate(self) -> Gain:
        arms = (self.uniform, self.allocated)
        visits = (self.uniform.visits, self.allocated.visits)
        if min(visits) < LEAST_VISITS or any(arm.x <= 0 or arm.t <= 0 for arm in arms):
            return Gain(None, None, None, *visits)
        (u, var_u), (a, var_a) = (arm.log_product() for arm in arms)
        half = Z95 * math.sqrt(var_u + var_a)
        return Gain(math.exp(u - a), math.exp(u - a - half), math.exp(u - a + half), *visits)
