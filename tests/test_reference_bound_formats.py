"""The reference's bound where formats have scales of 16, factors, minima or super-scales: it holds, and is nearly attained."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from reference_experts import ones
from simulated import label, linear, linear_ratio, simulated_linear

from ktmoe.matrix import Matrix
from ktmoe.reference import TINY, UNIT
from ktmoe.weights.elements import E4M3, INT4, UINT4
from ktmoe.weights.formats import FP8_PER_ROW, WeightFormat, fp8, int4, nvfp4
from ktmoe.weights.offsets import Minimum
from ktmoe.weights.scales import Scale


@pytest.mark.parametrize("format", [int4(16), fp8(block=(1, 16)), WeightFormat(INT4, Scale("fp16", (1, 16)))], ids=label)
def test_the_bound_of_the_sum_over_groups_of_16_is_almost_attained(format):
    # the total is 1, then 511 groups whose sums are u, each of which it loses: two of them in 32 k
    a = np.zeros((1, 16 * 512))
    a[0, ::16] = [1.0] + [UNIT] * 511
    assert 0.9 < linear_ratio(ones(format, 1, 16 * 512), a, "fma") <= 1


def test_the_bound_of_folded_e4m3_scales_is_almost_attained():
    # one chain: 1, then u many times, each of which it loses; groups of 16 lose nearly nothing, and are within the same bound
    matrix = ones(nvfp4(), 1, 1024)
    a = np.array([[1.0] + [UNIT] * 1023])
    assert 0.9 < linear_ratio(matrix, a, "vdpbf16ps folded") <= 1
    assert linear_ratio(matrix, a, "fma") < 0.1


@pytest.mark.parametrize("divides", [False, True])
def test_the_bound_of_a_factors_rounding_is_almost_attained(divides):
    """What the bound is larger by than that of the total, times the factor."""
    matrix = ones(nvfp4(divides), 1, 16)
    a = np.zeros((1, 16))
    a[0, 0] = 1 + 2.0**-7
    # (1 + 2**-7) * (1 + 2**-17) is half-way between two float32 numbers near 1; the quotient is nearly so
    factors = np.float32(1 + 2.0**-17) if not divides else 1 + np.float32(2.0**-23) * np.arange(1, 4000, dtype=np.float32)
    best = 0.0
    for value in np.atleast_1d(factors)[:: 1 if not divides else 40]:
        matrix.factor[0] = 1
        of_total = linear(matrix, a)[1] - UNIT * (1 + 2.0**-7)
        matrix.factor[0] = value
        y, bound = linear(matrix, a)
        assert Fraction(float(y[0, 0])) == Fraction(a[0, 0]) * Fraction(float(value)) or divides
        scale = 1 / float(value) if divides else float(value)
        lost = np.abs(simulated_linear(matrix, a, "fma") - y)
        assert lost <= bound
        best = max(best, float((lost / (bound - of_total * scale))[0, 0]))
    assert 0.9 < best <= 1


def test_a_total_that_overflows_before_its_factor_has_no_bound():
    for divides, value in ((False, 2.0**-100), (True, 2.0**100), (False, 0.0)):
        matrix = ones(nvfp4(divides), 1, 16)
        matrix.factor[0] = value
        for exponent, finite in ((126, True), (127, False)):
            a = np.zeros((1, 16))
            a[0, :2] = 2.0**exponent
            y, bound = linear(matrix, a)
            assert np.isfinite(y).all()
            assert np.isfinite(bound).all() == finite
            assert np.isfinite(simulated_linear(matrix, a, "fma")).all() == finite


def test_a_factor_multiplies_what_is_flushed():
    # the sum of products is denormal and lost; the factor makes it large
    matrix = ones(FP8_PER_ROW, 1, 2)
    matrix.factor[0] = 2.0**100
    a = np.ldexp([[1 + 2.0**-7, -1.0]], -126)
    y, bound = linear(matrix, a)
    assert y == 2.0**-33
    assert simulated_linear(matrix, a, "vdpbf16ps") == 0
    assert y <= bound <= 8 * 2.0**-26


def test_a_factor_comes_before_the_bias():
    matrix = replace(ones(FP8_PER_ROW, 1, 2), bias=np.full(1, 5, np.float32))
    matrix.factor[0] = 3
    assert linear(matrix, np.array([[1.0, 1.0]]))[0] == 11


def test_the_bound_of_minima_is_almost_attained():
    # values are 0; the float32 sum of x is 1, then loses u many times
    format = WeightFormat(UINT4, Scale("bf16", (1, 32)), offset=Minimum(Scale("bf16", (1, 128))))
    matrix = ones(format, 1, 128)
    matrix.codes[:], matrix.offsets[:] = 0, 1
    a = np.array([[UNIT] * 127 + [1.0]])
    y, _ = linear(matrix, a)
    assert y == -1 - 127 * UNIT
    assert simulated_linear(matrix, a, "fma") == -1
    assert 0.9 < linear_ratio(matrix, a, "fma") <= 1


def test_minima_that_cancel_the_values_leave_the_sums_sizes_in_the_bound():
    # value - minimum is 0, but the sums of either are 1 + 127 u, and lose it
    format = WeightFormat(UINT4, Scale("bf16", (1, 128)), offset=Minimum(Scale("bf16", (1, 128))))
    matrix = ones(format, 1, 128)
    matrix.offsets[:] = 1
    a = np.array([[UNIT] * 127 + [1.0]])  # forwards all of it is kept, backwards none
    y, bound = linear(matrix, a)
    assert y == 0
    assert 0.4 < np.abs(simulated_linear(matrix, a, "fma")) / bound <= 1


def test_denormal_x_that_counts_in_the_sum_of_x_alone_is_within_the_bound():
    format = WeightFormat(UINT4, Scale("bf16", (1, 32)), offset=Minimum(Scale("bf16", (1, 32))))
    matrix = ones(format, 1, 32)
    matrix.codes[:], matrix.offsets[:] = 0xFF, 15
    a = np.full((1, 32), 127 / 128 * TINY)
    y, bound = linear(matrix, a)
    assert y == 0
    assert simulated_linear(matrix, a, "vdpbf16ps") == -15 * a.sum()
    assert 15 * a.sum() <= bound <= 40 * a.sum()


def test_a_minimums_sum_of_x_that_overflows_has_no_bound():
    format = WeightFormat(UINT4, Scale("bf16", (1, 32)), offset=Minimum(Scale("bf16", (1, 32))))
    matrix = ones(format, 1, 32)
    matrix.codes[:], matrix.offsets[:] = 0, 2.0**-100
    for exponent, finite in ((120, True), (124, False)):
        a = np.full((1, 32), 2.0**exponent)
        assert np.isfinite(linear(matrix, a)[1]) == finite
        assert np.isfinite(simulated_linear(matrix, a, "fma")) == finite


def test_the_rounding_of_a_super_scale_is_within_the_bound():
    """The product of two fp32 numbers, rounded to float32; with bfloat16 scales it is exact, and the bound is the same."""
    scale, super_scale = np.float32(1 + 2.0**-23), np.float32(1 + 2.0**-1 + 2.0**-23)
    format = WeightFormat(E4M3, Scale("fp32", (1, 16)), Scale("fp32", (1, 32)))
    matrix = ones(replace(format, super_scale=None), 1, 32)
    matrix = Matrix("w", format, (1, 32), matrix.codes, matrix.scales, super_scales=np.full((1, 1), super_scale))
    matrix.scales[:] = scale
    a = np.zeros((1, 32))
    a[0, 0] = 1
    y, bound = linear(matrix, a)
    assert Fraction(float(y[0, 0])) == Fraction(float(scale)) * Fraction(float(super_scale))
    lost = np.abs(simulated_linear(matrix, a, "fma") - y)
    assert 0 < lost <= bound < 40 * UNIT * y
