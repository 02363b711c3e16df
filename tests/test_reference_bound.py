"""The float64 reference's bound against backends simulated in float32 numpy: none leaves it, and no mistake hides in it."""

from fractions import Fraction

import numpy as np
import pytest
from test_reference import BFLOAT16, DEEPSEEK, GPT_OSS, from_codes, pack, random_batch, random_experts

from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.reference import (
    BLOCK,
    EXP_RELATIVE_ERROR,
    ROUTER_WEIGHTS,
    TINY,
    UNIT,
    _activate,
    _linear,
    _operand,
    dequantize,
    forward,
    round_bfloat16,
)
from ktmoe.weights.activation import SILU
from ktmoe.weights.formats import BF16, E2M1, MXFP4, Scale, WeightFormat, int4

# backends simulated in float32


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


def tdpbf16ps(x, w):
    """x @ w.T, float32: for each 32 k a chain over the even ones and a chain over the odd, whose sum is added to the total."""
    x, w = flushed(x), flushed(w)
    total = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, x.shape[1], 32):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for at in range(start, min(start + 32, x.shape[1])):
            chains[at % 2] = flushed(fma(x[:, at, None], w[:, at], chains[at % 2]))
        total = flushed(total + flushed(chains[0] + chains[1]))
    return total


#: portable: fp32_lut in C; fma: fp32_lut with AVX-512F and avx2, a group's sum as a whole or by 32 products; vdpbf16ps:
#: avx512_bf16; int16: avx2; int8: all; amx, amx folded: amx, whose group sums are those of fma. None folds a scale but
#: vdpbf16ps and amx, which fold powers of two where they can, and "amx folded", which folds bfloat16 scales where they allow.
KINDS = ("portable", "fma", "fma by 32", "vdpbf16ps", "int16", "int8", "amx", "amx folded")
INTEGERS = ("int16", "int8")


def options(kind):
    """What the reference is to be asked for."""
    return {"activations": kind if kind in INTEGERS else "bf16", "rounding": "folded" if kind == "amx folded" else "exact"}


def allow_folding(scales, codebook):
    """The rule of rounding="folded", for each pair of a scale and a codebook entry."""
    powers = [np.ldexp(1.0, np.frexp(np.float64(v))[1] - 1) * (v != 0) for v in (scales.ravel(), np.array(codebook))]
    products = np.outer(*powers)  # of a scale and an entry without their significands, each of which is below 2
    normal = (products == 0) | (products >= TINY) & (4 * products <= 2.0**127)
    return normal.all() and not (np.abs(scales[scales != 0]) < TINY).any()


@np.errstate(all="ignore")
def simulated_linear(matrix, a, kind, shard=None):
    """A backend's float32 [tokens, n]; kind is one of KINDS, or "descending": all products from the last k to the first.

    shard: (first, last), to add the products of these k only, and the bias if they begin at 0. All else is as for all k.
    """
    n, k = matrix.shape
    first, last = shard or (0, k)
    a, scale, width = a.astype(np.float32), matrix.format.scale, k
    if scale is None:
        weights = matrix.codes.astype(np.float32)
    else:
        codes = np.stack([matrix.codes & 15, matrix.codes >> 4], axis=2).reshape(n, k)
        weights, width = np.array(matrix.format.codebook, np.float32)[codes], scale.extent[1]
        scales = matrix.scales.astype(np.float32)
        if scale.kind == "ue8m0":
            scales = np.ldexp(np.float32(1), matrix.scales.astype(int) - 127)
        folded = weights * np.repeat(scales, width, axis=1)[:, :k]
        entries = np.abs(np.outer(np.array(matrix.format.codebook, np.float32), scales))  # each, whether it occurs or not
        normal = (entries == 0) | (entries >= TINY) & np.isfinite(entries.astype(BFLOAT16))
        fold = kind == "descending" or (kind in ("vdpbf16ps", "amx") and scale.kind == "ue8m0" and normal.all())
        if kind == "amx folded" and allow_folding(scales, matrix.format.codebook):
            fold, folded = True, folded.astype(BFLOAT16).astype(np.float32)
        if fold:
            weights, scale, width = folded, None, k
        elif "32" in kind or kind in INTEGERS:
            width = 32

    def chain(start):
        order = np.arange(start, min(start + width, last))
        if kind == "descending":
            order = order[::-1]
        elif kind == "vdpbf16ps":
            order = start + (np.arange(len(order) + len(order) % 2).reshape(-1, 2)[:, ::-1]).ravel()
        total = np.zeros((len(a), n), np.float32)
        for at in order[order < last]:
            x, w = a[:, at, None], weights[:, at]
            if kind == "portable":
                total = total + x * w
            elif kind == "vdpbf16ps":
                total = flushed(fma(flushed(x), flushed(w), total))
            else:
                total = fma(x, w, total)
        return total

    if scale is None:
        total = tdpbf16ps(a[:, first:last], weights[:, first:last]) if kind.startswith("amx") else chain(first)
    else:
        unit = np.float32(0.5 if matrix.format.codebook == E2M1 else 1.0)
        total = np.zeros((len(a), n), np.float32)
        integers, steps = (int8_rows if kind == "int8" else int16_rows)(a)
        for start in range(first, last, width):
            factor = scales[:, start // matrix.format.scale.extent[1]]
            if kind in INTEGERS:
                at = slice(start, min(start + width, last))
                sums = integers[:, at] @ (weights[:, at] / unit).astype(np.int64).T
                assert np.abs(sums).max() < 2**24
                total = fma(sums.astype(np.float32) * steps[:, start // 32, None], factor * unit, total)
            elif kind == "portable":
                total = (total + chain(start).astype(np.float64) * factor).astype(np.float32)
            else:
                total = fma(chain(start), factor, total)
    return total if matrix.bias is None or first else total + matrix.bias


def simulated_forward(experts, x, ids, weights, router_weight, kind, rng, shards=None):
    """A backend in float32 numpy. Its exp errs by almost all that a backend's may, at random."""
    y, *others = simulated_parts(experts, x, ids, weights, router_weight, kind, rng, shards)
    for other in others:
        with np.errstate(over="ignore", invalid="ignore"):
            y = y + other
    return y


def simulated_parts(experts, x, ids, weights, router_weight, kind, rng, shards=None):
    """What simulated_forward() adds: an output for each shard of the intermediate dimension, one if there are none."""

    def exp(z):
        exact = np.exp(z.astype(np.float64))
        return (exact * (1 + 0.8 * EXP_RELATIVE_ERROR * rng.uniform(-1, 1, z.shape))).astype(np.float32)

    alpha, limit, offset = (np.float32(getattr(experts.activation, v)) for v in ("alpha", "limit", "up_offset"))
    one = np.float32(1)
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
                g = np.minimum(simulated_linear(experts.matrix(expert, "gate"), a, kind), limit)
                u = np.clip(simulated_linear(experts.matrix(expert, "up"), a, kind), -limit, limit) + offset
                e = exp(-alpha * g)
                h = u * (g / (one + e)) if kind == "portable" else (u * g) * (one / (one + e))
                h = (h * r if router_weight == "down_input" else h).astype(BFLOAT16)
                for of_shard, shard in zip(y, shards, strict=True):
                    d = simulated_linear(experts.matrix(expert, "down"), h, kind, shard)
                    of_shard[token] += r * d if router_weight == "down_output" else d
    return y


def worst(experts, x, ids, weights, kind, rng, router_weight="down_output", shards=None):
    """The worst error against the bound for both output dtypes, and the float32 reference."""
    y = simulated_forward(experts, x, ids, weights, router_weight, kind, rng, shards)
    given = {"router_weight": router_weight, "shards": shards} | options(kind)
    float32, bfloat16 = (forward(experts, x, ids, weights, out_dtype=d, **given) for d in ("float32", "bfloat16"))
    assert np.array_equal(float32.y, bfloat16.y, equal_nan=True)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (flushed(y) if kind == "vdpbf16ps" else y).astype(BFLOAT16)
        return max(float32.worst(y), bfloat16.worst(rounded)), float32


#: UE8M0 and bfloat16 scales, groups of 32 and longer ones, and no scale.
FORMATS = (MXFP4, WeightFormat("q4", E2M1, Scale("ue8m0", (1, 64))), int4(32), int4(128), BF16)


def kinds_of(format):
    if format.scale is None:
        return ("portable", "fma", "vdpbf16ps", "amx")
    absent = {"fma by 32": format.scale.extent[1] == 32, "amx folded": format.scale.kind == "ue8m0"}
    return tuple(kind for kind in KINDS if not absent.get(kind))


PAIRS = [(format, kind) for format in FORMATS for kind in kinds_of(format)]


def label(value):
    return value.description if isinstance(value, WeightFormat) else str(value)


@pytest.mark.parametrize(("format", "kind"), PAIRS, ids=label)
def test_a_simulated_backend_stays_within_the_bound(format, kind):
    for seed, router_weight in enumerate(ROUTER_WEIGHTS):
        rng = np.random.default_rng(seed)
        activation = (SILU, DEEPSEEK, GPT_OSS)[(seed + KINDS.index(kind)) % 3]
        experts = random_experts(
            rng,
            2,
            163 if format is BF16 else 164,
            70,
            format=format,
            scale_bytes=(119, 122) if seed % 2 else (122, 127),
            activation=activation,
            bias=activation is GPT_OSS,
        )
        x, ids, weights = random_batch(rng, experts, tokens=8, top_k=2)
        x[::2] = (x[::2].astype(np.float32) ** 3).astype(BFLOAT16)  # further apart: int16 rounds more of them
        ratio, reference = worst(experts, x, ids, weights, kind, rng, router_weight)
        assert ratio <= 1
        assert np.isfinite(reference.bound).all()


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


@pytest.mark.parametrize(("format", "kind"), PAIRS, ids=label)
@pytest.mark.parametrize("case", EDGES)
def test_a_simulated_backend_stays_within_the_bound_at_the_edges(case, format, kind):
    scale_bytes, down_bytes, exponents = EDGES[case]
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 1, 72, 36, format=format, scale_bytes=scale_bytes, down_bytes=down_bytes)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    x = (x.astype(np.float64) * np.ldexp(1.0, rng.integers(*exponents, x.shape))).astype(BFLOAT16)
    ratio, reference = worst(experts, x, ids, weights, kind, rng)
    assert ratio <= 1
    bounded = np.isfinite(reference.bound)
    assert bounded.any() or case == "overflow"
    assert bounded.all() or "overflow" in case
    assert case != "overflow" or not bounded.all()


# the bound is tight


def one_expert(gate, up, down, x):
    """forward and a simulated backend on one token and one expert, whose router weight is 1."""
    experts = from_codes(gate, up, down)
    arguments = experts, np.array([x]), np.zeros((1, 1), int), np.ones((1, 1), np.float32)
    simulated = simulated_forward(*arguments, "down_output", "vdpbf16ps", np.random.default_rng(0))
    return forward(*arguments, out_dtype="float32"), simulated


@np.errstate(all="ignore")
def linear(matrix, a, activations="bf16", rounding="exact"):
    """The reference's y and bound for a linear map of bfloat16 or other float32 numbers that are known exactly."""
    operand, eps = _operand(a, a, a, activations) if activations != "bf16" else (a, np.zeros_like(a))
    return _linear(matrix, operand, eps, BLOCK, activations, rounding)


def linear_ratio(matrix, a, kind):
    """A simulated linear map's largest error by its bound."""
    y, bound = linear(matrix, a, **options(kind))
    return (np.abs(simulated_linear(matrix, a, kind) - y) / bound).max()


def test_the_accumulation_bound_is_almost_attained():
    # h = 4096, then 63 times 4096 u, each of which the float32 sum loses as a tie to even
    ones, zeros = np.full((64, 64), 2), np.zeros((64, 64), int)
    gate, up = zeros.copy(), zeros.copy()
    gate[:, 0] = 2
    up[0, 0] = 2
    up[1:, 1] = 2
    reference, simulated = one_expert(gate, up, ones, [64.0, 64 * UNIT] + [0.0] * 62)
    assert reference.y[0, 0] == 4096 + 63 * 4096 * UNIT
    assert simulated[0, 0] == 4096
    assert 0.9 < reference.worst(simulated) <= 1


def test_half_of_the_bound_within_32_k_is_attained_by_two_chains():
    # each chain is 1, then u many times, each of which it loses; the odd one ends by 2 u, which the sum of the two loses: of 31
    # roundings each loses all it can, but a product goes through 17 at most, where the bound has 33 for one chain
    a = np.array([[1.0, 1.0] + [UNIT, UNIT] * 15])
    a[0, 31] = 2 * UNIT
    matrix = Matrix("w", BF16, (1, 32), np.ones((1, 32), BFLOAT16))
    assert simulated_linear(matrix, a, "amx") == 2
    assert 0.46 < linear_ratio(matrix, a, "amx") < 0.5


def ones_int4(group, k):
    """int4 [1, k] that is all 1."""
    return Matrix("w", int4(group), (1, k), np.full((1, k // 2), 0x99, np.uint8), np.ones((1, -(-k // group)), BFLOAT16))


def test_the_bound_within_a_group_is_almost_attained():
    # a group's sum is 1, then 127 times u, each of which it loses; the total before is no part of that, however large it is
    a = np.array([[1.0] + [UNIT] * 127])
    assert 0.9 < linear_ratio(ones_int4(128, 128), a, "fma") <= 1
    two = ones_int4(128, 256)
    two.scales[0, 1] = 0.0
    y, bound = linear(two, np.hstack([a, a]))
    assert y == 1 + 127 * UNIT
    assert bound <= 1.1 * linear(ones_int4(128, 128), a)[1]


@pytest.mark.parametrize("kind", ["fma", "int16"])
def test_the_bound_of_the_sum_over_groups_is_almost_attained(kind):
    # the total is 1, then 511 groups whose sums are u, each of which it loses
    a = np.zeros((1, 32 * 512))
    a[0, ::32] = [1.0] + [UNIT] * 511
    assert 0.9 < linear_ratio(ones_int4(32, 32 * 512), a, kind) <= 1
    if kind == "int16":
        assert linear_ratio(ones_int4(32, 32 * 512), a, kind) > 0.99


def test_the_bound_of_the_sum_over_slots_is_almost_attained():
    # d = 1; the router weights are 1, then 127 times u, each of which the float32 sum loses
    experts = from_codes([[2, 0], [0, 0]], [[0, 2], [0, 0]], [[2, 0], [0, 0]])
    arguments = experts, np.array([[64.0, 1 / 64]]), np.zeros((1, 128), int), np.array([[1.0] + [UNIT] * 127])
    reference = forward(*arguments, out_dtype="float32")
    simulated = simulated_forward(*arguments, "down_output", "fma", np.random.default_rng(0))
    assert reference.y[0, 0] == 1 + 127 * UNIT
    assert simulated[0, 0] == 1
    assert 0.9 < reference.worst(simulated) <= 1


@pytest.mark.parametrize(("byte", "kind"), [(127, "vdpbf16ps"), (254, "vdpbf16ps"), (127, "amx")])
def test_a_flushed_partial_sum_is_within_the_bound(byte, kind):
    # the products +-2**-126 and their neighbours are normal numbers, their difference is not
    scale = Fraction(2) ** (byte - 127)
    a = np.ldexp([[1 + 2.0**-7, -1.0]], -120 if byte == 254 else -126)
    matrix = Matrix("w", MXFP4, (1, 2), pack([[2, 2]]), np.array([[byte]], np.uint8))
    y, bound = linear(matrix, a)
    assert Fraction(float(y[0, 0])) == Fraction(float(a.sum())) * scale
    assert simulated_linear(matrix, a, kind) == 0
    assert y <= bound <= float(4 * Fraction(TINY) * max(scale, 1)) * 1.01


@pytest.mark.parametrize("kind", ["vdpbf16ps", "amx"])
def test_the_bound_of_flushed_sums_is_almost_attained(kind):
    # each product is the greatest below 2**-126 that two bfloat16 numbers have, and is lost
    a = np.full((1, 96), 255 / 128 * 2.0**-64)
    matrix = Matrix("w", BF16, (1, 96), np.full((1, 96), 255 / 128 * 2.0**-64, BFLOAT16))
    assert simulated_linear(matrix, a, kind) == 0
    assert 0.95 < linear_ratio(matrix, a, kind) <= 1


def test_a_total_is_flushed_by_amx_only_where_the_step_that_it_adds_is_not():
    tiny = np.zeros((1, 64))
    for values, lost in (
        ({0: 1 + 2.0**-7, 1: -1.0}, 2.0**-7),  # the chains' sum
        ({0: 1 + 2.0**-7, 32: -1.0}, 2.0**-7),  # the total
        ({0: 1.0, 32: 1 + 2.0**-7, 33: -1.0}, 2.0**-7),  # the chains' sum; the total then gets zero
        ({0: 1 + 2.0**-7, 2: -1.0, 1: 1.5, 3: -1.0, 32: 1.0}, 2.0**-7 + 0.5),  # both chains
    ):
        a = tiny.copy()
        a[0, list(values)] = list(values.values())
        matrix = Matrix("w", BF16, (1, 64), np.full((1, 64), TINY, BFLOAT16))
        y, bound = linear(matrix, a)
        assert np.abs(y - simulated_linear(matrix, a, "amx")) == lost * TINY < bound


def test_a_group_whose_unscaled_sum_overflows_has_no_bound():
    matrix = Matrix("w", MXFP4, (2, 2), pack([[7, 7], [2, 0]]), np.array([[0], [0]], np.uint8))
    a = np.full((1, 2), 2.0**126)
    y, bound = linear(matrix, a)
    assert y.tolist() == [[6.0, 0.5]]
    assert simulated_linear(matrix, a, "portable").tolist() == [[np.inf, 0.5]]
    assert np.isinf(bound[0, 0])
    assert np.isfinite(bound[0, 1])


def test_a_zero_scale_does_not_undo_an_overflow():
    # a scale of 0 makes the group's infinite sum NaN; a finite one 0
    matrix = ones_int4(32, 64)
    matrix.scales[0, 0] = 0.0
    for exponent, finite in ((122, True), (123, False)):
        a = np.hstack([np.full((1, 32), 2.0**exponent), np.ones((1, 32))])
        y, bound = linear(matrix, a)
        assert y == 32
        assert np.isfinite(simulated_linear(matrix, a, "fma")) == finite
        assert not np.isfinite(bound) or finite
    assert np.isfinite(linear(matrix, np.full((1, 64), 2.0**119))[1])


@pytest.mark.parametrize("exponent", [126, 127])
def test_int16_overflows_where_the_sum_in_units_does(exponent):
    # E2M1's unit is 1/2, so that the sum of 2**127 * 1 is formed as 2 * 2**127
    matrix = Matrix("w", MXFP4, (1, 2), pack([[2, 0]]), np.array([[100]], np.uint8))
    a = np.array([[2.0**exponent, 0.0]])
    for kind, finite in (("fma", True), ("int16", exponent < 127)):
        y, bound = linear(matrix, a, "int16" if kind == "int16" else "bf16")
        assert y == 2.0 ** (exponent - 27)
        assert np.isfinite(simulated_linear(matrix, a, kind)) == finite
        assert np.isfinite(bound) == finite


def test_a_flushed_weight_is_within_the_bound_of_bf16_only():
    numbers = np.ldexp([[1.0, 127 / 128, 1.0]], -126)  # the middle one is denormal
    a = np.ldexp([[1.0, 1.0, -1.0]], 120)
    small = WeightFormat("q4", (TINY, TINY * 127 / 128, -TINY) + (0.0,) * 13, Scale("ue8m0", (1, 32)))
    lost = 127 / 128 * 2.0**-6
    b16 = Matrix("w", BF16, (1, 3), numbers.astype(BFLOAT16))
    q4 = Matrix("w", small, (1, 4), pack([[0, 1, 0, 3]]), np.array([[127]], np.uint8))
    for matrix, rows in ((b16, a), (q4, np.hstack([a, a[:, :1]]))):
        y, bound = linear(matrix, rows)
        simulated = simulated_linear(matrix, rows, "vdpbf16ps")
        assert np.abs(y - simulated) == lost
        assert lost <= bound <= 1.001 * lost
    normal = Matrix("w", BF16, (1, 3), np.abs(numbers + TINY).astype(BFLOAT16))
    assert linear(normal, a)[1] < 1e-6


def test_the_rounding_of_a_bias_is_within_the_bound():
    matrix = Matrix("w", MXFP4, (1, 2), pack([[2, 0]]), np.array([[127]], np.uint8), np.ones(1, np.float32))
    a = np.array([[UNIT, 0.0]])
    y, bound = linear(matrix, a)
    assert y == 1 + UNIT
    assert simulated_linear(matrix, a, "portable") == 1
    assert UNIT <= bound <= 1.001 * UNIT


def test_a_router_weight_on_the_experts_input_rounds_to_float32_and_then_to_bfloat16():
    rng = np.random.default_rng(13)
    x = rng.integers(128, 256, 1_000_000) / 128  # all significands of bfloat16
    r = rng.random(len(x), dtype=np.float32)
    twice, once = round_bfloat16((x * r).astype(np.float32)), round_bfloat16(x * r)
    at = np.nonzero(twice != once)[0][0]
    experts = from_codes([[0, 2], [0, 0]], [[2, 0], [0, 0]], [[2, 0], [0, 0]])
    reference = forward(
        experts, [[x[at], 2.0**120]], [[0]], [[r[at]]], router_weight="expert_input", out_dtype="float32", columns=[0]
    )
    g = round_bfloat16(np.float32(2.0**120 * r[at]))
    assert reference.y == round_bfloat16(g * twice[at])


def test_a_sum_that_overflows_float32_has_no_bound():
    experts = from_codes([[2, 0], [0, 0]], [[0, 2], [0, 0]], [[2, 0], [0, 0]])
    for r, finite in ((1e36, True), (1e37, False)):
        reference = forward(experts, [[64.0, 1.0]], [[0]], [[r]], out_dtype="float32")
        assert np.isfinite(reference.bound[0, 0]) == finite


@pytest.mark.parametrize("activation", [SILU, DEEPSEEK, GPT_OSS], ids=["silu", "deepseek", "gpt-oss"])
@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_the_activation_bound_holds_and_is_almost_attained(activation, sign):
    # every exp errs by the most that is allowed; g and u err by their own eps, which is 0 or larger than all other errors
    rng = np.random.default_rng(12)
    size = np.ldexp(1.0, rng.integers(-140, 12, 200_000)) * rng.uniform(1, 2, 200_000)
    g = (size * rng.choice([-1, 1], size.shape)).astype(np.float32)
    u = (8 * rng.standard_normal(size.shape)).astype(np.float32)
    alpha, limit, offset = (np.float32(getattr(activation, v)) for v in ("alpha", "limit", "up_offset"))
    for eps in (0.0, 1e-4):
        eps_g, eps_u = eps * np.abs(g.astype(np.float64)), eps * np.abs(u.astype(np.float64))
        with np.errstate(all="ignore"):
            h, bound = _activate(activation, g.astype(np.float64), eps_g, u.astype(np.float64), eps_u)
            g_near = (g + 0.99 * rng.choice([-1, 1], g.shape) * eps_g).astype(np.float32) if eps else g
            u_near = (u + 0.99 * rng.choice([-1, 1], u.shape) * eps_u).astype(np.float32) if eps else u
            g_near, u_near = np.minimum(g_near, limit), np.clip(u_near, -limit, limit) + offset
            e = np.exp((-alpha * g_near).astype(np.float64)) * (1 + sign * 0.75 * EXP_RELATIVE_ERROR)
            e = np.where(e < TINY, 0, e).astype(np.float32)  # 0.75: the rest is the rounding to float32
            one = np.float32(1)
            sigmoid = one / (one + e)
            for simulated in (u_near * (g_near / (one + e)), u_near * (g_near * sigmoid), u_near * g_near * sigmoid):
                ratio = np.abs(simulated - h) / bound
                assert ratio.max() <= 1
                assert eps or not sign or ratio.max() > 0.5


@pytest.mark.parametrize("distance", [0, 2.0**-9])
def test_the_bound_allows_a_bfloat16_flip_at_a_tie_and_only_there(distance):
    # sigmoid(64) is 1 to within 2**-92, so that h = 64 u, and u = 1 + 2**-8 lies between the bfloat16 numbers 1 and 1 + 2**-7
    gate, up, down = ([[2, 0, 0, 0], [0, 0, 0, 0]], [[0, 2, 2, 2], [0, 0, 0, 0]], [[2, 0], [4, 0], [0, 0], [0, 0]])
    reference, simulated = one_expert(gate, up, down, [64.0, 1.0, 2.0**-8, -distance])
    assert reference.y.tolist() == simulated.tolist() == [[64, 128, 0, 0]]
    flipped = np.array([[64.5, 129, 0, 0]])
    if distance:
        assert reference.worst(flipped) > 1e4
    else:
        assert 0.999 < reference.worst(flipped) <= 1
        assert reference.worst(np.array([[65, 129, 0, 0]])) > 1.9


def test_the_bound_is_mostly_the_rounding_of_the_output():
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 2, 256, 256)
    reference = forward(experts, *random_batch(rng, experts))
    half_ulp = 2.0**-9 * np.median(np.abs(reference.y))
    assert half_ulp / 2 <= np.median(reference.bound) <= 2 * half_ulp


def test_a_backend_that_adds_in_any_order_has_a_larger_bound():
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 1, 1024, 64)
    arguments = experts, *random_batch(rng, experts, tokens=4, top_k=1)
    chain, any_order = (forward(*arguments, out_dtype="float32", block=block) for block in (32, 1024))
    assert np.allclose(chain.y, any_order.y, rtol=0, atol=1e-12 * np.abs(chain.y).max())
    assert np.median(any_order.bound / chain.bound) > 2
    assert 0 < any_order.worst(simulated_forward(*arguments, "down_output", "descending", rng)) <= 1


def differ_somewhere(rng, arrays, where):
    """Codes and scales of one expert, as from_arrays takes them, with one mistake."""
    codes, *scales = (array.copy() for array in arrays)
    row = rng.integers(codes.shape[1])
    if where == "row":
        codes[0, [row, row - 1]] = codes[0, [row - 1, row]]
        return codes, *scales
    array = scales[0] if where == "scale" else codes
    bits = array.view(np.uint16) if array.dtype == BFLOAT16 else array
    at = 0, row, rng.integers(array.shape[2])
    if bits.dtype == np.uint16:
        bits[at] ^= 1 << rng.integers(4, 7)  # one of the significand's upper bits
    else:
        bits[at] ^= 1 if where == "scale" else 1 << rng.integers(8)
    return codes, *scales


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
@pytest.mark.parametrize(
    ("format", "kind"),
    [
        *((MXFP4, kind) for kind in ("vdpbf16ps", "amx", "int16", "int8")),
        *((int4(32), kind) for kind in ("fma", "int16", "int8", "amx folded")),
        (BF16, "fma"),
        (BF16, "amx"),
    ],
    ids=label,
)
def test_one_mistake_leaves_the_bound(format, kind, projection):
    rng = np.random.default_rng(5)
    experts = random_experts(rng, 1, 64, 64, format=format)
    tokens = 128 if kind == "int8" else 16  # of 8 bits, many an h stays the same
    x, ids, _ = random_batch(rng, experts, tokens, top_k=1)
    weights = np.ones((tokens, 1))
    reference = forward(experts, x, ids, weights, out_dtype="float32", **options(kind))
    matrices = {p: experts.matrix(0, p) for p in ("gate", "up", "down")}
    arrays = {p: tuple(v[None] for v in (m.codes, m.scales) if v is not None) for p, m in matrices.items()}

    def error(changed):
        wrong = ExpertWeights.from_arrays(**arrays | {projection: changed}, format=format)
        if np.allclose(dequantize(wrong.matrix(0, projection)), dequantize(matrices[projection]), rtol=0, atol=1e-30):
            return np.inf  # -0 or a denormal instead of 0, or a mistake that a scale of 0 hides
        return reference.worst(simulated_forward(wrong, x, ids, weights, "down_output", kind, rng))

    for where in ("code", "scale", "row"):
        if where != "scale" or format.scale:
            for _ in range(8):
                assert error(differ_somewhere(rng, arrays[projection], where)) > 1, where


# int16


def neighbours(a):
    """The bfloat16 numbers below and above, for positive ones."""
    bits = a.astype(BFLOAT16).view(np.uint16)
    return ((bits + np.uint16(step)).view(BFLOAT16).astype(np.float64) for step in (65535, 1))


def test_a_quantised_h_that_is_uncertain_is_within_its_error_and_attains_it():
    # element 0 is the maximum: 1, or the number below, whose step is half as large; the rest are exact, or have a neighbour
    rng = np.random.default_rng(17)
    h = round_bfloat16(np.ldexp(rng.uniform(0.5, 1, (1, 40)), -rng.integers(1, 14, (1, 40))))
    h[0, 0] = h[0, 33] = 1.0
    low, high = neighbours(h)
    uncertain = rng.random(h.shape) < 0.3
    uncertain[0, :2], uncertain[0, 32:] = (True, False), False
    low, high = np.where(uncertain, low, h), np.where(uncertain, high, h)
    quantised, eps = _operand(h, low, high, "int16")
    assert np.array_equal(quantised, _operand(h, h, h, "int16")[0])
    choice = rng.integers(3, size=(2000, 40))
    chosen = np.choose(choice, [np.broadcast_to(v, choice.shape) for v in (low, h, high)])
    integers, steps = int16_rows(chosen)
    attained = np.abs(integers * np.repeat(steps, 32, axis=1)[:, :40].astype(np.float64) - quantised).max(axis=0)
    assert np.array_equal(attained, eps[0])
    assert not eps[0, 32:].any()  # the second group is certain
    assert (eps[0, :32][~uncertain[0, :32]] > 0).any()  # an element that is certain, but whose step is not
    assert not _operand(h, h, h, "int16")[1].any()


def test_a_quantised_h_in_int8_that_is_uncertain_is_within_its_error_and_attains_it():
    # the maximum is 1, or a number beside it: three steps; the second group is certain; in the third only one element is not
    rng = np.random.default_rng(20)
    h = round_bfloat16(np.ldexp(rng.uniform(0.5, 1, (1, 70)), -rng.integers(0, 9, (1, 70))))
    h[0, [0, 33, 65]] = 1.0
    low, high = neighbours(h)
    uncertain = rng.random(h.shape) < 0.3
    uncertain[0, :2], uncertain[0, 32:] = (True, False), False
    uncertain[0, 66] = True
    low, high = np.where(uncertain, low, h), np.where(uncertain, high, h)
    quantised, eps = _operand(h, low, high, "int8")
    assert np.array_equal(quantised, _operand(h, h, h, "int8")[0])
    choice = rng.integers(3, size=(4000, 70))
    chosen = np.choose(choice, [np.broadcast_to(v, choice.shape) for v in (low, h, high)])
    integers, steps = int8_rows(chosen)
    off = np.abs(integers * np.repeat(steps, 32, axis=1)[:, :70].astype(np.float64) - quantised)
    assert np.array_equal(off.max(axis=0)[1:], eps[0, 1:])
    assert 0 < off[:, 0].max() <= eps[0, 0]  # the maximum goes with its own step only, which the error does not know
    assert not eps[0, 32:66].any()
    assert not eps[0, 67:].any()
    assert (eps[0, :32][~uncertain[0, :32]] > 0).any()  # an element that is certain, but whose step is not
    assert not _operand(h, h, h, "int8")[1].any()


@pytest.mark.parametrize("bits", range(1, 14))
def test_a_maximum_in_int8_that_may_be_anything_is_covered(bits):
    """The steps between its ends are tried one by one, or, where they are many, half of the largest is added."""
    rng = np.random.default_rng(bits)
    h = round_bfloat16(rng.uniform(0.1, 1, (3, 32)))
    high = h.copy()
    high[:, 5] = (h[:, 5].astype(BFLOAT16).view(np.uint16) + np.uint16(1 << bits)).view(BFLOAT16).astype(np.float64)
    quantised, eps = _operand(h, h, high, "int8")
    for step in rng.integers(0, 1 << bits, 200, endpoint=True):
        one = h.copy()
        one[:, 5] = (h[:, 5].astype(BFLOAT16).view(np.uint16) + np.uint16(step)).view(BFLOAT16).astype(np.float64)
        integers, steps = int8_rows(one)
        assert (np.abs(integers * steps.astype(np.float64) - quantised) <= eps).all()
    assert np.isinf(_operand(h, h, np.full((3, 32), np.inf), "int8")[1]).all()


def test_a_maximum_that_may_be_anything_has_every_step():
    h, low, high = np.zeros((1, 32)), np.full((1, 32), -(2.0**-126)), np.full((1, 32), 1.0)
    low[0, 1], h[0, 1], high[0, 1] = 3 * 2.0**-16, 3 * 2.0**-16, 3 * 2.0**-16
    quantised, eps = _operand(h, low, high, "int16")
    assert quantised[0, 1] == 3 * 2.0**-16
    assert eps[0, 1] == 2.0**-16  # where the maximum is 1, the step is 2**-14
    assert eps[0, 0] == 1
    assert np.isinf(_operand(h, low, np.full((1, 32), np.inf), "int16")[1]).all()


@pytest.mark.parametrize("mistake", ["none", "no rounding", "truncated", "ties away", "coarser", "one maximum a row"])
def test_a_mistake_in_int16_leaves_the_bound(mistake, monkeypatch):
    def mistaken(a):
        groups = a.astype(np.float64).reshape(len(a), -1, 32)
        largest = np.abs(groups).max(axis=2 if mistake != "one maximum a row" else (1, 2), keepdims=True)
        steps = np.ldexp(1.0, np.frexp(largest)[1] - 15 + (mistake == "coarser")) * np.ones((1, groups.shape[1], 1))
        nearest = {"truncated": np.trunc, "ties away": lambda v: np.copysign(np.floor(np.abs(v) + 0.5), v)}.get(
            mistake, np.rint
        )
        return nearest(groups / steps).astype(np.int64).reshape(a.shape), steps[..., 0].astype(np.float32)

    rng = np.random.default_rng(18)
    experts = random_experts(rng, 1, 128, 64)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    x = (x.astype(np.float32) ** 3).astype(BFLOAT16)
    reference = forward(experts, x, ids, weights, out_dtype="float32", activations="int16")
    monkeypatch.setattr(f"{__name__}.int16_rows", mistaken)
    kind = "fma" if mistake == "no rounding" else "int16"
    ratio = reference.worst(simulated_forward(experts, x, ids, weights, "down_output", kind, rng))
    assert ratio <= 1 if mistake == "none" else ratio > 1


@pytest.mark.parametrize(
    "mistake", ["none", "no rounding", "truncated", "ties away", "step not rounded", "128", "one maximum a row"]
)
def test_a_mistake_in_int8_leaves_the_bound(mistake, monkeypatch):
    def mistaken(a):
        groups = a.astype(np.float64).reshape(len(a), -1, 32)
        largest = np.abs(groups).max(axis=2 if mistake != "one maximum a row" else (1, 2), keepdims=True)
        steps = largest / (128 if mistake == "128" else 127) * np.ones((1, groups.shape[1], 1))
        steps = steps if mistake == "step not rounded" else round_bfloat16(steps)
        nearest = {"truncated": np.trunc, "ties away": lambda v: np.copysign(np.floor(np.abs(v) + 0.5), v)}.get(
            mistake, np.rint
        )
        return nearest(groups / steps).astype(np.int64).reshape(a.shape), steps[..., 0].astype(np.float32)

    rng = np.random.default_rng(18)
    experts = random_experts(rng, 1, 128, 64)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    x = np.rint(8 * x.astype(np.float64)) / 2  # halves, of which many are ties
    x[:, ::32] = 127.0
    reference = forward(experts, x, ids, weights, out_dtype="float32", activations="int8")
    monkeypatch.setattr(f"{__name__}.int8_rows", mistaken)
    kind = "fma" if mistake == "no rounding" else "int8"
    ratio = reference.worst(simulated_forward(experts, x, ids, weights, "down_output", kind, rng))
    assert ratio <= 1 if mistake == "none" else ratio > 1


def test_int8_is_within_half_a_step_of_bf16():
    """A linear map of given x; and typically it is far nearer."""
    rng = np.random.default_rng(21)
    experts = random_experts(rng, 1, 256, 256, format=int4(64))
    gate = experts.matrix(0, "gate")
    a = random_batch(rng, experts, tokens=8, top_k=1)[0].astype(np.float64)
    y = [linear(gate, a, v)[0] for v in ("bf16", "int8")]
    largest = np.repeat(np.abs(a).reshape(8, -1, 32).max(axis=2), 32, axis=1)
    most = (1 + 2.0**-8) / 254 * largest @ np.abs(dequantize(gate)).T
    assert (np.abs(y[0] - y[1]) <= most).all()
    assert np.median(np.abs(y[0] - y[1]) / most) < 0.1
    assert 0.003 < np.sqrt(np.mean((y[0] - y[1]) ** 2) / np.mean(y[0] ** 2)) < 0.02


def test_int16_is_near_bf16():
    """2**-15 of the maximum of each group of x and of h; and its own bound is smaller, since nearly nothing is rounded."""
    rng = np.random.default_rng(19)
    experts = random_experts(rng, 1, 256, 256, format=int4(64))
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    bf16, int16 = (forward(experts, x, ids, weights, out_dtype="float32", activations=v) for v in ("bf16", "int16"))
    assert 0 < np.abs(bf16.y - int16.y).max() < 2.0**-9 * np.abs(bf16.y).max()
    assert np.median(int16.bound) < np.median(bf16.bound)
    gate = experts.matrix(0, "gate")
    a = x.astype(np.float64)
    y = [linear(gate, a, v)[0] for v in ("bf16", "int16")]
    largest = np.repeat(np.abs(a).reshape(8, -1, 32).max(axis=2), 32, axis=1)
    assert (np.abs(y[0] - y[1]) <= 2.0**-15 * largest @ np.abs(dequantize(gate)).T).all()
