"""gemm1() and gemm2(): the bits of MoELayer.forward(), whatever kind the arrays are and whatever padding holds."""

import ml_dtypes
import numpy as np
import pytest
from helpers import BF16, DEEPSEEK, FORMATS, GPT_OSS, random_batch, random_experts, same_bits
from two_stage_pipeline import Experts, decoded, restored, rounded, to_bytes

import ktmoe
from ktmoe import SILU, MoELayer, backends, two_stage
from ktmoe.experts import ROUTER_WEIGHTS
from ktmoe.quantization import RULES
from ktmoe.quantization.blocks import ELEMENTS
from ktmoe.two_stage import SCALE_ORDERS, UNITS, BlockScaled, dequantize, gemm1, gemm2, moe_sorting, quantize

MODES = ("bf16", "int16", "int8", "mxfp4", "mxfp8", "mxfp8/mxfp4", "mxfp4/bf16", "bf16/mxfp8", "mxfp4:even/mxfp8:floor")


def served(experts, mode):
    """The backends that run here natively and have this mode for these experts."""
    return [name for name in backends.available() if isinstance(backends.get(name).lookup(experts, mode), backends.Found)]


def both(layer, x, ids, weights, unit=32, **options):
    sorting = moe_sorting(ids, weights, layer.num_experts, unit, layer.expert_mask)
    return gemm2(layer, gemm1(layer, x, sorting, **options), sorting, "float32" if x.dtype == np.float32 else "bfloat16")


@pytest.fixture(scope="module")
def odd():
    """Experts whose sizes are no multiples of blocks and panels, with biases, and a batch with repeated ids."""
    rng = np.random.default_rng(11)
    experts = random_experts(rng, 6, 200, 90, biases=True, activation=GPT_OSS)
    x, ids, weights = random_batch(rng, experts, 37, 4)
    return experts, x, ids.astype(np.int32), weights


@pytest.mark.parametrize("mode", MODES)
def test_the_pair_is_forward(odd, mode):
    experts, x, ids, weights = odd
    names = served(experts, mode)
    assert names
    for name in names:
        with MoELayer(experts, name, mode) as layer:
            layer.expert_mask[2] = False
            for batch, dtype in ((x, BF16), (x[:1], BF16), (x, np.float32)):
                batch, of_batch = batch.astype(dtype), slice(len(batch))
                expected = layer.forward(batch, ids[of_batch], weights[of_batch])
                assert same_bits(both(layer, batch, ids[of_batch], weights[of_batch], UNITS[len(name) % 4]), expected), name


@pytest.mark.parametrize("activation", [SILU, DEEPSEEK], ids=["silu", "clamped"])
@pytest.mark.parametrize("name", ["b16", "fp8", "gptq-32", "super-32 minima", "nvfp4"])
def test_other_weights(name, activation):
    """Every format that a layer can have; h of 77 columns where its codes allow that."""
    rng = np.random.default_rng(len(name))
    experts = random_experts(rng, 4, 160, 77 if name == "b16" else 96, formats=FORMATS[name], activation=activation)
    x, ids, weights = random_batch(rng, experts, 19, 3)
    for mode in ("bf16", "mxfp8", "mxfp4/mxfp8"):
        with MoELayer(experts, "auto", mode) as layer:
            assert same_bits(both(layer, x, ids, weights), layer.forward(x, ids, weights))


@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("mode", ["bf16", "mxfp4", "mxfp8/mxfp4"])
def test_wherever_router_weights_are_multiplied(odd, router_weight, mode):
    experts, x, ids, weights = odd
    with MoELayer(experts, "auto", mode, router_weight=router_weight) as layer:
        assert same_bits(both(layer, x, ids, weights), layer.forward(x, ids, weights))


@pytest.mark.parametrize("order", SCALE_ORDERS)
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_what_h_is(odd, mode, order):
    """Rows of pairs are those of the layer that keeps h in bfloat16, rounded; all others are zeros."""
    experts, x, ids, weights = odd
    with MoELayer(experts, "auto", f"{mode}/bf16") as layer:
        sorting = moe_sorting(ids, weights, 6, 16)
        h = gemm1(layer, x, sorting)
        assert h.dtype == BF16
    with MoELayer(experts, "auto", mode) as layer:
        found = gemm1(layer, x, sorting, order)
        real = (sorting.sorted_token_ids & 0xFFFFFF) < len(x)
        assert not np.asarray(h)[~real].any()
        assert (found.format, found.scale_order) == (mode, order)
        padded = np.pad(h.astype(np.float64), ((0, 0), (0, 6)))
        codes, scales = to_bytes(*rounded(padded[real], mode), mode)
        np.testing.assert_array_equal(found.codes[real], codes[:, : found.codes.shape[1]])
        plain = two_stage.untile_scales(found.scales, len(h), 3, order)
        np.testing.assert_array_equal(plain[real], scales)
        assert not found.codes[~real].any()
        assert not plain[~real].any()
        assert same_bits(gemm2(layer, found, sorting), layer.forward(x, ids, weights))


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "mxfp8/mxfp4", "mxfp4:round"])
def test_tokens_that_are_rounded_already(odd, mode):
    """By the rule "round" 4.5 becomes 4, and 4 becomes 3: such rows must not be rounded again."""
    experts, x, ids, weights = odd
    with MoELayer(experts, "auto", mode) as layer:
        sorting = moe_sorting(ids, weights, 6)
        h = gemm1(layer, x, sorting)
        for order in SCALE_ORDERS:
            to, _, rule = mode.partition("/")[0].partition(":")
            rows = quantize(x, to, rule or "ceil", scale_order=order)
            for array, expected in zip(gemm1(layer, rows, sorting)[:2], h[:2], strict=True):
                np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("mode", ["bf16", "mxfp4"])
def test_what_nobody_may_read(odd, mode):
    """Rows of padding, what is behind the blocks, and more rows than there are, may hold anything: a GPU leaves them as they
    were. An expert's rows may be in any order, as a GPU's sort leaves them."""
    experts, x, ids, weights = odd
    with MoELayer(experts, "auto", mode) as layer:
        sorting = moe_sorting(ids, weights, 6)
        h, expected = gemm1(layer, x, sorting), layer.forward(x, ids, weights)
        valid, tokens = sorting.num_valid_ids.tolist()
        token_ids, row_weights, block_experts = (array.copy() for array in sorting[:3])
        token_ids[valid:], row_weights[valid:], block_experts[valid // 32 :] = -5, np.nan, 77
        padding = (token_ids & 0xFFFFFF) >= tokens
        row_weights[padding] = np.inf
        if mode == "bf16":
            h = h.copy()
            h[padding] = np.nan
        else:
            h.codes[padding], h.scales[padding] = 0x77, 255
        assert same_bits(gemm2(layer, h, sorting._replace(sorted_weights=row_weights)), expected)

        order = np.arange(len(token_ids))
        for block in range(0, valid, 32):
            order[block : block + 32] = block + np.random.default_rng(block).permutation(32)
        shuffled = two_stage.Sorting(token_ids[order], row_weights[order], block_experts, sorting.num_valid_ids)
        again = gemm1(layer, x, shuffled)
        if mode == "bf16":
            assert same_bits(again[~padding[order]], h[order][~padding[order]])
        assert same_bits(gemm2(layer, again, shuffled), expected)
        cut = again[:valid] if mode == "bf16" else again._replace(codes=again.codes[:valid], scales=again.scales[:valid])
        assert same_bits(gemm2(layer, cut, shuffled), expected)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("mode", ["bf16", "mxfp8"])
def test_nothing_to_do(odd, mode, tokens):
    """No tokens, no slots, and tokens whose experts are all masked: zeros, and h of padding alone."""
    experts, x, ids, weights = odd
    with MoELayer(experts, "auto", mode) as layer:
        for top_k, mask in ((4, False), (0, True)):
            layer.expert_mask[:] = mask
            sorting = moe_sorting(ids[:tokens, :top_k], weights[:tokens, :top_k], 6, 32, layer.expert_mask)
            h = gemm1(layer, x[:tokens], sorting)
            out = np.ones((tokens, layer.hidden), np.float32)
            assert gemm2(layer, h, sorting, "float32", out) is out
            assert not out.any()
            assert len(h if mode == "bf16" else h.codes) == len(sorting.sorted_token_ids)


def test_out_is_written(odd):
    experts, x, ids, weights = odd
    with MoELayer(experts, "auto", "mxfp4") as layer:
        sorting = moe_sorting(ids, weights, 6)
        h, expected = gemm1(layer, x, sorting), layer.forward(x, ids, weights)
        for out in (np.empty_like(expected), np.empty_like(expected).view(np.uint16)):
            assert gemm2(layer, h, sorting, out=out) is out
            assert same_bits(out.view(BF16), expected)


@pytest.mark.parametrize("interleave", two_stage.INTERLEAVES)
def test_experts_from_raw_arrays(interleave):
    """The rows of gate and up, wherever they stand, become the same matrices; without interleaving nothing is copied."""
    rng = np.random.default_rng(5)
    raw = Experts.random(rng, 64, 32, 3)
    bias = rng.standard_normal((3, 64)).astype(np.float32)
    order = {
        0: np.arange(64),
        1: np.arange(64).reshape(2, 32).T.ravel(),
        16: np.arange(64).reshape(2, 2, 16).swapaxes(0, 1).ravel(),
    }[interleave]
    w1, w1_scale, w1_bias = (np.ascontiguousarray(array[:, order]) for array in (raw.w1, raw.w1_scale, bias))
    experts = two_stage.experts(w1, w1_scale, raw.w2, raw.w2_scale, w1_bias=w1_bias, w2_bias=bias, interleave=interleave)
    for expert in range(3):
        gate, up, down = (experts.matrix(expert, projection) for projection in ("gate", "up", "down"))
        np.testing.assert_array_equal(np.concatenate([gate.codes, up.codes]), raw.w1[expert])
        np.testing.assert_array_equal(np.concatenate([gate.scales, up.scales]), raw.w1_scale[expert])
        np.testing.assert_array_equal(np.concatenate([gate.bias, up.bias]), bias[expert])
        np.testing.assert_array_equal(down.codes, raw.w2[expert])
        np.testing.assert_array_equal(down.bias, bias[expert])
        np.testing.assert_array_equal(ktmoe.reference.dequantize(down), decoded(raw.w2[expert], raw.w2_scale[expert]))
        assert np.shares_memory(down.codes, raw.w2)
        assert np.shares_memory(gate.codes, w1) == (interleave == 0)


@pytest.mark.parametrize("to", ELEMENTS)
@pytest.mark.parametrize("columns", [32, 64, 90])
def test_rows_are_quantized_byte_for_byte(to, columns):
    """Against the definition, in float64: numbers of many sizes, ties, zeros of both signs, and a row of zeros."""
    rng = np.random.default_rng(columns)
    x = np.ldexp(rng.integers(-255, 256, (50, columns)), rng.integers(-12, 3, (50, 1))).astype(BF16)
    x[:10] = rng.choice(np.array([0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, 6, 7, 208, 464]), (10, columns)).astype(
        BF16
    )
    x[10] = 0
    whole = np.pad(x.astype(np.float64), ((0, 0), (0, -columns % 32)))
    values, exponents = rounded(whole, to)
    codes, scales = to_bytes(values, exponents, to)
    found = quantize(x, to)
    np.testing.assert_array_equal(found.codes, codes[:, : found.codes.shape[1]])
    np.testing.assert_array_equal(found.scales, scales)
    numbers = restored(values, exponents)[:, :columns]
    assert same_bits(dequantize(found), numbers.astype(BF16))
    for order in SCALE_ORDERS:
        rows = quantize(x.astype(np.float32), to, scale_order=order)
        np.testing.assert_array_equal(rows.scales, two_stage.tile_scales(scales, order))
        assert same_bits(dequantize(rows), numbers.astype(BF16))


def test_every_rule_of_rows_is_that_of_weights():
    """The same numbers as weights, rounded by ktmoe.quantize."""
    x = np.random.default_rng(8).standard_normal((40, 96)).astype(BF16)
    for to, rule in [key for key in RULES if key[0] in ELEMENTS]:
        matrix = ktmoe.quantization.Quantizer(to, rule=rule).matrix(ktmoe.Matrix("x", ktmoe.BF16, x.shape, x))[0]
        found = quantize(x, to, rule)
        np.testing.assert_array_equal(found.codes, matrix.codes)
        np.testing.assert_array_equal(found.scales, matrix.scales)


def test_bytes_of_other_dtypes():
    """Codes and scales may have the dtypes of their numbers."""
    rows = quantize(np.random.default_rng(9).standard_normal((4, 64)).astype(np.float32), "mxfp8")
    typed = BlockScaled(rows.codes.view(ml_dtypes.float8_e4m3fn), rows.scales.view(ml_dtypes.float8_e8m0fnu), "mxfp8")
    assert same_bits(dequantize(typed), dequantize(rows))


def test_the_ends_of_the_range():
    """Scale 255 and E4M3's NaN are NaN; 6 times 2^127 is infinite; denormal numbers are kept."""
    codes = np.zeros((3, 32), np.uint8)
    codes[:, 0], codes[2, 1] = 0x7E, 0x7F
    scales = np.array([[255], [254], [0]], np.uint8)
    numbers = dequantize(BlockScaled(codes, scales, "mxfp8")).astype(np.float64)
    assert np.isnan(numbers[0]).all()
    assert numbers[1, 0] == np.inf
    assert numbers[2, 0] == 448 * 2.0**-127
    assert np.isnan(numbers[2, 1])
    assert dequantize(BlockScaled(np.full((1, 16), 1, np.uint8), np.zeros((1, 1), np.uint8), "mxfp4"))[0, 0] == 2.0**-128
