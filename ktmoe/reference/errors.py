"""Errors of float32 roundings, which the reference's bounds are made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from ktmoe.reference.weights import TINY

#: Unit roundoff of float32, round to nearest.
UNIT = 2.0**-24
#: Largest finite float32.
MAX_FLOAT32 = float(np.finfo(np.float32).max)


def gamma(roundings: Any) -> Any:
    """Higham's gamma_n = n u / (1 - n u): the relative error of n float32 roundings. The last factor pays for float64's own."""
    return roundings * UNIT / (1 - roundings * UNIT) * (1 + 2.0**-20)


def after_rounding(value: np.ndarray, eps: np.ndarray) -> np.ndarray:
    """The error after one more float32 operation whose exact result is value and whose operands' error amounts to eps."""
    eps = eps + gamma(1) * (np.abs(value) + eps) + TINY
    return np.where(np.abs(value) + eps < MAX_FLOAT32, eps, np.inf)
