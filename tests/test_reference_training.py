"""Training in float64: gradients are those of numerical differentiation, and a simulated backend stays within the bound."""

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import DEEPSEEK, GPT_OSS
from reference_experts import BFLOAT16, random_batch, random_experts
from simulated import EDGES, FORMATS, edges_of, label
from simulated_training import CHOSEN, KINDS, Lora, ratios

from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS
from ktmoe.machine.numa import split
from ktmoe.reference import ROUTER_WEIGHTS, folds, forward, round_bfloat16
from ktmoe.reference.training import ReferenceTraining, training_backward, training_forward
from ktmoe.weights.activation import SILU
from ktmoe.weights.formats import BF16, FP8_PER_ROW, MXFP4, fp8, int4, nvfp4

SUBSETS = (PROJECTIONS, ("gate",), ("up", "down"), ())


def adapter(rng, experts, projections=PROJECTIONS, **options):
    return Lora(rng, experts, projections=projections, **options) if projections else None


def training_batch(rng, experts, tokens=6, top_k=3):
    """x, ids, weights and the gradient of y."""
    batch = random_batch(rng, experts, tokens, top_k)
    return *batch, rng.standard_normal(batch[0].shape).astype(BFLOAT16)


# Values


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("format", [MXFP4, BF16, nvfp4(divides=True), FORMATS[-1]], ids=label)
@pytest.mark.parametrize("activation", [SILU, DEEPSEEK, GPT_OSS, replace(GPT_OSS, limit=0.5)])
@pytest.mark.parametrize("projections", SUBSETS)
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_gradients_are_those_of_numerical_differentiation(format, activation, projections, router_weight):
    """In float64, along a random direction of each argument. An id is out of range, one stands twice, an expert is masked."""
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 4, 40, 70, format=format, activation=activation, bias=True)
    x, ids, weights, dy = training_batch(rng, experts)
    ids[0], ids[1, 0] = (0, 0, 1), -1
    x, weights = x.astype(np.float64), weights.astype(np.float64)
    lora = adapter(rng, experts, projections, dtype=np.float64)
    training = ReferenceTraining(experts, expert_mask=np.arange(4) != 2, router_weight=router_weight)
    gradients = training.backward(training.forward(x, ids, weights, lora)[1], dy, lora)
    arguments = [(x, gradients.x), (weights, gradients.weights)]
    for projection in projections:
        arguments += zip(lora.pairs[projection], gradients.lora[projection], strict=True)
    assert not gradients.weights[(ids < 0) | (ids == 2)].any()
    step = 1e-6
    for argument, gradient in arguments:
        direction, kept, losses = rng.standard_normal(argument.shape), argument.copy(), []
        for sign in (1, -1):
            argument[...] = kept + sign * step * direction
            losses.append((training.forward(x, ids, weights, lora)[0] * dy).sum())
        argument[...] = kept
        expected = (losses[0] - losses[1]) / (2 * step)
        size = np.linalg.norm(gradient * direction)
        assert abs((gradient * direction).sum() - expected) <= 1e-7 * size + 1e-8 * abs(losses[0])


def test_into_add_scale_and_wanted():
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 2, 40, 70)
    x, ids, weights, dy = training_batch(rng, experts)
    lora = adapter(rng, experts)
    training = ReferenceTraining(experts)
    out = np.empty(x.shape)
    y, saved = training.forward(x, ids, weights, lora, out=out)
    assert y is out
    assert training.forward(x, ids, weights, lora, save=False)[1] is None
    plain = training.backward(saved, dy, lora)
    into = {p: tuple(np.ones(v.shape) for v in pair) for p, pair in lora.pairs.items()}
    added = training.backward(saved, dy, lora, into=into, add=True, scale=0.5, wanted=("lora",))
    assert added.x is None
    assert added.weights is None
    for projection, pair in into.items():
        for target, gradient in zip(pair, plain.lora[projection], strict=True):
            assert np.allclose(target, 1 + 0.5 * gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("projections", SUBSETS)
def test_the_values_are_those_without_roundings_but_for_these(router_weight, projections):
    """Roundings to bfloat16 change sums of 64 and more by less than a hundredth of the largest."""
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 2, 96, 128, activation=GPT_OSS, bias=True)
    x, ids, weights, dy = training_batch(rng, experts)
    lora = adapter(rng, experts, projections)
    plain = ReferenceTraining(experts, router_weight=router_weight)
    y, saved = plain.forward(x, ids, weights, lora)
    expected = plain.backward(saved, dy, lora)
    given = {"router_weight": router_weight, "out_dtype": "float32"}
    passes = training_forward(experts, x, ids, weights, lora, **given)
    back = training_backward(experts, x, ids, weights, dy, lora, **given)
    pairs = [(passes.y, y), (back.x, expected.x), (back.weights, expected.weights)]
    for projection in projections:
        pairs += zip(back.lora[projection], expected.lora[projection], strict=True)
    for found, exact in pairs:
        assert np.isfinite(found.bound).all()
        assert np.abs(found.y - exact).max() < 0.02 * np.abs(exact).max()
    assert passes.t is None or passes.t.y.shape == (ids.size, 3, lora.rank)


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_without_an_adapter_y_is_that_of_forward(shards, out_dtype):
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 2, 40, 70, activation=DEEPSEEK, bias=True)
    x, ids, weights, _ = training_batch(rng, experts)
    given = {"out_dtype": out_dtype, "shards": shards and split(70, 32, shards), "expert_mask": np.array([True, False])}
    expected, found = forward(experts, x, ids, weights, **given), training_forward(experts, x, ids, weights, **given).y
    assert np.array_equal(found.y, expected.y)
    assert np.array_equal(found.bound, expected.bound)


# The bound


@pytest.mark.cover("values")
@pytest.mark.parametrize("format", FORMATS, ids=label)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("projections", SUBSETS)
def test_a_simulated_backend_stays_within_the_bound(format, kind, router_weight, projections):
    rng = np.random.default_rng(5)
    experts = random_experts(rng, 2, 40, 70, format=format, activation=GPT_OSS, bias=True)
    lora = adapter(rng, experts, projections)
    found, references = ratios(experts, lora, router_weight, kind, rng, *training_batch(rng, experts, 4, 2))
    for name, ratio in found.items():
        assert ratio <= 1, name
        reference, _ = references[name]
        assert np.isfinite(reference.bound).all()
        # dr of "expert_input" sums up all errors of dX without their signs
        assert np.median(reference.bound) < (0.3 if name == "dr" else 0.03) * np.abs(reference.y).max()


@pytest.mark.parametrize("format", [MXFP4, int4(32), fp8(), FP8_PER_ROW, BF16], ids=label)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cover("values")
def test_so_does_one_with_shards(format, kind):
    rng = np.random.default_rng(6)
    experts = random_experts(rng, 2, 32, 3 * max(64, format.unit[1]), format=format, bias=True)
    shards = split(experts.intermediate, math.lcm(32, *format.unit), 2)
    batch = training_batch(rng, experts, 3, 2)
    for router_weight in ROUTER_WEIGHTS:
        found, _ = ratios(experts, adapter(rng, experts), router_weight, kind, rng, *batch, shards=shards)
        assert max(found.values()) <= 1


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize("scales", [(119, 124), (0, 127)], ids=["all allow it", "some do not"])
def test_so_does_one_that_rounds_weights_or_has_two_numbers_each(kind, scales):
    """In both directions, the matrices that allow it; the others are as they were."""
    rng = np.random.default_rng(11)
    experts = random_experts(rng, 1, 64, 96, format=int4(32), scale_bytes=scales)
    batch, lora = training_batch(rng, experts, 4, 2), adapter(rng, experts, size=0.01)
    found, references = ratios(experts, lora, "down_output", kind, rng, *batch)
    assert max(found.values()) <= 1
    exact = training_backward(experts, *batch, lora, out_dtype="float32").x
    is_rounded = kind == "amx folded" and folds(experts.matrix(0, "gate"))
    assert (references["dx"][0].y != exact.y).any() == is_rounded


@pytest.mark.cover("values")
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("format", [MXFP4, BF16, int4(32)], ids=label)
@pytest.mark.parametrize("kind", KINDS)
def test_so_do_numbers_at_the_edges_of_the_range(edge, format, kind):
    if edge not in edges_of(format):
        pytest.skip("such scales do not exist")
    rng = np.random.default_rng(7)
    scales, down, exponents = EDGES[edge]
    experts = random_experts(rng, 2, 64, 64, format=format, scale_bytes=scales, down_bytes=down, activation=DEEPSEEK)
    x, ids, weights, dy = training_batch(rng, experts, 4, 2)
    with np.errstate(over="ignore"):
        x = np.ldexp(x.astype(np.float64), rng.integers(*exponents, x.shape)).astype(BFLOAT16)
    found, _ = ratios(experts, adapter(rng, experts), "down_output", kind, rng, x, ids, weights, dy)
    assert max(found.values()) <= 1


def test_nan_and_skipped_slots_stay_where_they_are():
    rng = np.random.default_rng(8)
    experts = random_experts(rng, 3, 40, 70, bias=True)
    x, ids, weights, dy = training_batch(rng, experts, 5, 2)
    ids[:] = [[0, 1], [0, -1], [2, 2], [1, -5], [-1, 9]]
    x[2, 3], weights[1, 1], weights[4] = np.nan, np.nan, np.inf
    lora = adapter(rng, experts)
    for router_weight in ROUTER_WEIGHTS:
        given = {"router_weight": router_weight, "out_dtype": "float32"}
        back = training_backward(experts, x, ids, weights, dy, lora, **given)
        assert np.isinf(back.x.bound[2]).all()
        assert np.isfinite(back.x.bound[[0, 1, 3, 4]]).all()
        assert not back.x.y[4].any()
        assert not back.x.bound[4].any()
        assert not back.weights.y[ids < 0].any()
        assert not back.weights.bound[(ids < 0) | (ids > 2)].any()
        for da, db in back.lora.values():
            assert np.isfinite(da.bound[:2]).all()
            assert np.isfinite(db.bound[:2]).all()
            assert not np.isfinite(da.bound[2]).any()
        passes = training_forward(experts, x, ids, weights, lora, **given)
        assert np.isinf(passes.g.bound.reshape(5, 2, -1)[ids < 0]).all()


def test_bfloat16_outputs_and_the_scale():
    rng = np.random.default_rng(9)
    experts = random_experts(rng, 2, 40, 70)
    x, ids, weights, dy = training_batch(rng, experts)
    lora = adapter(rng, experts, dtype=BFLOAT16)
    wide = training_backward(experts, x, ids, weights, dy, lora, out_dtype="float32")
    narrow = training_backward(experts, x, ids, weights, dy, lora, scale=0.5)
    assert np.array_equal(wide.x.y, narrow.x.y)
    assert narrow.x.worst(round_bfloat16(wide.x.y)) <= 1
    for one, half in zip(wide.lora["up"], narrow.lora["up"], strict=True):
        assert np.array_equal(0.5 * one.y, half.y)
    bits = training_backward(experts, x.view(np.uint16), ids, weights, dy.view(np.uint16), lora, scale=0.5)
    assert np.array_equal(bits.x.y, narrow.x.y)


def test_wrong_arguments_are_refused():
    rng = np.random.default_rng(10)
    experts = random_experts(rng, 2, 40, 70)
    x, ids, weights, dy = training_batch(rng, experts)
    for options, words in (
        ({"router_weight": "up"}, "router_weight must be"),
        ({"out_dtype": "float16"}, "out_dtype must be"),
        ({"rounding": "up"}, "rounding and tuned_for"),
        ({"tuned_for": "speed"}, "rounding and tuned_for"),
        ({"shards": [(0, 7)]}, "shards must be"),
    ):
        with pytest.raises(InputError, match=words):
            training_forward(experts, x, ids, weights, **options)
    with pytest.raises(InputError, match=r"grad_y must be \[6, 40\]"):
        training_backward(experts, x, ids, weights, dy[:, :-1])
    with pytest.raises(InputError, match="expert_mask must be"):
        ReferenceTraining(experts, expert_mask=[True])
    with pytest.raises(InputError, match=r"x must be \[tokens, 40\]"):
        ReferenceTraining(experts).forward(x[:, 1:], ids, weights)
