"""A layer's output in float64, and a rigorous bound on a backend's error: what docs/numerics.md says, as code to be read.

Names follow the text: for one expert, g = gate(x), u = up(x), h = activation(g, u), d = down(h); r is a router weight.
Every `eps_v` bounds |what a backend has for v - v|, elementwise.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktmoe.errors import InputError
from ktmoe.experts import ROUTER_WEIGHTS, ExpertWeights, checked_experts
from ktmoe.modes import mode_of
from ktmoe.reference.activation import activate
from ktmoe.reference.errors import MAX_FLOAT32, after_rounding, gamma
from ktmoe.reference.linear_map import linear
from ktmoe.reference.operands import flush_to_zero, operand
from ktmoe.reference.weights import BLOCK, INTEGER_KINDS, TINY, columns_of, folds, integer_unit, round_bfloat16, splits

#: What bfloat16 and fp16 scales may do: multiply sums, or each weight, which is then rounded to bfloat16 in the matrices that
#: folds().
ROUNDING = ("exact", "folded")
#: What kernels are chosen for. "prefill": weights may be sums of two numbers, in the matrices that a backend splits().
TUNED_FOR = ("decode", "prefill")


@dataclass(frozen=True)
class Reference:
    """y: float64 [tokens, columns], not rounded to the output dtype. bound: float64, |a backend's output - y| <= bound.

    The bound is infinite where a non-finite input or a possible overflow of float32 or bfloat16 leaves nothing to compare.

    Examples:
        >>> expected = reference.forward(experts, x, ids, weights, router_weight=layer.router_weight, out_dtype="float32")
        >>> expected.worst(layer.forward(x, ids, weights)) <= 1
        True
    """

    y: np.ndarray
    bound: np.ndarray

    def error(self, actual: np.ndarray) -> np.ndarray:
        """|actual - y| / bound, elementwise: at most 1 if a backend is right; NaN is infinite, unless the bound is: then 0.

        Examples:
            >>> Reference(y=np.array([[1.0]]), bound=np.array([[0.5]])).error(np.array([[1.25]]))
            array([[0.5]])
        """
        with np.errstate(divide="ignore", invalid="ignore"):  # infinity less infinity, and zero by zero
            difference = np.abs(np.asarray(actual).astype(np.float64) - self.y)
            difference = np.where(np.isnan(difference), np.inf, difference)
            ratio = np.where(difference == 0, 0.0, difference / self.bound)
        return np.where(np.isinf(self.bound), 0.0, ratio)

    def worst(self, actual: np.ndarray) -> float:
        """The largest error(actual).

        Examples:
            >>> Reference(y=np.array([[1.0]]), bound=np.array([[0.5]])).worst(np.array([[1.25]]))
            0.5
        """
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
    shards: (first, last) of each in the intermediate dimension, ascending, if a backend computes an output for each
    shard and then adds these in this order; y is the same. Each begins at a multiple of experts.shard_unit.
    Experts are read and dequantised one matrix at a time, only those that are used. Raises InputError.

    Examples:
        >>> expected = reference.forward(experts, x, ids, weights)
        >>> expected.y.dtype, expected.y.shape == x.shape
        (dtype('float64'), True)
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
            h, low, high = (round_bfloat16(v) for v in (h, h - eps_h, h + eps_h))
            h, eps_h = operand(h, low, high, of_h)
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
                d, eps_d = linear(columns_of(down, first, last), h[:, k], eps_h[:, k], block, activations, *of_down, columns)
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


def checked_cuts(experts: ExpertWeights, shards: Any) -> list[tuple[int, int]]:
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
            f"shards must be (first, last) that follow each other from 0 to {experts.intermediate}, each of them begun"
            f" at a multiple of {unit} and not empty, found {shards!r}"
        )
    return cuts


def checked_batch(experts: ExpertWeights, x: Any, expert_ids: Any, expert_weights: Any, expert_mask: Any) -> Any:
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


def bfloat16_rows(x: Any) -> np.ndarray:
    """bfloat16, uint16 that holds its bits, or floats that are rounded to it, as float64."""
    x = np.asarray(x)
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return round_bfloat16(x.astype(np.float64))
