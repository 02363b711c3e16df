"""What MX modes make of rows: for each block of 32 k a power of two and E2M1 or E4M3 numbers, by a rule; and how far off these
can be. The rules are stated here once more, from docs/quantizing.md: nothing is shared with ktmoe.quantization but their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: The least bfloat16 number above zero; exponents of the scale 2**e.
LEAST = 2.0**-133
EXPONENTS = (-127, 127)


@dataclass(frozen=True)
class _Element:
    """bits: of a normal number behind its first one. least: exponent of the least normal number. largest: number."""

    bits: int
    least: int
    largest: float


_ELEMENTS = {"mxfp4": _Element(1, 0, 6.0), "mxfp8": _Element(3, -6, 448.0)}


def _binade(v: Any) -> Any:
    """floor(log2(|v|)), exactly."""
    return np.frexp(v)[1] - 1


def _ceil(m: Any, of: Any) -> Any:
    """ceil(log2(M / largest)). float64 has the quotient exactly where it is a power of two; others are far from one."""
    fraction, exponent = np.frexp(m / of.largest)
    return exponent - (fraction == 0.5)


def _round(m: Any, of: Any) -> Any:
    """The integer nearest to log2(M / largest)."""
    fraction, exponent = np.frexp(m / of.largest)
    return exponent - (fraction**2 < 0.5)


def _floor(m: Any, of: Any) -> Any:
    """floor(log2 M) - floor(log2(largest))."""
    return _binade(m) - _binade(of.largest)


def _even(bits: int) -> Callable[..., Any]:
    """_floor() of M', which is M rounded to so many bits behind the first, ties up."""

    def exponent(m: Any, of: Any) -> Any:
        quantum = _binade(m) - bits
        return _floor(np.ldexp(np.floor(np.ldexp(m, -quantum) + 0.5), quantum), of)

    return exponent


def _down(v: Any) -> Any:
    """The nearest integer, of two the one nearer to zero."""
    return np.copysign(np.ceil(np.abs(v) - 0.5), v)


#: (target, rule): the exponent e of a block's scale by its largest magnitude, and how a quotient becomes an integer.
_RULES: dict[tuple[str, str], tuple[Any, Any]] = {
    ("mxfp4", "ceil"): (_ceil, np.rint),
    ("mxfp4", "round"): (_round, np.rint),
    ("mxfp4", "floor"): (_floor, np.rint),
    ("mxfp4", "even"): (_even(1), np.rint),
    ("mxfp4", "quark"): (_even(1), np.rint),
    ("mxfp4", "modelopt"): (_ceil, _down),
    ("mxfp4", "gguf"): (_floor, _down),
    ("mxfp8", "ceil"): (_ceil, np.rint),
    ("mxfp8", "round"): (_round, np.rint),
    ("mxfp8", "floor"): (_floor, np.rint),
    ("mxfp8", "even"): (_even(3), np.rint),
    ("mxfp8", "compressed-tensors"): (_even(1), np.rint),
}


def mx_blocks(
    least: np.ndarray, most: np.ndarray, a: np.ndarray, low: np.ndarray, high: np.ndarray, target: str, rule: str
) -> tuple[np.ndarray, np.ndarray]:
    """What becomes of blocks a, [tokens, blocks, 32], and the error of that for blocks between low and high, all finite.

    least, most: [tokens, blocks, 1], the least and the largest that the largest magnitude of such a block can be.
    target, rule: names of a rule of ktmoe.quantization. 2**128 becomes infinite, and its error, or that of what may become it.
    """
    of, (exponent, to_integer) = _ELEMENTS[target], _RULES[target, rule]

    def scale(m: Any) -> Any:
        return np.clip(exponent(np.maximum(m, LEAST), of), *EXPONENTS)

    def nearest(v: Any, e: Any) -> Any:
        """v / 2^e rounded to the element, times 2^e. Below the least normal number the quantum is that number's."""
        t = np.ldexp(v, -e)
        quantum = np.maximum(_binade(t), of.least) - of.bits
        return np.ldexp(np.clip(np.ldexp(to_integer(np.ldexp(t, -quantum)), quantum), -of.largest, of.largest), e)

    quantised, eps = nearest(a, scale(np.abs(a).max(axis=2, keepdims=True))), np.zeros_like(a)
    # nearest is monotone for one e, and e is monotone in the largest magnitude: each e between its ends may be
    first, last = scale(least), scale(most)
    for step in range(int((last - first).max(initial=0)) + 1):
        e = np.minimum(first + step, last)
        eps = np.maximum(eps, np.maximum(nearest(high, e) - quantised, quantised - nearest(low, e)))
    eps = np.where(np.abs(quantised) + eps < 2.0**128, eps, np.inf)
    return np.where(np.abs(quantised) < 2.0**128, quantised, np.copysign(np.inf, quantised)), eps
