"""Weights that make rules of rounding differ. It runs in the writers' environments: it needs numpy alone."""

from __future__ import annotations

import numpy as np

#: Of the matrix: whole blocks of 128 x 128.
ROWS, COLUMNS = 128, 512


def weights(*, narrow: bool = False, zeros: bool = True) -> np.ndarray:
    """float32 [ROWS, COLUMNS], each a bfloat16 number.

    Groups of many magnitudes, all fractions of a largest weight, ties of E2M1, E4M3 and of integers, and, if zeros, weights and
    groups of 32 that are zero, none of them -0. narrow: magnitudes that fp16 scales have, too.
    """
    random = np.random.default_rng(7)
    numbers = random.standard_normal((ROWS, COLUMNS))
    numbers *= 2.0 ** random.integers(*((-4, 5) if narrow else (-90, 90)), (ROWS, 1))
    numbers[:16] = random.integers(-28, 29, (16, COLUMNS)) / 4  # ties, if the scale is a power of two
    numbers[16:32] = random.integers(-255, 256, (16, COLUMNS)) / 2
    numbers[32:40] = random.uniform(-1, 1, (8, COLUMNS)) * 2.0 ** random.integers(-8, 1, (8, COLUMNS))
    largest = (1 + np.arange(128) / 128).reshape(8, 16)  # of a group: each fraction of a bfloat16 number
    numbers[40:48, ::32] = largest * 4
    numbers[40:48] = np.clip(numbers[40:48], -4, 8)
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    found = ((bits + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32)
    if zeros:
        found[48:52, :64] = 0
        found[52, ::3] = 0
        return found + np.float32(0)
    return np.where(found == 0, np.float32(2.0**-60), found)
