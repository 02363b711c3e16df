"""The values of the float64 reference against simpler statements of them, in rationals. Its bound: test_reference_bound.py."""

import math

import numpy as np
import pytest
from helpers import DEEPSEEK, GPT_OSS, SUPER_SCALED
from rationals import naive_forward
from reference_experts import BFLOAT16, from_codes, random_batch, random_experts

from ktmoe.errors import InputError
from ktmoe.experts import ExpertWeights
from ktmoe.reference import ROUTER_WEIGHTS, Reference, forward, round_bfloat16
from ktmoe.weights.activation import SILU
from ktmoe.weights.elements import E2M1, E5M2, INT4, INT8_PLUS_128, UINT4, Element
from ktmoe.weights.formats import (
    BF16,
    FP8_PER_MATRIX,
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
    int8,
    nvfp4,
    uint4,
)
from ktmoe.weights.order import AWQ, GPTQ

#: Integers know nothing of a factor.
FACTORED = WeightFormat(E2M1, Scale("ue8m0", (1, 32)), factor=Factor(per_row=True))

# forward against rational arithmetic


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


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    ("format", "activations"),
    [(format, "bf16") for format in (int4(32), int4(64), BF16)]
    + [
        (format, mode)
        for format in (
            MXFP4,
            int4(64),
            int4(32, "fp16", GPTQ),
            FACTORED,
            int8(),
            int8(64),
            nvfp4(),
            uint4(32),
            *SUPER_SCALED.values(),
        )
        for mode in ("int16", "int8")
    ],
    ids=lambda v: v if isinstance(v, str) else v.description,
)
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_formats_and_activations_equal_rational_arithmetic(router_weight, format, activations):
    rng = np.random.default_rng(15)
    experts = random_experts(rng, 2, 35 if format is BF16 else 36, 36, format=format, bias=True)
    x, ids, weights = random_batch(rng, experts, tokens=2, top_k=2)
    x = (x.astype(np.float32) ** 5).astype(BFLOAT16)  # far apart, so that integers are rounded
    expected = naive_forward(experts, x, ids, weights, [True] * 2, router_weight, activations)
    y = forward(experts, x, ids, weights, router_weight=router_weight, activations=activations).y
    assert np.isfinite(expected).all()
    assert np.abs(y - expected).max() <= 1e-12 * np.abs(expected).max()
    if activations != "bf16":
        assert np.abs(forward(experts, x, ids, weights, router_weight=router_weight).y - y).max() > 1e-7 * np.abs(y).max()


#: Kinds of scales, elements, offsets, factors and orders.
OTHERS = (
    MXFP8,
    nvfp4(),
    nvfp4(divides=True),
    fp8(block=(16, 16)),
    fp8("bf16", block=(16, 16)),
    FP8_PER_ROW,
    FP8_PER_MATRIX,
    int8(),
    int8(16, "fp16", INT8_PLUS_128),
    int8(16, "fp32", rows=16),
    WeightFormat(E5M2, factor=Factor(per_row=True, divides=True)),
    uint4(32, order=GPTQ, plus=1),
    int4(32, "fp16", GPTQ),
    uint4(32, order=AWQ),
    WeightFormat(UINT4, Scale("bf16", (1, 32)), offset=ZeroPoint((1, 16))),
    WeightFormat(UINT4, Scale("fp16", (1, 32)), offset=Minimum(Scale("fp16", (1, 32)))),
    *SUPER_SCALED.values(),
    WeightFormat(INT4, Scale("e4m3", (1, 16)), Scale("fp32", (4, 64)), Minimum(Scale("ue8m0", (1, 64)))),
)


@pytest.mark.parametrize("format", OTHERS, ids=lambda v: v.description)
def test_every_kind_of_format_equals_rational_arithmetic(format):
    rng = np.random.default_rng(22)
    experts = random_experts(rng, 2, 40, 24, format=format, bias=True)
    x, ids, weights = random_batch(rng, experts, tokens=1, top_k=2)
    expected = naive_forward(experts, x, ids, weights, [True] * 2, "down_output")
    y = forward(experts, x, ids, weights).y
    assert np.abs(y - expected).max() <= 1e-12 * np.abs(expected).max()


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
    assert Reference(np.full((1, 1), np.inf), np.full((1, 1), np.inf)).worst([[np.inf]]) == 0  # without a warning


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
    "format",
    [BF16, WeightFormat(Element("129/256", "q4", (129 / 256, *[0.0] * 15)), MXFP4.scale), int4(64, "fp32"), MXFP8],
    ids=lambda v: v.description,
)
def test_integers_are_refused_where_they_do_not_exist(format):
    experts = random_experts(np.random.default_rng(16), 1, 32, 32, format=format)
    arguments = experts, np.ones((1, 32)), np.zeros((1, 1), int), np.ones((1, 1))
    for mode in ("int16", "int8"):
        with pytest.raises(InputError, match=f"'{mode}'.*gate.*{format.description}"):
            forward(*arguments, activations=mode)
    assert np.isfinite(forward(*arguments).bound).all()
