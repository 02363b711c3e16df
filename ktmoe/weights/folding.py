"""What kernels can make of an element and its scales: bfloat16 weights that hold the scale, small integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ktmoe.weights.elements import Element
from ktmoe.weights.formats import WeightFormat

#: What MoELayer's `rounding` may be: whether a scaled weight may be rounded to bfloat16.
ROUNDING = ("exact", "folded")

#: E4M3's exponents of the least and the greatest number above 0, and its significant bits.
_E4M3_SCALES = (-9, 8, 4)
_BF16_BITS = 8

_NONE = (255, 0)


def fold_range(weight_format: WeightFormat, rounding: str = "exact", terms: int = 1) -> tuple[int, int]:
    """(low, high): a matrix whose scales are in it has bfloat16 weights that hold the scale; (255, 0) if none has.

    terms: of how many bfloat16 numbers a weight is the sum. Of 2, where each value is a sum of two signed powers of two: bf16,
    exponent fields of scales that are not zero. Both products are exact and must neither overflow nor be denormal. Scales must
    not be negative. All else is for 1:

    ue8m0: bytes, and the product is exact: 2 to 252 for E2M1, 10 to 246 for E4M3.
    e4m3: (0, 255) where the product of any two numbers is exact, as with E2M1.
    bf16, fp16: exponent fields of scales that are not zero. The product has to be rounded, which `rounding` has to allow, and
    must neither overflow then nor be denormal.
    """
    scale = weight_format.scale
    if scale is None or scale.extent[0] != 1 or weight_format.offset or weight_format.super_scale:
        return _NONE
    if terms == 2:
        return _terms_range(weight_format.element, scale.kind)
    rounded = scale.kind in ("bf16", "fp16")
    if rounded and rounding != "folded":
        return _NONE
    exponents = _exponents(weight_format.element.values)
    if not exponents:
        return (0, 254) if rounded else _NONE
    low, high = min(exponents), max(exponents)
    if scale.kind == "ue8m0":
        if weight_format.element.family == "f8":
            return 1 - low, 254 - high
        # kt_codebook.folded holds the exponent field of a normal number raised by 126; beyond 255 it would run into the sign.
        # What is subtracted from it, (253 - byte) << 7, must not be negative.
        return (1 - low, min(253, 254 - high)) if low >= -126 and high <= 2 else _NONE
    if scale.kind == "bf16":
        # Significands below 2 make a product's exponent up to 1 more than the sum of theirs, and rounding may add 1. Field 0 is
        # of denormal scales.
        return max(1, 1 - low), min(254, 252 - high)
    if scale.kind == "fp16":
        # Field 0 is of denormal scales, from 2**-24 on, which are normal numbers here.
        return 0 if low - 24 >= -126 else max(1, -111 - low), min(30, 140 - high)
    if scale.kind == "e4m3":
        least, most, bits = _E4M3_SCALES
        exact = bits + _significant_bits(weight_format.element.values) <= _BF16_BITS
        return (0, 255) if exact and low + least >= -126 and high + most <= 127 else _NONE
    return _NONE


def _terms_range(element: Element, kind: str) -> tuple[int, int]:
    if kind != "bf16" or element.family != "q4":
        return _NONE
    sums = [two_terms(value) for value in element.values if value is not None]
    exponents = _exponents([term for terms in sums if terms for term in terms])
    # kernels/q4_amx_terms.c subtracts (252 << 7) - bits of the scale, which must not be negative, from a term's exponent field
    # raised by 125, which must not run into the sign.
    if None in sums or not exponents or min(exponents) < -126 or max(exponents) > 3:
        return _NONE
    return max(1, 1 - min(exponents)), 251


def two_terms(value: float) -> tuple[float, float] | None:
    """The larger and the smaller of two signed powers of two, or zeros, whose sum a value is; None if there are none.

    Their sizes add up to the value's where that is possible: 3 = 2 + 1, but 7 = 8 - 1.
    """
    size, sign = abs(value), math.copysign(1.0, value)
    below = 2.0 ** math.floor(math.log2(size)) if size else 0.0
    for high in (below, 2 * below):
        low = size - high
        if abs(math.frexp(low)[0]) in (0.0, 0.5):
            return sign * high, sign * low
    return None


def unit(values: Sequence[float], most: int) -> float:
    """The largest power of two from 2**-8 to 1 of which every value is a multiple, by at most `most`; 0.0 if there is none."""
    for exponent in range(0, -9, -1):
        wholes = [value / 2.0**exponent for value in values]
        if all(whole == int(whole) and abs(whole) <= most for whole in wholes):
            return 2.0**exponent
    return 0.0


def _exponents(values: Sequence[float | None]) -> list[int]:
    return [math.frexp(value)[1] - 1 for value in values if value]


def _significant_bits(values: Sequence[float | None]) -> int:
    """The most significant bits that any value needs."""
    integers = [abs(int(math.ldexp(math.frexp(value)[0], 53))) for value in values if value]
    return max((integer // (integer & -integer)).bit_length() for integer in integers)
