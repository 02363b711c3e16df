"""The routed experts in float64, and a rigorous bound on a backend's error: what docs/numerics.md says, as code to be read.

Nothing here is shared with a kernel. Names follow the text: for one expert, g = gate(x), u = up(x), h = activation(g, u),
d = down(h); r is a router weight. Every `eps_v` bounds |what a backend has for v - v|, elementwise.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ktmoe.errors import InputError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.weights.activation import GatedActivation
from ktmoe.weights.formats import WeightFormat

#: Unit roundoff of float32, round to nearest.
UNIT = 2.0**-24
#: Smallest normal number of float32 and bfloat16: what a flush to zero can change a number by.
TINY = 2.0**-126
#: Largest finite float32.
MAX_FLOAT32 = float(np.finfo(np.float32).max)
#: A backend adds blocks of this many products in ascending k; within a block any order will do. Integers are quantised by it.
BLOCK = 32

#: A backend's exp(z), z float32: relative error at most this where 2**-126 <= exp(z) <= 2**126. Below, the result lies in
#: [0, 2**-126 * (1 + this)]; above, it is at least 2**126 * (1 - this), infinity included; exp(NaN) is NaN.
EXP_RELATIVE_ERROR = 2.0**-22
#: Roundings of an activation apart from its exp and the exp's argument: 1 + e, 1 / (1 + e), g * sigmoid, u + offset, product.
ACTIVATION_ROUNDINGS = 5

#: Where v * sigmoid(v) has its only minimum; it falls before and rises after.
SILU_MINIMUM = -1.2784645427610738

ROUTER_WEIGHTS = ("down_output", "down_input", "expert_input")
#: What a linear map takes: bfloat16 rows as they are, or each group of 32 as 16-bit integers times one power of two, or as
#: 8-bit integers times one bfloat16 number.
ACTIVATIONS = ("bf16", "int16", "int8")
#: "int8": the largest integer, and the least maximum of a group, whose scale is 2**-118.
LARGEST_INT8 = 127
LEAST_INT8_MAXIMUM = 127 * 2.0**-118
#: Scales, neighbouring bfloat16 numbers, that are tried where a group's is not certain; beyond, half of the largest is added.
INT8_SCALES = 8
#: What bfloat16 scales may do: multiply sums, or each weight, which is then rounded to bfloat16 in the matrices that folds().
ROUNDING = ("exact", "folded")


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


def dequantize(matrix: Matrix, rows=slice(None)) -> np.ndarray:
    """The real numbers that a matrix stands for, codebook[code] * scale or bfloat16, exactly, float64 [n, k].

    rows: an index along n, to read only some rows. Raises FormatError, which names the tensor, if the matrix holds a NaN.
    """
    matrix.refuse()
    codes = matrix.codes[rows]
    if matrix.format.family == "b16":
        return codes.astype(np.float64)
    codebook, byte = np.array(matrix.format.codebook), np.arange(256)
    pairs = np.stack([codebook[byte & 15], codebook[byte >> 4]], axis=1)  # low nibble = even k
    weights = pairs.take(codes, axis=0).reshape(-1, matrix.shape[1])
    weights *= np.repeat(_scales(matrix, rows), matrix.format.scale.extent[1], axis=1)[:, : matrix.shape[1]]
    return weights


def round_bfloat16(a: np.ndarray) -> np.ndarray:
    """The bfloat16 numbers nearest to float64 a, ties to even, as float64; denormals are kept, beyond the range is infinite."""
    a = np.asarray(a, dtype=np.float64)
    exponent = np.frexp(a)[1]  # |a| in [2**(exponent-1), 2**exponent); bfloat16 has 8 significant bits
    quantum = np.maximum(exponent - 8, -133)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(a, -quantum)), quantum)
    return np.where(np.isfinite(a), np.where(np.abs(rounded) < 2.0**128, rounded, np.copysign(np.inf, a)), a)


def integer_unit(format: WeightFormat) -> float | None:
    """The largest power of two, 2**-8 to 1, of which a codebook is multiples, by 16 at most; None if there is none."""
    if format.family == "q4" and format.scale.extent[1] % BLOCK == 0:
        for unit in 2.0 ** -np.arange(9):
            entries = np.array(format.codebook) / unit
            if (entries == np.rint(entries)).all() and np.abs(entries).max() <= 16:
                return float(unit)
    return None


def folds(matrix: Matrix) -> bool:
    """Whether rounding="folded" rounds a matrix's weights to bfloat16: if its scales are bfloat16, each normal or zero, and
    by their exponents and the codebook's no product, whether it occurs or not, is denormal, or above 2**127 when rounded.
    """
    if matrix.format.scale is None or matrix.format.scale.kind != "bf16":
        return False
    matrix.refuse()

    def exponents(values):
        sizes = np.abs(np.asarray(values, np.float64))
        return np.frexp(sizes[sizes > 0])[1] - 1  # floor(log2)

    scales, entries = exponents(matrix.scales), exponents(matrix.format.codebook)
    if not scales.size or not entries.size:
        return True
    least, most = scales.min() + entries.min(), scales.max() + entries.max()
    return bool(scales.min() >= -126 and least >= -126 and most + 2 <= 127)


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
    shards: Sequence[tuple[int, int]] | None = None,
) -> Reference:
    """The layer's output in float64 and the bound on the error of a backend that rounds its output to out_dtype.

    x: [tokens, hidden] bfloat16, uint16 that holds bfloat16 bits, or floats that are rounded to bfloat16.
    expert_ids: integers [tokens, top_k]; an id outside [0, num_experts), or whose expert_mask is False, adds zero.
    expert_weights: [tokens, top_k], float32. router_weight: what they multiply, one of ROUTER_WEIGHTS.
    columns: which outputs to compute, an index along hidden. To check samples, pass a few tokens' rows and a few columns.
    block: products that a backend may add in any order, see BLOCK; intermediate or hidden, whichever is larger, allows any.
    activations: what the linear maps take, one of ACTIVATIONS. Integers exist for the formats that have an integer_unit.
    rounding: one of ROUNDING. "folded": y and bound are those of a backend that rounds the weights of each matrix that folds().
    shards: (first, last) of each part of the intermediate dimension, ascending, if a backend computes an output for each
    part and then adds these in this order; y is the same.
    Experts are read and dequantised one matrix at a time, only those that are used. Raises InputError.
    """
    x, ids, weights, active = _inputs(experts, x, expert_ids, expert_weights, expert_mask)
    if router_weight not in ROUTER_WEIGHTS:
        raise InputError(f"router_weight must be one of {ROUTER_WEIGHTS}, found {router_weight!r}")
    if out_dtype not in ("bfloat16", "float32"):
        raise InputError(f"out_dtype must be 'bfloat16' or 'float32', found {out_dtype!r}")
    if activations not in ACTIVATIONS:
        raise InputError(f"activations must be one of {ACTIVATIONS}, found {activations!r}")
    if rounding not in ROUNDING:
        raise InputError(f"rounding must be one of {ROUNDING}, found {rounding!r}")
    if rounding == "folded" and activations != "bf16":
        raise InputError(
            f"rounding 'folded' needs activations 'bf16', found {activations!r}, which multiplies integers and folds no scale"
        )
    for projection, format in experts.formats.items():
        if activations != "bf16" and integer_unit(format) is None:
            raise InputError(
                f"activations {activations!r} need a codebook of integers up to 16 times one power of two from 2**-8 to 1,"
                f" and scales for groups of 32; {projection} of {experts.name} is {format.description}"
            )
    cuts = _cuts(experts, shards)
    y = np.zeros((len(cuts), len(x), len(np.arange(experts.hidden)[columns])))  # of each shard
    eps, size = np.zeros_like(y), np.zeros_like(y)
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        for expert in np.unique(ids[active]).tolist():
            token, slot = np.nonzero(active & (ids == expert))
            r = weights[token, slot][:, None]
            a = x[token]
            if router_weight == "expert_input":
                a = round_bfloat16((a * r).astype(np.float32))
            a, eps_a = operand(a, a, a, activations)
            g, eps_g = linear(experts.matrix(expert, "gate"), a, eps_a, block, activations, rounding)
            u, eps_u = linear(experts.matrix(expert, "up"), a, eps_a, block, activations, rounding)
            h, eps_h = activate(experts.activation, g, eps_g, u, eps_u)
            if router_weight == "down_input":
                h, eps_h = h * r, _rounding(h * r, np.abs(r) * eps_h)
            # rounding is monotone: a backend's h lies between the roundings of h - eps_h and h + eps_h
            h, eps_h = operand(*(round_bfloat16(v) for v in (h, h - eps_h, h + eps_h)), activations)
            down = experts.matrix(expert, "down")
            # the whole matrix folds or does not, whatever one of its parts might do
            of_down = "folded" if rounding == "folded" and folds(down) else "exact"
            if router_weight != "down_output":
                r = np.ones_like(r)
            for shard, (first, last) in enumerate(cuts):
                part, k = _part(down, first, last), slice(first, last)
                d, eps_d = linear(part, h[:, k], eps_h[:, k], block, activations, of_down, columns)
                np.add.at(y[shard], token, r * d)
                np.add.at(eps[shard], token, np.abs(r) * eps_d)
                np.add.at(size[shard], token, np.abs(r) * (np.abs(d) + eps_d))
        # a shard's sum of r * d, in any order: one rounding for the product and one per sum (Higham 2002, eq. 4.4)
        slots = active.sum(axis=1, keepdims=True)
        eps = eps + _gamma(slots + 1) * size + (slots + 1) * (slots > 0) * TINY
        eps = np.where(size + eps < MAX_FLOAT32, eps, np.inf)
        (y, *others), (eps, *eps_others) = y, eps
        for other, eps_other in zip(others, eps_others, strict=True):
            y = y + other
            eps = np.where(slots > 0, _rounding(y, eps + eps_other), 0.0)
        if out_dtype == "bfloat16":
            eps = np.maximum(round_bfloat16(y + eps) - y, y - round_bfloat16(y - eps)) + _flush(y, eps)
        eps = np.where(np.isfinite(y) & np.isfinite(eps), eps, np.inf)
    return Reference(y, eps)


def _cuts(experts: ExpertWeights, shards) -> list[tuple[int, int]]:
    """The shards, checked; one that is everything if there are none."""
    if shards is None:
        return [(0, experts.intermediate)]
    try:
        cuts = [(operator.index(first), operator.index(last)) for first, last in shards]
    except (TypeError, ValueError):
        cuts = []
    scale = experts.formats["down"].scale
    units = (BLOCK, scale.extent[1] if scale else BLOCK)  # groups of integers, groups of scales: neither may be cut
    ends = [0, *(last for _, last in cuts)]
    if (
        not cuts
        or [first for first, _ in cuts] != ends[:-1]
        or ends[-1] != experts.intermediate
        or any(first >= last or any(first % unit for unit in units) for first, last in cuts)
    ):
        raise InputError(
            f"shards must be (first, last) of parts that follow each other from 0 to {experts.intermediate}, each of them begun"
            f" at a multiple of {max(units)} and not empty, found {shards!r}"
        )
    return cuts


def _part(matrix: Matrix, first: int, last: int) -> Matrix:
    """A matrix with k from first to last, which are whole groups of scales; the bias goes with k = 0."""
    step, scale = matrix.format.codes_per_item, matrix.format.scale
    return replace(
        matrix,
        shape=(matrix.shape[0], last - first),
        codes=np.ascontiguousarray(matrix.codes[:, first // step : last // step]),
        scales=np.ascontiguousarray(matrix.scales[:, first // scale.extent[1] : -(-last // scale.extent[1])])
        if scale
        else None,
        bias=None if first else matrix.bias,
    )


def operand(a: np.ndarray, low: np.ndarray, high: np.ndarray, activations: str) -> tuple[np.ndarray, np.ndarray]:
    """What a linear map takes for bfloat16 rows a, and its error, given that a backend's rows lie between low and high."""
    if activations != "bf16":
        return _quantise(a, low, high, _int16 if activations == "int16" else _int8)
    eps = np.maximum(high - a, a - low)
    return a, eps + _flush(a, eps)


def _quantise(a: np.ndarray, low: np.ndarray, high: np.ndarray, integers) -> tuple[np.ndarray, np.ndarray]:
    """Each group of 32 as _int16 or _int8 make it, and what that can be off for rows between low and high."""
    tokens, k = a.shape
    a, low, high = (np.pad(v, ((0, 0), (0, -k % BLOCK))).reshape(tokens, -(-k // BLOCK), BLOCK) for v in (a, low, high))
    finite = np.isfinite(low + high).all(axis=2, keepdims=True)
    quantised, eps = integers(*(np.where(finite, v, 0.0) for v in (a, low, high)))
    quantised, eps = np.where(finite, quantised, np.nan), np.where(finite, eps, np.inf)
    return quantised.reshape(tokens, -1)[:, :k], eps.reshape(tokens, -1)[:, :k]


def _maxima(a: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The groups' maximum magnitudes: of a, and the least and the largest of anything between low and high."""
    return tuple(v.max(axis=2, keepdims=True) for v in (np.abs(a), np.maximum(low, -high), np.maximum(-low, high)))


def _int16(a: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each group, whose maximum is M: RNE(a / s) * s, where s = 2**(E - 14), E = floor(log2(M)), at least -126."""

    def nearest(v, e):
        return np.ldexp(np.rint(np.ldexp(v, 14 - e)), e - 14)

    own, least, most = (np.frexp(np.maximum(maximum, TINY))[1] - 1 for maximum in _maxima(a, low, high))
    quantised, eps = nearest(a, own), np.zeros_like(a)
    # nearest is monotone for one E; where M may be on either side of a power of two, it may be either E
    for step in range(int((most - least).max(initial=0)) + 1):
        e = np.minimum(least + step, most)
        eps = np.maximum(eps, np.maximum(nearest(high, e) - quantised, quantised - nearest(low, e)))
    return quantised, eps


def _int8(a: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each group, whose maximum is M, at least LEAST_INT8_MAXIMUM: RNE(a / s) * s, where s = M / 127, to bfloat16."""

    def nearest(v, s):
        # float64 rounds the quotient of two numbers of 8 bits neither to half an integer nor away from it
        return np.rint(v / s) * s

    own, least, most = (
        round_bfloat16(np.maximum(maximum, LEAST_INT8_MAXIMUM) / LARGEST_INT8) for maximum in _maxima(a, low, high)
    )
    quantised, eps = nearest(a, own), np.zeros_like(a)
    # nearest is monotone for one s; s is one of the bfloat16 numbers from least to most
    s = least
    for _ in range(INT8_SCALES):
        eps = np.maximum(eps, np.maximum(nearest(high, s) - quantised, quantised - nearest(low, s)))
        left = s < most
        if not left.any():
            break
        s = np.minimum(s + np.ldexp(1.0, np.frexp(s)[1] - 8), most)
    return quantised, np.where(left, np.maximum(high - quantised, quantised - low) + most / 2, eps)


def linear(
    matrix: Matrix,
    a: np.ndarray,
    eps_a: np.ndarray,
    block: int = BLOCK,
    activations: str = "bf16",
    rounding: str = "exact",
    rows=slice(None),
) -> tuple[np.ndarray, np.ndarray]:
    """a @ W.T + bias, and the error of a float32 sum of exact products that adds blocks in ascending k.

    Where a sum before a block is s, none inside it exceeds |s| + sum |a w|, and adding n products takes n roundings in any
    order: an error of gamma(n) times that (Higham 2002, "Accuracy and Stability of Numerical Algorithms", eq. 4.4). s is of all
    k before; or of the scale's group, if the group's sum is then multiplied by the scale and added to the total.
    """
    weights, flushed, scale = dequantize(matrix, rows), _denormal_weights(matrix, rows), matrix.format.scale
    if rounding == "folded" and folds(matrix):
        weights, flushed, scale = round_bfloat16(weights), None, None  # as those of b16, and all normal or zero
    factors = np.abs(_scales(matrix, rows)) if scale else None
    group = scale.extent[1] if scale else -(-matrix.shape[1] // block) * block
    if group % block:
        block = -(-block // group) * group  # blocks are parts of groups, or whole groups
    unit = integer_unit(matrix.format) if activations != "bf16" else 1.0
    limit = MAX_FLOAT32 / (1 + _gamma(matrix.shape[1] + 1))
    total, eps, spread = (np.zeros((len(a), len(weights))) for _ in range(3))  # spread: what changed operands can have added
    for start in range(0, matrix.shape[1], block):
        if start % group == 0:
            before, in_group, sizes = total, 0.0, 0.0
        k = slice(start, start + block)
        w, size = weights[:, k].T, np.abs(a[:, k]) + eps_a[:, k]
        terms = size @ np.abs(w)
        of_all, of_group = (np.abs(s) + spread + terms + eps for s in (total, total - before))
        n = len(w) + 1  # one for the scale
        overflow, flush = of_all >= limit, (1 + _gamma(n)) * n * TINY
        if scale:  # it may multiply the group's sum, and with it what that flushed or overflowed
            groups = factors[:, start // group : -(-(start + block) // group)]
            smallest, largest = groups.min(axis=1), groups.max(axis=1)
            in_group, sizes = in_group + terms, sizes + size.sum(axis=1, keepdims=True)
            unscaled = np.where(smallest > 0, in_group / smallest, sizes * np.abs(matrix.format.codebook).max())
            overflow, flush = overflow | (unscaled / unit >= limit), flush * np.maximum(largest, 1.0)
        sums = -(-len(w) // min(group, BLOCK))  # that are scaled and added to the total
        if activations != "bf16":  # each of them is exact
            error = _gamma(sums) * of_all + sums * TINY
        elif scale and scale.kind == "bf16":
            error = _gamma(n) * of_group + _gamma(sums) * of_all + flush
        else:  # a power of two may also be folded into the weights, whose products are then added to the total
            error = _gamma(n) * np.maximum(of_group, of_all) + flush
        eps = np.where(overflow, np.inf, eps + error)
        total = total + a[:, k] @ w
        if eps_a[:, k].any():
            spread = spread + eps_a[:, k] @ np.abs(w)
        if flushed is not None:
            spread = spread + size @ flushed[:, k].T
    eps = eps + spread
    if matrix.bias is not None:
        total = total + matrix.bias[rows]
        eps = _rounding(total, eps)
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
    relative = (1 + _gamma(ACTIVATION_ROUNDINGS)) / (1 - error_divisor) - 1
    eps_s = eps_s + relative * (np.abs(s) + eps_s) + 2 * TINY * (1 + largest)

    t_low, t, t_high = (np.clip(v, -limit, limit) + offset for v in (u - eps_u, u, u + eps_u))
    eps_t = np.maximum(t_high - t, t - t_low)
    eps = np.abs(t) * eps_s + eps_t * (np.abs(s) + eps_s) + 2 * TINY
    return t * s, np.where((np.abs(t) + eps_t) * (1 + largest) < MAX_FLOAT32, eps, np.inf)


def _gamma(roundings):
    """Higham's gamma_n = n u / (1 - n u): the relative error of n float32 roundings. The last factor pays for float64's own."""
    return roundings * UNIT / (1 - roundings * UNIT) * (1 + 2.0**-20)


def _rounding(value: np.ndarray, eps: np.ndarray) -> np.ndarray:
    """The error after one more float32 operation whose exact result is value and whose operands' error amounts to eps."""
    eps = eps + _gamma(1) * (np.abs(value) + eps) + TINY
    return np.where(np.abs(value) + eps < MAX_FLOAT32, eps, np.inf)


def _flush(value: np.ndarray, eps) -> np.ndarray:
    """What flushing a denormal number to zero can change, for a number within eps of value."""
    size = np.abs(value)
    return np.where(size - eps <= TINY, np.minimum(size + eps, TINY), 0.0)  # TINY itself may be a denormal that was rounded up


def _scales(matrix: Matrix, rows) -> np.ndarray:
    """The scales of the groups of each of the rows, float64 [n, groups]."""
    scale = matrix.format.scale
    stored = matrix.scales[np.arange(matrix.shape[0])[rows] // scale.extent[0]]
    return np.ldexp(1.0, stored.astype(np.int32) - 127) if scale.kind == "ue8m0" else stored.astype(np.float64)


def _denormal_weights(matrix: Matrix, rows) -> np.ndarray | None:
    """|w| where the bfloat16 number of the weight, or of its code, is denormal and may count as 0; else 0. None if none is."""
    if matrix.format.family == "b16":
        size = np.abs(dequantize(matrix, rows))
        size[size >= TINY] = 0
        return size if size.any() else None
    codebook = tuple(v if abs(v) < TINY else 0.0 for v in matrix.format.codebook)
    if not any(codebook):
        return None
    return np.abs(dequantize(replace(matrix, format=replace(matrix.format, codebook=codebook)), rows))


def _inputs(experts: ExpertWeights, x, expert_ids, expert_weights, expert_mask):
    """x as float64 bfloat16 numbers, ids, weights as float64 float32 numbers, and which slots count."""
    x, ids = np.asarray(x), np.asarray(expert_ids)
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
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
    return round_bfloat16(x.astype(np.float64)), ids, weights, active
