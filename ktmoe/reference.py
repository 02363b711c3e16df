"""The routed experts in float64, and a rigorous bound on a backend's error: what docs/numerics.md says, as code to be read.

Nothing here is shared with a kernel. Names follow the text: for one expert, g = gate(x), u = up(x), h = activation(g, u),
d = down(h); r is a router weight. Every `eps_v` bounds |what a backend has for v - v|, elementwise.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ktmoe.errors import InputError
from ktmoe.experts import ROUTER_WEIGHTS, ExpertWeights, Matrix, checked_experts
from ktmoe.modes import mode_of
from ktmoe.reference_errors import MAX_FLOAT32, UNIT, after_rounding, gamma
from ktmoe.reference_operands import flush_to_zero, operand
from ktmoe.reference_weights import (
    BLOCK,
    INTEGER_KINDS,
    TINY,
    denormal_weights,
    dequantize,
    factors,
    folds,
    integer_unit,
    part,
    read,
    round_bfloat16,
    splits,
    term_sizes,
)
from ktmoe.weights.activation import GatedActivation
from ktmoe.weights.formats import Minimum, WeightFormat

__all__ = [
    "ACTIVATION_ROUNDINGS",
    "BLOCK",
    "EXP_RELATIVE_ERROR",
    "MAX_FLOAT32",
    "ROUNDING",
    "ROUTER_WEIGHTS",
    "TINY",
    "TUNED_FOR",
    "UNIT",
    "Reference",
    "activate",
    "dequantize",
    "folds",
    "forward",
    "integer_unit",
    "linear",
    "operand",
    "round_bfloat16",
    "splits",
]

#: A backend's exp(z), z float32: relative error at most this where 2**-126 <= exp(z) <= 2**126. Below, the result lies in
#: [0, 2**-126 * (1 + this)]; above, it is at least 2**126 * (1 - this), infinity included; exp(NaN) is NaN.
EXP_RELATIVE_ERROR = 2.0**-22
#: Roundings of an activation apart from its exp and the exp's argument: 1 + e, 1 / (1 + e), g * sigmoid, u + offset, product.
ACTIVATION_ROUNDINGS = 5

#: Where v * sigmoid(v) has its only minimum; it falls before and rises after.
SILU_MINIMUM = -1.2784645427610738

#: What bfloat16 and fp16 scales may do: multiply sums, or each weight, which is then rounded to bfloat16 in the matrices that
#: folds().
ROUNDING = ("exact", "folded")
#: What kernels are chosen for. "prefill": weights may be sums of two numbers, in the matrices that a backend splits().
TUNED_FOR = ("decode", "prefill")
#: Scale kinds that a backend may fold into weights that are bfloat16 numbers then, exactly.
FOLDED_EXACTLY = ("ue8m0", "e4m3")


@dataclass(frozen=True)
class Reference:
    """y: float64 [tokens, columns], not rounded to the output dtype. bound: float64, |a backend's output - y| <= bound.

    The bound is infinite where a non-finite input or a possible overflow of float32 or bfloat16 leaves nothing to compare.
    """

    y: np.ndarray
    bound: np.ndarray

    def error(self, actual: np.ndarray) -> np.ndarray:
        """|actual - y| / bound, elementwise: at most 1 if a backend is right; NaN is infinite, unless the bound is: then 0."""
        difference = np.abs(np.asarray(actual).astype(np.float64) - self.y)
        difference = np.where(np.isnan(difference), np.inf, difference)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(difference == 0, 0.0, difference / self.bound)
        return np.where(np.isinf(self.bound), 0.0, ratio)

    def worst(self, actual: np.ndarray) -> float:
        """The largest error(actual)."""
        return float(self.error(actual).max(initial=0.0))


def forward(
    experts: ExpertWeights,
    x: np.ndarray,
    expert_ids: np.ndarray,
    expert_weights: np.ndarray,
    *,
    expert_mask: np.ndarray | None = None,
    router_weight: str = "down_output",
    out_dtype: str = "bfloat16",
    columns: np.ndarray | slice = slice(None),
    block: int = BLOCK,
    activations: str = "bf16",
    rounding: str = "exact",
    tuned_for: str = "decode",
    shards: Sequence[tuple[int, int]] | None = None,
) -> Reference:
    """The layer's output in float64 and the bound on the error of a backend that rounds its output to out_dtype.

    x: [tokens, hidden] bfloat16, uint16 that holds bfloat16 bits, or floats that are rounded to bfloat16.
    expert_ids: integers [tokens, top_k]; an id outside [0, num_experts), or whose expert_mask is False, adds zero.
    expert_weights: [tokens, top_k], float32. router_weight: what they multiply, one of ROUTER_WEIGHTS.
    columns: which outputs to compute, an index along hidden. To check samples, pass a few tokens' rows and a few columns.
    block: products that a backend may add in any order, see BLOCK; intermediate or hidden, whichever is larger, allows any.
    activations: what the linear maps take, the name of a mode as ktmoe.modes has it. "int16" and "int8" exist for the formats
    that have an integer_unit. Of MX modes the bound holds for each form of rows that a backend may have.
    rounding: one of ROUNDING. "folded": y and bound are those of a backend that rounds the weights of each matrix that folds().
    tuned_for: one of TUNED_FOR. "prefill": the bound also holds for a backend that multiplies by two numbers a weight in each
    matrix that splits(); y is the same.
    shards: (first, last) of each part of the intermediate dimension, ascending, if a backend computes an output for each
    part and then adds these in this order; y is the same. Each begins at a multiple of experts.shard_unit.
    Experts are read and dequantised one matrix at a time, only those that are used. Raises InputError.
    """
    x, ids, weights, active = checked_batch(experts, x, expert_ids, expert_weights, expert_mask)
    if router_weight not in ROUTER_WEIGHTS:
        raise InputError(f"router_weight must be one of {ROUTER_WEIGHTS}, found {router_weight!r}")
    if out_dtype not in ("bfloat16", "float32"):
        raise InputError(f"out_dtype must be 'bfloat16' or 'float32', found {out_dtype!r}")
    if rounding not in ROUNDING:
        raise InputError(f"rounding must be one of {ROUNDING}, found {rounding!r}")
    if tuned_for not in TUNED_FOR:
        raise InputError(f"tuned_for must be one of {TUNED_FOR}, found {tuned_for!r}")
    mode = mode_of(activations)
    integers = "bf16" not in mode.forms
    if rounding == "folded" and integers:
        raise InputError(
            f"rounding 'folded' needs bf16 rows, found activations {activations!r}, which multiply integers and fold no scale"
        )
    for projection, format in experts.formats.items():
        if integers and integer_unit(format) is None:
            raise InputError(
                f"activations {activations!r} need 8-bit integers, or 4-bit ones up to 16, less zero points, times one power of"
                f" two from 2**-8 to 1, without scales or with {', '.join(INTEGER_KINDS)} scales per 1x32, a multiple of it or,"
                f" of 4 bits, 1x16, and without minima and super-scales; {projection} of {experts.name} is"
                f" {format.description}"
            )
    cuts = checked_cuts(experts, shards)
    of_x, of_h = (mode.name if integers else side or "bf16" for side in (mode.x, mode.h))
    how = block, activations, rounding, tuned_for
    y = np.zeros((len(cuts), len(x), len(np.arange(experts.hidden)[columns])))  # of each shard
    eps, size = np.zeros_like(y), np.zeros_like(y)
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        for expert in np.unique(ids[active]).tolist():
            token, slot = np.nonzero(active & (ids == expert))
            r = weights[token, slot][:, None]
            a = x[token]
            if router_weight == "expert_input":
                a = round_bfloat16((a * r).astype(np.float32))
            a, eps_a = operand(a, a, a, of_x)
            g, eps_g = linear(experts.matrix(expert, "gate"), a, eps_a, *how)
            u, eps_u = linear(experts.matrix(expert, "up"), a, eps_a, *how)
            h, eps_h = activate(experts.activation, g, eps_g, u, eps_u)
            if router_weight == "down_input":
                h, eps_h = h * r, after_rounding(h * r, np.abs(r) * eps_h)
            # rounding is monotone: a backend's h lies between the roundings of h - eps_h and h + eps_h
            h, eps_h = operand(*(round_bfloat16(v) for v in (h, h - eps_h, h + eps_h)), of_h)
            down = experts.matrix(expert, "down")
            # the whole matrix folds or does not, whatever one of its parts might do
            of_down = (
                "folded" if rounding == "folded" and folds(down) else "exact",
                "prefill" if tuned_for == "prefill" and splits(down) else "decode",
            )
            if router_weight != "down_output":
                r = np.ones_like(r)
            for shard, (first, last) in enumerate(cuts):
                k = slice(first, last)
                d, eps_d = linear(part(down, first, last), h[:, k], eps_h[:, k], block, activations, *of_down, columns)
                np.add.at(y[shard], token, r * d)
                np.add.at(eps[shard], token, np.abs(r) * eps_d)
                np.add.at(size[shard], token, np.abs(r) * (np.abs(d) + eps_d))
        # a shard's sum of r * d, in any order: one rounding for the product and one per sum (Higham 2002, eq. 4.4)
        slots = active.sum(axis=1, keepdims=True)
        eps = eps + gamma(slots + 1) * size + (slots + 1) * (slots > 0) * TINY
        eps = np.where(size + eps < MAX_FLOAT32, eps, np.inf)
        (y, *others), (eps, *eps_others) = y, eps
        for other, eps_other in zip(others, eps_others, strict=True):
            y = y + other
            eps = np.where(slots > 0, after_rounding(y, eps + eps_other), 0.0)
        if out_dtype == "bfloat16":
            eps = np.maximum(round_bfloat16(y + eps) - y, y - round_bfloat16(y - eps)) + flush_to_zero(y, eps)
        eps = np.where(np.isfinite(y) & np.isfinite(eps), eps, np.inf)
    return Reference(y, eps)


def checked_cuts(experts: ExpertWeights, shards) -> list[tuple[int, int]]:
    """The shards, checked; one that is everything if there are none."""
    if shards is None:
        return [(0, experts.intermediate)]
    try:
        cuts = [(operator.index(first), operator.index(last)) for first, last in shards]
    except (TypeError, ValueError):
        cuts = []
    unit = experts.shard_unit  # whole blocks of integers, and no cut through what shares a scale
    ends = [0, *(last for _, last in cuts)]
    if (
        not cuts
        or [first for first, _ in cuts] != ends[:-1]
        or ends[-1] != experts.intermediate
        or any(first >= last or first % unit for first, last in cuts)
    ):
        raise InputError(
            f"shards must be (first, last) of parts that follow each other from 0 to {experts.intermediate}, each of them begun"
            f" at a multiple of {unit} and not empty, found {shards!r}"
        )
    return cuts


def linear(
    matrix: Matrix,
    a: np.ndarray,
    eps_a: np.ndarray,
    block: int = BLOCK,
    activations: str = "bf16",
    rounding: str = "exact",
    tuned_for: str = "decode",
    rows=slice(None),
) -> tuple[np.ndarray, np.ndarray]:
    """a @ W.T, times the factor, + bias, and the error of a float32 sum of exact products that adds blocks in ascending k.

    a is as operand() made it. activations: the mode; rows may have any of its forms that the format has kernels for.
    Where a sum before a block is s, none inside it exceeds |s| + sum |a w|, and adding n products takes n roundings in any
    order: an error of gamma(n) times that (Higham 2002, "Accuracy and Stability of Numerical Algorithms", eq. 4.4). s is of all
    k before; or of the scale's group, if the group's sum is then multiplied by the scale and added to the total. The total of
    all k is multiplied, or divided, by the factor, and then the bias is added: a rounding each. Where a weight may be the
    sum of two numbers, there are twice as many products, and those of one weight may be larger than it.
    """
    format, given = matrix.format, read(matrix, rows)
    weights, flushed, scales, minima = given.scaled, denormal_weights(matrix, rows), given.scales, given.minima
    if rounding == "folded" and folds(matrix):
        weights, flushed, scales = round_bfloat16(weights), None, None  # as those of b16, and all normal or zero
    split = tuned_for == "prefill" and scales is not None and splits(matrix)
    of_terms = term_sizes(matrix, rows) if split else None
    group, block = _groups(given.group if scales is not None else None, format, matrix.shape[1], block)
    forms = mode_of(activations).forms
    integers = forms != ("bf16",) and integer_unit(format) is not None  # may be; errors of bf16 rows are not smaller
    unit = integer_unit(format) if integers else 1.0
    limit = MAX_FLOAT32 / (1 + gamma(matrix.shape[1] + 1))
    total, eps, spread = (np.zeros((len(a), len(weights))) for _ in range(3))  # spread: what changed operands can have added
    less = _Minima(format.offset.scale.extent[1], total) if minima is not None else None
    for start in range(0, matrix.shape[1], block):
        if start % group == 0:
            of_this, in_group, sizes = np.zeros_like(total), 0.0, 0.0
        k = slice(start, start + block)
        w, size = weights[:, k].T, np.abs(a[:, k]) + eps_a[:, k]
        terms = size @ np.abs(w)
        if less:
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
            if format.family == "i8" and integers:  # it may multiply the scale of x first, which is below |x|
                overflow |= size.max(axis=1, keepdims=True) * largest >= limit
            if format.super_scale:  # what rounding its product with a scale changes, where that is denormal
                lost = (smallest < TINY) * 2.0**-149 * sizes * given.largest
                flush = flush + lost
        sums = -(-len(w) // min(group, BLOCK))  # that are scaled and added to the total
        if "bf16" not in forms:  # each of the sums is exact
            of_sums = gamma(_before_the_fma(format, activations)) * terms + lost
            error = of_sums + gamma(sums) * (of_all + of_sums) + sums * TINY
        elif scales is None or (format.scale.kind in FOLDED_EXACTLY and not format.super_scale):
            # such a scale may also be folded into the weights, whose products are then added to the total
            error = gamma(n) * np.maximum(of_group, of_all) + flush
        else:
            error = gamma(n + bool(format.super_scale)) * of_group + gamma(sums) * of_all + flush
        if split and "bf16" in forms:
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
    of_float32 = format.family == "i8" and activations == "int16"  # such a sum has more than 24 bits
    of_scales = format.super_scale is not None and format.family == "i8" and activations == "int8"  # that of x times the others
    return of_float32 + of_scales + (format.super_scale is not None)


def _groups(group: int | None, format: WeightFormat, k: int, block: int) -> tuple[int, int]:
    """The k that share a scale, all of them if there is none; and blocks that are parts of what shares a scale or a minimum, or
    whole ones."""
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
        """Of a block."""
        self.k += len(minima)
        self.x_sizes = self.x_sizes + size.sum(axis=1, keepdims=True)
        self.largest = np.maximum(self.largest, np.abs(minima).max(axis=0))
        self.products = self.products + a @ minima
        self.sizes = self.sizes + size @ np.abs(minima)
        self.pending = self.pending + eps_a @ np.abs(minima)

    def complete(self, at_end: bool) -> bool:
        """Whether groups end here."""
        return at_end or self.k % self.length == 0

    def subtract(self, total, eps, of_all, limit) -> tuple[np.ndarray, np.ndarray]:
        """The total and its error after these groups; of_all is not less than any sum on the way."""
        of_x = gamma(min(self.k, self.length)) * self.sizes + self.k * TINY * self.largest
        fmas = -(-self.k // self.length)
        eps = eps + of_x + gamma(fmas) * (of_all + of_x) + fmas * TINY
        eps = np.where((self.x_sizes >= limit) | (of_all >= limit), np.inf, eps)
        total = total - self.products
        self._clear()
        return total, eps


def _finish(matrix: Matrix, rows, total: np.ndarray, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


def activate(
    activation: GatedActivation, g: np.ndarray, eps_g: np.ndarray, u: np.ndarray, eps_u: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(u' + up_offset) * g' * sigmoid(alpha * g') before its rounding to bfloat16; GatedActivation has the formula's source.

    The inputs' errors pass through as intervals: the clamps are monotone, and v * sigmoid(alpha * v) falls to its minimum
    and then rises. Parameters are float32 numbers for a backend, so they are rounded to float32 here.
    """
    alpha, limit, offset = (float(np.float32(v)) for v in (activation.alpha, activation.limit, activation.up_offset))

    def gate(v):
        return v / (1 + np.exp(-alpha * v))

    low, middle, high = (np.minimum(v, limit) for v in (g - eps_g, g, g + eps_g))
    s, lowest = gate(middle), np.clip(SILU_MINIMUM / alpha, low, high)
    eps_s = np.maximum(s - gate(lowest), np.maximum(np.abs(gate(low) - s), np.abs(gate(high) - s)))
    # e = exp(-alpha g) has a relative error from its rounded argument and its own; 1 + e has e / (1 + e) of it. Beyond
    # |alpha g| = 100 sigmoid or e is below 2**-126 whatever their errors, which the last term covers.
    largest = np.maximum(np.abs(low), np.abs(high))
    error_e = np.exp(UNIT * np.minimum(alpha * largest, 100.0)) * (1 + EXP_RELATIVE_ERROR) - 1
    error_divisor = error_e / (1 + np.exp(alpha * low))
    relative = (1 + gamma(ACTIVATION_ROUNDINGS)) / (1 - error_divisor) - 1
    eps_s = eps_s + relative * (np.abs(s) + eps_s) + 2 * TINY * (1 + largest)

    t_low, t, t_high = (np.clip(v, -limit, limit) + offset for v in (u - eps_u, u, u + eps_u))
    eps_t = np.maximum(t_high - t, t - t_low)
    eps = np.abs(t) * eps_s + eps_t * (np.abs(s) + eps_s) + 2 * TINY
    return t * s, np.where((np.abs(t) + eps_t) * (1 + largest) < MAX_FLOAT32, eps, np.inf)


def checked_batch(experts: ExpertWeights, x, expert_ids, expert_weights, expert_mask):
    """x as float64 bfloat16 numbers, ids, weights as float64 float32 numbers, and which slots count. Raises InputError."""
    checked_experts(experts)
    x, ids = bfloat16_rows(x), np.asarray(expert_ids)
    weights = np.asarray(expert_weights).astype(np.float32).astype(np.float64)
    if x.ndim != 2 or x.shape[1] != experts.hidden:
        raise InputError(f"x must be [tokens, {experts.hidden}], found {list(x.shape)}")
    if ids.ndim != 2 or len(ids) != len(x) or ids.dtype.kind not in "iu" or ids.shape != weights.shape:
        raise InputError(
            f"expert_ids and expert_weights must be [{len(x)}, top_k], ids integer,"
            f" found {ids.dtype} {list(ids.shape)} and {list(weights.shape)}"
        )
    active = (ids >= 0) & (ids < experts.num_experts)
    if expert_mask is not None:
        mask = np.asarray(expert_mask)
        if mask.dtype != bool or mask.shape != (experts.num_experts,):
            raise InputError(f"expert_mask must be bool [{experts.num_experts}], found {mask.dtype} {list(mask.shape)}")
        active &= mask[np.where(active, ids, 0)]
    return x, ids, weights, active


def bfloat16_rows(x) -> np.ndarray:
    """bfloat16, uint16 that holds its bits, or floats that are rounded to it, as float64."""
    x = np.asarray(x)
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return round_bfloat16(x.astype(np.float64))
