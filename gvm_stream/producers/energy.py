"""How large the gradient of a response is, from what the sampler knows anyway."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def energy_proxy(logprobs: npt.NDArray[np.float32]) -> float:
    """Proxy of ||grad log pi(y)||^2 from the log-probs of the sampled tokens [T], in nats: sum_t (1 - pi(y_t))^2.

    The gradient of log pi(y_t) in the logits is e(y_t) - pi, whose squared norm lies between (1 - pi(y_t))^2 and twice
    that; under the policy itself the terms of different tokens are uncorrelated, so the squares add up. The unit is
    arbitrary: allocation only compares.
    """
    return float(np.square(np.expm1(logprobs.astype(np.float64))).sum())
