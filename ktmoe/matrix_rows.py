"""Some rows of a matrix, and matrices joined row after row, with the checkpoint's own bytes in every source order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import Factor, WeightFormat


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
    begins = weight_format.arrays(first, k) if first else {}
    arrays = {"bias": None if matrix.bias is None else matrix.bias[first:last]}
    for label, (_, shape) in weight_format.arrays(last, k).items():
        array = getattr(matrix, label)
        if label == "factor":
            arrays[label] = array[first:last] if weight_format.factor.per_row else array
            continue
        axis = int(weight_format.order.transposed)
        begin = begins[label][1][axis] if first else 0
        rows = (slice(None),) * axis + (slice(begin, shape[axis]),)
        arrays[label] = np.ascontiguousarray(array[rows])
    return Matrix(f"{matrix.name}[{first}:{last}]" if name is None else name, weight_format, (last - first, k), **arrays)


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
    if label == "factor" and weight_format.factor.per_row and not matrix.format.factor.per_row:
        return np.repeat(array, matrix.shape[0])
    return array
