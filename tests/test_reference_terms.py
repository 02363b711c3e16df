"""tuned_for="prefill" in the float64 reference: which matrices have two numbers a weight, and the bound on those that do."""

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from helpers import pack_nibbles, unsigned
from reference_experts import BFLOAT16, random_batch, random_experts
from simulated import allow_two_terms, flushed, label, linear, simulated_linear, tdpbf16ps, two_terms, worst

from ktmoe.matrix import Matrix
from ktmoe.reference import ROUTER_WEIGHTS, TINY, forward, splits
from ktmoe.reference.weights import term_sizes
from ktmoe.weights import folding
from ktmoe.weights.elements import E2M1, INT4, UINT4, Element
from ktmoe.weights.formats import BF16, MXFP4, WeightFormat, int4, nvfp4, uint4
from ktmoe.weights.offsets import Minimum
from ktmoe.weights.scales import Factor, Scale

INT4_32 = int4(32)
E2M1_64 = WeightFormat(E2M1, Scale("bf16", (1, 64)))


def matrix_of(values, scales):
    """[16 rows, a group for each scale]: every row has all codes with every scale."""
    codes = np.tile(np.arange(16), (16, 2 * len(scales)))
    scales = np.tile(np.array(scales, np.float64).astype(BFLOAT16), (16, 1))
    weight_format = WeightFormat(Element("values", "q4", values), Scale("bf16", (1, 32)))
    return Matrix("w", weight_format, codes.shape, pack_nibbles(codes), scales)


@pytest.mark.parametrize("values", [INT4.values, E2M1.values, tuple(range(-4, 12)), UINT4.values, (2.0**-126,) * 16])
def test_two_terms_of_a_value(values):
    """By the reference, the kernels' rule and the simulation: signed powers of two, whose sum it is, the larger one first."""
    for value in values:
        found = folding.two_terms(value)
        if value in (11, 13):
            assert found is None
            continue
        high, low = found
        assert Fraction(high) + Fraction(low) == Fraction(value)
        assert abs(high) > abs(low) or high == low == 0
        assert all(np.frexp(abs(term))[0] in (0, 0.5) for term in found)
        sizes = abs(high) + abs(low)
        assert sizes == abs(value) or (abs(value), sizes) in ((7, 9), (14, 18), (15, 17))
        assert tuple(two_terms(np.array([value]))) == found


#: name: (values, the least scale, the greatest)
EDGES = {
    "int4": (INT4.values, 2.0**-126, (2 - 2.0**-7) * 2.0**124),
    "e2m1": (E2M1.values, 2.0**-125, (2 - 2.0**-7) * 2.0**124),
    "small": ((2.0**-120, 3 * 2.0**-120) * 8, 2.0**-6, (2 - 2.0**-7) * 2.0**124),
    "one": ((1.0, 0.0) * 8, 2.0**-126, (2 - 2.0**-7) * 2.0**124),
}


@pytest.mark.parametrize("case", EDGES)
def test_a_matrix_splits_up_to_the_edges_of_the_rule(case):
    values, least, greatest = EDGES[case]
    within = [0.0, least, greatest, 1.0]
    assert splits(matrix_of(values, within))
    for scale in (-1.0, -0.0, least * (1 - 2.0**-7), greatest * 2, 2.0**-133):
        matrix = matrix_of(values, [*within, scale])
        assert matrix.scales[0, -1] == scale
        assert not splits(matrix)
        assert not allow_two_terms(matrix.scales, values)
    assert allow_two_terms(matrix_of(values, within).scales, values)
    low, high = folding.fold_range(matrix_of(values, within).format, terms=2)
    assert (2.0 ** (low - 127), (2 - 2.0**-7) * 2.0 ** (high - 127)) == (least, greatest)
    assert splits(matrix_of(values, [0.0]))


#: format: whether positive scales of moderate size allow two numbers.
SPLITTING = {
    INT4_32: True,
    int4(96): True,
    E2M1_64: True,
    WeightFormat(INT4, Scale("bf16", (1, 32)), factor=Factor(per_row=True)): True,
    int4(16): False,
    int4(64, "fp16"): False,
    int4(32, "fp32"): False,
    MXFP4: False,
    BF16: False,
    nvfp4(): False,
    uint4(32, "bf16"): False,
    WeightFormat(UINT4, Scale("bf16", (1, 32))): False,
    WeightFormat(INT4, Scale("bf16", (2, 32))): False,
    WeightFormat(INT4, Scale("bf16", (1, 32)), offset=Minimum(Scale("bf16", (1, 32)))): False,
}


@pytest.mark.parametrize("format", SPLITTING, ids=label)
def test_two_numbers_are_for_bfloat16_scales_of_4_bits(format):
    experts = random_experts(np.random.default_rng(0), 1, 64, 64, format=format)
    if format.scale and format.scale.dtype.kind != "u":
        experts = unsigned(experts)
    assert splits(experts.matrix(0, "up")) == SPLITTING[format]


@pytest.mark.cover("values")
@pytest.mark.parametrize("format", [INT4_32, int4(128), E2M1_64], ids=label)
@pytest.mark.parametrize("kind", ["amx terms", "fma", "portable", "vdpbf16ps"])
def test_simulated_backends_stay_within_the_bound(format, kind):
    """Also those that do not know the choice: its bound holds for all."""
    rng = np.random.default_rng(1)
    experts = unsigned(random_experts(rng, 2, 132, 130, format=format, bias=True))
    batch = random_batch(rng, experts)
    for router_weight in ROUTER_WEIGHTS:
        error, _ = worst(experts, *batch, kind, rng, router_weight)
        assert error <= 1
    exact, either = (forward(experts, *batch, out_dtype="float32", tuned_for=v) for v in ("decode", "prefill"))
    assert np.array_equal(exact.y, either.y)
    assert (exact.bound <= either.bound).all()
    shards = [(0, 128), (128, 130)]
    assert worst(experts, *batch, "amx terms", rng, shards=shards)[0] <= 1


def test_terms_are_exact():
    """Each product of a code and a scale's significand is its two terms' sum, and what is multiplied is nothing else."""
    for values, first in itertools.product((INT4.values, E2M1.values), range(128, 256, 16)):
        matrix = matrix_of(values, [m / 128 for m in range(first, first + 16)])
        x = np.eye(matrix.shape[1])
        exact, bound = linear(matrix, x, tuned_for="prefill")
        assert np.array_equal(simulated_linear(matrix, x, "amx terms"), exact)
        assert np.isfinite(bound).all()
        sizes = term_sizes(matrix)
        assert (np.abs(exact.T) <= sizes).all()
        assert (sizes <= 9 / 7 * np.abs(exact.T)).all()


def test_the_bound_is_for_the_sizes_of_both_terms():
    """7 = 8 - 1: what the first adds and the second takes away is rounded by more than their sum would be."""
    rng = np.random.default_rng(2)
    matrix = matrix_of((7.0,) * 8 + (-7.0,) * 8, [1.0] * 8)
    rows = np.array([7.0, -7.0])[rng.integers(0, 2, matrix.shape)]
    matrix = replace(matrix, codes=pack_nibbles(np.where(rows > 0, 0, 8)))
    a = (rng.choice([-1, 1], (64, matrix.shape[1])) * rng.integers(128, 256, (64, matrix.shape[1]))).astype(np.float64)
    y, bound = linear(matrix, a, tuned_for="prefill")
    error = np.abs(simulated_linear(matrix, a, "amx terms") - y)
    assert (error <= bound).all()


def test_no_bound_where_the_larger_terms_overflow():
    """Eight times x leaves float32 where seven times it does not."""
    matrix = matrix_of((7.0,) * 16, [1.0])
    a = np.full((1, 32), 2.0**128 / 7.3 / 32)
    a = a.astype(BFLOAT16).astype(np.float64)
    y, split = linear(matrix, a, tuned_for="prefill")
    assert (np.abs(y) < 2.0**128).all()
    assert np.isfinite(linear(matrix, a)[1]).all()
    assert np.isinf(split).all()


def test_flushed_terms_are_within_the_bound():
    matrix = matrix_of((3.0,) * 16, [2.0**-64])
    a = np.full((1, 32), 2.0**-63)
    y, bound = linear(matrix, a, tuned_for="prefill")
    assert not simulated_linear(matrix, a, "amx terms").all() or (flushed(y) == y).all()
    assert (np.abs(simulated_linear(matrix, a, "amx terms") - y) <= bound).all()
    assert (bound < 2 * 66 * TINY).all()


@pytest.mark.parametrize("mistake", ["none", "no second", "seven", "signs", "even and odd"])
def test_a_mistake_leaves_the_bound(mistake):
    rng = np.random.default_rng(6)
    matrix = unsigned(random_experts(rng, 1, 64, 64, format=INT4_32)).matrix(0, "gate")
    a = rng.standard_normal((16, 64)).astype(BFLOAT16).astype(np.float32)
    y, bound = linear(matrix, a.astype(np.float64), tuned_for="prefill")
    codes = np.stack([matrix.codes & 15, matrix.codes >> 4], axis=2).reshape(64, 64)
    values = np.array(INT4.values)[codes]
    high, low = two_terms(values)
    scales = np.repeat(matrix.scales.astype(np.float64), 32, axis=1)
    if mistake == "no second":
        low = np.where((np.arange(64) == 40) & (np.arange(64)[:, None] == 5), 0, low)
    elif mistake == "seven":
        low = np.where(values == 7, 0, low)
    elif mistake == "signs":
        low = np.abs(low)
    elif mistake == "even and odd":
        a = a.reshape(16, 32, 2)[:, :, ::-1].reshape(16, 64)
    ratio = np.abs(tdpbf16ps(a, *((term * scales).astype(np.float32) for term in (high, low))) - y) / bound
    if mistake == "none":
        assert ratio.max() <= 1
    elif mistake != "no second" or low[5, 40] != two_terms(values)[1][5, 40]:
        assert ratio.max() > 10
