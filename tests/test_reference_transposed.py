"""Sums over the rows of a matrix in the float64 reference: which weights are exact, how far others are, the order of sums."""

import re

import numpy as np
import pytest
from environments import ROOT
from helpers import ALL_FORMATS
from reference_experts import BFLOAT16, random_experts
from simulated import EDGES, FORMATS, edges_of, label
from simulated_training import KINDS, SimulatedTraining

from ktmoe.dequantization import read
from ktmoe.reference import UNIT, dequantize
from ktmoe.reference.transposed import (
    TWO_TERMS_BLOCK,
    Sum,
    gradient_rows,
    may_be_two,
    operand_weights,
    product,
    roundings_of,
    together,
    transposed,
    weight_bits,
)
from ktmoe.weights.formats import BF16, FP8_PER_ROW, MXFP4, MXFP8, fp8, int4, int8, nvfp4
from ktmoe.weights.offsets import Minimum


def test_blocks_of_two_numbers_are_the_driver_s():
    """The driver adds the second ones after the first ones of so many panels of 64; only amx, which is emulated, has any."""
    header = (ROOT / "ktmoe" / "_native" / "backward" / "transposed.h").read_text()
    assert int(re.search(r"KT_PRODUCT_PANELS = (\d+)", header)[1]) * 64 == TWO_TERMS_BLOCK


def matrix_of(rng, format, n=64, k=96, **options):
    return random_experts(rng, 1, k, n, format=format, **options).matrix(0, "gate")


def simulated(kind):
    """A simulated backend, for its sums alone."""
    run = object.__new__(SimulatedTraining)
    run.kind = kind
    return run


@pytest.mark.parametrize("format", list(dict.fromkeys((*FORMATS, *ALL_FORMATS.values()))), ids=label)
def test_which_weights_are_exact(format):
    """By their bits: float32 has them, one bfloat16 number, or the sum of two; and how far those that are rounded may be."""
    rng = np.random.default_rng(1)
    matrix = matrix_of(rng, format, 256, 512)
    exact = dequantize(matrix, factor=False)
    found = simulated("fma").weights(matrix).astype(np.float64)
    values, lost = operand_weights(format, read(matrix))
    assert np.allclose(values, exact, rtol=1e-14, atol=0)
    assert (np.abs(found - exact) <= lost + 1e-14 * np.abs(exact)).all()
    of_scaled, of_minima = roundings_of(format)
    is_exact = not (of_scaled or of_minima or isinstance(format.offset, Minimum))
    assert is_exact == (not lost.any())
    if is_exact:
        assert np.array_equal(found, exact)
    high = exact.astype(BFLOAT16).astype(np.float64)
    low = (exact - high).astype(BFLOAT16).astype(np.float64)
    if not isinstance(format.offset, Minimum):
        assert np.array_equal(high, exact) == (weight_bits(format) <= 8)
        assert np.array_equal(high + low, exact) == (weight_bits(format) <= 16)
        assert may_be_two(format) == (8 < weight_bits(format) <= 16)


#: What docs/training-numerics.md says: significant bits of a weight.
BITS = {MXFP4: 2, MXFP8: 4, BF16: 8, nvfp4(): 6, FP8_PER_ROW: 4, int4(32): 11, int4(64, "fp16"): 14, int8(64): 15, fp8(): 28}


@pytest.mark.parametrize("format", BITS, ids=label)
def test_the_bits_of_a_weight(format):
    assert weight_bits(format) == BITS[format]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS, ids=label)
@pytest.mark.cover("values")
def test_a_simulated_product_stays_within_the_bound(format, kind):
    rng = np.random.default_rng(2)
    matrix = matrix_of(rng, format, 320)
    run = simulated(kind)
    a = rng.standard_normal((5, matrix.shape[0])).astype(BFLOAT16).astype(np.float32)
    actual = run.transposed(run.rows(matrix, a), run.weights(matrix), None)
    found = transposed(matrix, *gradient_rows(matrix, *3 * [a.astype(np.float64)]))
    assert np.allclose(found.value, run.rows(matrix, a).astype(np.float64) @ dequantize(matrix, factor=False))
    assert (np.abs(actual - found.value) <= found.eps).all()
    assert (np.abs(actual) <= found.size).all()


def test_the_bound_is_nearly_attained():
    """Equal products, one more than a power of two of them has room for: each addition loses nearly half a unit."""
    rng = np.random.default_rng(3)
    matrix = random_experts(rng, 1, 32, 256, format=BF16).matrix(0, "gate")
    matrix.codes[:] = 1
    matrix.codes[0] = 2.0**24
    a = np.ones((1, 256))
    found = transposed(matrix, a, np.zeros_like(a))
    lost = 255.0  # each 1 is half a unit of the sum, and a tie to an even one
    assert (found.eps >= lost).all()
    assert (found.eps < 1.2 * lost).all()


def test_an_error_of_the_rows_passes_through():
    rng = np.random.default_rng(4)
    matrix = matrix_of(rng, MXFP4)
    a = rng.standard_normal((3, 64))
    eps = np.abs(rng.standard_normal(a.shape)) * 1e-2
    found, exact = transposed(matrix, a, eps), transposed(matrix, a, np.zeros_like(a))
    through = eps @ np.abs(dequantize(matrix))
    assert (found.eps >= through).all()
    assert np.allclose(found.eps, through + exact.eps, rtol=0.01)


def test_a_weight_that_float32_has_not_leaves_no_bound():
    rng = np.random.default_rng(5)
    matrix = matrix_of(rng, MXFP4, scale_bytes=(119, 124))
    matrix.scales[3, 1] = 254
    matrix.codes[3, 16] = 0x77  # 6 * 2^127
    found = transposed(matrix, np.zeros((2, 64)), np.zeros((2, 64)))
    assert np.isinf(found.eps).any(axis=0).nonzero()[0].tolist()[:2] == [32, 33]
    assert np.isfinite(found.eps[:, :32]).all()


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("kind", KINDS)
def test_denormal_and_huge_weights(edge, kind):
    rng = np.random.default_rng(6)
    for format in (MXFP4, int4(32), BF16):
        if edge not in edges_of(format):
            continue
        scales, down, _ = EDGES[edge]
        for of in (scales, down):
            matrix = matrix_of(rng, format, scale_bytes=of)
            run = simulated(kind)
            a = rng.standard_normal((2, 64)).astype(BFLOAT16)
            with np.errstate(all="ignore"):
                actual = run.transposed(a.astype(np.float32), run.weights(matrix), None)
                value, eps = together([transposed(matrix, a.astype(np.float64), np.zeros(a.shape))])
                far = np.abs(actual - value)
            assert (far <= eps)[np.isfinite(eps)].all()


def test_the_factor_multiplies_rows_which_are_rounded_to_bfloat16():
    rng = np.random.default_rng(7)
    for format in (nvfp4(), nvfp4(divides=True), FP8_PER_ROW):
        matrix = matrix_of(rng, format)
        v = rng.standard_normal((4, 64)).astype(BFLOAT16).astype(np.float32)
        factor = np.broadcast_to(matrix.factor, 64)
        expected = (v / factor if format.factor.divides else v * factor).astype(BFLOAT16)
        value, eps = gradient_rows(matrix, *3 * [v.astype(np.float64)])
        assert np.array_equal(value, expected.astype(np.float64))
        assert not eps.any()
        low, high = v * np.float32(1 - 2.0**-7), v * np.float32(1 + 2.0**-7)
        ends = np.minimum(low, high), np.maximum(low, high)
        value, eps = gradient_rows(matrix, *(end.astype(BFLOAT16).astype(np.float64) for end in (v, *ends)))
        assert (eps > 2.0**-9 * np.abs(value)).all()


def test_a_total_of_several_sums_covers_both_ways_to_add_them():
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((2, 3, 40)).astype(np.float32), rng.standard_normal((2, 40, 8)).astype(np.float32)
    sums = [product(x.astype(np.float64), 0.0, y.astype(np.float64)) for x, y in zip(a, b, strict=True)]
    value, eps = together(sums)
    run = simulated("fma")
    apart = run.chain(a[0], b[0]) + run.chain(a[1], b[1])
    one = run.chain(a[1], b[1], run.chain(a[0], b[0]))
    assert not np.array_equal(apart, one)
    for actual in (apart, one):
        assert (np.abs(actual - value) <= eps).all()
    # a chain that goes on from a sum that is large rounds as one of its size
    large = Sum(np.full((3, 8), 1e6), np.zeros((3, 8)), np.full((3, 8), 1e6), 0.0)
    _, eps = together([large, sums[0]])
    assert (eps >= 40 * UNIT * 1e6).all()
