"""What kernels can make of a codebook and its scales: bfloat16 weights that hold the scale, small integers."""

from __future__ import annotations

import math

#: What MoELayer's `scales` may be: whether a scaled weight may be rounded to bfloat16.
ROUNDING = ("exact", "folded")


def fold_range(codebook, kind: str) -> tuple[int, int]:
    """(low, high): the scales whose product with any entry is zero or a normal bfloat16 number; (255, 0) if none fold.

    kind: "ue8m0", for which these are bytes, and the product is exact; 2 to 252 for E2M1. "bf16": exponent fields of scales
    that are not zero, and the product is to be rounded to bfloat16, which must not overflow either.
    """
    exponents = [math.frexp(value)[1] - 1 for value in codebook if value]
    if not exponents:
        return (0, 254) if kind == "bf16" else (255, 0)
    low, high = min(exponents), max(exponents)
    if kind == "bf16":
        # Significands below 2 make a product's exponent up to 1 more than the sum of theirs, and rounding may add 1. Field 0 is
        # of denormal scales.
        return max(1, 1 - low), min(254, 252 - high)
    # kt_codebook.folded holds the exponent field of a normal number raised by 126; beyond 255 it would run into the sign. What
    # is subtracted from it, (253 - byte) << 7, must not be negative.
    return (1 - low, min(253, 254 - high)) if low >= -126 and high <= 2 else (255, 0)


def unit(codebook) -> float:
    """The largest power of two from 2**-8 to 1 of which every entry is a multiple, by at most 16; 0.0 if there is none."""
    for exponent in range(0, -9, -1):
        wholes = [value / 2.0**exponent for value in codebook]
        if all(whole == int(whole) and abs(whole) <= 16 for whole in wholes):
            return 2.0**exponent
    return 0.0
