"""Rows of a packed dense matrix, by their numbers: what an embedding looks up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ktmoe import arrays
from ktmoe._native import core
from ktmoe.dequantization import dequantize, in_rows
from ktmoe.matrix import Matrix
from ktmoe.weights.elements import NUMBERS
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.offsets import ZeroPoint
from ktmoe.weights.order import ROWS
from ktmoe.weights.scales import Factor, Scale

#: Weights that are dequantised at a time: each is some float64 numbers.
AT_ONCE = 1 << 18


def read_rows(packed: core.PackedLinear, weight_format: WeightFormat, ids: np.ndarray, out: np.ndarray) -> None:
    """Write rows of a packed matrix into out, each number rounded once.

    ids: int64 [count], C-contiguous, within the matrix. out: uint16 (bfloat16 bits) or float32 [count, k], C-contiguous.
    Only what the packed panels have of these rows is read.
    """
    own = _of_rows(weight_format)
    if NUMBERS.get(own.element.family) == (np.float32 if out.dtype == np.float32 else arrays.BF16) and not own.factor:
        packed.read_rows(ids, {"codes": out})
        return
    count, k = out.shape
    stored = own.empty(count, k)
    packed.read_rows(ids, stored)
    for some in _in_turns(count, k):
        rows = Matrix("rows", own, (some.stop - some.start, k), **{label: array[some] for label, array in stored.items()})
        out[some] = _rounded(dequantize(rows), out.dtype)


def read_rows_of_export(matrix: Matrix, ids: np.ndarray, out: np.ndarray) -> None:
    """The same of a whole matrix, as a backend that packs in a way of its own gives it back."""
    matrix = in_rows(matrix)
    for some in _in_turns(*out.shape):
        out[some] = _rounded(dequantize(matrix, ids[some]), out.dtype)


def _of_rows(weight_format: WeightFormat) -> WeightFormat:
    """The format of rows as PackedLinear.read_rows() gives them: each has scales and a factor of its own; records that are
    packed as they stand come so."""
    scale, offset, factor = weight_format.scale, weight_format.offset, weight_format.factor
    order = weight_format.order if weight_format.order.packed else ROWS
    if scale and scale.extent[0] > 1:
        scale = Scale("fp32", (1, scale.extent[1]))
    if isinstance(offset, ZeroPoint):
        offset = ZeroPoint(offset.extent)
    return replace(weight_format, scale=scale, offset=offset, factor=factor and Factor(True, factor.divides), order=order)


def _in_turns(count: int, k: int) -> Any:
    """Slices of so many rows."""
    step = max(1, AT_ONCE // k)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _rounded(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 numbers rounded once, to nearest even: to float32, or to bits of bfloat16."""
    with np.errstate(over="ignore"):  # infinite, as the product of an input with such a weight is
        nearest = numbers.astype(np.float32)
    if dtype == np.float32:
        return nearest
    # Rounded to odd, a float32 that is not exact stays on its side of what is halfway between two bfloat16 numbers.
    bits, exact = nearest.view(np.uint32), nearest == numbers
    bits -= np.abs(nearest) > np.abs(numbers)
    bits |= ~exact
    return nearest.astype(arrays.BF16).view(np.uint16)
