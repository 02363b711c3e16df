"""The values of the float64 reference against simpler statements of them, in rationals. Its bound: test_reference_bound.py."""

import functools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from ktmoe.errors import FormatError, InputError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.reference import (
    ROUTER_WEIGHTS,
    Reference,
    _operand,
    dequantize,
    forward,
    integer_unit,
    round_bfloat16,
)
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import BF16, E2M1, MXFP4, Scale, WeightFormat, int4

BFLOAT16 = ml_dtypes.bfloat16
GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
DEEPSEEK = GatedActivation(limit=10.0)


def random_experts(
    rng,
    num_experts,
    hidden,
    intermediate,
    *,
    format=MXFP4,
    scale_bytes=(119, 124),
    down_bytes=None,
    activation=SILU,
    bias=False,
):
    """scale_bytes: the least and the greatest exponent of scales, or of b16 weights, as UE8M0 has it; bfloat16s may be <= 0."""

    def numbers(shape, low, high):
        value = np.ldexp(rng.integers(128, 256, shape) / 128, rng.integers(low, high, shape, endpoint=True) - 127)
        return (value * rng.choice([-1, 1, 0], shape, p=[0.48, 0.48, 0.04])).astype(BFLOAT16)

    def matrices(n, k, low, high):
        if format.scale is None:
            return (numbers((num_experts, n, k), low, high),)
        codes, shape = rng.integers(0, 256, (num_experts, n, k // 2), dtype=np.uint8), (num_experts, *format.scale.shape(n, k))
        if format.scale.kind == "bf16":
            return codes, numbers(shape, low, high)
        return codes, rng.integers(low, high, shape, dtype=np.uint8, endpoint=True)

    shapes = {"gate": intermediate, "up": intermediate, "down": hidden}
    biases = {p: rng.standard_normal((num_experts, n)).astype(np.float32) for p, n in shapes.items()} if bias else None
    gate, up = matrices(intermediate, hidden, *scale_bytes), matrices(intermediate, hidden, *scale_bytes)
    down = matrices(hidden, intermediate, *(down_bytes or scale_bytes))
    return ExpertWeights.from_arrays(gate, up, down, biases=biases, format=format, activation=activation)


def random_batch(rng, experts, tokens=6, top_k=3):
    x = rng.standard_normal((tokens, experts.hidden)).astype(BFLOAT16)
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


def bfloat16s(bits):
    """The rational numbers that 16 bits stand for, by the definition of the format."""
    return [
        (-1) ** (b >> 15) * (Fraction(128 * (b >> 7 & 255 > 0) + (b & 127), 128) * Fraction(2) ** (max(b >> 7 & 255, 1) - 127))
        for b in np.asarray(bits).ravel().tolist()
    ]


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


@pytest.mark.parametrize(("group", "k"), [(32, 96), (32, 34), (64, 200), (128, 288)])
def test_dequantize_int4_applies_each_scale_to_its_own_group(group, k):
    rng = np.random.default_rng(group)
    codes = rng.integers(0, 16, (6, k))
    bits = rng.integers(0, 2**16, (6, -(-k // group)), dtype=np.uint16)
    bits[bits >> 7 & 255 == 255] = 0x0001  # the least denormal in place of NaN and infinity
    bits[0, 0], bits[1, 0], bits[2, 0] = 0x8000, 0x0000, 0xC040  # -0, 0, -3
    matrix = Matrix("w", int4(group), (6, k), pack(codes), bits.view(BFLOAT16))
    weights, scales = dequantize(matrix), bfloat16s(bits)
    assert weights.dtype == np.float64
    for n in range(6):
        for at in range(k):
            assert Fraction(weights[n, at]) == (int(codes[n, at]) - 8) * scales[n * bits.shape[1] + at // group]
    assert not weights[:2, :group].any()
    assert np.array_equal(weights[2, :group], -3 * (codes[2, :group] - 8.0))
    assert np.array_equal(dequantize(matrix, [4, 1]), weights[[4, 1]])


def test_dequantize_every_bfloat16_weight():
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[bits >> 7 & 255 < 255].reshape(15, -1)  # 15 x 4352 finite numbers
    bits = np.concatenate([bits[:, :1], bits], axis=1)  # k is odd
    weights = dequantize(Matrix("w", BF16, bits.shape, bits.view(BFLOAT16)))
    assert [Fraction(w) for w in weights.ravel().tolist()] == bfloat16s(bits)
    assert np.array_equal(np.signbit(weights), bits >= 0x8000)
    assert np.array_equal(dequantize(Matrix("w", BF16, bits.shape, bits.view(BFLOAT16)), slice(3, 7)), weights[3:7])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_dequantize_refuses_what_is_no_number_by_name(value):
    name = "layers.3.ffn.experts.7.w1"
    scales = np.full((3, 2), 127, np.uint8)
    scales[2, 1] = 255
    numbers = np.ones((3, 2), BFLOAT16)
    numbers[2, 1] = value
    for matrix in (
        Matrix(name, MXFP4, (3, 64), np.zeros((3, 32), np.uint8), scales),
        Matrix(name, int4(64), (3, 128), np.zeros((3, 64), np.uint8), numbers),
        Matrix(name, BF16, (3, 2), numbers),
    ):
        for rows in (slice(None), [2]):
            with pytest.raises(FormatError, match=r"layers\.3\.ffn\.experts\.7\.w1.*\[2, 1\]"):
                dequantize(matrix, rows)


# round_bfloat16


def test_round_bfloat16_at_every_midpoint():
    bits = np.arange(0x7F81, dtype=np.uint16)  # zero, every positive number, infinity
    numbers = bits.view(BFLOAT16).astype(np.float64)
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
        expected = a.astype(BFLOAT16).astype(np.float64)
        assert np.array_equal(round_bfloat16(a.astype(np.float64)), expected, equal_nan=True)


def test_round_bfloat16_keeps_what_float32_would_lose():
    # float64 -> float32 -> bfloat16 would round twice: to the tie 1 + 2**-8, then down to 1
    assert round_bfloat16(1 + 2.0**-8 + 2.0**-40) == 1 + 2.0**-7
    assert np.array_equal(round_bfloat16([np.inf, -np.inf, 1e300, -1e300, 5e-324]), [np.inf, -np.inf, np.inf, -np.inf, 0])
    assert np.isnan(round_bfloat16(np.nan))


# int16, int8


def int16_step(largest):
    """Of a group with this maximum."""
    exponent = -126
    while largest >= Fraction(2) ** (exponent + 1):
        exponent += 1
    return Fraction(2) ** (exponent - 14)


def int8_step(largest):
    return nearest_bfloat16(max(largest, Fraction(127, 2**118)) / 127)


def quantised_by_rationals(row, activations):
    """What a mode makes of one row of Fractions, one element at a time."""
    result = []
    for start in range(0, len(row), 32):
        group = row[start : start + 32]
        step = {"int16": int16_step, "int8": int8_step}[activations](max(map(abs, group)))
        integers = [round(v / step) for v in group]  # half to even
        assert max(map(abs, integers)) <= {"int16": 32640, "int8": 127}[activations]
        result += [q * step for q in integers]
    return result


def int16(x):
    return _operand(x, x, x, "int16")[0]


def int8(x):
    return _operand(x, x, x, "int8")[0]


def assert_quantised(bits, activations):
    """A few rows of bfloat16, by their bits."""
    rows = [bfloat16s(row) for row in bits]
    expected = np.array([[float(v) for v in quantised_by_rationals(row, activations)] for row in rows])
    x = bits.view(BFLOAT16).astype(np.float64)
    assert np.array_equal(_operand(x, x, x, activations)[0], expected)


@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_integers_equal_rational_arithmetic_at_every_exponent(activations):
    """Each row: a maximum of one exponent, the rest from 20 exponents below up to it, of every kind: ties, zeros, denormals."""
    rng = np.random.default_rng(0)
    exponent = np.arange(255)[:, None]
    bits = np.maximum(exponent - rng.integers(0, 20, (255, 70)), 0) << 7 | rng.integers(0, 128, (255, 70))
    bits[:, [0, 32, 64]] = exponent << 7 | [0, 127, 64]  # the last group has 6 elements
    assert_quantised((bits | rng.integers(0, 2, bits.shape) << 15).astype(np.uint16), activations)


def test_int8_equals_rational_arithmetic_at_every_maximum():
    """Each row: the 128 numbers of a binade as maxima of a group each, and numbers of the binades below."""
    for exponent in (9, 14, 15, 16, 100, 254):
        others = np.maximum(exponent - 1 - np.arange(31) // 4, 0) << 7 | np.random.default_rng(exponent).integers(
            0, 128, (128, 31)
        )
        bits = np.concatenate([(exponent << 7 | np.arange(128))[:, None], others], axis=1)
        assert_quantised(bits.reshape(1, -1).astype(np.uint16), "int8")


def test_int8_at_ties_and_limits():
    x = np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0.498046875, 3.0, *[0.0] * 23])
    expected = np.array([127.0, 0, 2, 2, 0, -2, 126, 0, 3, *[0.0] * 23])
    assert np.array_equal(round_bfloat16(x), x)
    for shift in (-118, -30, 0, 121):
        assert np.array_equal(int8(np.ldexp([x], shift)), np.ldexp([expected], shift))
    for largest, step in ((64.0, 129 / 256), (128.0, 129 / 128), (129.0, 1.015625), (254.0, 2.0), (255.0, 129 / 64)):
        assert int8_step(Fraction(largest)) == step
        assert np.array_equal(int8(np.array([[largest, -largest]])), [[127 * step, -127 * step]])
    tiny = 2.0**-118  # the least step
    x = np.array([[126.5 * tiny, tiny / 2, 1.5 * tiny, 2.0**-126, 2.0**-133]])
    assert np.array_equal(int8(x), [[126 * tiny, 0, 2 * tiny, 0, 0]])
    greatest = (2 - 2.0**-7) * 2.0**127
    assert np.array_equal(int8(np.array([[0.0, greatest]])), [[0.0, 127 * 129 / 128 * 2.0**121]])
    assert not int8(np.zeros((1, 40))).any()


def test_int8_errs_by_at_most_half_a_step():
    """A step is 1/127 of the group's maximum, to 2**-9 of itself: for Gaussian x the mean square error is 1 % of it."""
    rng = np.random.default_rng(1)
    x = np.ldexp(rng.standard_normal((400, 96)), rng.integers(-110, 120, (400, 1)) + rng.integers(-20, 1, (400, 96)))
    x = round_bfloat16(x)
    largest = np.repeat(np.abs(x).reshape(400, 3, 32).max(axis=2), 32, axis=1)
    error = np.abs(int8(x) - x)
    assert (error <= largest / 254 * (1 + 2.0**-8)).all()
    assert (error > 0.99 * largest / 254).any()
    x = round_bfloat16(rng.standard_normal((1000, 1024)))
    assert 0.004 < np.sqrt(np.mean((int8(x) - x) ** 2)) < 0.006


def test_int16_at_ties_and_limits():
    def row(*values):
        return np.array(values + (0.0,) * (64 - len(values)))

    one = 2.0**-14  # the step of a group whose maximum is in [1, 2)
    x = row(1.0, one / 2, 1.5 * one, 2.5 * one, -one / 2, -1.5 * one, 0.53125 * one, one / 4, 65 * one, 255 * one / 2)
    expected = row(1.0, 0.0, 2 * one, 2 * one, 0.0, -2 * one, one, 0.0, 65 * one, 128 * one)
    assert np.array_equal(round_bfloat16(x), x)
    for shift in (-112, -30, 0, 127):
        assert np.array_equal(int16(np.ldexp([x], shift)), np.ldexp([expected], shift))
    greatest = (2 - 2.0**-7) * 2.0**127
    for x in (row(), row(greatest, -greatest), row(*[0.0] * 32, 2.0**-133, -127 * 2.0**-133), row(2.0**-126, 2.0**-133)):
        assert np.array_equal(int16(x[None]), x[None])
    assert 255 * 2**7 == 32640 == greatest / 2.0 ** (127 - 14)  # the largest q


def test_int16_errs_by_at_most_one_part_in_32768_of_the_groups_maximum():
    rng = np.random.default_rng(1)
    x = np.ldexp(rng.standard_normal((400, 96)), rng.integers(-140, 120, (400, 1)) + rng.integers(-20, 1, (400, 96)))
    x = round_bfloat16(x)
    largest = np.repeat(np.abs(x).reshape(400, 3, 32).max(axis=2), 32, axis=1)
    error = np.abs(int16(x) - x)
    assert (error <= 2.0**-15 * largest).all()
    assert (error > 0.9 * 2.0**-15 * largest).any()
    assert not error[largest < 2.0**-126].any()  # denormals are multiples of the least step


def test_int16_represents_99_percent_of_gaussian_numbers_exactly():
    x = round_bfloat16(np.random.default_rng(2).standard_normal((1000, 1024)))
    assert 0.985 < (int16(x) == x).mean() < 0.995


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_group_of_integers_that_is_not_finite_is_nan(value):
    x = np.full((2, 70), 127.0)
    x[1, 66] = value
    expected = np.full((2, 70), 127.0)
    expected[1, 64:] = np.nan
    assert np.array_equal(int16(x), expected, equal_nan=True)
    assert np.array_equal(int8(x), expected, equal_nan=True)


def test_which_formats_have_integers():
    ue8m0, per_16 = Scale("ue8m0", (1, 32)), Scale("bf16", (1, 16))
    sixteenths = tuple(n / 16 for n in range(16))
    for format, unit in (
        (MXFP4, 0.5),
        (int4(32), 1),
        (int4(256), 1),
        (WeightFormat("q4", sixteenths, ue8m0), 2.0**-4),
        (WeightFormat("q4", tuple(2.0**-8 * n for n in range(16)), ue8m0), 2.0**-8),
        (WeightFormat("q4", (16.0, -16.0) + (0.0,) * 14, ue8m0), 1),
        (WeightFormat("q4", (17.0,) + (0.0,) * 15, ue8m0), None),
        (WeightFormat("q4", (16.0, 0.5) + (0.0,) * 14, ue8m0), None),
        (WeightFormat("q4", (2.0**-9,) + (0.0,) * 15, ue8m0), None),
        (WeightFormat("q4", E2M1, per_16), None),
        (BF16, None),
    ):
        assert integer_unit(format) == unit


# forward against rational arithmetic


@functools.cache
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


def naive_forward(experts, x, ids, weights, mask, router_weight, activations="bf16", rounded=()):
    """The definition, one scalar at a time: exact but for the activation, which is Python's float.

    rounded: the names of the matrices whose weights rounding="folded" rounds to bfloat16.
    """

    def weight(matrix, row, k):
        if matrix.format.scale is None:
            return Fraction(float(matrix.codes[row, k]))
        byte, scale = int(matrix.codes[row, k // 2]), matrix.scales[row, k // matrix.format.scale.extent[1]]
        scale = Fraction(2) ** (int(scale) - 127) if scale.dtype == np.uint8 else Fraction(float(scale))
        product = Fraction(matrix.format.codebook[byte >> 4 if k % 2 else byte & 15]) * scale
        return nearest_bfloat16(product) if matrix.name in rounded else product

    def linear(matrix, a):
        a = a if activations == "bf16" else quantised_by_rationals(a, activations)
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


@pytest.mark.parametrize(
    ("format", "activations"),
    [(format, "bf16") for format in (int4(32), int4(64), BF16)]
    + [(format, mode) for format in (MXFP4, int4(64)) for mode in ("int16", "int8")],
    ids=lambda v: v if isinstance(v, str) else v.description,
)
def test_formats_and_activations_equal_rational_arithmetic(format, activations):
    rng = np.random.default_rng(15)
    experts = random_experts(rng, 2, 67 if format is BF16 else 68, 36, format=format, bias=True)
    x, ids, weights = random_batch(rng, experts, tokens=2, top_k=2)
    x = (x.astype(np.float32) ** 5).astype(BFLOAT16)  # far apart, so that integers are rounded
    for router_weight in ROUTER_WEIGHTS:
        expected = naive_forward(experts, x, ids, weights, [True] * 2, router_weight, activations)
        y = forward(experts, x, ids, weights, router_weight=router_weight, activations=activations).y
        assert np.abs(y - expected).max() <= 1e-12 * np.abs(expected).max()
    if activations != "bf16":
        assert np.abs(forward(experts, x, ids, weights, router_weight=router_weight).y - y).max() > 1e-7 * np.abs(y).max()


def test_the_clamps_clamp():
    def silu(v):
        return v / (1 + math.exp(-v))

    # g = 6 x0, u = 6 x1, y0 = h0; the gate is clamped only from above
    experts = from_codes([[7, 0], [0, 0]], [[0, 7], [0, 0]], [[2, 0], [0, 0]], activation=DEEPSEEK)
    x = np.array([[8, 8], [8, -8], [-8, -8], [-1, 1]])
    y = forward(experts, x, np.zeros((4, 1), int), np.ones((4, 1))).y[:, 0]
    assert np.array_equal(y, round_bfloat16([10 * silu(10), -10 * silu(10), -10 * silu(-48), 6 * silu(-6)]))


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
        ({"activations": "int4"}, "activations.*'int4'"),
        ({"rounding": "rounded"}, "rounding.*'rounded'"),
        *(({"rounding": "folded", "activations": mode}, f"'folded'.*'{mode}'") for mode in ("int16", "int8")),
    ):
        with pytest.raises(InputError, match=message):
            forward(**{"experts": experts, "x": x, "expert_ids": ids, "expert_weights": weights} | change)
    assert forward(experts, x[:0], ids[:0], weights[:0]).y.shape == (0, 32)
    assert not forward(experts, x, ids[:, :0], weights[:, :0]).y.any()


@pytest.mark.parametrize(
    "format", [BF16, WeightFormat("q4", (77 / 256, *[0.0] * 15), MXFP4.scale), int4(16)], ids=lambda v: v.description
)
def test_integers_are_refused_where_they_do_not_exist(format):
    experts = random_experts(np.random.default_rng(16), 1, 32, 32, format=format)
    arguments = experts, np.ones((1, 32)), np.zeros((1, 1), int), np.ones((1, 1))
    for mode in ("int16", "int8"):
        with pytest.raises(InputError, match=f"'{mode}'.*gate.*{format.description}"):
            forward(*arguments, activations=mode)
    assert np.isfinite(forward(*arguments).bound).all()
