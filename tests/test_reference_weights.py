"""The reference's weights and its rounding, against rationals: every code with every scale, every bfloat16, every midpoint."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from helpers import ALL_FORMATS, pack_nibbles, random_experts
from rationals import bfloat16s, e4m3, factor_of, weight_of
from reference_experts import BFLOAT16
from simulated import label

from ktmoe.errors import FormatError
from ktmoe.matrix import Matrix
from ktmoe.reference import TINY, dequantize, round_bfloat16
from ktmoe.weights.elements import E2M1, UINT4
from ktmoe.weights.formats import BF16, MXFP4, MXFP8, WeightFormat, fp8, int4, nvfp4, uint4
from ktmoe.weights.offsets import Minimum
from ktmoe.weights.order import AWQ, GPTQ
from ktmoe.weights.scales import Scale

# dequantize


def test_dequantize_every_code_with_every_scale_byte():
    scales = np.arange(255, dtype=np.uint8)[:, None]
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (255, 1))
    weights = dequantize(Matrix("w", MXFP4, (255, 32), pack_nibbles(codes), scales))
    assert weights.dtype == np.float64
    for byte in range(255):
        for code in range(16):
            expected = Fraction(E2M1.values[code]) * Fraction(2) ** (byte - 127)
            for weight in weights[byte, [code, code + 16]].tolist():
                assert Fraction(weight) == expected
                assert math.copysign(1, weight) == (-1 if code & 8 else 1)


def test_dequantize_applies_each_scale_to_its_own_32_weights():
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 16, (5, 68)), rng.integers(0, 255, (5, 3), dtype=np.uint8)
    matrix = Matrix("w", MXFP4, (5, 68), pack_nibbles(codes), scales)
    weights = dequantize(matrix)
    for n in range(5):
        for k in range(68):
            assert weights[n, k] == E2M1.values[codes[n, k]] * 2.0 ** (int(scales[n, k // 32]) - 127)
    for rows in (slice(1, 4), np.array([4, 0]), [3]):
        assert np.array_equal(dequantize(matrix, rows), weights[rows])


@pytest.mark.parametrize("make", [int4, uint4, lambda group: uint4(group, order=GPTQ), lambda group: fp8(block=(group, group))])
def test_dequantize_takes_memory_for_a_matrix_not_for_a_group(make):
    """A file may say that any number of columns share a scale: then it has one for each row, or one in all."""
    rng, shape, wide, usual = np.random.default_rng(3), (64, 96), make(2**31 - 1), make(96)
    assert wide.arrays(*shape) == usual.arrays(*shape)
    arrays = {name: rng.integers(1, 15, of).astype(dtype) for name, (dtype, of) in wide.arrays(*shape).items()}
    tracemalloc.start()
    found = dequantize(Matrix("w", wide, shape, **arrays))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found, dequantize(Matrix("w", usual, shape, **arrays)))
    assert peak < 20 * found.nbytes


@pytest.mark.parametrize(("group", "k"), [(32, 96), (32, 34), (64, 200), (128, 288)])
def test_dequantize_int4_applies_each_scale_to_its_own_group(group, k):
    rng = np.random.default_rng(group)
    codes = rng.integers(0, 16, (6, k))
    bits = rng.integers(0, 2**16, (6, -(-k // group)), dtype=np.uint16)
    bits[bits >> 7 & 255 == 255] = 0x0001  # the least denormal in place of NaN and infinity
    bits[0, 0], bits[1, 0], bits[2, 0] = 0x8000, 0x0000, 0xC040  # -0, 0, -3
    matrix = Matrix("w", int4(group), (6, k), pack_nibbles(codes), bits.view(BFLOAT16))
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


def test_dequantize_every_e4m3_code_with_every_scale_byte():
    """And those that fold are the bytes that docs/numerics.md names."""
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    scales = np.tile(np.arange(255, dtype=np.uint8)[:, None], (1, 8))
    weights = dequantize(Matrix("w", MXFP8, (255, 254), np.tile(codes, (255, 1)), scales))
    for byte in range(255):
        expected = [e4m3(code) * Fraction(2) ** (byte - 127) for code in codes.tolist()]
        assert [Fraction(w) for w in weights[byte].tolist()] == expected
        sizes = np.abs(weights[byte][weights[byte] != 0])
        folds = sizes.min() >= TINY and np.array_equal(round_bfloat16(sizes), sizes)
        assert folds == (10 <= byte <= 246)
    assert np.array_equal(np.signbit(weights), np.tile(codes >= 128, (255, 1)))


def test_e2m1_folds_with_the_scale_bytes_that_the_contract_names():
    values = np.unique(np.abs(E2M1.values))[1:]
    for byte in range(255):
        products = np.ldexp(values, byte - 127)
        folds = products.min() >= TINY and np.array_equal(round_bfloat16(products), products)
        assert folds == (2 <= byte <= 252)


def test_e2m1_with_every_e4m3_scale_is_a_normal_bfloat16_number():
    stored = np.array([byte for byte in range(256) if byte & 127 != 127], np.uint8)[:, None]
    codes = np.tile(np.arange(16, dtype=np.uint8), (254, 1))
    matrix = Matrix("w", nvfp4(), (254, 16), pack_nibbles(codes), stored, factor=np.full(1, 3, np.float32))
    weights = dequantize(matrix, factor=False)
    for row, byte in enumerate(stored[:, 0].tolist()):
        assert [Fraction(w) for w in weights[row].tolist()] == [Fraction(value) * e4m3(byte) for value in E2M1.values]
    assert np.array_equal(weights.astype(BFLOAT16).astype(np.float64), weights)
    assert np.abs(weights[weights != 0]).min() >= TINY
    assert np.array_equal(dequantize(matrix), 3 * weights)


@pytest.mark.parametrize("format", ALL_FORMATS.values(), ids=label)
def test_dequantize_equals_rational_arithmetic(format):
    """Every part of every format, one weight at a time, from the bits of its checkpoint."""
    rng = np.random.default_rng(1)
    matrix = random_experts(rng, 1, 136, 16, formats=format).matrix(0, "gate")
    n, k = matrix.shape
    weights, multiplied = dequantize(matrix, factor=False), dequantize(matrix)
    assert weights.dtype == multiplied.dtype == np.float64
    exact = [[weight_of(matrix, row, at) for at in range(k)] for row in range(n)]
    if isinstance(format.offset, Minimum):
        assert np.allclose(weights, np.array(exact, float), rtol=1e-13, atol=1e-15 * np.abs(weights).max())
    else:
        assert [[Fraction(w) for w in row] for row in weights.tolist()] == exact
        expected = [[float(w * factor_of(matrix, row)) for w in of_row] for row, of_row in enumerate(exact)]
        assert np.array_equal(multiplied, expected)
    assert np.array_equal(multiplied, weights) == (format.factor is None)
    for rows in (slice(1, 4), np.array([14, 0]), [3]):
        assert np.array_equal(dequantize(matrix, rows), multiplied[rows])


def test_scales_of_blocks_are_of_their_rows_and_columns():
    rng = np.random.default_rng(2)
    codes = rng.choice([code for code in range(256) if code & 127 != 127], (200, 300)).astype(np.uint8)
    scales = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    weights = dequantize(Matrix("w", fp8(), (200, 300), codes, scales))
    for n, k in [(0, 0), (127, 127), (128, 127), (127, 128), (199, 256), (130, 299)]:
        assert Fraction(weights[n, k]) == e4m3(int(codes[n, k])) * Fraction(float(scales[n // 128, k // 128]))


@pytest.mark.parametrize("plus", [0, 1])
def test_every_code_with_every_zero_point(plus):
    """(code - z) * scale, z = (stored + plus) mod 16."""
    stored = np.arange(16, dtype=np.uint8)[:, None]
    codes = np.tile(np.arange(16, dtype=np.uint8), (16, 2))
    scales = np.full((16, 1), 3 * 2.0**-20, np.float16)  # denormal
    matrix = Matrix("w", uint4(32, plus=plus), (16, 32), pack_nibbles(codes), scales, offsets=stored)
    for z in range(16):
        assert np.array_equal(dequantize(matrix)[z], (codes[z] - float((z + plus) % 16)) * 3 * 2.0**-20)


@pytest.mark.parametrize(
    ("order", "code_at", "point_at"),
    [
        # GPTQ: rows of 8 k, nibble k % 8; AWQ: columns of 8 n, nibble 5 is that of n % 8 = 3
        (GPTQ, ((2, 11), 5), ((1, 1), 3)),
        (AWQ, ((21, 1), 5), ((1, 1), 5)),
    ],
    ids=["gptq", "awq"],
)
def test_one_code_and_one_zero_point_of_an_order(order, code_at, point_at):
    """The weight at n = 11, k = 21, whose group is the second of 16."""
    weight_format = uint4(16, order=order)
    arrays = {label: np.zeros(shape, dtype) for label, (dtype, shape) in weight_format.arrays(16, 32).items()}
    arrays["scales"][:] = 1
    (at, nibble), (group, of_point) = code_at, point_at
    arrays["codes"].view(np.uint32)[at] = 9 << 4 * nibble
    arrays["offsets"].view(np.uint32)[group] = 15 << 4 * of_point
    weights = dequantize(Matrix("w", weight_format, (16, 32), **arrays))
    expected = np.zeros((16, 32))
    expected[11, 16:] = -15
    expected[11, 21] = 9 - 15
    assert np.array_equal(weights, expected)


def test_minima_and_super_scales_of_their_groups():
    """value * scale * super-scale - minimum, each with groups of its own."""
    weight_format = WeightFormat(UINT4, Scale("fp16", (1, 16)), Scale("bf16", (2, 32)), Minimum(Scale("fp32", (1, 8))))
    codes = np.tile(np.arange(16, dtype=np.uint8), (3, 4))
    scales = np.arange(1, 13).reshape(3, 4).astype(np.float16)
    supers = np.array([[2, 4], [8, 16]]).astype(BFLOAT16)
    minima = np.arange(24, dtype=np.float32).reshape(3, 8)
    weights = dequantize(Matrix("w", weight_format, (3, 64), pack_nibbles(codes), scales, offsets=minima, super_scales=supers))
    for n in range(3):
        for k in range(64):
            assert weights[n, k] == codes[n, k] * scales[n, k // 16] * float(supers[n // 2, k // 32]) - minima[n, k // 8]


def test_dequantize_refuses_what_is_no_number_in_any_array():
    def changed(name, label, at, bits):
        matrix = random_experts(np.random.default_rng(3), 1, 64, 64, formats=ALL_FORMATS[name]).matrix(0, "up")
        array = getattr(matrix, label)
        array.view(f"u{array.dtype.itemsize}")[at] = bits
        return matrix

    for matrix, message in (
        (changed("fp8", "codes", (63, 5), 0x7F), r"weight \[63, 5\].*127"),
        (changed("fp8", "scales", (0, 0), 0x7F800000), r"scale \[0, 0\].*inf"),
        (changed("nvfp4", "scales", (7, 3), 0xFF), r"scale \[7, 3\].*255"),
        (changed("gptq-32", "scales", (1, 9), 0x7C00), r"scale \[1, 9\].*inf"),
        (changed("fp8-row", "factor", (9,), 0x7FC00000), r"factor \[9\].*nan"),
        (changed("nvfp4 divided", "factor", (0,), 0x80000000), r"factor \[0\] is 0"),
        (changed("minima", "offsets", (2, 1), 0xFC00), r"offset \[2, 1\].*-inf"),
        (changed("minima", "super_scales", (2, 0), 0x7F800000), r"super_scale \[2, 0\].*inf"),
    ):
        with pytest.raises(FormatError, match=rf"experts\.0\.up: {message}"):
            dequantize(matrix, [0])


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
