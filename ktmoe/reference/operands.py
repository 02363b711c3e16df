"""What the reference's linear maps take: bfloat16 rows as they are, or quantised by blocks, and how far off these can be."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ktmoe.quantization.rules import Rule
from ktmoe.reference.mx import mx_blocks
from ktmoe.reference.weights import BLOCK, TINY, round_bfloat16

#: "int8": the largest integer, and the least maximum of a block, whose scale is 2**-118.
LARGEST_INT8 = 127
LEAST_INT8_MAXIMUM = 127 * 2.0**-118
#: Scales, neighbouring bfloat16 numbers, that are tried where a block's is not certain; beyond, half of the largest is added.
INT8_SCALES = 8


def operand(a: np.ndarray, low: np.ndarray, high: np.ndarray, side: str | Rule) -> tuple[np.ndarray, np.ndarray]:
    """What a linear map takes for bfloat16 rows a, and its error, given that a backend's rows lie between low and high.

    side: "bf16", rows as they are; or what each block of 32 is: "int16", 16-bit integers times one power of two; "int8", 8-bit
    integers times one bfloat16 number; a rule of an MX format, its numbers times one power of two.

    Examples:
        >>> a = np.full((1, 32), 1.1)
        >>> rows, error = reference.operand(a, a, a, "int8")
        >>> bool(abs(rows - 1.1).max() < 0.01)
        True
    """
    if side == "bf16":
        eps = np.maximum(high - a, a - low)
        return a, eps + flush_to_zero(a, eps)
    if not isinstance(side, Rule):
        return _quantise(a, low, high, {"int16": _int16, "int8": _int8}[side])
    with np.errstate(invalid="ignore"):
        quantised, eps = _quantise(a, low, high, functools.partial(_mx, side))
        return quantised, eps + flush_to_zero(quantised, eps)


def _quantise(a: np.ndarray, low: np.ndarray, high: np.ndarray, blocks: Any) -> tuple[np.ndarray, np.ndarray]:
    """Each block of 32 as _int16, _int8 or _mx make it, and what that can be off for rows between low and high."""
    tokens, k = a.shape
    a, low, high = (np.pad(v, ((0, 0), (0, -k % BLOCK))).reshape(tokens, -(-k // BLOCK), BLOCK) for v in (a, low, high))
    finite = np.isfinite(low + high).all(axis=2, keepdims=True)
    quantised, eps = blocks(*(np.where(finite, v, 0.0) for v in (a, low, high)))
    quantised, eps = np.where(finite, quantised, np.nan), np.where(finite, eps, np.inf)
    return quantised.reshape(tokens, -1)[:, :k], eps.reshape(tokens, -1)[:, :k]


def _maxima(a: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The blocks' maximum magnitudes: of a, and the least and the largest of anything between low and high."""
    return tuple(v.max(axis=2, keepdims=True) for v in (np.abs(a), np.maximum(low, -high), np.maximum(-low, high)))


def _mx(rule: Rule, a: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each block, rounded by a rule of an MX format."""
    _, least, most = _maxima(a, low, high)
    return mx_blocks(least, most, a, low, high, rule.target, rule.name)


def _int16(a: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """RNE(a / s) * s for each block, whose maximum is M, where s = 2**(E - 14), E = floor(log2(M)), at least -126."""

    def nearest(v: Any, e: Any) -> Any:
        return np.ldexp(np.rint(np.ldexp(v, 14 - e)), e - 14)

    own, least, most = (np.frexp(np.maximum(maximum, TINY))[1] - 1 for maximum in _maxima(a, low, high))
    quantised, eps = nearest(a, own), np.zeros_like(a)
    # nearest is monotone for one E; where M may be on either side of a power of two, it may be either E
    for step in range(int((most - least).max(initial=0)) + 1):
        e = np.minimum(least + step, most)
        eps = np.maximum(eps, np.maximum(nearest(high, e) - quantised, quantised - nearest(low, e)))
    return quantised, eps


def _int8(a: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """RNE(a / s) * s for each block, whose maximum is M, at least LEAST_INT8_MAXIMUM, where s = M / 127, to bfloat16."""

    def nearest(v: Any, s: Any) -> Any:
        # float64 rounds the quotient of two numbers of 8 bits neither to half an integer nor away from it
        return np.rint(v / s) * s

    own, least, most = (
        round_bfloat16(np.maximum(maximum, LEAST_INT8_MAXIMUM) / LARGEST_INT8) for maximum in _maxima(a, low, high)
    )
    quantised, eps = nearest(a, own), np.zeros_like(a)
    # nearest is monotone for one s; s is one of the bfloat16 numbers from least to most
    s = least
    for _ in range(INT8_SCALES):
        eps = np.maximum(eps, np.maximum(nearest(high, s) - quantised, quantised - nearest(low, s)))
        left = s < most
        if not left.any():
            break
        s = np.minimum(s + np.ldexp(1.0, np.frexp(s)[1] - 8), most)
    return quantised, np.where(left, np.maximum(high - quantised, quantised - low) + most / 2, eps)


def flush_to_zero(value: np.ndarray, eps: Any) -> np.ndarray:
    """What flushing a denormal number to zero can change, for a number within eps of value."""
    size = np.abs(value)
    return np.where(size - eps <= TINY, np.minimum(size + eps, TINY), 0.0)  # TINY itself may be a denormal that was rounded up
