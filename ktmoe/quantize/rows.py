"""bfloat16 weights as symmetric integers of 8 or 4 bits, with one float32 scale for each row.

A row's scale s is its max |w| / most, most = 127 or 7. Its codes q are integers from -most to most, and q * s stands for w;
docs/numerics.md says how far that can be from w. A row of zeros has the scale 0. The rules differ in the last bit of s and in
what is near a tie. Operations are in float32 unless said otherwise:

    EVEN_8   s = max |w| * (1 / 127); q = w * (1 / s), to the nearest integer, ties to even
    EVEN_4   s = max |w| / 7; t = w * (16 / s), to the nearest integer, ties to even; q = t / 16, to the nearest, halves away
             from 0
    AWAY_8   s = max |w| / 127; q = w / s, to the nearest integer, halves away from 0
    AWAY_4   s = max |w| / 7; q = w / s in float64, to the nearest integer, halves away from 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.weights.formats import BF16, WeightFormat, int4, int8

#: Weights that are rounded at a time: their float32 and float64 copies stay in the L2 cache.
_AT_ONCE = 2**16


@dataclass(frozen=True)
class Rule:
    """How rows are rounded.

    format: what becomes of BF16. most: the largest code. scale: of each row's largest magnitude, float32.
    nearest: (weights float32 [rows, k], scales float32 [rows, 1] above 0) -> codes, integers as floats; those beyond `most` are
    set to it.
    """

    format: WeightFormat
    most: int
    scale: Callable[[np.ndarray], np.ndarray]
    nearest: Callable[[np.ndarray, np.ndarray], np.ndarray]

    def codes(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(codes int8 [n, k], scales float32 [n]) of finite bfloat16 weights [n, k]."""
        n, k = weights.shape
        codes, scales = np.empty((n, k), np.int8), np.empty(n, np.float32)
        step = max(1, _AT_ONCE // k)
        for rows in (slice(first, first + step) for first in range(0, n, step)):
            exact = weights[rows].astype(np.float32)
            scales[rows] = self.scale(np.abs(exact).max(axis=1))
            of_rows = scales[rows, None]
            codes[rows] = np.clip(self.nearest(exact, np.where(of_rows == 0, np.float32(1), of_rows)), -self.most, self.most)
        return codes, scales

    def matrix(self, matrix: Matrix) -> Matrix:
        """A BF16 matrix, rounded. Raises FormatError for another format, for a weight that is not finite, and for 4 bits and an
        odd k."""
        if matrix.format != BF16:
            raise FormatError(f"{matrix.name}: expected {BF16.description} to round, found {matrix.format.description}")
        _, columns = self.format.code_unit
        if matrix.shape[1] % columns:
            raise FormatError(f"{matrix.name}: expected a multiple of {columns} columns to round, found {list(matrix.shape)}")
        matrix.refuse()
        codes, scales = self.codes(matrix.codes)
        stored = codes.view(np.uint8)
        if columns == 2:
            stored = stored + np.uint8(8)
            stored = stored[:, 0::2] | stored[:, 1::2] << 4
        return Matrix(matrix.name, self.format, matrix.shape, stored, bias=matrix.bias, factor=scales)

    def experts(self, experts: ExpertWeights) -> ExpertWeights:
        """The same experts, each matrix rounded when it is asked for. Raises FormatError unless all are BF16."""
        for projection, weight_format in experts.formats.items():
            if weight_format != BF16:
                raise FormatError(
                    f"{experts.name}: expected {BF16.description} to round, found {weight_format.description} ({projection})"
                )

        def read(expert: int, projection: str) -> Matrix:
            return self.matrix(experts.matrix(expert, projection))

        sizes = experts.num_experts, experts.hidden, experts.intermediate
        return ExpertWeights(*sizes, read, self.format, experts.activation, experts.name, experts.router_weight)


def _even(weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.rint(_times_inverse(weights, scales))


def _even_in_sixteenths(weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return _away(np.rint(_times_inverse(weights, scales / np.float32(16))) / np.float32(16))


def _away_from_zero(weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return _away(weights / scales)


def _away_from_zero_in_float64(weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return _away(weights.astype(np.float64) / scales)


def _times_inverse(weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """weights * (1 / scales) in float32; the quotient where the inverse of a denormal scale is not finite."""
    with np.errstate(over="ignore", divide="ignore"):
        inverse = np.float32(1) / scales
    if np.isfinite(inverse).all():
        return weights * inverse
    return (weights.astype(np.float64) / scales).astype(np.float32)


def _away(numbers: np.ndarray) -> np.ndarray:
    """To the nearest integer, halves away from zero. 0.5 is added in float64, since in float32 that may round."""
    return np.copysign(np.floor(np.abs(numbers).astype(np.float64) + 0.5), numbers)


EVEN_8 = Rule(int8(), 127, lambda largest: largest * np.float32(1 / 127), _even)
EVEN_4 = Rule(int4(), 7, lambda largest: largest / np.float32(7), _even_in_sixteenths)
AWAY_8 = Rule(int8(), 127, lambda largest: largest / np.float32(127), _away_from_zero)
AWAY_4 = Rule(int4(), 7, lambda largest: largest / np.float32(7), _away_from_zero_in_float64)
