"""The reference's weights and its rounding, against rationals: every code with every scale, every bfloat16, every midpoint."""

import math
from fractions import Fraction

import numpy as np
import pytest
from helpers import pack_nibbles
from rationals import bfloat16s
from reference_experts import BFLOAT16

from ktmoe.errors import FormatError
from ktmoe.experts import Matrix
from ktmoe.reference import dequantize, round_bfloat16
from ktmoe.weights.elements import E2M1
from ktmoe.weights.formats import BF16, MXFP4, int4

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
