"""The real numbers that a matrix stands for, in float64: every format, read by what its WeightFormat says.

Nothing here is shared with a kernel or with packing, but for the formats themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktmoe.matrix import Matrix
from ktmoe.weights.elements import Element
from ktmoe.weights.offsets import Minimum, ZeroPoint
from ktmoe.weights.order import ROWS
from ktmoe.weights.scales import Scale


@dataclass(frozen=True)
class Weights:
    """Some rows of a matrix, float64, without its factor.

    scaled: (value - zero point) * scale * super-scale, exactly, [n, k].
    group, scales: scale * super-scale, [n, groups], for so many k each; 0 and None without scales.
    minima: what is to be subtracted from scaled, [n, k]; None without minima.
    largest: no |value - zero point| is above it.
    """

    scaled: np.ndarray
    group: int
    scales: np.ndarray | None
    minima: np.ndarray | None
    largest: float


def in_rows(matrix: Matrix) -> Matrix:
    """The same matrix in the order of rows."""
    return matrix if matrix.format.order.rows else matrix.in_order(ROWS)


def read(matrix: Matrix, rows: Any = slice(None)) -> Weights:
    """rows: an index along n. Raises FormatError, which names the tensor, if the matrix holds a NaN."""
    matrix.refuse()
    matrix = in_rows(matrix)
    format, (n, k), stored = matrix.format, matrix.shape, matrix.stored
    rows = np.arange(n)[rows]
    weights = _values(format.element, matrix.codes[rows], k)
    largest = max((abs(value) for value in format.element.values if value is not None), default=math.inf)
    group, scales, minima = 0, None, None
    if isinstance(format.offset, ZeroPoint):
        points = format.offset.numbers(stored["offsets"][rows]).astype(np.float64)
        weights -= spread(points, format.offset.extent[1], k)
        largest += 15
    if format.scale:
        group = math.gcd(format.scale.extent[1], format.super_scale.extent[1] if format.super_scale else 0)
        columns = np.arange(0, k, group)
        scales = _shared(format.scale, stored["scales"], rows, columns)
        if format.super_scale:
            scales = scales * _shared(format.super_scale, stored["super_scales"], rows, columns)
        weights *= spread(scales, group, k)
    if isinstance(format.offset, Minimum):
        minima = _shared(format.offset.scale, stored["offsets"], rows, np.arange(k))
        if format.offset.super_scale:
            minima = minima * _shared(format.offset.super_scale, stored["super_offsets"], rows, np.arange(k))
        if format.offset.added:
            minima = -minima
    return Weights(weights, group, scales, minima, largest)


def spread(numbers: np.ndarray, group: int, k: int) -> np.ndarray:
    """Numbers of so many columns each, [n, groups], for each of k columns: [n, k]."""
    return np.repeat(numbers, min(group, k), axis=1)[:, :k]  # a file may name any group


def _values(element: Element, codes: np.ndarray, k: int) -> np.ndarray:
    """The real numbers of codes in the order of rows, as a new array [n, k]."""
    if element.bits != 4:
        return element.numbers(codes)
    byte = np.arange(256)
    pairs = np.stack([element.numbers(byte & 15), element.numbers(byte >> 4)], axis=1)  # low nibble = even k
    return pairs.take(codes, axis=0).reshape(len(codes), k)


def _shared(scale: Scale, stored: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """What these rows and columns of a matrix share of stored numbers, float64 [rows, columns]."""
    return scale.numbers(stored[rows // scale.extent[0]])[:, columns // scale.extent[1]]


def factors(matrix: Matrix, rows: Any = slice(None)) -> np.ndarray:
    """The factor, or divisor, of each of the rows, float64 [n], of a matrix that has one."""
    return np.broadcast_to(matrix.stored["factor"].astype(np.float64), matrix.shape[:1])[rows]


def dequantize(matrix: Matrix, rows: Any = slice(None), factor: bool = True) -> np.ndarray:
    """The real numbers that a matrix stands for, float64 [n, k]: exact, but for float64's own roundings where a format has a
    minimum, a divisor, or both a super-scale and a factor.

    rows: an index along n, to read only some rows. Not factor: without the matrix's factor, as sums are of these.
    Raises FormatError, which names the tensor, if the matrix holds a NaN.

    Examples:
        >>> numbers = reference.dequantize(experts.matrix(0, "gate"))
        >>> numbers.dtype, numbers.shape == (experts.intermediate, experts.hidden)
        (dtype('float64'), True)
    """
    weights = read(matrix, rows)
    scaled = weights.scaled if weights.minima is None else weights.scaled - weights.minima
    if factor and matrix.format.factor:
        of_row = factors(matrix, rows)[:, None]
        return scaled / of_row if matrix.format.factor.divides else scaled * of_row
    return scaled
