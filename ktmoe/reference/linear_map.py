"""A linear map of one matrix in float64, and a bound on a backend's error: its sums, its scales, its minima and its factor.

Every `eps_v` bounds |what a backend has for v - v|, elementwise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ktmoe.dequantization import factors, read
from ktmoe.matrix import Matrix
from ktmoe.modes import mode_of
from ktmoe.reference.errors import MAX_FLOAT32, after_rounding, gamma
from ktmoe.reference.operands import flush_to_zero
from ktmoe.reference.weights import (
    BLOCK,
    TINY,
    denormal_weights,
    folds,
    integer_unit,
    round_bfloat16,
    small_integers,
    splits,
    term_sizes,
)
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.offsets import Minimum

#: Scale kinds that a backend may fold into weights that are bfloat16 numbers then, exactly.
FOLDED_EXACTLY = ("ue8m0", "e4m3")


def linear(
    matrix: Matrix,
    a: np.ndarray,
    eps_a: np.ndarray,
    block: int = BLOCK,
    activations: str = "bf16",
    rounding: str = "exact",
    tuned_for: str = "decode",
    rows: Any = slice(None),
) -> tuple[np.ndarray, np.ndarray]:
    """a @ W.T, times the factor, + bias, and the error of a float32 sum of exact products that adds blocks in ascending k.

    a is as operand() made it. activations: the mode; rows may have any of its forms that the format has kernels for.
    Where a sum before a block is s, none inside it exceeds |s| + sum |a w|, and adding n products takes n roundings in any
    order: an error of gamma(n) times that (Higham 2002, "Accuracy and Stability of Numerical Algorithms", eq. 4.4). s is of all
    k before; or of the scale's group, if the group's sum is then multiplied by the scale and added to the total. The total of
    all k is multiplied, or divided, by the factor, and then the bias is added: a rounding each. Where a weight may be the
    sum of two numbers, there are twice as many products, and those of one weight may be larger than it.

    Examples:
        >>> a = np.ones((1, matrix.shape[1]))
        >>> y, error = reference.linear(matrix, a, np.zeros_like(a))
        >>> y.shape == (1, matrix.shape[0])
        True
    """
    format, given = matrix.format, read(matrix, rows)
    weights, flushed, scales, minima = given.scaled, denormal_weights(matrix, rows), given.scales, given.minima
    if rounding == "folded" and folds(matrix):
        weights, flushed, scales = round_bfloat16(weights), None, None  # as those of b16, and all normal or zero
    split = tuned_for == "prefill" and scales is not None and splits(matrix)
    of_terms = term_sizes(matrix, rows) if split else None
    group, block = _groups(given.group if scales is not None else 0, format, matrix.shape[1], block)
    forms = mode_of(activations).forms
    integers = forms != ("bf16",) and integer_unit(format) is not None  # may be; errors of bf16 rows are not smaller
    unit = integer_unit(format) if integers else 1.0
    limit = MAX_FLOAT32 / (1 + gamma(matrix.shape[1] + 1))
    total, eps, spread = (np.zeros((len(a), len(weights))) for _ in range(3))  # spread: what changed operands can have added
    less = _Minima(format.offset.scale.extent[1], total) if isinstance(format.offset, Minimum) else None
    for start in range(0, matrix.shape[1], block):
        if start % group == 0:
            of_this, in_group, sizes = np.zeros_like(total), 0.0, 0.0
        k = slice(start, start + block)
        w, size = weights[:, k].T, np.abs(a[:, k]) + eps_a[:, k]
        terms = size @ np.abs(w)
        if less and minima is not None:
            less.add(a[:, k], size, eps_a[:, k], minima[:, k].T)
            # x that is denormal may count as 0 in products, but not in the sums of x
            spread = spread + flush_to_zero(a[:, k], eps_a[:, k]) @ np.abs(minima[:, k].T)
        most = spread + terms + eps + (less.pending if less else 0.0)
        of_all, of_group = np.abs(total) + most + (less.sizes if less else 0.0), np.abs(of_this) + most
        n = len(w) + 1  # one for the scale
        overflow, flush, lost = of_all >= limit, (1 + gamma(n)) * n * TINY, 0.0
        if scales is not None:  # it may multiply the group's sum, and with it what that flushed or overflowed
            factor = np.abs(scales[:, start // group : -(-(start + block) // group)])
            smallest, largest = factor.min(axis=1), factor.max(axis=1)
            in_group, sizes = in_group + terms, sizes + size.sum(axis=1, keepdims=True)
            if group < len(w):  # several groups, each by its own
                own = np.repeat(factor, group, axis=1)[:, : len(w)].T
                unscaled = size @ np.where(own > 0, np.abs(w) / own, given.largest)
            else:
                unscaled = np.where(smallest > 0, in_group / smallest, sizes * given.largest)
            overflow |= (unscaled / unit >= limit) | (largest > MAX_FLOAT32)
            flush = flush * np.maximum(largest, 1.0)
            if format.element.family == "int" and integers:  # it may multiply the scale of x first, which is below |x|
                overflow |= size.max(axis=1, keepdims=True) * largest >= limit
            if format.super_scale:  # what rounding its product with a scale changes, where that is denormal
                lost = (smallest < TINY) * 2.0**-149 * sizes * given.largest
                flush = flush + lost
        sums = -(-len(w) // min(group, BLOCK))  # that are scaled and added to the total
        if "bf16" not in forms:  # each of the sums is exact
            of_sums = gamma(_before_the_fma(format, activations)) * terms + lost
            error = of_sums + gamma(sums) * (of_all + of_sums) + sums * TINY
        elif scales is None or (format.scales["scales"].kind in FOLDED_EXACTLY and not format.super_scale):
            # such a scale may also be folded into the weights, whose products are then added to the total
            error = gamma(n) * np.maximum(of_group, of_all) + flush
        else:
            error = gamma(n + bool(format.super_scale)) * of_group + gamma(sums) * of_all + flush
        if of_terms is not None and "bf16" in forms:
            of_two = of_all + size @ of_terms[:, k].T - terms
            overflow |= of_two >= limit
            error = np.maximum(error, gamma(2 * n) * of_two + (1 + gamma(2 * n)) * 2 * n * TINY)
        eps = np.where(overflow, np.inf, eps + error)
        added = a[:, k] @ w
        total, of_this = total + added, of_this + added
        if eps_a[:, k].any():
            spread = spread + eps_a[:, k] @ np.abs(w if minima is None else w - minima[:, k].T)
        if flushed is not None:
            spread = spread + size @ flushed[:, k].T
        if less and less.complete(start + block >= matrix.shape[1]):
            total, eps = less.subtract(total, eps, of_all, limit)
    return _finish(matrix, rows, total, eps + spread)


def _before_the_fma(format: WeightFormat, activations: str) -> int:
    """Roundings of an exact sum of integers, or of the scales that multiply it, before an FMA adds it to the total."""
    integers, bits = format.element.family == "int", format.element.bits
    of_float32 = integers and bits > 4 and activations == "int16"  # such a sum has more than 24 bits
    of_scales = integers and format.super_scale is not None and activations == "int8"  # that of x times the others
    of_wide = not integers and not small_integers(format)  # a sum, or its product with the scale of x, has more than 24 bits
    return of_float32 + of_scales + of_wide + (format.super_scale is not None)


def _groups(group: int, format: WeightFormat, k: int, block: int) -> tuple[int, int]:
    """The k that share a scale, all of them if there is none; and blocks that are parts of what shares a scale or a minimum, or
    whole ones. group: 0 if there is no scale."""
    lengths = [group] if group else []
    if isinstance(format.offset, Minimum):
        lengths.append(format.offset.scale.extent[1])
    while misfits := [length for length in lengths if length % block and block % length]:
        block = math.lcm(block, misfits[0])
    return group or -(-k // block) * block, block


class _Minima:
    """What the minima of unfinished groups will subtract: total = fma(-m, X, total), X a float32 sum of x in any order."""

    def __init__(self, length: int, total: np.ndarray):
        self.length, self._zeros = length, np.zeros_like(total)
        self._clear()

    def _clear(self) -> None:
        self.k, self.largest, self.x_sizes = 0, 0.0, 0.0
        self.products = self.sizes = self.pending = self._zeros  # m X; |m| times the sizes of x; what changed operands add

    def add(self, a: np.ndarray, size: np.ndarray, eps_a: np.ndarray, minima: np.ndarray) -> None:
        """Add what the minima of a block will subtract."""
        self.k += len(minima)
        self.x_sizes = self.x_sizes + size.sum(axis=1, keepdims=True)
        self.largest = np.maximum(self.largest, np.abs(minima).max(axis=0))
        self.products = self.products + a @ minima
        self.sizes = self.sizes + size @ np.abs(minima)
        self.pending = self.pending + eps_a @ np.abs(minima)

    def complete(self, at_end: bool) -> bool:
        """Whether groups of minima end here."""
        return at_end or self.k % self.length == 0

    def subtract(self, total: Any, eps: Any, of_all: Any, limit: Any) -> tuple[np.ndarray, np.ndarray]:
        """The total and its error after these groups; of_all is not less than any sum on the way."""
        of_x = gamma(min(self.k, self.length)) * self.sizes + self.k * TINY * self.largest
        fmas = -(-self.k // self.length)
        eps = eps + of_x + gamma(fmas) * (of_all + of_x) + fmas * TINY
        eps = np.where((self.x_sizes >= limit) | (of_all >= limit), np.inf, eps)
        total = total - self.products
        self._clear()
        return total, eps


def _finish(matrix: Matrix, rows: Any, total: np.ndarray, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A total after the factor and the bias, and its error."""
    if matrix.format.factor:
        of_row = factors(matrix, rows)
        eps = np.where(np.abs(total) + eps < MAX_FLOAT32, eps, np.inf)  # before the factor brings it back
        if matrix.format.factor.divides:
            total, eps = total / of_row, eps / np.abs(of_row)
        else:
            total, eps = total * of_row, eps * np.abs(of_row)
        eps = after_rounding(total, eps)
    if matrix.bias is not None:
        total = total + matrix.bias[rows]
        eps = after_rounding(total, eps)
    return total, eps
