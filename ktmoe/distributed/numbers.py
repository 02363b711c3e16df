"""Numbers as they travel: x in bits of bfloat16, sums in float32, y in its own dtype."""

from __future__ import annotations

import numpy as np

from ktmoe.arrays import BF16


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """uint16 of x, which is such bits or float32, then rounded to nearest even; C-contiguous."""
    return np.ascontiguousarray(x if x.dtype == np.uint16 else x.astype(BF16).view(np.uint16))


def rounded_like(y: np.ndarray, target: np.ndarray) -> np.ndarray:
    """float32 in the target's dtype, float32 or uint16, which are bits of bfloat16."""
    return y if target.dtype == np.float32 else y.astype(BF16).view(np.uint16)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The same memory as uint8 [bytes]."""
    return array.reshape(-1).view(np.uint8)
