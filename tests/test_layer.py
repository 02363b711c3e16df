"""MoELayer.forward against the float64 reference, on every backend: shapes, tokens per expert, kinds of x, activations."""

import functools

import emulator
import numpy as np
import pytest
import ways
from helpers import (
    B16,
    BF16,
    DEEPSEEK,
    FORMATS,
    GPT_OSS,
    KINDS,
    LONGEST,
    MIXED,
    SCALES,
    WEIGHTS,
    assert_folds,
    assert_right,
    bits,
    folds,
    random_batch,
    random_experts,
    reading,
    same_bits,
)

from ktmoe import MXFP4, SILU, MoELayer, int4
from ktmoe._native import core
from ktmoe.errors import UnavailableError
from ktmoe.experts import ROUTER_WEIGHTS

# hidden, intermediate: tails of panels (64), blocks of k (32, 128, 256), groups (up to 128) and codes; hidden 100 and 34 make
# the driver copy x to pad it.
SHAPES = [(32, 64), (64, 100), (100, 64), (34, 2), (2, 34), (2880, 64), (64, 1440), (96, 288)]
# On both sides of where the kernels change: rows of a register tile, few() and many(), rows of one kernel call.
TOKENS = [1, 2, 3, 4, 5, 6, 7, 12, 13, 25]

every_weights = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
every_kind = pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)


@functools.cache
def of_kind(name):
    """Experts, and two batches with what the reference computes for them: twenty backends compare with it, in three modes."""
    rng = np.random.default_rng(11)
    experts = random_experts(rng, 3, 160, 96, biases=True, **WEIGHTS[name])
    return experts, [(random_batch(rng, experts, tokens, 2), {}) for tokens in (1, 30)]


@pytest.mark.cover("all")
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_kind_of_weights(backend, name):
    """On every backend, instruction set and mode, whatever the other tests choose."""
    experts, batches = of_kind(name)
    with MoELayer(experts, backend) as layer:
        assert_folds(layer, experts, WEIGHTS[name].get("fold", True))
        for batch, computed in batches:
            assert_right(layer, experts, *batch, computed=computed)


@pytest.mark.cover("values")
@every_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(backend, shape, weights):
    rng = np.random.default_rng(shape)
    experts = random_experts(rng, 3, *shape, **weights)
    with MoELayer(experts, backend) as layer:
        assert_folds(layer, experts, weights.get("fold", True))
        batches = ((1, BF16), (3, BF16), (9, np.float32)) if max(shape) < 1000 else ((1, BF16), (9, np.float32))
        for tokens, dtype in batches:
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 2, dtype))


LONG = ["folded", "b16", "nvfp4", "fp8", "int8-row"]


@pytest.mark.parametrize("weights", [WEIGHTS[name] for name in LONG], ids=LONG)
def test_a_long_sum(backend, weights):
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 1, 7200, 32, **weights)
    with MoELayer(experts, backend) as layer:
        for tokens in (1, 9):
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 1, np.float32))


@pytest.mark.parametrize("name", ["b16", "mxfp8", "fp8", "fp8-row", "int8-row", "int8+128"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (101, 65), (259, 1), (129, 259)], ids=str)
def test_odd_shapes(backend, shape, name):
    """Not of 4-bit codes, since two of them make a byte."""
    rng = np.random.default_rng(shape)
    experts = random_experts(rng, 3, *shape, formats=FORMATS[name], scales=(126, 128), biases=True)
    with MoELayer(experts, backend) as layer:
        for tokens, dtype in ((1, BF16), (3, BF16), (9, np.float32)):
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 2, dtype))


@pytest.mark.cover("values")
@every_kind
@pytest.mark.parametrize("tokens", TOKENS)
def test_tokens_per_expert(backend, tokens, weights):
    """k of 288 and 96: more than a kernel's block of 128 or 256, and less than the longest group."""
    rng = np.random.default_rng(tokens)
    experts = random_experts(rng, 2, 288, 96, **weights)
    with MoELayer(experts, backend) as layer:
        x, _, router_weights = random_batch(rng, experts, tokens, 2)
        assert_right(layer, experts, x, np.tile([1, 0], (tokens, 1)), router_weights)


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    ("tokens", "weights"),
    [
        *((tokens, {}) for tokens in (core.ROWS_MAX, core.ROWS_MAX + 1, 2 * core.ROWS_MAX + 1)),
        *(
            (core.ROWS_MAX + 1, WEIGHTS[name])
            for name in ("int4-64", "b16", "all three", "nvfp4", "fp8", "awq-128", "int8-row")
        ),
    ],
    ids=str,
)
def test_more_tokens_per_expert_than_a_kernel_call_takes(backend, tokens, weights):
    rng = np.random.default_rng(tokens)
    experts = random_experts(rng, 1, 64, 32, **weights)
    with MoELayer(experts, backend) as layer:
        x, ids, router_weights = random_batch(rng, experts, tokens, 1)
        y = assert_right(layer, experts, x, ids, router_weights)
        core.tune(reduce_slots=10**6)
        assert same_bits(layer.forward(x, ids, router_weights), y)


@pytest.mark.cover("values")
@pytest.mark.parametrize("weights", MIXED.values(), ids=MIXED)
def test_formats_differ_by_projection(backend, weights):
    rng = np.random.default_rng(14)
    experts = random_experts(rng, 3, 388, 160, biases=True, activation=DEEPSEEK, **weights)
    with MoELayer(experts, backend) as layer:
        assert_folds(layer, experts, weights.get("fold", True))
        for tokens in (1, 20):
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 2, np.float32))


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_one_matrix_without_integers_makes_a_layer_bf16(backend, projection):
    """int16 exists for 4-bit codes; a backend that has it falls back on bf16, and says so where int16 was asked for."""
    rng = np.random.default_rng(15)
    experts = random_experts(rng, 2, 64, 64, formats=dict.fromkeys(("gate", "up", "down"), int4(32)) | {projection: B16})
    with MoELayer(experts, backend) as layer:
        assert layer.activations == "bf16"
        assert_right(layer, experts, *random_batch(rng, experts, 3, 2, np.float32))
    with pytest.raises(
        UnavailableError, match=rf"{backend}.* no activation mode 'int16' for these weights, only bf16, mxfp8, mxfp4\."
    ):
        MoELayer(experts, backend, "int16")


@pytest.mark.parametrize("activation", [SILU, DEEPSEEK, GPT_OSS], ids=["silu", "deepseek", "gpt-oss"])
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biased"])
def test_activations_router_weights_and_biases(backend, activation, router_weight, biases):
    rng = np.random.default_rng(5)
    experts = random_experts(rng, 3, 100, 72, biases=biases, activation=activation, scales=(124, 128))  # large: clamps matter
    with MoELayer(experts, backend, router_weight=router_weight) as layer:
        for tokens, dtype in ((1, BF16), (30, BF16), (30, np.float32)):
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 2, dtype))


OTHERS = ["int4-32", "int4-128", "b16", "all three", "nvfp4 divided", "mxfp8", "fp8-row", "int8-64", "gptq-64"]


@pytest.mark.cover("values")
@pytest.mark.parametrize("weights", [WEIGHTS[name] for name in OTHERS], ids=OTHERS)
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_router_weights_of_other_formats(backend, router_weight, weights):
    rng = np.random.default_rng(5)
    experts = random_experts(rng, 3, 100, 72, biases=True, activation=GPT_OSS, scales=(122, 126), **weights)
    with MoELayer(experts, backend, router_weight=router_weight) as layer:
        for tokens, dtype in ((1, BF16), (30, np.float32)):
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 2, dtype))


def test_the_clamp_is_reached(backend):
    """What the test before relies on."""
    outputs = []
    for activation in (SILU, DEEPSEEK):
        experts = random_experts(np.random.default_rng(5), 3, 100, 72, activation=activation, scales=(124, 128))
        with MoELayer(experts, backend) as layer:
            outputs.append(layer.forward(*random_batch(np.random.default_rng(6), experts, 4, 2)))
    assert not same_bits(*outputs)


def test_gate_and_up_may_be_folded_apart(backend):
    """One kernel call takes both only where one kernel serves both."""
    rng = np.random.default_rng(7)
    whole = random_experts(rng, 3, 64, 96)

    def mixed(expert, projection):
        matrix = whole.matrix(expert, projection)
        if (expert, projection) in ((0, "gate"), (1, "up"), (2, "down")):
            matrix.scales[0, 0] = 1
        return matrix

    experts = reading(whole, mixed)
    with MoELayer(experts, backend) as layer:
        unfolded = {key for key, folded in core.folded(layer.packed).items() if not folded}
        assert unfolded >= {(0, "gate"), (1, "up"), (2, "down")}
        assert (len(unfolded) == 3) == folds(layer)
        for tokens in (1, 8, 40):
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 3))


# Scale bytes outside 2..252, where the folded weight would leave bfloat16's normal range. x brings the sums back to about 1.


@pytest.mark.parametrize("tokens", [1, 20])
def test_least_scale_bytes(backend, tokens):
    rng = np.random.default_rng(8)
    experts = random_experts(rng, 2, 96, 64, scales=(0, 2), down_scales=SCALES)
    x, ids, weights = random_batch(rng, experts, tokens, 2, np.float32)
    with MoELayer(experts, backend) as layer:
        y = assert_right(layer, experts, x * np.float32(2.0**119), ids, weights)
        assert core.folded(layer.packed) == {
            (e, p): folds(layer, p == "down") for e in range(2) for p in ("gate", "up", "down")
        }
    assert np.abs(y).min() > 2.0**-100  # not lost to the scale's being a denormal


@pytest.mark.parametrize("tokens", [1, 20])
def test_greatest_scale_bytes(backend, tokens):
    rng = np.random.default_rng(9)
    experts = random_experts(rng, 2, 64, 96, scales=(112, 115), down_scales=(252, 254))
    x, ids, weights = random_batch(rng, experts, tokens, 2, np.float32)
    with MoELayer(experts, backend) as layer:
        assert_right(layer, experts, x, ids, weights * np.float32(2.0**-100))
        assert core.folded(layer.packed) == {
            (e, p): folds(layer, p != "down") for e in range(2) for p in ("gate", "up", "down")
        }


# bfloat16 scales and weights at the ends of their range.

INTEGERS = [int4(32), LONGEST]


@pytest.mark.parametrize("weight_format", INTEGERS, ids=lambda weight_format: weight_format.description)
@pytest.mark.parametrize("tokens", [1, 20])
def test_least_bfloat16_scales(backend, weight_format, tokens):
    """Denormal ones among them. x is no larger than where a group's sum, before it is scaled, fits float32."""
    rng = np.random.default_rng(16)
    formats = {"gate": weight_format, "up": weight_format, "down": MXFP4}
    experts = random_experts(rng, 2, 96, 64, formats=formats, scales=(0, 2), down_scales=SCALES)
    assert ((np.abs(experts.matrix(0, "up").scales.astype(float)) < 2.0**-126) & (experts.matrix(0, "up").scales != 0)).any()
    x, ids, router_weights = random_batch(rng, experts, tokens, 2, np.float32)
    with MoELayer(experts, backend) as layer:
        y = assert_right(layer, experts, x * np.float32(2.0**113), ids, router_weights)
    assert np.abs(y).max() > 2.0**-30


@pytest.mark.parametrize("weight_format", [*INTEGERS, B16], ids=lambda weight_format: weight_format.description)
@pytest.mark.parametrize("tokens", [1, 20])
def test_greatest_bfloat16_scales_and_weights(backend, weight_format, tokens):
    """Up to 2**101 for gate and up, whose sums x of 2**-103 brings back; almost 2**128 for down."""
    rng = np.random.default_rng(17)
    experts = random_experts(rng, 2, 96, 64, formats=weight_format, scales=(220, 227))
    x, ids, router_weights = random_batch(rng, experts, tokens, 2, np.float32)
    with MoELayer(experts, backend) as layer:
        assert_right(layer, experts, x * np.float32(2.0**-103), ids, router_weights * np.float32(2.0**-60))
    experts = random_experts(rng, 2, 96, 64, formats=weight_format, scales=(112, 115), down_scales=(248, 254))
    with MoELayer(experts, backend) as layer:
        assert_right(layer, experts, x, ids, router_weights * np.float32(2.0**-100))


@pytest.mark.parametrize(("byte", "fold"), [(0, False), (1, False), (2, True), (252, True), (253, False), (254, False)])
def test_which_scale_bytes_fold(backend, byte, fold):
    experts = random_experts(np.random.default_rng(0), 1, 64, 64)
    for projection, at in (("gate", (0, 0)), ("up", (63, 1)), ("down", (17, 0))):
        experts.matrix(0, projection).scales[at] = byte
    with MoELayer(experts, backend) as layer:
        assert set(core.folded(layer.packed).values()) == {folds(layer, fold)}


# Kinds of x


def test_kinds_of_x_agree(backend):
    rng = np.random.default_rng(10)
    for hidden in (64, 100):
        experts = random_experts(rng, 2, hidden, 64)
        x, ids, weights = random_batch(rng, experts, 5, 2)
        with MoELayer(experts, backend) as layer:
            y = layer.forward(x, ids, weights)
            as_bits = layer.forward(x.view(np.uint16), ids, weights)
            as_float = layer.forward(x.astype(np.float32), ids, weights)
        assert (y.dtype, as_bits.dtype, as_float.dtype) == (BF16, np.uint16, np.float32)
        assert np.array_equal(bits(y), as_bits)
        assert same_bits(as_float.astype(BF16), y)  # both round the same sums, once


def test_float32_is_rounded_to_nearest_even(backend):
    rng = np.random.default_rng(11)
    experts = random_experts(rng, 1, 64, 64)
    halfway = (np.arange(0x3F00, 0x3F00 + 6 * 64, dtype=np.uint32) << 16 | 0x8000).view(np.float32).reshape(6, 64)
    near = [np.nextafter(halfway, np.float32(0)), np.nextafter(halfway, np.float32(np.inf))]
    x = np.concatenate([halfway, -halfway, *near, rng.standard_normal((6, 64)).astype(np.float32)])
    ids, weights = np.zeros((len(x), 1), int), np.ones((len(x), 1), np.float32)
    with MoELayer(experts, backend) as layer:
        y = layer.forward(x, ids, weights)
        assert same_bits(y, layer.forward(x.astype(BF16).astype(np.float32), ids, weights))
        truncated = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
        assert not same_bits(y, layer.forward(truncated, ids, weights))


@pytest.mark.parametrize("hidden", [64, 100])
@pytest.mark.parametrize("dtype", [BF16, np.uint16, np.float32], ids=str)
def test_out(backend, hidden, dtype):
    rng = np.random.default_rng(12)
    experts = random_experts(rng, 3, hidden, 64)
    x, ids, weights = random_batch(rng, experts, 6, 2, np.float32)
    x = x.astype(BF16).view(np.uint16) if dtype == np.uint16 else x.astype(dtype)
    ids[2] = -1  # a token that no expert writes
    with MoELayer(experts, backend) as layer:
        y = layer.forward(x, ids, weights)
        out = np.full_like(x, 0x7FC0 if dtype == np.uint16 else np.nan)
        assert layer.forward(x, ids, weights, out=out) is out
        assert same_bits(out, y)
        exact = layer.forward(x.view(BF16 if dtype == np.uint16 else dtype).astype(np.float32), ids, weights)
        core.tune(scratch_bytes=1)  # in chunks: a chunk's output must not be another one's input
        unrounded = np.full(x.shape, np.nan, np.float32)
        assert layer.forward(x, ids, weights, out=unrounded) is unrounded
        assert same_bits(unrounded, exact)
        in_place = x.copy()
        assert layer.forward(in_place, ids, weights, out=in_place) is in_place
        assert same_bits(in_place, y)


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_nothing_to_compute(backend, tokens, top_k, dtype):
    experts = random_experts(np.random.default_rng(0), 2, 64, 64)
    x = np.ones((tokens, 64), dtype)
    ids, weights = np.zeros((tokens, top_k), int), np.ones((tokens, top_k), np.float32)
    with MoELayer(experts, backend) as layer:
        out = np.full((tokens, 64), np.nan, dtype)
        for y in (layer.forward(x, ids, weights), layer.forward(x, ids, weights, out=out)):
            assert y.shape == (tokens, 64)
            assert y.dtype == dtype
            assert not bits(y).any()


@pytest.mark.parametrize("tokens", [1, 6, 13, 200])
def test_no_multiply_is_done_in_vain(emulator_folder, tokens):
    """And none is left out, of course. An instruction multiplies one k-pair of 16 columns; only padding is extra."""
    if ways.WAYS["avx512_bf16"] == "native":
        pytest.skip("this CPU has the instructions")  # so that nobody counts them
    rng = np.random.default_rng(13)
    experts = random_experts(rng, 2, 100, 160)
    with ways.prepared("avx512_bf16", emulator_folder), MoELayer(experts, "avx512_bf16") as layer:
        x, _, weights = random_batch(rng, experts, tokens, 1)
        emulator.reset()
        layer.forward(x, np.zeros((tokens, 1), int), weights)
        gate_up, down = (2 * 192 // 16) * (128 // 2), (128 // 16) * (160 // 2)
        assert emulator.counts()["vdpbf16ps"] == tokens * (gate_up + down)
