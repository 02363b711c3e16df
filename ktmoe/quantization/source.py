"""What is rounded: the real numbers that a matrix stands for, each rounded to float32 once at most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ktmoe.dequantization import dequantize
from ktmoe.errors import FormatError
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.offsets import Minimum, ZeroPoint
from ktmoe.weights.scales import SCALE_KINDS

#: Significant bits of an element's value, which is a bfloat16 number, and of float32.
_VALUE_BITS, _FLOAT32_BITS = 8, 24
#: What the native code calls codes that are numbers, by family.
_NUMBERS = {"b16": "bf16", "f16": "fp16", "f32": "fp32"}


@dataclass(frozen=True)
class SourceMatrix:
    """A matrix [n, k] as the native code reads it: (values[code] - point) * scale, times its factor or divided by it.

    stored: "bf16", "fp16" or "fp32", codes that are numbers; "bytes"; "nibbles", low nibble = even k. codes: C-contiguous.
    values: float32, by code; None for numbers. scales: float32, for extents of (rows, columns), or None.
    points: float32 [n, groups], for so many columns, or None. factors: float32 [n] or [1], or None. divides: whether they do.
    """

    name: str
    shape: tuple[int, int]
    stored: str
    codes: np.ndarray
    values: np.ndarray | None = None
    scales: np.ndarray | None = None
    extent: tuple[int, int] = (1, 1)
    points: np.ndarray | None = None
    point_columns: int = 1
    factors: np.ndarray | None = None
    divides: bool = False


def read(matrix: Matrix) -> SourceMatrix:
    """A matrix of any format. Raises FormatError for a zero point that is none."""
    matrix_format = matrix.format
    if matrix_format.element.family in _NUMBERS and not matrix_format.factor and matrix_format.order.rows:
        return SourceMatrix(matrix.name, matrix.shape, _NUMBERS[matrix_format.element.family], matrix.codes)
    return _coded(matrix) if _rounded_once(matrix_format) else _in_float64(matrix)


def refuse(matrix: Matrix) -> NoReturn:
    """Raise FormatError for a weight that is not finite; it names the place."""
    matrix.refuse()
    with np.errstate(over="ignore"):
        wrong = ~np.isfinite(dequantize(matrix).astype(np.float32))
    place = np.argwhere(wrong)[0].tolist()
    raise FormatError(f"{matrix.name}: weight {place} is too large for float32")


def _rounded_once(matrix_format: WeightFormat) -> bool:
    """Whether each weight is made with one rounding at most: value times scale is exact, or there is no factor."""
    if matrix_format.super_scale or isinstance(matrix_format.offset, Minimum):
        return False
    scale = matrix_format.scale
    return not (scale and matrix_format.factor) or _VALUE_BITS + SCALE_KINDS[scale.kind].bits <= _FLOAT32_BITS


def _coded(matrix: Matrix) -> SourceMatrix:
    matrix_format, (n, k) = matrix.format, matrix.shape
    arrays = matrix_format.rows(matrix.stored, n, k)
    given: dict[str, Any] = {}
    if matrix_format.element.values:
        values = np.full(1 << matrix_format.element.row_bits, math.nan, np.float32)  # bytes may hold more than a code has bits
        values[: len(matrix_format.element.values)] = [math.nan if v is None else v for v in matrix_format.element.values]
        given["values"] = values
        stored = "nibbles" if matrix_format.element.bits == 4 else "bytes"
    else:
        stored = _NUMBERS[matrix_format.element.family]
    if matrix_format.scale:
        with np.errstate(invalid="ignore"):
            numbers = SCALE_KINDS[matrix_format.scale.kind].numbers(arrays["scales"])
        given |= {"scales": np.ascontiguousarray(numbers, np.float32), "extent": matrix_format.scale.extent}
    if isinstance(matrix_format.offset, ZeroPoint):
        if arrays["offsets"].max() > 15:
            matrix.refuse()
        points = matrix_format.offset.numbers(arrays["offsets"]).astype(np.float32)
        given |= {"points": points, "point_columns": matrix_format.offset.extent[1]}
    if matrix_format.factor:
        given |= {"factors": arrays["factor"], "divides": matrix_format.factor.divides}
    return SourceMatrix(matrix.name, matrix.shape, stored, arrays["codes"], **given)


def _in_float64(matrix: Matrix) -> SourceMatrix:
    """The weights by way of float64 numbers, which are exact or nearly so."""
    with np.errstate(over="ignore"):
        weights = dequantize(matrix).astype(np.float32)
    return SourceMatrix(matrix.name, matrix.shape, "fp32", weights)
