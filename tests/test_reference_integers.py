"""int16 and int8 of the float64 reference against rational arithmetic, at ties, limits and every exponent."""

from fractions import Fraction

import numpy as np
import pytest
from rationals import bfloat16s, int8_step, quantised_by_rationals
from reference_experts import BFLOAT16

from ktmoe.reference import integer_unit, operand, round_bfloat16
from ktmoe.weights import formats
from ktmoe.weights.elements import E2M1, INT4, INT8, INT8_PLUS_128, Element
from ktmoe.weights.formats import (
    BF16,
    FP8_PER_ROW,
    MXFP4,
    MXFP8,
    Factor,
    Minimum,
    Scale,
    WeightFormat,
    ZeroPoint,
    fp8,
    int4,
    nvfp4,
    uint4,
)
from ktmoe.weights.order import GPTQ


def int16(x):
    return operand(x, x, x, "int16")[0]


def int8(x):
    return operand(x, x, x, "int8")[0]


def assert_quantised(bits, activations):
    """A few rows of bfloat16, by their bits."""
    rows = [bfloat16s(row) for row in bits]
    expected = np.array([[float(v) for v in quantised_by_rationals(row, activations)] for row in rows])
    x = bits.view(BFLOAT16).astype(np.float64)
    assert np.array_equal(operand(x, x, x, activations)[0], expected)


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

    def of(values):
        return WeightFormat(Element("values", "q4", values), ue8m0)

    for format, unit in (
        (MXFP4, 0.5),
        (int4(32), 1),
        (int4(256), 1),
        (of(sixteenths), 2.0**-4),
        (of(tuple(2.0**-8 * n for n in range(16))), 2.0**-8),
        (of((16.0, -16.0) + (0.0,) * 14), 1),
        (of((17.0,) + (0.0,) * 15), 1),
        (of((127.0,) + (0.0,) * 15), 1),
        (of((128.0,) + (0.0,) * 15), None),
        (of((16.0, 0.5) + (0.0,) * 14), 0.5),
        (of((64.0, 0.5) + (0.0,) * 14), None),
        (of((2.0**-9,) + (0.0,) * 15), None),
        (WeightFormat(E2M1, per_16), 0.5),
        (WeightFormat(E2M1, Scale("bf16", (1, 48))), None),
        (WeightFormat(E2M1), 0.5),
        (BF16, None),
        (int4(64, "fp16"), 1),
        (int4(64, "fp16", GPTQ), 1),
        (WeightFormat(E2M1, ue8m0, factor=Factor(per_row=True)), 0.5),
        (int4(64, "fp32"), None),
        (uint4(64), 1),
        (uint4(32, order=GPTQ, plus=1), 1),
        (WeightFormat(INT4, Scale("fp16", (1, 32)), offset=ZeroPoint((1, 32))), None),
        (WeightFormat(E2M1, ue8m0, Scale("bf16", (1, 256))), 0.5),
        (WeightFormat(E2M1, ue8m0, offset=Minimum(ue8m0)), 0.5),
        (WeightFormat(E2M1, Scale("bf16", (2, 32))), None),
        (nvfp4(), 0.5),
        (nvfp4(divides=True), 0.5),
        (MXFP8, None),
        (fp8("bf16"), None),
        (FP8_PER_ROW, None),
        (formats.int8(), 1),
        (formats.int8(32, "fp16", INT8_PLUS_128), 1),
        (WeightFormat(INT8), 1),
        (formats.int8(16), 1),
        (formats.int8(48), None),
        (formats.int8(128, "fp32"), None),
        (formats.int8(128, rows=128), None),
        (WeightFormat(INT8, offset=Minimum(ue8m0)), 1),
        (WeightFormat(INT8, Scale("bf16", (1, 32)), Scale("bf16", (1, 256))), 1),
    ):
        assert integer_unit(format) == unit
