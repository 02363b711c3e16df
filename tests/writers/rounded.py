"""Weights that make rules of rounding differ. It runs in the writers' environments: it needs numpy alone."""

from __future__ import annotations

import numpy as np

#: The matrix: rows that are made for something, and random ones. Whole blocks of 128 x 128, and of 8 x 16.
MADE, ROWS, COLUMNS = 128, 128 + 2048, 512
#: A block of FP8, so small that there are thousands.
BLOCK = (8, 16)
#: Exponents of magnitudes that fp16 scales have, too.
NARROW = (-4, 5)


def weights(
    *, exponents: tuple[int, int] = (-100, 124), bits: int = 8, zeros: bool = True, signed_zeros: bool = True
) -> np.ndarray:
    """float32 [ROWS, COLUMNS], numbers of so many significant bits: 8 are bfloat16's.

    Thousands of groups of any rule. The first rows have all fractions of a largest weight, ties of E2M1, E4M3 and of integers,
    and groups of 32 zeros. The others are random; exponents: of the magnitudes of eight rows, those of 16 columns being up to
    2^8 times smaller. zeros: whether weights are zero here and there; signed_zeros: whether some of these are -0.
    """
    random = np.random.default_rng(7)
    numbers = random.standard_normal((ROWS, COLUMNS))
    numbers *= 2.0 ** np.repeat(random.integers(*exponents, (ROWS // 8, 1)), 8, axis=0)
    numbers[MADE:] *= np.repeat(2.0 ** -random.integers(0, 9, (ROWS - MADE, COLUMNS // 16)), 16, axis=1)
    numbers[:16] = random.integers(-28, 29, (16, COLUMNS)) / 4  # ties, if the scale is a power of two
    numbers[16:32] = random.integers(-255, 256, (16, COLUMNS)) / 2
    numbers[32:40] = random.uniform(-1, 1, (8, COLUMNS)) * 2.0 ** random.integers(-8, 1, (8, COLUMNS))
    largest = (1 + np.arange(128) / 128).reshape(8, 16)  # of a group: each fraction of a bfloat16 number
    numbers[40:48, ::32] = largest * 4
    numbers[40:48] = np.clip(numbers[40:48], -4, 8)
    dropped = np.uint32(24 - bits)
    stored = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    found = ((stored + (np.uint32(1) << dropped >> np.uint32(1))) >> dropped << dropped).view(np.float32)
    if not zeros:
        return np.where(found == 0, np.float32(2.0 ** exponents[0]), found)
    found[48:52, :64] = 0
    found[52, ::3] = 0
    found[random.random(found.shape) < 0.02] = 0
    if signed_zeros:
        found[random.random(found.shape) < 0.01] = -0.0
        return found
    return found + np.float32(0)
