"""Random matrices of every format and x that are integers times powers of two, so that every sum of theirs is exact in float32.

All that a kernel may add up is a multiple of one unit, and what it adds up comes to less than 2^24 units: no order of sums and
no way of scaling rounds anything.
"""

from __future__ import annotations

import numpy as np
from exact import exact_matrix
from ggml_records import random_bits
from random_layers import POOL, one_of

from ktmoe import ExpertWeights, Matrix, MoELayer
from ktmoe.dequantization import factors, read
from ktmoe.experts import PROJECTIONS
from ktmoe.reference import integer_unit
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.records import RecordOrder
from ktmoe.weights.scales import SCALE_KINDS

#: What float32 has exactly, of any unit.
LIMIT = 2.0**24


def integer_matrix(rng, n: int, k: int, weight_format: WeightFormat, bias=None) -> Matrix:
    """Of n outputs and k inputs, rounded up to whole items of the arrays."""
    n, k = (-(-size // unit) * unit for size, unit in zip((n, k), weight_format.code_unit, strict=True))
    if bias is not None:
        bias = np.resize(bias, n)
    if not isinstance(weight_format.order, RecordOrder):
        return exact_matrix(rng, n, k, weight_format, bias)[0]
    order = weight_format.order
    records = random_bits(rng, order, n * (k // order.weights))
    for label, field in order.fields.items():
        scale = weight_format.scales[label]
        if SCALE_KINDS[scale.kind].field:  # a float: the others may be any integers
            numbers = np.full((len(records), len(field.items)), 2.0 ** rng.integers(-2, 1))
            if scale.kind == "fp16":
                numbers *= rng.choice([-1, 1], numbers.shape)
            field.write(records, scale.stored(numbers))
    factor = None
    if weight_format.factor:
        factor = 2.0 ** rng.integers(-2, 3, weight_format.factor.shape(n)).astype(np.float32)
    shape = weight_format.arrays(n, k)["codes"][1]
    return Matrix("w", weight_format, (n, k), codes=records.reshape(shape), factor=factor, bias=bias)


def unit_of(*arrays: np.ndarray) -> float:
    """The largest power of two of which all numbers are multiples."""
    numbers = np.concatenate([array[array != 0] for array in arrays]) if arrays else np.zeros(0)
    if not numbers.size:
        return 1.0
    significands, exponents = np.frexp(numbers)
    wholes = np.abs(np.ldexp(significands, 53)).astype(np.int64)
    lowest = exponents - 53 + np.log2(wholes & -wholes).astype(int)
    return 2.0 ** lowest.min()


def random_x(rng, tokens: int, matrix: Matrix, of_int8: bool = False) -> np.ndarray:
    """float64 [tokens, k], integers times a power of two: as many of them not zero as sums of the matrix's numbers allow.

    of_int8: the largest of each 32 is 127, or all are zero: rows of int8 have such numbers exactly.
    """
    k, given = matrix.shape[1], read(matrix)
    numbers = [given.scaled] if given.minima is None else [given.scaled, given.minima]
    sizes = sum(np.abs(array) for array in numbers) / unit_of(*numbers)
    largest = 127 if of_int8 else 7
    x = rng.integers(-largest, largest + 1, (tokens, k)).astype(float)
    blocks = range(0, k, 32)
    tops = np.zeros((tokens, k), bool)
    if of_int8:
        for start in blocks:
            at = rng.integers(start, min(start + 32, k), tokens)
            x[np.arange(tokens), at], tops[np.arange(tokens), at] = rng.choice([-127.0, 127.0], tokens), True
    for turn in range(20):
        wrong = (np.abs(x) @ sizes.T).max(axis=1, initial=0) >= LIMIT
        if not wrong.any():
            return x
        for token in np.nonzero(wrong)[0]:
            kept = rng.integers(0, 2, k).astype(bool) | (tops[token] & (turn < 6))
            if turn >= 6 and of_int8:  # a block whose largest goes is zero
                kept &= np.repeat([(kept & tops[token])[start : start + 32].any() for start in blocks], 32)[:k]
            x[token] = np.where(kept, x[token], 0)
    raise AssertionError(f"{matrix.format.description}: weights are too large for exact sums")


def products(matrix: Matrix, x: np.ndarray) -> np.ndarray:
    """x W^T times the factor, plus the bias, in float64: exactly, where factors are powers of two."""
    given = read(matrix)
    y = x @ (given.scaled if given.minima is None else given.scaled - given.minima).T
    if matrix.format.factor:
        y = y / factors(matrix) if matrix.format.factor.divides else y * factors(matrix)
    return y if matrix.bias is None else y + matrix.bias


def random_format(rng, of_integers: bool) -> WeightFormat:
    """One that kernels have; of_integers: that kernels of integers have."""
    return one_of(rng, [of for of in POOL.values() if not of_integers or integer_unit(of) is not None])


def layer_of(backend: str, matrices: dict[str, list[Matrix]], activation, **settings) -> MoELayer:
    """A layer of these matrices by projection, one for each expert."""
    first = {projection: of[0] for projection, of in matrices.items()}
    intermediate, hidden = first["gate"].shape
    formats = {projection: first[projection].format for projection in PROJECTIONS}
    count = len(matrices["gate"])
    experts = ExpertWeights(count, hidden, intermediate, lambda e, p: matrices[p][e], formats, activation)
    return MoELayer(experts, backend, **settings)
