"""Backends simulated in float32 numpy, for the tests of the reference's bound."""

import ml_dtypes
import numpy as np
from helpers import SUPER_SCALED, WHOLE
from reference_experts import BFLOAT16

from ktmoe import reference
from ktmoe.modes import mode_of
from ktmoe.reference import BLOCK, EXP_RELATIVE_ERROR, TINY, forward
from ktmoe.weights.elements import E2M1, INT8_PLUS_128, UINT4
from ktmoe.weights.formats import (
    BF16,
    FP8_PER_ROW,
    MXFP4,
    MXFP8,
    Minimum,
    Scale,
    WeightFormat,
    ZeroPoint,
    fp8,
    int4,
    int8,
    nvfp4,
    uint4,
)
from ktmoe.weights.order import AWQ, GPTQ


def flushed(a):
    return np.where(np.abs(a) < TINY, np.float32(0), a)


def fma(a, b, c):
    """a * b + c in float32, rounded once: first in float64 and to odd, which the second rounding cannot mistake for a tie."""
    product = a.astype(np.float64) * b  # exact
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)  # exact (Knuth's TwoSum)
    inexact = (lost != 0) & (total.view(np.int64) % 2 == 0)
    return np.where(inexact, np.nextafter(total, np.copysign(np.inf, lost)), total).astype(np.float32)


def int16_rows(a):
    """Integers [tokens, k] and steps [tokens, groups of 32], by integer arithmetic on the bits of bfloat16 numbers."""
    tokens, k = a.shape
    bits = np.pad(a.astype(BFLOAT16).view(np.uint16).astype(np.int64), ((0, 0), (0, -k % 32))).reshape(tokens, -1, 32)
    exponent = np.maximum(bits >> 7 & 255, 1)
    most = exponent.max(axis=2, keepdims=True)
    significand = (bits & 127 | 128 * (bits >> 7 & 255 > 0)) << 7
    shift = np.minimum(most - exponent, 40)
    q = (significand + (1 << shift >> 1) - (shift > 0) + (shift > 0) * (significand >> shift & 1)) >> shift  # half to even
    step = np.where(most == 255, np.nan, np.ldexp(1.0, most - 127 - 14)).astype(np.float32)
    return np.where(bits >> 15, -q, q).reshape(tokens, -1)[:, :k], step[..., 0]


def int8_rows(a):
    """The same for int8, in float32: what is rounded twice is rounded right, as docs/numerics.md has it."""
    tokens, k = a.shape
    groups = np.pad(a.astype(np.float32), ((0, 0), (0, -k % 32))).reshape(tokens, -1, 32)
    largest = np.maximum(np.abs(groups).max(axis=2, keepdims=True), np.float32(127 * 2.0**-118))
    step = (largest / np.float32(127)).astype(BFLOAT16).astype(np.float32)
    step = np.where(np.isfinite(groups).all(axis=2, keepdims=True), step, np.float32(np.nan))
    q = np.nan_to_num(np.rint(groups / step)).astype(np.int64)
    return q.reshape(tokens, -1)[:, :k], step[..., 0]


def power_rows(a):
    """The same for int8 rows of MXFP4's numbers, which are integers of at most 12 times a power of two in each block."""
    tokens, k = a.shape
    groups = np.pad(a.astype(np.float32), ((0, 0), (0, -k % 32))).reshape(tokens, -1, 32)
    finite = np.isfinite(groups).all(axis=2, keepdims=True)
    groups = np.where(finite, groups, np.float32(0))
    exponent = np.maximum(np.frexp(np.abs(groups).max(axis=2, keepdims=True))[1] - 1, -126)
    q = np.ldexp(groups, 3 - exponent)
    assert np.array_equal(q, np.rint(q))
    assert np.abs(q).max() <= 12
    step = np.where(finite, np.ldexp(np.float32(1), exponent - 3), np.float32(np.nan))
    return q.astype(np.int64).reshape(tokens, -1)[:, :k], step[..., 0]


#: target and rule: the largest magnitude from which on a block's scale is 2 instead of 1.
MX_LIMITS = {
    "mxfp4": {"floor": 8.0, "gguf": 8.0, "round": 6 * 2**0.5, "even": 7.0, "quark": 7.0, "ceil": np.nextafter(6, 7)},
    "mxfp8": {
        "floor": 512.0,
        "round": 448 * 2**0.5,
        "even": 496.0,
        "compressed-tensors": 448.0,
        "ceil": np.nextafter(448, 449),
    },
}
MX_LIMITS["mxfp4"]["modelopt"] = MX_LIMITS["mxfp4"]["ceil"]


def mx_scales(blocks, rule):
    """The scales of blocks [tokens, blocks, k], by a table of all scales."""
    limits = np.ldexp(MX_LIMITS[rule.target][rule.name], np.arange(-127, 127))
    return np.ldexp(1.0, np.searchsorted(limits, np.abs(blocks).max(axis=2, keepdims=True), side="right") - 127)


def mx_rows(a, rule, scales=mx_scales):
    """float32: blocks of 32 as a rule for MXFP4 or MXFP8 has them, by ml_dtypes' rounding. None: as they are."""
    if rule is None:
        return a
    largest, dtype = {"mxfp4": (6.0, ml_dtypes.float4_e2m1fn), "mxfp8": (448.0, ml_dtypes.float8_e4m3fn)}[rule.target]
    tokens, k = a.shape
    blocks = np.pad(a.astype(np.float64), ((0, 0), (0, -k % 32))).reshape(tokens, -1, 32)
    finite = np.isfinite(blocks).all(axis=2, keepdims=True)
    blocks = np.where(finite, blocks, 0.0)
    scale = scales(blocks, rule)
    t = np.clip(blocks / scale, -largest, largest).astype(np.float32)
    if rule.ties == "zero":
        t = np.nextafter(t, np.float32(0))
    rounded = np.where(finite, t.astype(dtype).astype(np.float64) * scale, np.nan)
    return rounded.reshape(tokens, -1)[:, :k].astype(np.float32)


def tdpbf16ps(x, *terms):
    """x @ w.T, float32, w the sum of terms: for each 32 k and each term a chain over the even k and one over the odd, whose sum
    is added to the total."""
    x, terms = flushed(x), [flushed(w) for w in terms]
    total = np.zeros((len(x), len(terms[0])), np.float32)
    for start in range(0, x.shape[1], 32):
        for w in terms:
            chains = [np.zeros_like(total), np.zeros_like(total)]
            for at in range(start, min(start + 32, x.shape[1])):
                chains[at % 2] = flushed(fma(x[:, at, None], w[:, at], chains[at % 2]))
            total = flushed(total + flushed(chains[0] + chains[1]))
    return total


def two_terms(values):
    """Signed powers of two, or zeros, whose sums these are, the larger ones first; they add up to no more than they have to."""
    below = np.ldexp(1.0, np.frexp(values)[1] - 1) * (values != 0)
    rest = np.abs(values) - below
    high = np.where(np.isin(np.frexp(rest)[0], (0, 0.5)), below, 2 * below)
    return np.copysign(high, values), values - np.copysign(high, values)


def allow_two_terms(scales, codebook):
    """The rule of tuned_for="prefill", for the exponents of scales and of the terms of codebook's entries."""
    terms = np.abs(np.concatenate(two_terms(np.array(codebook, np.float64))))
    terms, some = terms[terms > 0], np.abs(scales[scales != 0]).astype(np.float64)
    if np.signbit(scales).any() or not np.isin(np.frexp(terms)[0], 0.5).all() or terms.min() < TINY or terms.max() > 8:
        return False
    return not some.size or bool(some.min() >= max(TINY, TINY / terms.min()) and some.max() < 2.0**125)


#: portable: fp32_lut in C; fma: fp32_lut with AVX-512F and avx2, a group's sum as a whole or by 32 products; vdpbf16ps:
#: avx512_bf16; int16: avx2; int8: all; amx, amx folded: amx, whose group sums are those of fma. None folds a scale but
#: vdpbf16ps and amx, which fold powers of two where they can, amx, which folds E4M3's into values of 4 bits, too, and "amx
#: folded", which folds bfloat16 and fp16 scales where they allow, and "amx terms", whose weights are two numbers where bfloat16
#: scales allow.
KINDS = ("portable", "fma", "fma by 32", "vdpbf16ps", "int16", "int8", "amx", "amx folded", "amx terms")
INTEGERS = ("int16", "int8")


def options(kind, mode=None):
    """What the reference is to be asked for. mode: the name of an MX mode."""
    return {
        "activations": mode or (kind if kind in INTEGERS else "bf16"),
        "rounding": "folded" if kind == "amx folded" else "exact",
        "tuned_for": "prefill" if kind == "amx terms" else "decode",
    }


def allow_folding(scales, codebook):
    """The rule of rounding="folded", for each pair of a scale and a codebook entry."""
    powers = [np.ldexp(1.0, np.frexp(np.float64(v))[1] - 1) * (v != 0) for v in (scales.ravel(), np.array(codebook))]
    products = np.outer(*powers)  # of a scale and an entry without their significands, each of which is below 2
    normal = (products == 0) | (products >= TINY) & (4 * products <= 2.0**127)
    return normal.all() and not (np.abs(scales[scales != 0]) < TINY).any()


@np.errstate(all="ignore")
def simulated_linear(matrix, a, kind, shard=None):
    """A backend's float32 [tokens, n]; kind is one of KINDS, or "descending": all products from the last k to the first; or
    "vdpbf16ps folded": that with E4M3 scales folded, as no backend of ours does it; or "int8 powers": int8 of MXFP4's numbers.

    shard: (first, last), to add the products of these k only, and the bias if they begin at 0. All else is as for all k.
    """
    rows, kind = (power_rows, "int8") if kind == "int8 powers" else (int8_rows if kind == "int8" else int16_rows, kind)
    n, k = matrix.shape
    first, last = shard or (0, k)
    a, width = a.astype(np.float32), k
    weights, scales, minima = numbers_of(matrix)
    scale = matrix.format.scale
    if scale:
        width = scale.extent[1]
        folded = weights * np.repeat(scales, width, axis=1)[:, :k]
        fold, terms = kind == "descending", None
        values = np.array([v for v in matrix.format.element.values if v is not None], np.float32)
        if kind in ("vdpbf16ps", "amx") and scale.kind == "ue8m0" and matrix.format.super_scale is None and minima is None:
            entries = np.abs(np.outer(values, scales))  # each, whether it occurs or not
            fold = ((entries == 0) | (entries >= TINY) & np.isfinite(entries.astype(BFLOAT16))).all()
        if kind in ("amx", "vdpbf16ps folded") and scale.kind == "e4m3" and matrix.format.element == E2M1:
            fold = True
        if kind == "amx folded" and allow_folding(scales, values):
            fold, folded = True, folded.astype(BFLOAT16).astype(np.float32)
        if kind == "amx terms" and scale.kind == "bf16" and allow_two_terms(scales, values):
            fold, factors = True, np.repeat(scales, width, axis=1)[:, :k]
            terms = [(term * factors).astype(np.float32) for term in two_terms(weights.astype(np.float64))]
        if fold:
            weights, scale, width = folded, None, k
        elif "32" in kind or kind in INTEGERS:
            width = min(width, 32)

    def chain(start):
        order = np.arange(start, min(start + width, last))
        if kind == "descending":
            order = order[::-1]
        elif kind.startswith("vdpbf16ps"):
            order = start + (np.arange(len(order) + len(order) % 2).reshape(-1, 2)[:, ::-1]).ravel()
        if kind == "amx" and matrix.format.family == "f8":
            return tdpbf16ps(a[:, order], weights[:, order])
        total = np.zeros((len(a), n), np.float32)
        for at in order[order < last]:
            x, w = a[:, at, None], weights[:, at]
            if kind == "portable":
                total = total + x * w
            elif kind.startswith("vdpbf16ps"):
                total = flushed(fma(flushed(x), flushed(w), total))
            else:
                total = fma(x, w, total)
        return total

    if scale is None and kind not in INTEGERS:
        terms = [weights] if matrix.format.scale is None or terms is None else terms
        of_k = slice(first, last)
        total = tdpbf16ps(a[:, of_k], *(w[:, of_k] for w in terms)) if kind.startswith("amx") else chain(first)
    else:
        unit = np.float32(0.5 if matrix.format.element == E2M1 else 1.0)
        total = np.zeros((len(a), n), np.float32)
        integers, steps = rows(a)
        for start in range(first, last, 32 if scale is None else width):
            at = slice(start, min(start + (32 if scale is None else width), last))
            factor = np.ones(n, np.float32) if scale is None else scales[:, start // scale.extent[1]]
            if kind in INTEGERS:
                sums = integers[:, at] @ (weights[:, at] / unit).astype(np.int64).T
                assert np.abs(sums).max() < (2**24 if matrix.format.family == "q4" or kind == "int8" else 2**28)
            if kind == "int8" and matrix.format.family == "int":
                total = fma(sums.astype(np.float32), steps[:, start // 32, None] * factor, total)
            elif kind in INTEGERS:
                total = fma(sums.astype(np.float32) * steps[:, start // 32, None], factor * unit, total)
            elif kind == "portable":
                total = (total + chain(start).astype(np.float64) * factor).astype(np.float32)
            else:
                total = fma(chain(start), factor, total)
            if minima is not None:
                x = a if kind not in INTEGERS else integers.astype(np.float32) * np.repeat(steps, 32, axis=1)[:, :k]
                total = less_minima(total, x, minima, matrix.format.offset.scale.extent[1], at, last)
    if matrix.format.factor:
        total = total / matrix.factor if matrix.format.factor.divides else total * matrix.factor
    return total if matrix.bias is None or first else total + matrix.bias


def numbers_of(matrix):
    """float32: value - zero point [n, k]; scale * super-scale, rounded, [n, groups], or None; what is subtracted, [n, groups],
    rounded, or None."""
    format, (n, k) = matrix.format, matrix.shape
    stored, offset = format.rows(matrix.stored, n, k), format.offset
    codes = stored["codes"]
    if format.element.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(n, k)
    weights = format.element.numbers(codes).astype(np.float32)
    if isinstance(offset, ZeroPoint):
        points = (stored["offsets"] + offset.plus) % 16
        weights = weights - np.repeat(points, offset.extent[1], axis=1)[:, :k].astype(np.float32)
    scales = minima = None
    if format.scale:
        scales = format.scale.spread(stored["scales"], n, k)
        if format.super_scale:
            scales = scales * format.super_scale.spread(stored["super_scales"], n, k)
        scales = scales[:, :: format.scale.extent[1]].astype(np.float32)
    if isinstance(offset, Minimum):
        minima = offset.scale.spread(stored["offsets"], n, k)
        if offset.super_scale:
            minima = minima * offset.super_scale.spread(stored["super_offsets"], n, k)
        minima = (-minima if offset.added else minima)[:, :: offset.scale.extent[1]].astype(np.float32)
    return weights, scales, minima


def less_minima(total, a, minima, width, at, last):
    """The total less the minima of the groups that end in these k, each times a float32 sum of x, from the last one down."""
    for start in range(at.start // width * width, at.stop, width):
        stop = min(start + width, last)
        if at.start < stop <= at.stop:
            x = np.zeros(len(a), np.float32)
            for k in reversed(range(start, stop)):
                x = x + a[:, k]
            total = fma(x[:, None], -minima[:, start // width], total)
    return total


def simulated_forward(experts, x, ids, weights, router_weight, kind, rng, shards=None, rules=(None, None)):
    """A backend in float32 numpy. Its exp errs by almost all that a backend's may, at random. rules: what rounds x and h."""
    y, *others = simulated_shards(experts, x, ids, weights, router_weight, kind, rng, shards, rules)
    for other in others:
        with np.errstate(over="ignore", invalid="ignore"):
            y = y + other
    return y


def simulated_shards(experts, x, ids, weights, router_weight, kind, rng, shards=None, rules=(None, None)):
    """What simulated_forward() adds: an output for each shard of the intermediate dimension, one if there are none."""

    def exp(z):
        exact = np.exp(z.astype(np.float64))
        return (exact * (1 + 0.8 * EXP_RELATIVE_ERROR * rng.uniform(-1, 1, z.shape))).astype(np.float32)

    alpha, limit, offset = (np.float32(getattr(experts.activation, v)) for v in ("alpha", "limit", "up_offset"))
    one = np.float32(1)
    of_x, of_h = rules
    x = np.asarray(x).astype(np.float32)
    shards = shards or [(0, experts.intermediate)]
    y = np.zeros((len(shards), len(x), experts.hidden), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for expert in range(experts.num_experts):
            for slot in range(ids.shape[1]):
                token = np.nonzero(ids[:, slot] == expert)[0]
                if not len(token):
                    continue
                r = weights[token, slot].astype(np.float32)[:, None]
                a = x[token]
                if router_weight == "expert_input":
                    a = (a * r).astype(BFLOAT16)
                a = mx_rows(a, of_x)
                g = np.minimum(simulated_linear(experts.matrix(expert, "gate"), a, kind), limit)
                u = np.clip(simulated_linear(experts.matrix(expert, "up"), a, kind), -limit, limit) + offset
                e = exp(-alpha * g)
                h = u * (g / (one + e)) if kind == "portable" else (u * g) * (one / (one + e))
                h = (h * r if router_weight == "down_input" else h).astype(BFLOAT16)
                h = mx_rows(flushed(h) if kind in ("vdpbf16ps", "amx") else h, of_h)
                for of_shard, shard in zip(y, shards, strict=True):
                    d = simulated_linear(experts.matrix(expert, "down"), h, kind, shard)
                    of_shard[token] += r * d if router_weight == "down_output" else d
    return y


def worst(experts, x, ids, weights, kind, rng, router_weight="down_output", shards=None, mode=None):
    """The worst error against the bound for both output dtypes, and the float32 reference. mode: the name of an MX mode."""
    rules = (mode_of(mode).x, mode_of(mode).h) if mode else (None, None)
    y = simulated_forward(experts, x, ids, weights, router_weight, kind, rng, shards, rules)
    given = {"router_weight": router_weight, "shards": shards} | options(kind, mode)
    float32, bfloat16 = (forward(experts, x, ids, weights, out_dtype=d, **given) for d in ("float32", "bfloat16"))
    assert np.array_equal(float32.y, bfloat16.y, equal_nan=True)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (flushed(y) if kind == "vdpbf16ps" else y).astype(BFLOAT16)
        return max(float32.worst(y), bfloat16.worst(rounded)), float32


#: One scale for 16 to 128 k, or 128 rows of them, of every kind; none; zero points, minima, super-scales; factors; orders.
FORMATS = (
    MXFP4,
    WeightFormat(E2M1, Scale("ue8m0", (1, 64))),
    int4(32),
    int4(128),
    BF16,
    int4(16),
    int4(64, "fp16", GPTQ),
    uint4(32, order=GPTQ, plus=1),
    uint4(128, order=AWQ),
    nvfp4(),
    nvfp4(divides=True),
    MXFP8,
    fp8(),
    fp8("bf16"),
    FP8_PER_ROW,
    int8(),
    int8(64),
    int8(32, "fp16", INT8_PLUS_128),
    *SUPER_SCALED.values(),
    WeightFormat(UINT4, Scale("bf16", (1, 32)), offset=Minimum(Scale("bf16", (1, 32)))),
    WeightFormat(UINT4, Scale("ue8m0", (1, 64)), Scale("fp16", (1, 128)), Minimum(Scale("bf16", (1, 128)))),
    WeightFormat(UINT4, Scale("fp32", (1, 64)), Scale("fp32", (2, 128)), Minimum(Scale("fp32", (1, 32)))),
)


def kinds_of(format):
    if format.scale is None:
        return ("portable", "fma", "vdpbf16ps", "amx", *(INTEGERS if format.family in ("q4", "int") else ()))
    plain = format.family in ("q4", "int") and set(format.arrays(8, 8)) == {"codes", "scales"}
    plain = plain and format.scale.extent[1] % 32 == 0
    integers = format.family in ("q4", "int") and format.scale.kind in ("ue8m0", "e4m3", "bf16", "fp16", *WHOLE)
    integers = integers and format.scale.extent[0] == 1 and format.scale.extent[1] % 16 == 0
    absent = {
        "fma by 32": format.scale.extent[1] <= 32 or isinstance(format.offset, Minimum),
        "amx folded": not plain or format.family == "int" or format.scale.kind not in ("bf16", "fp16"),
        "amx terms": not plain or format.family == "int" or format.scale.kind != "bf16",
        **dict.fromkeys(INTEGERS, not integers),
    }
    return tuple(kind for kind in KINDS if not absent.get(kind))


PAIRS = [(format, kind) for format in FORMATS for kind in kinds_of(format)]


def label(value):
    return value.description if isinstance(value, WeightFormat) else str(value)


#: name: (scale bytes of gate and up, of down, range of the exponents added to x)
EDGES = {
    "no scale folds": ((0, 1), (253, 254), (110, 116)),
    "no scale folds, down tiny": ((253, 254), (0, 1), (-120, -114)),
    "all scales, gate and up": ((0, 254), (119, 124), (-126, -112)),
    "all scales, down": ((70, 80), (0, 254), (-20, 20)),
    "denormal x": ((240, 252), (119, 124), (-134, -120)),
    "denormal h": ((58, 60), (200, 202), (-4, 4)),
    "denormal y": ((119, 124), (0, 2), (-4, 4)),
    "wide x": ((119, 124), (119, 124), (-60, 10)),
    "huge gate": ((119, 124), (119, 124), (12, 14)),
    "near overflow": ((178, 181), (119, 124), (0, 4)),
    "overflow": ((184, 186), (119, 124), (0, 4)),
}


def edges_of(format):
    """The cases of EDGES that a format's scales can have: fp16's are 2**-24 to 2**15, and a factor comes after large sums."""
    if format.scale is None and format.factor:
        return tuple(name for name in EDGES if name != "no scale folds")
    if format.scale is None or format.scale.kind not in ("fp16", *WHOLE):
        return tuple(EDGES)
    return tuple(name for name, (scales, down, _) in EDGES.items() if all(103 <= v <= 142 for v in (*scales, *down)))


@np.errstate(all="ignore")
def linear(matrix, a, activations="bf16", rounding="exact", tuned_for="decode"):
    """The reference's y and bound for a linear map of bfloat16 or other float32 numbers that are known exactly."""
    operand, eps = reference.operand(a, a, a, activations) if activations != "bf16" else (a, np.zeros_like(a))
    return reference.linear(matrix, operand, eps, BLOCK, activations, rounding, tuned_for)


def linear_ratio(matrix, a, kind):
    """A simulated linear map's largest error by its bound."""
    y, bound = linear(matrix, a, **options(kind))
    return (np.abs(simulated_linear(matrix, a, kind) - y) / bound).max()
