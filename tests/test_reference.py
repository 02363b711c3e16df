"""The float64 reference against slower and simpler statements of it: rationals, and backends simulated in float32 numpy."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from ktmoe.activation import SILU, GatedActivation
from ktmoe.errors import FormatError, InputError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.formats import E2M1, MXFP4
from ktmoe.reference import (
    BLOCK,
    EXP_RELATIVE_ERROR,
    ROUTER_WEIGHTS,
    TINY,
    UNIT,
    Reference,
    _activate,
    _linear,
    dequantize,
    forward,
    round_bfloat16,
)

GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
DEEPSEEK = GatedActivation(limit=10.0)


def random_experts(
    rng, num_experts, hidden, intermediate, *, scale_bytes=(119, 124), down_bytes=None, activation=SILU, bias=False
):
    def matrices(n, k, bytes_=scale_bytes):
        codes = rng.integers(0, 256, (num_experts, n, k // 2), dtype=np.uint8)
        return codes, rng.integers(bytes_[0], bytes_[1] + 1, (num_experts, n, -(-k // 32)), dtype=np.uint8)

    shapes = {"gate": intermediate, "up": intermediate, "down": hidden}
    biases = {p: rng.standard_normal((num_experts, n)).astype(np.float32) for p, n in shapes.items()} if bias else None
    gate, up = matrices(intermediate, hidden), matrices(intermediate, hidden)
    down = matrices(hidden, intermediate, down_bytes or scale_bytes)
    return ExpertWeights.from_arrays(gate, up, down, biases=biases, activation=activation)


def random_batch(rng, experts, tokens=6, top_k=3):
    x = rng.standard_normal((tokens, experts.hidden)).astype(ml_dtypes.bfloat16)
    ids = rng.integers(0, experts.num_experts, (tokens, top_k))
    return x, ids, rng.random((tokens, top_k), dtype=np.float32)


def pack(codes):
    """Codes 0 to 15, [n, k], as stored: two a byte, low nibble = even k."""
    codes = np.asarray(codes, dtype=np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def from_codes(gate, up, down, activation=SILU):
    """One expert with all scales 1 from the codes, [n, k] each."""

    def pair(codes):
        stored = pack(codes)
        return stored[None], np.full((1, len(stored), -(-2 * stored.shape[1] // 32)), 127, np.uint8)

    return ExpertWeights.from_arrays(pair(gate), pair(up), pair(down), activation=activation)


# dequantize


def test_dequantize_every_code_with_every_scale_byte():
    scales = np.arange(255, dtype=np.uint8)[:, None]
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (255, 1))
    weights = dequantize(Matrix("w", MXFP4, (255, 32), pack(codes), scales))
    assert weights.dtype == np.float64
    for byte in range(255):
        for code in range(16):
            expected = Fraction(E2M1[code]) * Fraction(2) ** (byte - 127)
            for weight in weights[byte, [code, code + 16]].tolist():
                assert Fraction(weight) == expected
                assert math.copysign(1, weight) == (-1 if code & 8 else 1)


def test_dequantize_applies_each_scale_to_its_own_32_weights():
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 16, (5, 68)), rng.integers(0, 255, (5, 3), dtype=np.uint8)
    matrix = Matrix("w", MXFP4, (5, 68), pack(codes), scales)
    weights = dequantize(matrix)
    for n in range(5):
        for k in range(68):
            assert weights[n, k] == E2M1[codes[n, k]] * 2.0 ** (int(scales[n, k // 32]) - 127)
    for rows in (slice(1, 4), np.array([4, 0]), [3]):
        assert np.array_equal(dequantize(matrix, rows), weights[rows])


def test_dequantize_refuses_the_nan_scale_by_name():
    scales = np.full((3, 2), 127, np.uint8)
    scales[2, 1] = 255
    matrix = Matrix("layers.3.ffn.experts.7.w1", MXFP4, (3, 64), np.zeros((3, 32), np.uint8), scales)
    with pytest.raises(FormatError, match=r"layers\.3\.ffn\.experts\.7\.w1.*found 255.*\[2, 1\]"):
        dequantize(matrix)
    with pytest.raises(FormatError, match=r"\[2, 1\]"):
        dequantize(matrix, [2])
    assert dequantize(matrix, slice(0, 2)).shape == (2, 64)


# round_bfloat16


def test_round_bfloat16_at_every_midpoint():
    bits = np.arange(0x7F81, dtype=np.uint16)  # zero, every positive number, infinity
    numbers = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    assert np.array_equal(round_bfloat16(numbers), numbers)
    numbers[-1] = 2.0**128  # where infinity begins if the exponent went on
    low, high = numbers[:-1], numbers[1:]
    middle = (low + high) / 2
    even = np.where(bits[:-1] % 2 == 0, low, high)
    for sign in (1, -1):
        for a, expected in ((middle, even), (np.nextafter(middle, 0), low), (np.nextafter(middle, np.inf), high)):
            expected = np.where(expected == 2.0**128, np.inf, expected)
            rounded = round_bfloat16(sign * a)
            assert np.array_equal(rounded, sign * expected)
            assert np.array_equal(np.signbit(rounded), np.full(rounded.shape, sign < 0))


def test_round_bfloat16_agrees_with_ml_dtypes_on_float32():
    a = np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = a.astype(ml_dtypes.bfloat16).astype(np.float64)
        assert np.array_equal(round_bfloat16(a.astype(np.float64)), expected, equal_nan=True)


def test_round_bfloat16_keeps_what_float32_would_lose():
    # float64 -> float32 -> bfloat16 would round twice: to the tie 1 + 2**-8, then down to 1
    assert round_bfloat16(1 + 2.0**-8 + 2.0**-40) == 1 + 2.0**-7
    assert np.array_equal(round_bfloat16([np.inf, -np.inf, 1e300, -1e300, 5e-324]), [np.inf, -np.inf, np.inf, -np.inf, 0])
    assert np.isnan(round_bfloat16(np.nan))


# forward against rational arithmetic


def nearest_bfloat16(a: Fraction) -> Fraction:
    """Round half to even with 8 significant bits, in rationals; normal numbers and zero only."""
    if a == 0:
        return a
    exponent = 0
    while abs(a) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(a) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (exponent - 7)
    return round(a / quantum) * quantum  # round() of a Fraction is half to even


def naive_forward(experts, x, ids, weights, mask, router_weight):
    """The definition, one scalar at a time: exact but for the activation, which is Python's float."""

    def weight(matrix, row, k):
        byte = int(matrix.codes[row, k // 2])
        return Fraction(E2M1[byte >> 4 if k % 2 else byte & 15]) * Fraction(2) ** (int(matrix.scales[row, k // 32]) - 127)

    def linear(matrix, a):
        bias = [Fraction(0)] * matrix.shape[0] if matrix.bias is None else [Fraction(float(b)) for b in matrix.bias]
        n, k = matrix.shape
        return [bias[row] + sum(weight(matrix, row, i) * a[i] for i in range(k)) for row in range(n)]

    def act(g, u):
        alpha, limit = (float(np.float32(v)) for v in (experts.activation.alpha, experts.activation.limit))
        g, u = min(float(g), limit), max(-limit, min(float(u), limit))
        return Fraction((u + experts.activation.up_offset) * g / (1 + math.exp(-alpha * g)))

    y = [[Fraction(0)] * experts.hidden for _ in x]
    for t in range(len(x)):
        for expert, r in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if not 0 <= expert < experts.num_experts or not mask[expert]:
                continue
            a, r = [Fraction(float(v)) for v in x[t]], Fraction(r)
            if router_weight == "expert_input":
                a = [nearest_bfloat16(Fraction(float(np.float32(float(v * r))))) for v in a]
            g, u = (linear(experts.matrix(expert, p), a) for p in ("gate", "up"))
            h = [act(*pair) for pair in zip(g, u, strict=True)]
            h = [nearest_bfloat16(v * r if router_weight == "down_input" else v) for v in h]
            d = linear(experts.matrix(expert, "down"), h)
            y[t] = [s + (r * v if router_weight == "down_output" else v) for s, v in zip(y[t], d, strict=True)]
    return np.array([[float(v) for v in row] for row in y])


@pytest.mark.parametrize("activation", [SILU, DEEPSEEK, GPT_OSS], ids=["silu", "deepseek", "gpt-oss"])
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_forward_equals_rational_arithmetic(router_weight, activation):
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 3, 36, 34, scale_bytes=(122, 128), activation=activation, bias=activation is GPT_OSS)
    x, ids, weights = random_batch(rng, experts, tokens=4, top_k=3)
    ids[0] = [1, 1, 2]  # a repeated id
    ids[1] = [-1, 3, 0]  # ids out of range
    mask = np.array([True, True, False])
    expected = naive_forward(experts, x, ids, weights, mask, router_weight)
    reference = forward(experts, x, ids, weights, expert_mask=mask, router_weight=router_weight)
    assert np.abs(reference.y - expected).max() <= 1e-12 * np.abs(expected).max()


def test_the_clamps_clamp():
    def silu(v):
        return v / (1 + math.exp(-v))

    # g = 6 x0, u = 6 x1, y0 = h0; the gate is clamped only from above
    experts = from_codes([[7, 0], [0, 0]], [[0, 7], [0, 0]], [[2, 0], [0, 0]], activation=DEEPSEEK)
    x = np.array([[8, 8], [8, -8], [-8, -8], [-1, 1]])
    y = forward(experts, x, np.zeros((4, 1), int), np.ones((4, 1))).y[:, 0]
    assert np.array_equal(y, round_bfloat16([10 * silu(10), -10 * silu(10), -10 * silu(-48), 6 * silu(-6)]))


# backends simulated in float32


def flushed(a):
    return np.where(np.abs(a) < TINY, np.float32(0), a)


def simulated_linear(matrix, a, kind):
    """A backend's float32 [tokens, n]. kind is one of

    ieee: multiply, then add, in ascending k, with denormals; descending: likewise from the last k to the first;
    vdpbf16ps: ascending pairs of k, the odd one first, denormal inputs and results flushed to zero.
    A product of a bfloat16 and a folded weight is exact in float32, so that a fused multiply-add rounds like the sum alone.
    """
    flush = flushed if kind == "vdpbf16ps" else lambda v: v
    a = flush(a.astype(np.float32))
    k_order = np.arange(matrix.shape[1])
    if kind == "vdpbf16ps":
        k_order = k_order.reshape(-1, 2)[:, ::-1].ravel()
    elif kind == "descending":
        k_order = k_order[::-1]
    total = np.zeros((len(a), matrix.shape[0]), np.float32)
    if matrix.scales.min() >= 2 and matrix.scales.max() <= 252:
        weights = dequantize(matrix).astype(np.float32)
        for k in k_order:
            total = flush(total + flush(a[:, k, None] * weights[:, k]))
    else:
        unscaled = Matrix(matrix.name, matrix.format, matrix.shape, matrix.codes, np.full_like(matrix.scales, 127))
        weights = dequantize(unscaled).astype(np.float32)
        for group in range(matrix.scales.shape[1]):
            partial = np.zeros_like(total)
            for k in k_order[group * 32 : group * 32 + 32]:
                partial = flush(partial + flush(a[:, k, None] * weights[:, k]))
            scale = np.ldexp(1.0, matrix.scales[:, group].astype(int) - 127)
            total = flush((total + partial.astype(np.float64) * scale).astype(np.float32))
    return total if matrix.bias is None else total + matrix.bias


def simulated_forward(experts, x, ids, weights, router_weight, kind, rng):
    """A backend in float32 numpy. Its exp errs by almost all that a backend's may, at random."""

    def exp(z):
        exact = np.exp(z.astype(np.float64))
        return (exact * (1 + 0.8 * EXP_RELATIVE_ERROR * rng.uniform(-1, 1, z.shape))).astype(np.float32)

    alpha, limit, offset = (np.float32(getattr(experts.activation, v)) for v in ("alpha", "limit", "up_offset"))
    one = np.float32(1)
    x = np.asarray(x).astype(np.float32)
    y = np.zeros((len(x), experts.hidden), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for expert in range(experts.num_experts):
            for slot in range(ids.shape[1]):
                token = np.nonzero(ids[:, slot] == expert)[0]
                r = weights[token, slot].astype(np.float32)[:, None]
                a = x[token]
                if router_weight == "expert_input":
                    a = (a * r).astype(ml_dtypes.bfloat16)
                g = np.minimum(simulated_linear(experts.matrix(expert, "gate"), a, kind), limit)
                u = np.clip(simulated_linear(experts.matrix(expert, "up"), a, kind), -limit, limit) + offset
                e = exp(-alpha * g)
                h = u * (g / (one + e)) if kind == "ieee" else (u * g) * (one / (one + e))
                h = (h * r if router_weight == "down_input" else h).astype(ml_dtypes.bfloat16)
                d = simulated_linear(experts.matrix(expert, "down"), h, kind)
                y[token] += r * d if router_weight == "down_output" else d
    return y


def worst(experts, x, ids, weights, kind, rng, router_weight="down_output"):
    """The worst error against the bound for both output dtypes, and the float32 reference."""
    y = simulated_forward(experts, x, ids, weights, router_weight, kind, rng)
    float32 = forward(experts, x, ids, weights, router_weight=router_weight, out_dtype="float32")
    bfloat16 = forward(experts, x, ids, weights, router_weight=router_weight, out_dtype="bfloat16")
    assert np.array_equal(float32.y, bfloat16.y, equal_nan=True)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (flushed(y) if kind == "vdpbf16ps" else y).astype(ml_dtypes.bfloat16)
        return max(float32.worst(y), bfloat16.worst(rounded)), float32


@pytest.mark.parametrize("kind", ["ieee", "vdpbf16ps"])
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("activation", [SILU, DEEPSEEK, GPT_OSS], ids=["silu", "deepseek", "gpt-oss"])
def test_a_simulated_backend_stays_within_the_bound(kind, router_weight, activation):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        bytes_ = (119, 122) if seed % 2 else (122, 127)
        experts = random_experts(rng, 3, 196, 100, scale_bytes=bytes_, activation=activation, bias=activation is GPT_OSS)
        batch = random_batch(rng, experts)
        ratio, reference = worst(experts, *batch, kind, rng, router_weight)
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
    "near overflow": ((181, 182), (119, 124), (0, 4)),
}


@pytest.mark.parametrize("kind", ["ieee", "vdpbf16ps"])
@pytest.mark.parametrize("case", EDGES)
def test_a_simulated_backend_stays_within_the_bound_at_the_edges(kind, case):
    scale_bytes, down_bytes, exponents = EDGES[case]
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 2, 96, 64, scale_bytes=scale_bytes, down_bytes=down_bytes)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=2)
    x = (x.astype(np.float64) * np.ldexp(1.0, rng.integers(*exponents, x.shape))).astype(ml_dtypes.bfloat16)
    ratio, reference = worst(experts, x, ids, weights, kind, rng)
    assert ratio <= 1
    bounded = np.isfinite(reference.bound)
    assert bounded.any()
    assert bounded.all() == (case != "near overflow")


# the bound is tight


def one_expert(gate, up, down, x):
    """forward and a simulated backend on one token and one expert, whose router weight is 1."""
    experts = from_codes(gate, up, down)
    arguments = experts, np.array([x]), np.zeros((1, 1), int), np.ones((1, 1), np.float32)
    simulated = simulated_forward(*arguments, "down_output", "ieee", np.random.default_rng(0))
    return forward(*arguments, out_dtype="float32"), simulated


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


def test_the_bound_of_the_sum_over_slots_is_almost_attained():
    # d = 1; the router weights are 1, then 127 times u, each of which the float32 sum loses
    experts = from_codes([[2, 0], [0, 0]], [[0, 2], [0, 0]], [[2, 0], [0, 0]])
    arguments = experts, np.array([[64.0, 1 / 64]]), np.zeros((1, 128), int), np.array([[1.0] + [UNIT] * 127])
    reference = forward(*arguments, out_dtype="float32")
    simulated = simulated_forward(*arguments, "down_output", "ieee", np.random.default_rng(0))
    assert reference.y[0, 0] == 1 + 127 * UNIT
    assert simulated[0, 0] == 1
    assert 0.9 < reference.worst(simulated) <= 1


@pytest.mark.parametrize("byte", [127, 254])
def test_a_flushed_partial_sum_is_within_the_bound(byte):
    # the products +-2**-126 and their neighbours are normal numbers, their difference is not
    scale = Fraction(2) ** (byte - 127)
    a = np.ldexp([[1 + 2.0**-7, -1.0]], -120 if byte == 254 else -126)
    matrix = Matrix("w", MXFP4, (1, 2), pack([[2, 2]]), np.array([[byte]], np.uint8))
    y, bound = _linear(matrix, a, np.zeros_like(a), BLOCK)
    assert Fraction(float(y[0, 0])) == Fraction(float(a.sum())) * scale
    assert simulated_linear(matrix, a, "vdpbf16ps") == 0
    assert y <= bound <= float(4 * Fraction(TINY) * max(scale, 1)) * 1.01


def test_a_group_whose_unscaled_sum_overflows_has_no_bound():
    matrix = Matrix("w", MXFP4, (2, 2), pack([[7, 7], [2, 0]]), np.array([[0], [0]], np.uint8))
    a = np.full((1, 2), 2.0**126)
    y, bound = _linear(matrix, a, np.zeros_like(a), BLOCK)
    assert y.tolist() == [[6.0, 0.5]]
    with np.errstate(over="ignore"):
        assert simulated_linear(matrix, a, "ieee").tolist() == [[np.inf, 0.5]]
    assert np.isinf(bound[0, 0])
    assert np.isfinite(bound[0, 1])


def test_the_rounding_of_a_bias_is_within_the_bound():
    matrix = Matrix("w", MXFP4, (1, 2), pack([[2, 0]]), np.array([[127]], np.uint8), np.ones(1, np.float32))
    a = np.array([[UNIT, 0.0]])
    y, bound = _linear(matrix, a, np.zeros_like(a), BLOCK)
    assert y == 1 + UNIT
    assert simulated_linear(matrix, a, "ieee") == 1
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


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_one_wrong_code_leaves_the_bound(projection):
    rng = np.random.default_rng(5)
    experts = random_experts(rng, 1, 64, 64)
    x, ids, _ = random_batch(rng, experts, tokens=16, top_k=1)
    weights = np.ones((16, 1))
    reference = forward(experts, x, ids, weights, out_dtype="float32")
    arrays = {p: (experts.matrix(0, p).codes[None], experts.matrix(0, p).scales[None]) for p in ("gate", "up", "down")}
    for _ in range(20):
        codes = arrays[projection][0].copy()
        row, byte, bit = rng.integers(64), rng.integers(32), 1 << rng.integers(8)
        before = dequantize(experts.matrix(0, projection))[row, 2 * byte + (bit > 8)]
        codes[0, row, byte] ^= bit
        if before == 0 and bit in (8, 128):
            continue  # -0 instead of 0
        wrong = ExpertWeights.from_arrays(**arrays | {projection: (codes, arrays[projection][1])})
        y = simulated_forward(wrong, x, ids, weights, "down_output", "ieee", rng)
        assert reference.worst(y) > 1, (row, byte, bit)


# which slots count, and isolation


def test_skipped_masked_and_repeated_ids():
    rng = np.random.default_rng(6)
    experts = random_experts(rng, 3, 64, 32)
    x, _, _ = random_batch(rng, experts, tokens=5)
    ids = np.array([[0, 1], [0, 0], [0, -1], [3, 2**31 - 1], [2, 1]])
    weights = np.array([[0.5, 0.25], [0.5, 0.25], [0.5, np.nan], [np.nan, np.inf], [np.nan, 0.25]])
    mask = np.array([True, True, False])
    reference = forward(experts, x, ids, weights, expert_mask=mask)

    def alone(token, expert, weight):
        return forward(experts, x[token : token + 1], [[expert]], [[weight]]).y[0]

    expected = [
        alone(0, 0, 0.5) + alone(0, 1, 0.25),
        alone(1, 0, 0.75),
        alone(2, 0, 0.5),
        np.zeros(64),
        alone(4, 1, 0.25),
    ]
    assert np.allclose(reference.y, expected, rtol=0, atol=1e-13)
    assert np.isfinite(reference.bound).all()
    assert not reference.bound[3].any()  # nothing selected: exactly zero
    assert reference.error(np.full((5, 64), 1e-30))[3].min() == np.inf
    no_mask = forward(experts, x, ids, weights)
    assert np.isinf(no_mask.bound[4]).all()
    assert np.isfinite(no_mask.bound[:4]).all()


@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_token_is_excluded_and_alone(value, router_weight):
    rng = np.random.default_rng(7)
    experts = random_experts(rng, 2, 64, 32)
    x, ids, weights = random_batch(rng, experts, tokens=4, top_k=2)
    clean = forward(experts, x, ids, weights, router_weight=router_weight)
    x[1, 3] = value
    weights[2, 0] = value
    reference = forward(experts, x, ids, weights, router_weight=router_weight)
    assert np.isinf(reference.bound[1:3]).all()
    for token in (0, 3):
        assert np.array_equal(reference.bound[token], clean.bound[token])
        assert np.array_equal(reference.y[token], clean.y[token])
    y = clean.y.copy()
    y[1:3] = np.nan
    assert reference.worst(y) == 0
    y[0, 0] = np.nan
    assert reference.worst(y) == np.inf


def test_error_counts_a_difference_where_none_is_allowed():
    reference = Reference(np.zeros((1, 3)), np.array([[0.0, 2.0, np.inf]]))
    assert reference.error([[0.0, 1.0, np.nan]]).tolist() == [[0, 0.5, 0]]
    assert reference.error([[1e-300, 1.0, 7.0]]).tolist() == [[np.inf, 0.5, 0]]
    assert Reference(np.zeros((0, 3)), np.zeros((0, 3))).worst(np.zeros((0, 3))) == 0


# samples, inputs


def test_sampled_tokens_and_columns_are_those_of_the_whole():
    rng = np.random.default_rng(8)
    experts = random_experts(rng, 3, 128, 96, bias=True)
    x, ids, weights = random_batch(rng, experts, tokens=7)
    whole = forward(experts, x, ids, weights)
    for columns in (slice(5, 20), np.array([3, 127, 64]), [0]):
        sample = forward(experts, x[2:4], ids[2:4], weights[2:4], columns=columns)
        assert np.allclose(sample.y, whole.y[2:4][:, columns], rtol=1e-12, atol=1e-14)
        assert np.allclose(sample.bound, whole.bound[2:4][:, columns], rtol=1e-6)


def test_only_experts_that_are_used_are_read_once_each():
    rng = np.random.default_rng(9)
    inner = random_experts(rng, 8, 32, 32)
    asked = []

    def read(expert, projection):
        asked.append((expert, projection))
        return inner.matrix(expert, projection)

    experts = ExpertWeights(8, 32, 32, read)
    forward(experts, np.ones((2, 32)), [[5, 2], [7, 5]], np.ones((2, 2)), expert_mask=np.arange(8) != 7)
    assert asked == [(expert, projection) for expert in (2, 5) for projection in ("gate", "up", "down")]


def test_every_form_of_x_means_the_same():
    rng = np.random.default_rng(10)
    experts = random_experts(rng, 2, 32, 32)
    x, ids, weights = random_batch(rng, experts)
    expected = forward(experts, x, ids, weights)
    for form in (x.view(np.uint16), x.astype(np.float32), x.astype(np.float64)):
        assert np.array_equal(forward(experts, form, ids, weights).y, expected.y)
    unrounded = x.astype(np.float32) * np.float32(1 + 2.0**-12)  # less than half a unit in the last place of bfloat16
    assert np.array_equal(forward(experts, unrounded, ids, weights).y, expected.y)


def test_wrong_inputs_are_refused():
    experts = random_experts(np.random.default_rng(11), 2, 32, 34)
    x, ids, weights = np.ones((3, 32)), np.zeros((3, 2), int), np.ones((3, 2))
    for change, message in (
        ({"x": np.ones((3, 34))}, r"x must be \[tokens, 32\], found \[3, 34\]"),
        ({"expert_ids": np.zeros((2, 2), int)}, r"\[3, top_k\].*\[2, 2\]"),
        ({"expert_ids": np.zeros((3, 2))}, "float64"),
        ({"expert_weights": np.ones((3, 1))}, r"\[3, 1\]"),
        ({"expert_mask": np.ones(3, bool)}, r"bool \[2\], found bool \[3\]"),
        ({"router_weight": "down"}, "router_weight.*'down'"),
        ({"out_dtype": "float16"}, "out_dtype.*'float16'"),
    ):
        with pytest.raises(InputError, match=message):
            forward(**{"experts": experts, "x": x, "expert_ids": ids, "expert_weights": weights} | change)
    assert forward(experts, x[:0], ids[:0], weights[:0]).y.shape == (0, 32)
    assert not forward(experts, x, ids[:, :0], weights[:, :0]).y.any()
