"""The gated activation in float64, and a bound on a backend's error."""

from __future__ import annotations

from typing import Any

import numpy as np

from ktmoe.reference.errors import MAX_FLOAT32, UNIT, gamma
from ktmoe.reference.weights import TINY
from ktmoe.weights.activation import GatedActivation

#: A backend's exp(z), z float32: relative error at most this where 2**-126 <= exp(z) <= 2**126. Below, the result lies in
#: [0, 2**-126 * (1 + this)]; above, it is at least 2**126 * (1 - this), infinity included; exp(NaN) is NaN.
EXP_RELATIVE_ERROR = 2.0**-22
#: Roundings of an activation apart from its exp and the exp's argument: 1 + e, 1 / (1 + e), g * sigmoid, u + offset, product.
ACTIVATION_ROUNDINGS = 5

#: Where v * sigmoid(v) has its only minimum; it falls before and rises after.
SILU_MINIMUM = -1.2784645427610738


def activate(
    activation: GatedActivation, g: np.ndarray, eps_g: np.ndarray, u: np.ndarray, eps_u: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(u' + up_offset) * g' * sigmoid(alpha * g') before its rounding to bfloat16; GatedActivation has the formula's source.

    The inputs' errors pass through as intervals: the clamps are monotone, and v * sigmoid(alpha * v) falls to its minimum
    and then rises. Parameters are float32 numbers for a backend, so they are rounded to float32 here.

    Examples:
        >>> h, error = reference.activate(ktmoe.SILU, np.array([1.0]), np.array([0.0]), np.array([2.0]), np.array([0.0]))
        >>> h.round(4), bool(error[0] < 1e-5)
        (array([1.4621]), True)
    """
    alpha, limit, offset = (float(np.float32(v)) for v in (activation.alpha, activation.limit, activation.up_offset))

    def gate(v: Any) -> Any:
        return v / (1 + np.exp(-alpha * v))

    low, middle, high = (np.minimum(v, limit) for v in (g - eps_g, g, g + eps_g))
    s, lowest = gate(middle), np.clip(SILU_MINIMUM / alpha, low, high)
    eps_s = np.maximum(s - gate(lowest), np.maximum(np.abs(gate(low) - s), np.abs(gate(high) - s)))
    # e = exp(-alpha g) has a relative error from its rounded argument and its own; 1 + e has e / (1 + e) of it. Beyond
    # |alpha g| = 100 sigmoid or e is below 2**-126 whatever their errors, which the last term covers.
    largest = np.maximum(np.abs(low), np.abs(high))
    error_e = np.exp(UNIT * np.minimum(alpha * largest, 100.0)) * (1 + EXP_RELATIVE_ERROR) - 1
    error_divisor = error_e / (1 + np.exp(alpha * low))
    relative = (1 + gamma(ACTIVATION_ROUNDINGS)) / (1 - error_divisor) - 1
    eps_s = eps_s + relative * (np.abs(s) + eps_s) + 2 * TINY * (1 + largest)

    t_low, t, t_high = (np.clip(v, -limit, limit) + offset for v in (u - eps_u, u, u + eps_u))
    eps_t = np.maximum(t_high - t, t - t_low)
    eps = np.abs(t) * eps_s + eps_t * (np.abs(s) + eps_s) + 2 * TINY
    return t * s, np.where((np.abs(t) + eps_t) * (1 + largest) < MAX_FLOAT32, eps, np.inf)
