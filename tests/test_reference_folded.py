"""rounding="folded" in the float64 reference: which matrices fold, to which numbers, and the bound on those that do."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from helpers import pack_nibbles
from rationals import naive_forward, nearest_bfloat16, number
from reference_experts import BFLOAT16, random_batch, random_experts
from simulated import allow_folding, label, linear, simulated_forward, simulated_linear, tdpbf16ps

from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.reference import ROUTER_WEIGHTS, TINY, dequantize, folds, forward, round_bfloat16
from ktmoe.weights.elements import E2M1, INT4, Element
from ktmoe.weights.formats import BF16, MXFP4, MXFP8, WeightFormat, fp8, int4, nvfp4, uint4
from ktmoe.weights.offsets import Minimum
from ktmoe.weights.order import GPTQ
from ktmoe.weights.scales import Factor, Scale

GREATEST = (2 - 2.0**-7) * 2.0**127


def bfloat16_scales(values):
    """A format of these values, with a scale for 32 k."""
    return WeightFormat(Element("values", "q4", values), Scale("bf16", (1, 32)))


def matrix_of(values, scales):
    """[16 rows, a group for each scale]: every row has all codes with every scale."""
    codes = np.tile(np.arange(16), (16, 2 * len(scales)))
    scales = np.tile(np.array(scales, np.float64).astype(BFLOAT16), (16, 1))
    return Matrix("w", bfloat16_scales(values), codes.shape, pack_nibbles(codes), scales)


def entries(*values):
    """16 values: these, their negatives and zeros."""
    return (*values, *(-v for v in values), *[0.0] * (16 - 2 * len(values)))


# which matrices fold


BELOW, ABOVE = 1 - 2.0**-7, 2 - 2.0**-7  # significands next to a power of two; BELOW is one of denormal numbers, too

#: name: (values, the least scale that folds, the greatest); all significands of one exponent are alike
EDGES = {
    "int4": (INT4.values, 2.0**-126, ABOVE * 2.0**122),
    "e2m1": (E2M1.values, 2.0**-125, ABOVE * 2.0**123),
    "one": (entries(1.0), 2.0**-126, ABOVE * 2.0**125),
    "almost two": (entries(ABOVE), 2.0**-126, ABOVE * 2.0**125),
    "large": (entries(2.0**90, 1.5 * 2.0**100), 2.0**-126, ABOVE * 2.0**25),
    "small": (entries(2.0**-120, 1.5 * 2.0**-118), 2.0**-6, GREATEST),
    "large and small": (entries(2.0**-100, 2.0**100), 2.0**-26, ABOVE * 2.0**25),
    "denormal": (entries(2.0**-133, 1.0), 2.0**7, ABOVE * 2.0**125),
    "farthest apart": (entries(2.0**-126, 2.0**125), 1.0, ABOVE),
    "too far apart": (entries(2.0**-126, 2.0**126), None, None),
}


@pytest.mark.parametrize("case", EDGES)
def test_a_matrix_folds_up_to_the_edges_of_the_rule(case):
    values, least, greatest = EDGES[case]
    within = [0.0] if least is None else [0.0, -0.0, least, -least, greatest, -greatest]
    assert folds(matrix_of(values, within))
    weights = dequantize(matrix_of(values, within))
    rounded = np.abs(round_bfloat16(weights[weights != 0]))
    assert rounded.size == 0 or (rounded.min() >= TINY and rounded.max() <= 2.0**127)
    outside = (1.0,) if least is None else (BELOW * least, greatest / ABOVE * 2)
    for scale in (v for v in outside if v <= GREATEST):
        for sign in (-1, 1):
            matrix = matrix_of(values, [*within, sign * scale])
            assert matrix.scales[0, -1] == sign * scale
            assert not folds(matrix)
            y, _ = linear(matrix, np.eye(matrix.shape[1]), rounding="folded")
            assert np.array_equal(y, dequantize(matrix).T)  # as exact as ever
    assert allow_folding(np.array(within), values)
    assert not any(allow_folding(np.array([*within, v]), values) for v in outside if v <= GREATEST)


@pytest.mark.parametrize("values", [INT4.values, entries(2.0**100)], ids=["int4", "large"])
def test_a_matrix_with_a_denormal_scale_does_not_fold(values):
    for scale in (2.0**-133, BELOW * TINY):
        assert not folds(matrix_of(values, [1.0, -scale]))
    assert folds(matrix_of(values, [1.0, -TINY]))


def test_a_matrix_whose_scales_are_all_zero_folds():
    for values in (INT4.values, EDGES["too far apart"][0]):
        matrix = matrix_of(values, [0.0, -0.0])
        assert folds(matrix)
        assert not linear(matrix, np.ones((1, 64)), rounding="folded")[0].any()
    assert folds(matrix_of((0.0,) * 16, [GREATEST]))  # so do zeros


def test_codes_have_no_part_in_the_rule_and_every_scale_has():
    matrix = matrix_of(INT4.values, [1.0, 1.0, 1.0])
    matrix.codes[:] = 0x88  # zeros
    for value in (2.0**123, 2.0**-127):
        for at in ((0, 0), (15, 2)):
            matrix.scales[:] = 1.0
            assert folds(matrix)
            matrix.scales[at] = value
            assert not folds(matrix)


#: format: whether scales that are neither very large nor very small fold.
FOLDING = {
    int4(32): True,
    int4(96): True,
    int4(64, "fp16"): True,
    int4(64, "fp16", GPTQ): True,
    WeightFormat(E2M1, Scale("fp16", (1, 32)), factor=Factor(per_row=True)): True,
    int4(16): False,
    int4(48, "fp16"): False,
    int4(32, "fp32"): False,
    MXFP4: False,
    BF16: False,
    MXFP8: False,
    nvfp4(): False,
    fp8("bf16"): False,
    fp8("bf16", (1, 128)): False,
    uint4(32): False,
    uint4(32, "bf16"): False,
    WeightFormat(INT4, Scale("bf16", (2, 32))): False,
    WeightFormat(INT4, Scale("bf16", (1, 32)), Scale("bf16", (1, 64))): False,
    WeightFormat(INT4, Scale("bf16", (1, 32)), offset=Minimum(Scale("bf16", (1, 32)))): False,
}


@pytest.mark.parametrize("format", FOLDING, ids=label)
def test_folding_is_for_bfloat16_and_fp16_scales_of_4_bits(format):
    experts = random_experts(np.random.default_rng(0), 1, 64, 64, format=format)
    assert folds(experts.matrix(0, "up")) == FOLDING[format]


def test_every_fp16_scale_folds_with_codes_of_int4():
    """Its denormals, too: they are normal numbers in bfloat16, which has other significands."""
    stored = np.arange(2**16, dtype=np.uint16)
    stored = stored[stored >> 10 & 31 < 31].reshape(-1, 1)
    codes = np.tile(np.arange(32) % 16, (len(stored), 1))
    matrix = Matrix("w", int4(32, "fp16"), codes.shape, pack_nibbles(codes), stored.view(np.float16))
    assert folds(matrix)
    y, _ = linear(matrix, np.eye(32), rounding="folded")
    rng = np.random.default_rng(8)
    for row in rng.integers(0, len(stored), 200).tolist():
        for code in range(16):
            exact = (code - 8) * number("fp16", matrix.scales[row, 0])
            assert Fraction(y[code, row]) == nearest_bfloat16(exact)
    large = Matrix("w", replace(matrix.format, element=Element("large", "q4", entries(2.0**111, 1.0))), *stored_of(matrix))
    assert not folds(large)
    large.scales[:] = 2.0**-24
    assert folds(large)


def stored_of(matrix):
    return matrix.shape, matrix.codes, matrix.scales


def test_scales_that_are_no_numbers_do_not_fold():
    matrix = random_experts(np.random.default_rng(0), 1, 32, 32, format=int4(32)).matrix(0, "up")
    matrix.scales[3, 0] = np.nan
    with pytest.raises(FormatError, match=r"up.*\[3, 0\]"):
        folds(matrix)


# the numbers


def nearest(product):
    """An integer's nearest multiple of a power of two that has 8 significant bits, ties to even."""
    quantum = 2 ** max(product.bit_length() - 8, 0)
    return round(Fraction(product, quantum)) * quantum  # round() of a Fraction is half to even


@pytest.mark.parametrize(
    ("values", "unit", "exponents", "worst"),
    [(INT4.values, 0, (-126, 0, 122), 259), (E2M1.values, 1, (-125, 0, 123), 261)],
    ids=["int4", "e2m1"],
)
def test_every_product_of_a_code_and_a_significand_is_rounded_once(values, unit, exponents, worst):
    significands, errors = [sign * m for m in range(128, 256) for sign in (1, -1)], []
    for exponent in exponents:
        scales = np.ldexp(np.array(significands, float), exponent - 7).astype(BFLOAT16)[:, None]
        codes = np.tile(np.arange(32) % 16, (256, 1))
        matrix = Matrix("w", bfloat16_scales(values), codes.shape, pack_nibbles(codes), scales)
        y, _ = linear(matrix, np.eye(32), rounding="folded")
        for row, significand in enumerate(significands):
            for code, entry in enumerate(values):
                product = int(entry * 2**unit) * significand
                rounded = nearest(product)
                assert Fraction(y[code, row]) == Fraction(rounded) * Fraction(2) ** (exponent - 7 - unit)
                assert y[code, row] == y[code + 16, row]
                errors += [Fraction(abs(rounded - product), abs(product))] if product else []
        assert np.array_equal(simulated_linear(matrix, np.eye(32), "amx folded"), y)
    assert max(errors) == Fraction(1, worst) < Fraction(1, 2**8)


def test_no_product_of_two_bfloat16_numbers_errs_by_more_than_one_part_in_259():
    a = np.arange(128, 256)
    product = np.outer(a, a).astype(np.float64)
    error = np.abs(round_bfloat16(product) - product)
    assert (259 * error <= product).all()
    assert (259 * error == product).any()


def test_a_linear_map_differs_from_the_exact_one_by_259th_of_its_terms_sizes_at_most():
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 1, 256, 64, format=int4(64))
    for matrix in (experts.matrix(0, "gate"), experts.matrix(0, "down")):
        a = rng.standard_normal((8, matrix.shape[1])).astype(BFLOAT16).astype(np.float64)
        exact, folded = (linear(matrix, a, rounding=v)[0] for v in ("exact", "folded"))
        sizes = np.abs(a) @ np.abs(dequantize(matrix)).T
        assert (np.abs(folded - exact) * 259 <= sizes * (1 + 1e-12)).all()
        assert np.abs(folded - exact).max() > 1e-4 * np.abs(exact).max()
    worst = matrix_of(INT4.values, [148 / 128])
    worst.codes[:] = 0xFF  # 7 * 148 = 1036, a tie that goes to 1040
    exact, folded = (linear(worst, np.ones((1, 32)), rounding=v)[0] for v in ("exact", "folded"))
    assert np.array_equal(259 * (folded - exact), exact)


def folded_as_b16(experts):
    """The experts with the weights that folding rounds as bfloat16 weights, by ml_dtypes from float32, which they fit."""

    def read(expert, projection):
        matrix = experts.matrix(expert, projection)
        return Matrix(matrix.name, BF16, matrix.shape, dequantize(matrix).astype(np.float32).astype(BFLOAT16), bias=matrix.bias)

    return ExpertWeights(experts.num_experts, experts.hidden, experts.intermediate, read, BF16, experts.activation)


@pytest.mark.parametrize(
    "format", [int4(32), int4(128), WeightFormat(E2M1, Scale("bf16", (1, 64))), int4(64, "fp16", GPTQ)], ids=label
)
def test_folded_experts_are_b16_experts(format):
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 2, 164, 70, format=format, bias=True)
    batch = random_batch(rng, experts)
    for options in ({}, {"router_weight": "down_input", "out_dtype": "float32", "columns": slice(3, 40), "block": 164}):
        folded, b16 = forward(experts, *batch, rounding="folded", **options), forward(folded_as_b16(experts), *batch, **options)
        assert np.array_equal(folded.y, b16.y)
        assert np.array_equal(folded.bound, b16.bound)
        assert np.abs(forward(experts, *batch, **options).y - folded.y).max() > 1e-4 * np.abs(folded.y).max()


@pytest.mark.parametrize("format", [MXFP4, BF16, nvfp4(), MXFP8, fp8("bf16"), uint4(32)], ids=label)
def test_others_are_as_they_were(format):
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 2, 64, 34, format=format)
    batch = random_batch(rng, experts)
    exact, folded = (forward(experts, *batch, rounding=v) for v in ("exact", "folded"))
    assert np.array_equal(exact.y, folded.y)
    assert np.array_equal(exact.bound, folded.bound)


def test_forward_equals_rational_arithmetic_for_matrices_that_fold_and_those_that_do_not():
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 2, 68, 36, format=int4(32), bias=True)
    experts.matrix(0, "up").scales[-1, -1] = 2.0**-130
    experts.matrix(1, "down").scales[40, 1] = 2.0**-127
    names = {experts.matrix(e, p).name for e in range(2) for p in PROJECTIONS}
    rounded = names - {experts.matrix(0, "up").name, experts.matrix(1, "down").name}
    x, ids, weights = random_batch(rng, experts, tokens=2, top_k=2)
    ids[0] = [0, 1]
    for router_weight in ROUTER_WEIGHTS:
        expected = naive_forward(experts, x, ids, weights, [True] * 2, router_weight, rounded=rounded)
        options = {"router_weight": router_weight, "rounding": "folded"}
        reference = forward(experts, x, ids, weights, **options)
        assert np.abs(reference.y - expected).max() <= 1e-12 * np.abs(expected).max()
        sample = forward(experts, x, ids, weights, columns=[5, 40], **options)  # the rule sees the whole matrix
        assert np.allclose(sample.y, reference.y[:, [5, 40]], rtol=1e-12, atol=1e-14)


# the bound


def test_what_overflows_a_groups_sum_may_fold():
    # a group's sum leaves float32 before it is scaled; folded weights have no such sum
    a = np.full((1, 32), 2.0**124)
    for scale in (2.0**-20, 0.0):
        matrix = matrix_of((1.0,) * 15 + (0.0,), [scale])
        (_, exact), (y, folded) = (linear(matrix, a, rounding=v) for v in ("exact", "folded"))
        assert np.isinf(exact).all()
        assert np.isfinite(folded).all()
        assert not np.isfinite(simulated_linear(matrix, a, "fma")).any()
        assert (np.abs(simulated_linear(matrix, a, "amx folded") - y) <= folded).all()


def test_the_bound_of_flushed_products_is_almost_attained():
    # each product is the greatest below 2**-126 that two bfloat16 numbers have, and is lost
    matrix = matrix_of(entries(1.0), [255 / 128 * 2.0**-64])
    matrix.codes[:] = 0x00
    a = np.full((1, 32), 255 / 128 * 2.0**-64)
    y, bound = linear(matrix, a, rounding="folded")
    assert not simulated_linear(matrix, a, "amx folded").any()
    assert (0.95 * bound < y).all()
    assert (y <= bound).all()


def bits_of(weights, added):
    """float32 weights with something added to their bits, and then only bfloat16's bits of them."""
    return (weights.astype(np.float32).view(np.uint32) + np.uint32(added) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize(
    "mistake", ["none", "even and odd", "a group's scale", "no rounding", "truncated", "ties away", "one unit in one weight"]
)
def test_a_mistake_in_64_products_leaves_the_bound(mistake):
    rng = np.random.default_rng(6)
    matrix = random_experts(rng, 1, 64, 64, format=int4(32)).matrix(0, "gate")
    matrix.scales[5, 1] = 0.375
    a = rng.standard_normal((16, 64)).astype(BFLOAT16).astype(np.float32)
    y, bound = linear(matrix, a.astype(np.float64), rounding="folded")
    exact = dequantize(matrix)
    weights = exact.astype(np.float32).astype(BFLOAT16).astype(np.float32)
    if mistake == "even and odd":
        a = a.reshape(16, 32, 2)[:, :, ::-1].reshape(16, 64)
    elif mistake == "a group's scale":
        weights[5, 32:] = dequantize(Matrix("w", matrix.format, (64, 64), matrix.codes, np.ones((64, 2), BFLOAT16)))[5, 32:]
    elif mistake == "one unit in one weight":
        weights[5, 40] = bits_of(weights[5, 40:41], 1 << 16)[0]
    elif mistake != "none":
        weights = {
            "no rounding": exact.astype(np.float32),
            "truncated": bits_of(exact, 0),
            "ties away": bits_of(exact, 1 << 15),
        }[mistake]
    ratio = np.abs(tdpbf16ps(a, weights) - y) / bound
    assert ratio.max() <= 1 if mistake == "none" else ratio.max() > 10


LAYERS = ((MXFP4, "amx"), (int4(32), "amx folded"), (BF16, "amx"))
MISTAKES = ("none", "even and odd", "a group's scale")


@pytest.mark.parametrize(
    ("format", "kind", "mistake"), [(*v, m) for v in LAYERS for m in MISTAKES[: 3 if v[0].scale else 2]], ids=label
)
def test_a_mistake_in_amx_leaves_the_bound_of_a_layer(format, kind, mistake, monkeypatch):
    rng = np.random.default_rng(7)
    experts = random_experts(rng, 1, 64, 64, format=format)
    x, ids, _ = random_batch(rng, experts, tokens=16, top_k=1)
    weights = np.ones((16, 1), np.float32)
    rounding = "folded" if kind == "amx folded" else "exact"
    reference = forward(experts, x, ids, weights, out_dtype="float32", rounding=rounding)
    if mistake == "even and odd":

        def swapped(x, w):
            return tdpbf16ps(x.reshape(len(x), -1, 2)[:, :, ::-1].reshape(x.shape), w)

        monkeypatch.setattr("simulated.tdpbf16ps", swapped)
    elif mistake == "a group's scale":
        experts.matrix(0, "gate").scales[5, 1] = 127 if format is MXFP4 else 1
    ratio = reference.worst(simulated_forward(experts, x, ids, weights, "down_output", kind, rng))
    assert ratio <= 1 if mistake == "none" else ratio > 1
