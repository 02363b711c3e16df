"""Sums that backward passes are made of, in float64 with a bound: by a matrix's weights transposed, and by an adapter's.

Every `eps_v` bounds |what a backend has for v - v|, elementwise, as in ktmoe/reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ktmoe.dequantization import Weights, factors, read, spread
from ktmoe.matrix import Matrix
from ktmoe.reference.errors import MAX_FLOAT32, gamma
from ktmoe.reference.operands import operand
from ktmoe.reference.weights import BLOCK, TINY, folds, round_bfloat16
from ktmoe.weights.elements import NUMBERS
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.offsets import Minimum, ZeroPoint
from ktmoe.weights.scales import SCALE_KINDS

#: Significant bits of float32, of bfloat16 and of a sum of two bfloat16 numbers.
FLOAT32_BITS, BFLOAT16_BITS, TWO_TERMS_BITS = 24, 8, 16
#: Rows n of a matrix that a backend may add in any order where a weight is two numbers: first the larger ones of all of them.
TWO_TERMS_BLOCK = 512
#: The lengths in the sums that adapters and router weights need: see added_up().
STRIP, LANES, BATCH = 64, 4, 512
#: A weight below this may be a sum of two numbers of which one is denormal, and a denormal number may count as 0.
LEAST_SAFE = 2.0**-116
#: A weight of at least this may overflow when it is rounded to bfloat16, the first of two numbers.
MAX_WEIGHT = 2.0**127 * (2 - 2.0**-8)


@dataclass(frozen=True)
class Sum:
    """A float32 chain: value, its error, a bound on the size of any partial sum, and gamma of the chain's roundings, by which
    its error grows with what else is in the total that it is added to."""

    value: np.ndarray
    eps: np.ndarray
    size: np.ndarray
    roundings: float


def product(a: Any, eps_a: Any, b: Any, eps_b: Any = 0.0, factor: float = 1.0, more: int = 0, any_order: bool = False) -> Sum:
    """factor * a @ b in float32, [m, k] and [k, n]; each product of two numbers may be rounded, with so many roundings more.

    The order of the sum is one of those that added_up() knows, or any.
    """
    size_a, size_b = np.abs(a) + eps_a, np.abs(b) + eps_b
    errors = np.broadcast_to(eps_a, a.shape), np.broadcast_to(eps_b, b.shape)
    spread = 0.0
    if np.any(eps_a):
        spread = spread + errors[0] @ size_b
    if np.any(eps_b):
        spread = spread + np.abs(a) @ errors[1]
    found = added_up(a.shape[1], lambda k: a[:, k] @ b[k], lambda k: size_a[:, k] @ size_b[k], spread, more, any_order)
    if factor == 1:
        return found
    eps = abs(factor) * found.eps + gamma(1) * abs(factor) * (np.abs(found.value) + found.eps) + TINY
    return Sum(factor * found.value, eps, abs(factor) * found.size, found.roundings)


def rows_product(a: Any, eps_a: Any, b: Any, eps_b: Any, any_order: bool = False) -> Sum:
    """The sum of a * b for each row of a and b, both [m, k], as product() has it."""
    size_a, size_b = np.abs(a) + eps_a, np.abs(b) + eps_b
    spread = (eps_a * size_b + np.abs(a) * eps_b).sum(axis=1)
    value, size = (lambda k, v=v: v[:, k].sum(axis=1) for v in (a * b, size_a * size_b))
    return added_up(a.shape[1], value, size, spread, 0, any_order)


def added_up(k: int, value: Any, size: Any, spread: Any, more: int, any_order: bool) -> Sum:
    """A float32 sum of k products: in ascending order, where any STRIP of them may be added in any order; or LANES or more such
    chains of a BATCH of them, added up, one batch after the other; or all in any order (Higham 2002, eq. 4.4).

    value, size: of a slice of the products, the sum, and that of the largest sizes. spread: what their errors add. more:
    roundings of each product besides its own.
    """
    total = np.zeros_like(value(slice(0, 0)))
    grown, largest, all_sizes = total, total, total
    for first in range(0, k, BATCH):
        last = min(first + BATCH, k)
        before, of_chain, sizes = total, 0.0, 0.0
        for start in range(first, last, STRIP):
            strip = slice(start, min(start + STRIP, last))
            count, of_strip = strip.stop - start, size(strip)
            most = np.abs(total) + spread + grown + of_strip
            of_chain = of_chain + gamma(count + 1) * most
            largest, sizes = np.maximum(largest, most), sizes + of_strip
            total = total + value(strip)
        of_lanes = gamma((last - first) / LANES + LANES) * sizes + gamma(1) * (np.abs(before) + spread + grown + sizes)
        grown = grown + np.maximum(of_chain, of_lanes) + (last - first + 1) * TINY
        all_sizes = all_sizes + sizes
    if any_order:
        grown, largest = gamma(k + 1) * all_sizes + (k + 1) * TINY, all_sizes
    eps = spread + grown + gamma(more) * (all_sizes + grown)
    return Sum(total, np.where(all_sizes < MAX_FLOAT32, eps, np.inf), largest, gamma(k + 1 + more))


def together(sums: Sequence[Sum]) -> tuple[np.ndarray, np.ndarray]:
    """The total of sums, and its error: each may be a chain of its own, or be added to the total product by product, its
    blocks in turns with those of the others. Then no partial sum is larger than all their sizes together."""
    size = sum(one.size for one in sums)
    eps = sum(one.eps + one.roundings * (size - one.size) for one in sums) + gamma(len(sums) - 1) * size
    total: Any = sum(one.value for one in sums)
    return total, np.where(size + eps < MAX_FLOAT32, eps, np.inf)


def gradient_rows(matrix: Matrix, v: Any, low: Any, high: Any, rows: Any = slice(None)) -> tuple[np.ndarray, np.ndarray]:
    """What the transposed product takes for gradients v [m, n] of bfloat16 numbers, and its error, where a backend's are
    between low and high: times the factor of each n, or divided by it, rounded to float32 and then to bfloat16."""
    if matrix.format.factor is None:
        return operand(v, low, high, "bf16")
    of_row, divides = factors(matrix, rows), matrix.format.factor.divides

    def rounded(number: Any) -> Any:
        # float64 has the product, and rounds the quotient without harm (Figueroa 1995)
        scaled = number / of_row if divides else number * of_row
        return round_bfloat16(scaled.astype(np.float32))

    v, *ends = (rounded(number) for number in (v, low, high))
    return operand(v, np.minimum(*ends), np.maximum(*ends), "bf16")


def transposed(
    matrix: Matrix, a: np.ndarray, eps_a: np.ndarray, rounding: str = "exact", rows: Any = slice(None), block: int | None = None
) -> Sum:
    """a @ W, a [m, rows] as gradient_rows() made it: a float32 sum over the rows n of W, in ascending blocks.

    Where a block of n products is added to s, no partial sum exceeds |s| + sum |a w|, and each of n additions, and each product
    that is not exact, rounds once: an error of gamma(n + 1) times that. A weight may be two numbers: twice as many products.
    block: rows that may be added in any order; None: as ours add them.
    """
    given, two = read(matrix, rows), may_be_two(matrix.format)
    if rounding == "folded" and folds(matrix):
        weights, two = round_bfloat16(given.scaled), False
        lost = _lost(weights, np.zeros_like(weights))
    else:
        weights, lost = operand_weights(matrix.format, given)
    too_large = _too_large(given, weights)
    block = block or (TWO_TERMS_BLOCK if two else BLOCK)
    value = np.zeros((len(a), weights.shape[1]))
    grown, spread, largest, roundings = np.zeros_like(value), np.zeros_like(value), np.zeros_like(value), 0.0
    for start in range(0, len(weights), block):
        n = slice(start, start + block)
        w, size = weights[n], np.abs(a[:, n]) + eps_a[:, n]
        terms = (1 + 2.0**-6 * two) * (size @ (np.abs(w) + lost[n]))
        if eps_a[:, n].any():
            spread = spread + eps_a[:, n] @ np.abs(w)
        if lost[n].any():
            spread = spread + size @ lost[n]
        most = np.abs(value) + spread + grown + terms
        count = len(w) * (1 + two)
        of_block = gamma(count + 1)
        grown = grown + of_block * most + (1 + of_block) * count * TINY
        largest, roundings = np.maximum(largest, most), roundings + of_block
        value = value + a[:, n] @ w
    return Sum(value, np.where(too_large, np.inf, grown + spread), np.where(too_large, np.inf, largest), roundings)


def operand_weights(format: WeightFormat, given: Weights) -> tuple[np.ndarray, np.ndarray]:
    """The weights without their factor, [n, k], and how far those that a backend multiplies by may be from them.

    Those are float32 or bfloat16 numbers, or sums of two: exact where their bits suffice, as roundings_of() says; else a
    rounding for each operation of value * (scale * super-scale) - minimum * its super-scale. Denormal ones may count as 0.
    """
    of_scaled, of_minima = roundings_of(format)
    weights, lost = given.scaled, gamma(of_scaled) * np.abs(given.scaled)
    if given.minima is not None:
        weights = given.scaled - given.minima
        lost = lost + gamma(of_minima) * np.abs(given.minima)
        lost = lost + gamma(1) * (np.abs(weights) + lost)
    if format.super_scale and given.scales is not None:  # a product with a scale that is denormal
        denormal = (np.abs(given.scales) < TINY) & (given.scales != 0)
        lost = lost + 2.0**-149 * given.largest * spread(denormal, given.group, weights.shape[1])
    return weights, _lost(weights, lost)


def _lost(weights: np.ndarray, lost: np.ndarray) -> np.ndarray:
    size = np.abs(weights)
    return lost + np.where((size > 0) & (size < LEAST_SAFE), TINY, 0.0)


def _too_large(given: Weights, weights: np.ndarray) -> np.ndarray:
    """Which columns k have a weight, or what it is made of, that float32 or bfloat16 may not have."""
    large = (np.abs(weights) >= MAX_WEIGHT) | (np.abs(given.scaled) >= MAX_WEIGHT)
    if given.scales is not None:
        large |= spread(np.abs(given.scales) >= MAX_WEIGHT, given.group, weights.shape[1])
    return large.any(axis=0)


def roundings_of(format: WeightFormat) -> tuple[int, int]:
    """How often (value - zero point) * scale * super-scale, and a minimum times its super-scale, may round in float32; 0:
    both are exact, by their bits. A minimum is then subtracted, which may always round."""
    of_scales, with_scales = _scale_bits(format.scale, format.super_scale)
    of_minima = 0
    if isinstance(format.offset, Minimum):
        of_minima = _scale_bits(format.offset.scale, format.offset.super_scale)[1]
    product = with_scales + value_bits(format)
    return (product > FLOAT32_BITS) + (of_scales and with_scales > FLOAT32_BITS), int(of_minima > FLOAT32_BITS)


def weight_bits(format: WeightFormat) -> int:
    """Significant bits that (value - zero point) * scale * super-scale needs at most."""
    return value_bits(format) + _scale_bits(format.scale, format.super_scale)[1]


def may_be_two(format: WeightFormat) -> bool:
    """Whether a backend may have a weight as the sum of two bfloat16 numbers, which is exact."""
    return not isinstance(format.offset, Minimum) and BFLOAT16_BITS < weight_bits(format) <= TWO_TERMS_BITS


def _scale_bits(scale: Any, super_scale: Any) -> tuple[bool, int]:
    """Whether there are two levels of scales, and the bits of their product."""
    kinds = [level.kind for level in (scale, super_scale) if level is not None]
    return len(kinds) == 2, sum(SCALE_KINDS[kind].bits for kind in kinds)


def value_bits(format: WeightFormat) -> int:
    """Significant bits of a value less its zero point."""
    if format.element.family in NUMBERS:
        return ml_dtypes.finfo(NUMBERS[format.element.family]).nmant + 1
    values = np.array([value for value in format.element.values if value is not None])
    if isinstance(format.offset, ZeroPoint):
        values = np.subtract.outer(values, np.arange(16))
    return max(float(fraction).as_integer_ratio()[0].bit_length() for fraction in np.frexp(np.abs(values).ravel())[0])
