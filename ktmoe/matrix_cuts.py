"""Some rows or columns of a matrix, and matrices joined row after row, with the checkpoint's own bytes in every order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.scales import Factor


def check_rows(name: str, weight_format: WeightFormat, n: int, first: int, last: int) -> None:
    """Raise FormatError if rows [first, last) of a matrix with n rows cut what shares a scale, or an item of an array."""
    unit = weight_format.unit[0]
    if not 0 <= first < last <= n:
        raise FormatError(f"{name}: expected rows within 0 to {n}, found {first} to {last}")
    if first % unit or (last % unit and last != n):
        raise FormatError(
            f"{name}: {weight_format.description}: expected rows in multiples of {unit}, found {first} to {last} of {n}"
        )


def take_rows(matrix: Matrix, first: int, last: int, name: str | None = None) -> Matrix:
    """Rows [first, last) of a matrix, as one of the same format.

    name: of the result; by default with the rows behind the matrix's. Arrays are views where rows stand together.
    Raises FormatError, which names the matrix, where that would cut what shares a scale, or an item of an array.
    """
    weight_format, (n, k) = matrix.format, matrix.shape
    check_rows(matrix.name, weight_format, n, first, last)
    arrays = _cut(matrix, 0, (first, k), (last, k))
    if weight_format.factor and weight_format.factor.per_row:
        arrays["factor"] = arrays["factor"][first:last]
    if matrix.bias is not None:
        arrays["bias"] = matrix.bias[first:last]
    return Matrix(f"{matrix.name}[{first}:{last}]" if name is None else name, weight_format, (last - first, k), **arrays)


def take_columns(matrix: Matrix, first: int, last: int) -> Matrix:
    """Columns [first, last) of a matrix, as one of the same format, with its factor and its bias.

    Raises FormatError, which names the matrix, where that would cut what shares a scale, or an item of an array.
    """
    weight_format, (n, k) = matrix.format, matrix.shape
    unit = weight_format.unit[1]
    if not 0 <= first < last <= k or first % unit or (last % unit and last != k):
        raise FormatError(
            f"{matrix.name}: {weight_format.description}: expected columns within 0 to {k} in multiples of {unit}, "
            f"found {first} to {last}"
        )
    arrays = _cut(matrix, 1, (n, first), (n, last))
    return Matrix(f"{matrix.name}[:, {first}:{last}]", weight_format, (n, last - first), bias=matrix.bias, **arrays)


def _cut(matrix: Matrix, dimension: int, first: tuple[int, int], last: tuple[int, int]) -> dict[str, np.ndarray]:
    """A matrix's arrays from the end of a smaller one of shape `first` to that of one of shape `last`; the factor whole.

    dimension: of n and k, the one in which both differ.
    """
    weight_format, arrays = matrix.format, {}
    axis = dimension ^ int(weight_format.order.transposed)
    begins = weight_format.arrays(*first) if first[dimension] else {}
    for label, (_, shape) in weight_format.arrays(*last).items():
        array = getattr(matrix, label)
        if label != "factor":
            begin = begins[label][1][axis] if begins else 0
            array = np.ascontiguousarray(array[(slice(None),) * axis + (slice(begin, shape[axis]),)])
        arrays[label] = array
    return arrays


def joined_format(matrices: Sequence[tuple[str, WeightFormat, tuple[int, int]]]) -> WeightFormat:
    """The format of matrices joined row after row: theirs; but factors of a matrix become factors of its rows.

    matrices: name, format and shape of each, at least one. Raises FormatError, which names them, where their formats or their k
    differ, or where one of them ends within what shares a scale, or within an item of an array.
    """
    (first, given, (_, k)), *others = matrices
    common = _per_row(given) if others else given
    for name, weight_format, shape in others:
        if _per_row(weight_format) != common or shape[1] != k:
            expected, found = f"{given.description} with k = {k}", f"{weight_format.description} with k = {shape[1]}"
            raise FormatError(f"{name}: expected {expected} as {first} is, to be joined with it, found {found}")
    unit = common.unit[0]
    for name, _, (n, _) in matrices[:-1]:
        if n % unit:
            raise FormatError(f"{name}: {common.description}: expected a multiple of {unit} rows to join others to, found {n}")
    return common


def join_rows(matrices: Sequence[Matrix], name: str) -> Matrix:
    """Matrices joined row after row, as one. name: the result's.

    Where some have no bias, theirs is 0. Raises what joined_format() raises.
    """
    weight_format = joined_format([(matrix.name, matrix.format, matrix.shape) for matrix in matrices])
    n, k = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
    arrays = {}
    for label in weight_format.arrays(n, k):
        axis = int(weight_format.order.transposed and label != "factor")
        arrays[label] = np.concatenate([_array(matrix, label, weight_format) for matrix in matrices], axis)
    if any(matrix.bias is not None for matrix in matrices):
        arrays["bias"] = np.concatenate(
            [np.zeros(matrix.shape[0], np.float32) if matrix.bias is None else matrix.bias for matrix in matrices]
        )
    return Matrix(name, weight_format, (n, k), **arrays)


def _per_row(weight_format: WeightFormat) -> WeightFormat:
    """The same with a factor per row, where it has one per matrix: what each row is multiplied by is the same number."""
    factor = weight_format.factor
    return replace(weight_format, factor=Factor(True, factor.divides)) if factor else weight_format


def _array(matrix: Matrix, label: str, weight_format: WeightFormat) -> np.ndarray:
    array = getattr(matrix, label)
    if label == "factor" and matrix.format.factor != weight_format.factor:  # one per matrix becomes one per row
        return np.repeat(array, matrix.shape[0])
    return array
