"""What tests of rows need: who has integers, sums of these, groups of bfloat16 numbers of many sizes."""

from __future__ import annotations

import numpy as np

GROUP = 32
#: Instruction sets whose kernels take int16, and int8.
INT16 = ["avx_vnni", "avx2"]
INT8 = ["avx512_vnni", "avx_vnni", "avx2"]


def minus_16_sums(q):
    """-16 times the sums of each group's 32 integers, of its first and of its last 16: [groups, 3]."""
    halves = q.reshape(-1, 2, GROUP // 2).astype(int).sum(axis=2)
    return -16 * np.column_stack([halves.sum(axis=1), halves])


def words(sign, field, fraction):
    return (np.asarray(sign) << 15 | np.asarray(field) << 7 | np.asarray(fraction)).astype(np.uint16)


def numbers_below(top):
    """Groups whose first number has the exponent field top, and all others of up to 18 fields below, of both signs: at x of
    2**-8 of the maximum and below, every second one is a tie."""
    fields, fractions, signs = np.meshgrid(np.arange(max(top - 18, 0), top + 1), np.arange(128), [0, 1], indexing="ij")
    others = words(signs, fields, fractions).ravel()
    others = np.resize(others, (-(-len(others) // 31), 31))
    return np.concatenate([words(np.arange(len(others)) % 2, top, np.arange(len(others)) * 37 % 128)[:, None], others], axis=1)
