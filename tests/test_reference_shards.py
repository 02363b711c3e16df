"""The reference of a layer whose intermediate dimension is cut into shards: the same values, and a bound that holds for it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import DEEPSEEK, GPT_OSS
from reference_experts import BFLOAT16, from_codes, random_batch, random_experts
from simulated import (
    EDGES,
    FORMATS,
    INTEGERS,
    KINDS,
    PAIRS,
    kinds_of,
    label,
    simulated_forward,
    simulated_shards,
    worst,
)

from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.machine.numa import split
from ktmoe.reference import (
    ROUTER_WEIGHTS,
    UNIT,
    folds,
    forward,
    round_bfloat16,
)
from ktmoe.weights.activation import SILU
from ktmoe.weights.elements import E2M1
from ktmoe.weights.formats import BF16, FP8_PER_ROW, MXFP4, WeightFormat, fp8, int4, nvfp4
from ktmoe.weights.scales import Scale


def cuts(format, intermediate, shards):
    """The cuts of a layer of this format."""
    return split(intermediate, math.lcm(32, *format.unit), shards)


def changed(experts, projection, change):
    """The same experts but for one matrix of each: change(matrix) is what is different, by name."""

    def read(expert, which):
        matrix = experts.matrix(expert, which)
        return replace(matrix, **change(matrix)) if which == projection else matrix

    return ExpertWeights(experts.num_experts, experts.hidden, experts.intermediate, read, experts.formats, experts.activation)


# y


@pytest.mark.cover("values")
@pytest.mark.parametrize("format", FORMATS, ids=label)
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_the_values_do_not_depend_on_shards(format, router_weight):
    rng = np.random.default_rng(1)
    intermediate = 5 * 256 if format.unit[1] == 256 else 520
    experts = random_experts(rng, 2, 40, intermediate, format=format, activation=GPT_OSS, bias=True)
    arguments = experts, *random_batch(rng, experts)
    for activations in ("bf16", *(kind for kind in kinds_of(format) if kind in INTEGERS)):
        given = {"router_weight": router_weight, "activations": activations, "out_dtype": "float32"}
        whole = forward(*arguments, **given)
        for shards in (2, 5):
            of_shards = forward(*arguments, **given, shards=cuts(format, intermediate, shards))
            assert np.allclose(of_shards.y, whole.y, rtol=0, atol=1e-12 * np.abs(whole.y).max())
            assert np.isfinite(of_shards.bound).all()
            assert not np.array_equal(of_shards.bound, whole.bound)


def test_one_shard_is_none():
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 2, 40, 70, activation=GPT_OSS, bias=True)
    arguments = experts, *random_batch(rng, experts)
    whole, one = forward(*arguments), forward(*arguments, shards=[(0, 70)])
    assert np.array_equal(whole.y, one.y)
    assert np.array_equal(whole.bound, one.bound)


def test_whether_weights_are_rounded_is_the_whole_matrixs_affair():
    """One scale of the last shard is too small for its matrix to fold; the other shards' are not."""
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 1, 40, 96, format=int4(32))

    def tiny(matrix):
        scales = matrix.scales.copy()
        scales[0, 2] = 2.0**-130
        return {"scales": scales}

    batch = random_batch(rng, experts)
    for weights, expected in ((experts, True), (changed(experts, "down", tiny), False)):
        assert folds(weights.matrix(0, "down")) == expected
        whole = forward(weights, *batch, rounding="folded", out_dtype="float32")
        of_shards = forward(weights, *batch, rounding="folded", out_dtype="float32", shards=cuts(int4(32), 96, 3))
        assert np.allclose(of_shards.y, whole.y, rtol=0, atol=1e-12 * np.abs(whole.y).max())
        assert worst(weights, *batch, "amx folded", rng, shards=cuts(int4(32), 96, 3))[0] <= 1


def test_a_token_without_slots_is_exactly_zero():
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 2, 40, 70, bias=True)
    x, ids, weights = random_batch(rng, experts)
    ids[1], x[2, 0] = -1, np.inf
    reference = forward(experts, x, ids, weights, shards=cuts(MXFP4, 70, 3))
    assert not reference.y[1].any()
    assert not reference.bound[1].any()
    assert np.isinf(reference.bound[2]).all()
    assert np.isfinite(reference.bound[[0, *range(3, len(x))]]).all()


# The bound


@pytest.mark.cover("values")
@pytest.mark.parametrize(("format", "kind"), PAIRS, ids=label)
@pytest.mark.parametrize("seed", range(len(ROUTER_WEIGHTS)), ids=ROUTER_WEIGHTS)
def test_a_simulated_sharded_backend_stays_within_the_bound(seed, format, kind):
    rng, router_weight = np.random.default_rng(seed), ROUTER_WEIGHTS[seed]
    activation = (SILU, DEEPSEEK, GPT_OSS)[(seed + KINDS.index(kind)) % 3]
    experts = random_experts(
        rng,
        2,
        99 if format is BF16 else 100,
        3 * 256 if format.unit[1] == 256 else 290,
        format=format,
        scale_bytes=(119, 122) if seed % 2 else (122, 127),
        activation=activation,
        bias=activation is GPT_OSS,
    )
    x, ids, weights = random_batch(rng, experts, tokens=6, top_k=2)
    shards = cuts(format, experts.intermediate, 2 + seed % 2)
    ratio, reference = worst(experts, x, ids, weights, kind, rng, router_weight, shards)
    assert ratio <= 1
    assert np.isfinite(reference.bound).all()


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", EDGES)
def test_a_simulated_sharded_backend_stays_within_the_bound_at_the_edges(case, kind):
    scale_bytes, down_bytes, exponents = EDGES[case]
    rng = np.random.default_rng(5)
    format = int4(32) if kind in ("fma by 32", "amx folded") else MXFP4
    experts = random_experts(rng, 1, 40, 70, format=format, scale_bytes=scale_bytes, down_bytes=down_bytes)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    x = (x.astype(np.float64) * np.ldexp(1.0, rng.integers(*exponents, x.shape))).astype(BFLOAT16)
    ratio, reference = worst(experts, x, ids, weights, kind, rng, shards=cuts(format, 70, 3))
    assert ratio <= 1
    assert np.isfinite(reference.bound).all() or "overflow" in case


@pytest.mark.parametrize("kind", ["fma", "int16", "int8"])
def test_shards_that_cancel_each_other_are_within_the_bound(kind):
    """The second shard's weights are the first's, negated but for one code of a row, and its h is the first's."""
    rng = np.random.default_rng(6)
    experts, other = random_experts(rng, 1, 64, 256, format=int4(32)), rng.integers(64, 128, 64)

    def twice(matrix):
        half = len(matrix.codes) // 2
        return {"codes": np.tile(matrix.codes[:half], (2, 1)), "scales": np.tile(matrix.scales[:half], (2, 1))}

    def opposed(matrix):
        codes, scales = (np.hstack([half, half]) for half in (v[:, : v.shape[1] // 2] for v in (matrix.codes, matrix.scales)))
        scales[:, scales.shape[1] // 2 :] *= -1
        codes[np.arange(64), other] ^= 1
        return {"codes": codes, "scales": scales}

    experts = changed(changed(changed(experts, "gate", twice), "up", twice), "down", opposed)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    shards = cuts(int4(32), 256, 2)
    of_shards = simulated_shards(experts, x, ids, weights, "down_output", kind, rng, shards)
    ratio, reference = worst(experts, x, ids, weights, kind, rng, shards=shards)
    assert np.median(np.abs(reference.y)) < 0.1 * np.median(np.abs(of_shards[0]))
    assert ratio <= 1


def one_each(scale_bytes, code_of_last=2):
    """One expert, whose h is x0**2 at the first place of each shard, and whose first output is their sum, each by its scale."""
    intermediate = 32 * len(scale_bytes)
    gate, down = np.zeros((intermediate, 2), int), np.zeros((2, intermediate), int)
    gate[::32, 0] = down[0, ::32] = 2
    down[0, -32] = code_of_last
    scales = np.array([scale_bytes, scale_bytes], np.uint8)
    return changed(from_codes(gate, gate, down), "down", lambda _: {"scales": scales}), split(
        intermediate, 32, len(scale_bytes)
    )


def test_the_bound_of_the_sum_over_shards_is_almost_attained():
    # p_0 = 4096, then 4096 u from each of 63 shards, each of which the float32 sum loses as a tie to even
    experts, shards = one_each([127] + [127 - 24] * 63)
    arguments = experts, np.array([[64.0, 0.0]]), np.zeros((1, 1), int), np.ones((1, 1), np.float32)
    given = {"out_dtype": "float32", "activations": "int16"}
    reference = forward(*arguments, **given, shards=shards)
    simulated = simulated_forward(*arguments, "down_output", "int16", np.random.default_rng(0), shards)
    assert reference.y[0, 0] == 4096 + 63 * 4096 * UNIT
    assert simulated[0, 0] == 4096
    assert 0.9 < reference.worst(simulated) <= 1


def test_shards_whose_sum_overflows_on_the_way_have_no_bound():
    # 2**127 + 2**127 - 2**127, or half of each
    experts, shards = one_each([127] * 3, code_of_last=10)
    for exponent, finite in ((127, False), (126, True)):
        weights = np.full((1, 1), 2.0 ** (exponent - 12), np.float32)
        arguments = experts, np.array([[64.0, 0.0]]), np.zeros((1, 1), int), weights
        reference = forward(*arguments, out_dtype="float32", shards=shards)
        simulated = simulated_forward(*arguments, "down_output", "fma", np.random.default_rng(0), shards)
        assert reference.y[0, 0] == 2.0**exponent
        assert np.isfinite(simulated[0, 0]) == finite
        assert np.isfinite(reference.bound[0, 0]) == finite


# No mistake hides in it


@pytest.fixture(scope="module", params=["bf16", "int16", "int8"])
def sharded(request):
    """Experts with biases, a batch, shards, the float32 reference and each shard's output."""
    rng = np.random.default_rng(7)
    experts = random_experts(rng, 2, 64, 96, activation=GPT_OSS, bias=True)
    batch = random_batch(rng, experts, tokens=8, top_k=2)
    shards, kind = cuts(MXFP4, 96, 3), "fma" if request.param == "bf16" else request.param

    def of_shards(weights=experts):
        return simulated_shards(weights, *batch, "down_output", kind, np.random.default_rng(8), shards)

    reference = forward(experts, *batch, out_dtype="float32", shards=shards, activations=request.param)
    assert 0 < reference.worst(of_shards().sum(axis=0)) <= 1
    return experts, reference, of_shards


def share_outside(reference, y):
    return (reference.error(y) > 1).mean()


@pytest.mark.parametrize("dropped", range(3))
def test_a_shard_that_is_dropped_leaves_the_bound(sharded, dropped):
    _, reference, of_shards = sharded
    y = np.delete(of_shards(), dropped, axis=0).sum(axis=0)
    assert share_outside(reference, y) > 0.99


def test_a_shard_that_counts_twice_leaves_the_bound(sharded):
    _, reference, of_shards = sharded
    assert share_outside(reference, of_shards()[[0, 1, 1]].sum(axis=0)) > 0.99


def test_a_bias_that_each_shard_adds_leaves_the_bound(sharded):
    experts, reference, of_shards = sharded
    wrong = changed(experts, "down", lambda matrix: {"bias": matrix.bias * np.float32(2)})
    assert share_outside(reference, of_shards(wrong).sum(axis=0)) > 0.99
    wrong = changed(experts, "down", lambda matrix: {"bias": None})
    assert share_outside(reference, of_shards(wrong).sum(axis=0)) > 0.99


@pytest.mark.parametrize("format", [FP8_PER_ROW, nvfp4(divides=True)], ids=label)
def test_a_factor_that_a_shard_leaves_out_leaves_the_bound(format):
    rng = np.random.default_rng(11)
    experts = random_experts(rng, 2, 64, 96, format=format, bias=True)
    batch, shards = random_batch(rng, experts, tokens=8, top_k=2), cuts(format, 96, 3)
    without = changed(experts, "down", lambda matrix: {"factor": np.ones_like(matrix.factor)})
    right, wrong = (
        simulated_shards(weights, *batch, "down_output", "fma", np.random.default_rng(8), shards)
        for weights in (experts, without)
    )
    reference = forward(experts, *batch, out_dtype="float32", shards=shards)
    assert 0 < reference.worst(right.sum(axis=0)) <= 1
    for shard in range(3):
        y = np.where((np.arange(3) == shard)[:, None, None], wrong, right).sum(axis=0)
        assert share_outside(reference, y) > 0.9


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_shards_of_a_matrix_in_another_order_leave_the_bound(sharded, projection):
    """Of one matrix alone: the rows of gate and up, or the columns of down, no longer fit the others'."""
    experts, reference, of_shards = sharded

    def exchanged(array):
        axis = projection == "down"
        return np.ascontiguousarray(np.concatenate(np.split(array, 3, axis=int(axis))[::-1], axis=int(axis)))

    wrong = changed(experts, projection, lambda m: {"codes": exchanged(m.codes), "scales": exchanged(m.scales)})
    assert share_outside(reference, of_shards(wrong).sum(axis=0)) > 0.9


def test_partial_outputs_that_are_rounded_leave_the_bound(sharded):
    _, reference, of_shards = sharded
    y = round_bfloat16(of_shards()).astype(np.float32).sum(axis=0)
    assert share_outside(reference, y) > 0.1


# Shards that are refused

HALVES = WeightFormat(E2M1, Scale("bf16", (1, 64)))


@pytest.mark.parametrize(
    ("format", "multiple", "shards"),
    [
        (MXFP4, 32, []),
        (MXFP4, 32, 2),
        (MXFP4, 32, [0, 64]),
        (MXFP4, 32, [(0, 64, 70)]),
        (MXFP4, 32, [(0, 32.0), (32, 70)]),
        (MXFP4, 32, [(0, 64)]),
        (MXFP4, 32, [(0, 64), (64, 96)]),
        (MXFP4, 32, [(32, 70)]),
        (MXFP4, 32, [(0, 32), (64, 70)]),
        (MXFP4, 32, [(0, 64), (32, 70)]),
        (MXFP4, 32, [(0, 32), (32, 32), (32, 70)]),
        (MXFP4, 32, [(0, 70), (70, 70)]),
        (MXFP4, 32, [(0, 16), (16, 70)]),
        (MXFP4, 32, [(32, 70), (0, 32)]),
        (HALVES, 64, [(0, 32), (32, 70)]),
        (BF16, 32, [(0, 48), (48, 70)]),
        (fp8(block=(64, 32)), 64, [(0, 32), (32, 70)]),  # 64 rows of gate and up
        (fp8(block=(1, 64)), 64, [(0, 32), (32, 70)]),
    ],
    ids=label,
)
def test_shards_that_do_not_fit_are_refused(format, multiple, shards):
    rng = np.random.default_rng(9)
    experts = random_experts(rng, 1, 40, 70, format=format)
    message = rf"from 0 to 70, each of them begun at a multiple of {multiple} and not empty, found "
    with pytest.raises(InputError, match=message):
        forward(experts, *random_batch(rng, experts), shards=shards)


def test_shards_of_any_integer_type():
    rng = np.random.default_rng(10)
    experts = random_experts(rng, 1, 40, 70)
    arguments = experts, *random_batch(rng, experts)
    listed, array = (forward(*arguments, shards=shards) for shards in ([(0, 32), (32, 70)], np.array([[0, 32], [32, 70]])))
    assert np.array_equal(listed.y, array.y)
    assert np.array_equal(listed.bound, array.bound)
