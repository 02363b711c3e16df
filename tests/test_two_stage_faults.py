"""What stages refuse: arrays that are no sorting, rows that are not the mode's, experts whose arrays do not fit."""

import numpy as np
import pytest
from bare import Bare
from helpers import BF16, random_batch, random_experts
from two_stage_pipeline import Experts

from ktmoe import MoELayer, two_stage
from ktmoe.errors import ClosedError, FormatError, InputError, OutOfMemoryError, UnavailableError
from ktmoe.machine import memory
from ktmoe.two_stage import BlockScaled, Sorting, gemm1, gemm2, moe_sorting, quantize

TOKENS, TOP_K, EXPERTS = 10, 3, 4


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(2)
    experts = random_experts(rng, EXPERTS, 96, 64)
    x, ids, weights = random_batch(rng, experts, TOKENS, TOP_K)
    ids = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    with MoELayer(experts, "auto", "mxfp8/mxfp4") as layer:
        sorting = moe_sorting(ids, weights, EXPERTS)
        yield layer, x, sorting, gemm1(layer, x, sorting)


def changed(name, change):
    """A sorting with an array replaced by what change() makes of it, or changed by it in place."""

    def change_sorting(sorting):
        array = getattr(sorting, name).copy()
        made = change(array)
        return sorting._replace(**{name: array if made is None else made})

    return change_sorting


def put(name, place, value):
    return changed(name, lambda array: array.__setitem__(place, value))


MANY = 2**24 - 1
#: Of the sorting, what is wrong and the message.
BAD_SORTINGS = {
    "no tuple": (lambda sorting: list(sorting), "sorting must be Sorting"),
    "three arrays": (lambda sorting: sorting[:3], "sorting must be Sorting"),
    "a list of ids": (changed("sorted_token_ids", np.ndarray.tolist), "sorted_token_ids must be a numpy array"),
    "int64 ids": (changed("sorted_token_ids", lambda a: a.astype(np.int64)), "sorted_token_ids must be int32, found int64"),
    "float64 weights": (changed("sorted_weights", lambda a: a.astype(float)), "sorted_weights must be float32, found float64"),
    "experts as bytes": (
        changed("sorted_expert_ids", lambda a: a.astype(np.int8)),
        "sorted_expert_ids must be int32, found int8",
    ),
    "ids in rows": (changed("sorted_token_ids", lambda a: a[None]), r"sorted_token_ids must have shape \[any\], found \[1, "),
    "fewer weights": (changed("sorted_weights", lambda a: a[:-1]), r"sorted_weights must have shape \[\d+\], found"),
    "one number": (changed("num_valid_ids", lambda a: a[:1]), r"num_valid_ids must have shape \[2\], found \[1\]"),
    "fewer blocks": (
        changed("sorted_expert_ids", lambda a: a[:-1]),
        "sorted_expert_ids must have an item for each block of the 155 .*; found 4",
    ),
    "half a block": (put("num_valid_ids", 0, 48), "must be a multiple of the 32 rows of a block, found 48"),
    "more rows than there are": (put("num_valid_ids", 0, 160), r"num_valid_ids\[0\] must be 0 to 155, .*found 160"),
    "rows below 0": (put("num_valid_ids", 0, -32), r"num_valid_ids\[0\] must be 0 to 155, .*found -32"),
    "tokens below 0": (put("num_valid_ids", 1, -1), r"num_valid_ids\[1\] must be the number of tokens, .*found -1"),
    "2^24 tokens": (put("num_valid_ids", 1, 2**24), r"num_valid_ids\[1\] must be .* 0 to 16777215, found 16777216"),
    "other tokens": (put("num_valid_ids", 1, TOKENS - 1), r"must be slot << 24 \| token, with a token of at most 9, found"),
    "a token too large": (put("sorted_token_ids", 1, 11), r"sorted_token_ids\[1\] must be .* at most 10, found 0 << 24 \| 11"),
    "an id below 0": (put("sorted_token_ids", 0, -1), r"sorted_token_ids\[0\] must be slot << 24 \| token"),
    "a slot too large": (
        put("sorted_token_ids", 0, TOP_K << 24),
        r"sorted_token_ids\[0\] must .* slot below top_k; found 3 << 24 \| 0",
    ),
    "padding of another slot": (
        put("sorted_token_ids", 31, 1 << 24 | TOKENS),
        r"sorted_token_ids\[31\] must be top_k << 24 \| 10",
    ),
    "a pair twice": (
        changed("sorted_token_ids", lambda a: a.__setitem__(1, a[0])),
        r"each pair once, found slot \d of token \d",
    ),
    "an expert too large": (put("sorted_expert_ids", 1, 4), r"sorted_expert_ids\[1\] must be in \[0, 4\), .*found 4"),
    "a block that is unused": (put("sorted_expert_ids", 0, -1), r"sorted_expert_ids\[0\] must be in \[0, 4\), .*found -1"),
}


@pytest.mark.parametrize("name", BAD_SORTINGS)
def test_sortings_that_are_none(case, name):
    layer, x, sorting, h = case
    change, message = BAD_SORTINGS[name]
    for stage, rows in ((gemm1, x), (gemm2, h)):
        with pytest.raises(InputError, match=message):
            stage(layer, rows, change(sorting))


def test_blocks_of_masked_experts(case):
    """The numbers of blocks count the experts that are not masked now."""
    layer, x, sorting, _ = case
    layer.expert_mask[0] = False
    try:
        with pytest.raises(InputError, match=r"must be in \[0, 3\), the experts that are not masked, found 3"):
            gemm1(layer, x, sorting)
        layer.expert_mask = np.ones(EXPERTS)
        with pytest.raises(InputError, match=r"expert_mask must be a bool array \[4\], found float64 \[4\]"):
            gemm1(layer, x, sorting)
    finally:
        layer.expert_mask = np.ones(EXPERTS, bool)


BAD_X = {
    "fewer tokens": (lambda x: x[:-1], r"x must have shape \[10, 96\], found \[9, 96\]"),
    "another hidden size": (lambda x: x[:, :-2], r"x must have shape \[10, 96\], found \[10, 94\]"),
    "float64": (lambda x: x.astype(float), "x must be bfloat16 .*; found an array of float64"),
    "None": (lambda x: None, "x must be bfloat16 .*; found NoneType"),
    "another format": (lambda x: quantize(x, "mxfp4"), "x must be BlockScaled 'mxfp8' in mode .*, found BlockScaled 'mxfp4'"),
    "fewer columns": (lambda x: quantize(x[:, :64], "mxfp8"), r"x.codes must have shape \[any, 96\], found \[10, 64\]"),
    "scales of other rows": (
        lambda x: quantize(x, "mxfp8")._replace(scales=np.zeros((9, 3), np.uint8)),
        r"x.scales must have shape \[10 or more, 3\], found \[9, 3\]",
    ),
    "scales that are no tiles": (lambda x: quantize(x, "mxfp8")._replace(scale_order="tiled"), "x.scales must have 256 bytes"),
    "another order": (lambda x: quantize(x, "mxfp8")._replace(scale_order="rows"), "scale_order must be one of plain, tiled,"),
    "codes of floats": (
        lambda x: BlockScaled(x, x, "mxfp8"),
        "x.codes must be uint8, or float8 or float4 codes, found bfloat16",
    ),
}


@pytest.mark.parametrize("name", BAD_X)
def test_x_that_is_none(case, name):
    layer, x, sorting, _ = case
    change, message = BAD_X[name]
    with pytest.raises(InputError, match=message):
        gemm1(layer, change(x), sorting)


BAD_H = {
    "bfloat16": (lambda h: np.zeros((155, 64), BF16), "h must be BlockScaled 'mxfp4' in mode 'mxfp8/mxfp4', found ndarray"),
    "another format": (lambda h: h._replace(format="mxfp8"), "h must be BlockScaled 'mxfp4' .*, found BlockScaled 'mxfp8'"),
    "an unknown format": (lambda h: h._replace(format=4), "h must be BlockScaled 'mxfp4' in mode .*, found BlockScaled 4"),
    "another size": (lambda h: h._replace(codes=h.codes[:, :-1]), r"h.codes must have shape \[any, 32\], found \[155, 31\]"),
    "too few rows": (
        lambda h: h._replace(codes=h.codes[:32], scales=h.scales[:32]),
        r"h must have the 128 rows that num_valid_ids says, or more, found 32",
    ),
}


@pytest.mark.parametrize("name", BAD_H)
def test_h_that_is_none(case, name):
    layer, _, sorting, h = case
    change, message = BAD_H[name]
    with pytest.raises(InputError, match=message):
        gemm2(layer, change(h), sorting)


def test_modes_without_rounding_take_bfloat16(case):
    _, x, sorting, h = case
    with MoELayer(random_experts(np.random.default_rng(2), EXPERTS, 96, 64), "auto", "bf16") as layer:
        with pytest.raises(InputError, match="x must be bfloat16 in mode 'bf16', found BlockScaled 'mxfp8'"):
            gemm1(layer, quantize(x, "mxfp8"), sorting)
        with pytest.raises(InputError, match="h must be bfloat16 in mode 'bf16', found BlockScaled 'mxfp4'"):
            gemm2(layer, h, sorting)
        with pytest.raises(InputError, match="h must be bfloat16, found float32"):
            gemm2(layer, np.zeros((155, 64), np.float32), sorting)
        with pytest.raises(InputError, match="h must have the 128 rows that num_valid_ids says, or more, found 127"):
            gemm2(layer, np.zeros((127, 64), BF16), sorting)
        h = gemm1(layer, x, sorting)
        with pytest.raises(InputError, match="out must not overlap h"):
            gemm2(layer, h, sorting, out=h.reshape(-1)[: TOKENS * 96].reshape(TOKENS, 96))


def test_router_weights_that_multiply_x(case):
    _, x, sorting, _ = case
    layer = MoELayer(random_experts(np.random.default_rng(2), EXPERTS, 96, 64), "auto", "mxfp8", router_weight="expert_input")
    with layer, pytest.raises(InputError, match="x must not be rounded yet, since this layer's router weights multiply it"):
        gemm1(layer, quantize(x, "mxfp8"), sorting)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype must be one of bfloat16, float32, found 'float16'"),
        ({"dtype": np.float32}, "dtype must be one of bfloat16, float32, found"),
        ({"out": np.zeros((TOKENS, 96), np.float32)}, "out must be an array of bfloat16, found ndarray of float32"),
        ({"out": np.zeros((TOKENS, 95), BF16)}, r"out must have shape \[10, 96\], found \[10, 95\]"),
        ({"out": np.zeros((96, TOKENS), BF16).T}, "out must be C-contiguous, aligned and writeable; found strides"),
        ({"out": np.broadcast_to(np.zeros(1, BF16), (TOKENS, 96))}, "out must be C-contiguous, aligned and writeable"),
    ],
)
def test_outputs_that_cannot_be(case, options, message):
    layer, _, sorting, h = case
    with pytest.raises(InputError, match=message):
        gemm2(layer, h, sorting, **options)


def test_layers_that_cannot(case, monkeypatch):
    layer, x, sorting, h = case
    for stage, rows in ((gemm1, x), (gemm2, h)):
        with pytest.raises(InputError, match="layer must be a MoELayer, found NoneType"):
            stage(None, rows, sorting)
        with monkeypatch.context() as patch:
            patch.setattr(layer, "packed", Bare())
            with pytest.raises(UnavailableError, match=f"experts: backend '{layer.backend}' has no stages of its own"):
                stage(layer, rows, sorting)
            patch.setattr(layer, "packed", None)
            with pytest.raises(ClosedError, match="a stage after close"):
                stage(layer, rows, sorting)


def test_orders_and_rows_that_there_are_not(case):
    layer, x, sorting, _ = case
    with pytest.raises(InputError, match="scale_order must be one of plain, tiled, tiled16, found 'swizzled'"):
        gemm1(layer, x, sorting, "swizzled")
    for to in ("nvfp4", ["mxfp4"], None):
        with pytest.raises(InputError, match="to must be one of mxfp4, mxfp8, found"):
            quantize(x, to)
    for rule in ("quark", "ceil/bf16", "", None):  # of another format; the end of a mode's name
        with pytest.raises(InputError, match=r"rule must be one of ceil, .* to make mxfp8, found"):
            quantize(x, "mxfp8", rule)
    with pytest.raises(InputError, match="must have an even number of columns, found 95"):
        quantize(np.zeros((1, 95), BF16))
    with pytest.raises(InputError, match="rows must be BlockScaled, found tuple"):
        two_stage.dequantize((x, x))
    with pytest.raises(InputError, match=r"rows\.format must be one of mxfp4, mxfp8, found 'fp8'"):
        two_stage.dequantize(BlockScaled(x, x, "fp8"))
    with pytest.raises(InputError, match=r"rows\.format must be one of mxfp4, mxfp8, found \['mxfp4'\]"):
        two_stage.dequantize(BlockScaled(x, x, ["mxfp4"]))
    with pytest.raises(InputError, match=r"scales must have shape \[any, any\], found \[3\]"):
        two_stage.tile_scales(np.zeros(3, np.uint8))
    for size in (256, 600):
        with pytest.raises(InputError, match="scales must have 512 bytes or more, tiles of 256, for 40 rows"):
            two_stage.untile_scales(np.zeros(size, np.uint8), 40, 3)
    for rows, blocks, name in ((-1, 3, "rows"), (1.5, 3, "rows"), (1, None, "blocks")):
        with pytest.raises(InputError, match=f"{name} must be an integer from 0 to .*, found"):
            two_stage.untile_scales(np.zeros(256, np.uint8), rows, blocks)


RAW = Experts.random(np.random.default_rng(1), 64, 32, 2).arrays
BAD_EXPERTS = {
    "w1 of floats": (
        (RAW[0].astype(float), *RAW[1:]),
        {},
        InputError,
        "w1 must be uint8, or float8 or float4 codes, found float64",
    ),
    "w1 of one expert": ((RAW[0][0], *RAW[1:]), {}, FormatError, r"w1 must be \[experts, rows, columns\], found \[64, 32\]"),
    "odd rows": ((RAW[0][:, :-1], *RAW[1:]), {}, FormatError, "w1 must have a multiple of 2 rows, found 63"),
    "half of 32": ((RAW[0][:, :48], *RAW[1:]), {"interleave": 16}, FormatError, "w1 must have a multiple of 32 rows, found 48"),
    "scales of other rows": (
        (RAW[0], RAW[1][:, :-1], *RAW[2:]),
        {},
        FormatError,
        r"w1_scale must have shape \[2, 64, 2\], found",
    ),
    "w2 of other rows": ((*RAW[:2], RAW[2][:, :-1], RAW[3]), {}, FormatError, r"w2 must have shape \[2, 64, 16\], found"),
    "w2 of other experts": (
        (*RAW[:3], RAW[3][:1]),
        {},
        FormatError,
        r"w2_scale must have shape \[2, 64, 1\], found \[1, 64, 1\]",
    ),
    "another order": (RAW, {"interleave": 2}, InputError, r"interleave must be one of \(0, 1, 16\), found 2"),
    "an order that is no integer": (
        RAW,
        {"interleave": 16.0},
        InputError,
        r"interleave must be one of \(0, 1, 16\), found 16.0",
    ),
    "a bias of w1": (RAW, {"w1_bias": np.zeros((2, 32), np.float32)}, FormatError, r"w1_bias must have shape \[2, 64\], found"),
    "a bias of float64": (RAW, {"w2_bias": np.zeros((2, 64))}, FormatError, "w2_bias must be float32, found float64"),
}


@pytest.mark.parametrize("name", BAD_EXPERTS)
def test_experts_that_do_not_fit(name):
    arrays, options, error, message = BAD_EXPERTS[name]
    with pytest.raises(error, match=message):
        two_stage.experts(*arrays, **options)


def test_more_tokens_than_fit_into_memory(case, monkeypatch):
    """num_valid_ids says how many there are: what they need is asked for before it is taken. So is what a sort makes."""
    layer, x, sorting, h = case
    many = np.full_like(sorting.sorted_token_ids, 127 << 24 | MANY)
    many[0] = 5
    sorting = sorting._replace(sorted_token_ids=many, num_valid_ids=np.array([128, MANY], np.int32))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**30)
    for stage, rows in ((gemm1, x), (gemm2, h)):
        with pytest.raises(OutOfMemoryError, match=rf"a sorting of {MANY} tokens with 127 slots needs 39\.\d\d GiB"):
            stage(layer, rows, sorting)
    with pytest.raises(
        OutOfMemoryError, match=r"sorting \[1, 1\] ids of 16000000 experts into 1024000000 rows needs 8\.\d\d GiB"
    ):
        moe_sorting(np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32), 16_000_000, 64)


def test_a_sorting_may_be_any_four_arrays(case):
    """What a GPU's sort gives, as a plain tuple."""
    layer, x, sorting, h = case
    assert isinstance(sorting, Sorting)
    for found, expected in zip(gemm1(layer, x, tuple(sorting))[:2], h[:2], strict=True):
        np.testing.assert_array_equal(found, expected)
