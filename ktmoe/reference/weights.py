"""The weights that the reference computes with: their bfloat16 roundings, the matrices that fold or split, columns of a matrix.

Their real numbers are `ktmoe.dequantization`'s.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from ktmoe.dequantization import in_rows, read
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.offsets import Minimum, ZeroPoint
from ktmoe.weights.scales import Scale

#: Smallest normal number of float32 and bfloat16: what a flush to zero can change a number by.
TINY = 2.0**-126
#: A backend adds blocks of this many products in ascending k; within a block any order will do. Integers are quantised by it.
BLOCK = 32
#: Scale kinds that sums of integers can be multiplied by; those with which rounding="folded" rounds weights.
INTEGER_KINDS = ("ue8m0", "e4m3", "bf16", "fp16", "int8", "int6", "uint4", "odd")
ROUNDED_KINDS = ("bf16", "fp16")


def round_bfloat16(a: np.ndarray) -> np.ndarray:
    """The bfloat16 numbers nearest to float64 a, ties to even, as float64; denormals are kept, beyond the range is infinite.

    Examples:
        >>> reference.round_bfloat16(np.array([1.0, 1.001, 3.14159]))
        array([1.      , 1.      , 3.140625])
    """
    a = np.asarray(a, dtype=np.float64)
    exponent = np.frexp(a)[1]  # |a| in [2**(exponent-1), 2**exponent); bfloat16 has 8 significant bits
    quantum = np.maximum(exponent - 8, -133)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(a, -quantum)), quantum)
    return np.where(np.isfinite(a), np.where(np.abs(rounded) < 2.0**128, rounded, np.copysign(np.inf, a)), a)


def _plain(format: WeightFormat, family: str, kinds: tuple[str, ...]) -> bool:
    """Whether a format is values of this family times scales of these kinds, each of whole blocks of one row."""
    scale = format.scale
    if format.element.family != family or scale is None or format.super_scale or format.offset:
        return False
    return scale.kind in kinds and scale.extent[0] == 1 and scale.extent[1] % BLOCK == 0


def integer_unit(format: WeightFormat) -> float | None:
    """What a format's values, less its zero points, are multiples of where sums of integers can be made of them; None where
    they cannot.

    Integers of family int: 1. 4 bits: the largest power of two, 2**-8 to 1, of which all these are multiples, by 127 at most,
    or by 16 where there are zero points. Both without scales, or with scales of half blocks or of whole ones, of INTEGER_KINDS.

    Examples:
        >>> reference.integer_unit(ktmoe.MXFP4), reference.integer_unit(ktmoe.BF16)
        (0.5, None)
    """
    scale = format.scale
    if format.element.family not in ("q4", "int"):
        return None
    if scale is not None:
        whole = scale.extent[1] == BLOCK // 2 or scale.extent[1] % BLOCK == 0
        if scale.kind not in INTEGER_KINDS or scale.extent[0] != 1 or not whole:
            return None
    if format.element.family == "int":
        return 1.0
    values, most = np.array(format.element.values), 127
    if isinstance(format.offset, ZeroPoint):
        values, most = np.subtract.outer(values, np.arange(16)), 16
    for unit in 2.0 ** -np.arange(9):
        wholes = values / unit
        if (wholes == np.rint(wholes)).all() and np.abs(wholes).max() <= most:
            return float(unit)
    return None


def small_integers(format: WeightFormat) -> bool:
    """Whether the integers that a format's values are multiples of a unit by need at most 5 bits and a sign: 16 and less."""
    unit = integer_unit(format)
    return unit is not None and bool(np.abs(np.array(format.element.values)).max() <= 16 * unit)


def folds(matrix: Matrix) -> bool:
    """Whether rounding="folded" rounds a matrix's weights to bfloat16: if its scales are bfloat16, normal or zero, or fp16, and
    by their exponents and the values' no product, whether it occurs or not, is denormal, or above 2**127 when rounded.

    Examples:
        >>> reference.folds(matrix)  # bfloat16 has no scales that could be folded
        False
    """
    if not _plain(matrix.format, "q4", ROUNDED_KINDS):
        return False
    matrix.refuse()

    def exponents(values: Any) -> Any:
        sizes = np.abs(np.asarray(values, np.float64))
        return np.frexp(sizes[sizes > 0])[1] - 1  # floor(log2)

    scales, values = exponents(matrix.scales), exponents(matrix.format.element.values)
    if not scales.size or not values.size:
        return True
    least, most = scales.min() + values.min(), scales.max() + values.max()
    # fp16's least number is 2**-24
    return bool(scales.min() >= -126 and least >= -126 and most + 2 <= 127)


@functools.cache
def _powers(value: float) -> tuple[float, float] | None:
    """The sizes of two powers of two, or zeros, whose sum or difference a value's size is, the least; None without such."""
    size = abs(value)
    powers = [0.0, *(2.0**exponent for exponent in range(-126, 4))]
    sums = ((a, b) for a in powers for b in powers if (a > b or a == b == 0) and size in (a + b, a - b))
    return min(sums, key=sum, default=None)


def splits(matrix: Matrix) -> bool:
    """Whether tuned_for="prefill" may make each weight the sum of two bfloat16 numbers, exactly: if its scales are bfloat16,
    positive or zero, below 2**125, and each value of its element is a sum or a difference of two powers of two, from 2**-126
    to 8, whose products with any of its scales are normal.

    Examples:
        >>> reference.splits(matrix)  # bfloat16 has no scales that could be split
        False
    """
    if not _plain(matrix.format, "q4", ("bf16",)):
        return False
    matrix.refuse()
    powers = [_powers(value) for value in matrix.format.element.values]
    scales = matrix.stored["scales"].astype(np.float64)
    if None in powers or np.signbit(scales).any():
        return False
    scales, terms = scales[scales > 0], [term for pair in powers if pair for term in pair if term]
    if not terms or not scales.size:
        return bool(terms)
    return bool(scales.min() >= TINY and scales.max() < 2.0**125 and scales.min() * min(terms) >= TINY)


def term_sizes(matrix: Matrix, rows: Any = slice(None)) -> np.ndarray:
    """The sum of the sizes of the two numbers that each weight is a sum of."""
    matrix = in_rows(matrix)
    values = tuple(sum(pair) for pair in map(_powers, matrix.format.element.values) if pair)  # splits() says: each has one
    element = replace(matrix.format.element, values=values)
    return read(replace(matrix, format=replace(matrix.format, element=element)), rows).scaled


def columns_of(matrix: Matrix, first: int, last: int) -> Matrix:
    """A matrix with k from first to last, which cut nothing that is shared; the bias goes with k = 0. It is in rows."""
    matrix = in_rows(matrix)
    format, offset = matrix.format, matrix.format.offset
    shared: dict[str, Scale | ZeroPoint | None] = {"scales": format.scale, "super_scales": format.super_scale}
    shared["offsets"] = offset.scale if isinstance(offset, Minimum) else offset
    shared["super_offsets"] = offset.super_scale if isinstance(offset, Minimum) else None
    step = 2 if format.element.bits == 4 else 1
    arrays: dict[str, Any] = {"codes": matrix.codes[:, first // step : -(-last // step)]}
    for label, of in shared.items():
        if of:
            arrays[label] = getattr(matrix, label)[:, first // of.extent[1] : -(-last // of.extent[1])]
    arrays = {label: np.ascontiguousarray(array) for label, array in arrays.items()}
    return replace(matrix, shape=(matrix.shape[0], last - first), bias=None if first else matrix.bias, **arrays)


def denormal_weights(matrix: Matrix, rows: Any = slice(None)) -> np.ndarray | None:
    """|w|, without factor and minimum, where the bfloat16 number of the weight, or of its code, is denormal and may count as 0;
    else 0. None if none is."""
    element = matrix.format.element
    if element.family == "b16":
        size = np.abs(read(matrix, rows).scaled)
        size[size >= TINY] = 0
        return size if size.any() else None
    values = tuple(v if v is not None and abs(v) < TINY else 0.0 for v in element.values)
    if not any(values):
        return None
    # zero points need integers, and these are none
    matrix = in_rows(matrix)
    format = replace(matrix.format, element=replace(element, values=values), offset=None)
    return np.abs(read(replace(matrix, format=format, offsets=None, super_offsets=None), rows).scaled)
