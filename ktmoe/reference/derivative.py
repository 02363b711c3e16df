"""The activation's derivative in float64, times a gradient, with the error of a backend's: docs/training-numerics.md has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ktmoe.reference.activation import EXP_RELATIVE_ERROR, SILU_MINIMUM
from ktmoe.reference.errors import MAX_FLOAT32, UNIT, gamma
from ktmoe.reference.weights import TINY
from ktmoe.weights.activation import GatedActivation

#: The most roundings of a product of the gradient, u' + up_offset and D(g'), apart from D's own; and of alpha g', its products
#: with sigmoid and 1 - sigmoid and their sum with 1, or with sigmoid, apart from those of 1 - sigmoid and of sigmoid.
DERIVATIVE_ROUNDINGS = 4
SLOPE_ROUNDINGS = 5
#: Where the derivative of v * sigmoid(v) is largest; at the negative of it, smallest.
STEEPEST = 2.3993572805154675
#: The least v for which 1 + exp(-v) is taken as 1 in float32.
SATURATED = 18.0


@dataclass(frozen=True)
class _Within:
    """value, eps: |a backend's - value| <= eps."""

    value: np.ndarray
    eps: np.ndarray

    @property
    def size(self) -> np.ndarray:
        return np.abs(self.value) + self.eps

    def __mul__(self, other: _Within) -> _Within:
        eps = np.abs(self.value) * other.eps + self.eps * other.size
        return _Within(self.value * other.value, eps)


def derive(
    activation: GatedActivation,
    g: np.ndarray,
    eps_g: np.ndarray,
    u: np.ndarray,
    eps_u: np.ndarray,
    t: np.ndarray,
    eps_t: np.ndarray,
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """t * d act / dg and t * d act / du, each with its error, before their rounding to bfloat16.

    d act / dg = (u' + up_offset) * D(g'), D(v) = sigmoid(alpha v) * (1 + alpha v * (1 - sigmoid(alpha v))), where g <= limit,
    else 0; d act / du = g' * sigmoid(alpha g') where |u| <= limit, else 0. Where g or u may be on either side of its limit,
    either counts. Over an interval of g, both functions of g' are largest and smallest at its ends or at points that are known.
    """
    alpha, limit, offset = (float(np.float32(v)) for v in (activation.alpha, activation.limit, activation.up_offset))
    low, middle, high = (np.minimum(v, limit) for v in (g - eps_g, g, g + eps_g))
    gate, slope = _of_gate(alpha, low, middle, high)
    up_low, up, up_high = (np.clip(v, -limit, limit) + offset for v in (u - eps_u, u, u + eps_u))
    up = _Within(up, np.maximum(up_high - up, up - up_low))
    times = _Within(t, eps_t)
    largest = alpha * np.maximum(np.abs(low), np.abs(high))
    of_g = _rounded(times * up * slope, times.size * up.size * slope.size, (times, up), largest)
    of_u = _rounded(times * gate, times.size * gate.size, (times,), largest)
    of_g = _clamped(of_g, g > limit, g + eps_g > limit, g - eps_g > limit)
    outside = np.abs(u) > limit, np.abs(u) + eps_u > limit, np.abs(u) - eps_u > limit
    of_u = _clamped(of_u, *outside)
    return (of_g.value, of_g.eps), (of_u.value, of_u.eps)


def _of_gate(alpha: float, low: Any, middle: Any, high: Any) -> tuple[_Within, _Within]:
    """g' * sigmoid(alpha g') and its derivative D, as a backend computes them for a g' between low and high."""

    def sigmoid(v: Any) -> Any:
        return 1 / (1 + np.exp(-v))

    def steep(v: Any) -> Any:
        return sigmoid(alpha * v) * (1 + alpha * v * sigmoid(-alpha * v))

    def over(function: Any, *inner: Any) -> Any:
        """The function's value, and how far another one may be; inner: where the function turns."""
        value = function(middle)
        others = [low, high, *(np.clip(point / alpha, low, high) for point in inner)]
        return value, np.maximum.reduce([np.abs(function(v) - value) for v in others])

    gate, eps_gate = over(lambda v: v * sigmoid(alpha * v), SILU_MINIMUM)
    slope, eps_slope = over(steep, STEEPEST, -STEEPEST)
    # e = exp(-alpha g) as in reference.activate(): beyond 100 sigmoid or e is below 2**-126 whatever their errors, which the
    # absolute terms cover
    largest = alpha * np.maximum(np.abs(low), np.abs(high))
    error_e = np.exp(UNIT * np.minimum(largest, 100.0)) * (1 + EXP_RELATIVE_ERROR) - 1
    error_divisor = error_e * sigmoid(-alpha * low)
    error_s = (1 + gamma(2)) / (1 - error_divisor) - 1  # relative, of 1 / (1 + e)
    s, q = sigmoid(alpha * high), sigmoid(-alpha * low)  # the largest of sigmoid and of 1 - sigmoid
    # 1 - sigmoid: subtracted, or e * sigmoid
    error_q = np.where(alpha * low > SATURATED, 2 * q, error_s + error_e * q + gamma(1))
    of_product = largest * (q + error_q)
    error_inner = largest * error_q + gamma(SLOPE_ROUNDINGS) * (1 + of_product)
    inner = 1 + of_product + error_inner
    tiny = 2 * TINY * (2 + largest)
    error_slope = s * error_inner + (error_s + gamma(2)) * s * inner + tiny
    error_gate = ((1 + gamma(1)) * (1 + error_s) - 1) * (np.abs(gate) + eps_gate) + tiny * (1 + 1 / alpha)
    return _Within(gate, eps_gate + error_gate), _Within(slope, eps_slope + error_slope)


def _rounded(exact: _Within, size: Any, factors: Any, largest: Any) -> _Within:
    """A product after its roundings; its factors may be multiplied in any order, and what of them underflows is lost."""
    eps = exact.eps + gamma(DERIVATIVE_ROUNDINGS) * size
    most = 1 + largest
    for factor in factors:
        most = most * (1 + factor.size)
    eps = eps + 4 * TINY * most
    return _Within(exact.value, np.where(most < MAX_FLOAT32, eps, np.inf))


def _clamped(exact: _Within, is_out: Any, may_be_out: Any, must_be_out: Any) -> _Within:
    """0 where a clamp holds its argument, which is uncertain where it may be, or may not be, beyond the limit."""
    value = np.where(is_out, 0.0, exact.value)
    eps = np.where(is_out, exact.size, np.where(may_be_out, np.maximum(exact.eps, np.abs(exact.value)), exact.eps))
    return _Within(value, np.where(must_be_out, 0.0, eps))
