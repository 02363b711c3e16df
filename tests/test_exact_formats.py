"""Exact arithmetic for every format that kernels have: each kind of code with each kind of scale, zero points, factors, orders.

See exact.py. test_exact.py has UE8M0 and bfloat16 scales of 4-bit codes in more detail; here modes of integers are left out.
"""

from dataclasses import replace

import numpy as np
import pytest
import ways
from exact import (
    E4M3_CODES,
    OTHER_ZEROS,
    down_layer,
    forward,
    odd_scales,
    random_codes,
    random_factor,
    random_zero_points,
    scale_numbers,
    scaled_by,
    visible_layer,
    weights_of,
)
from helpers import BF16, FORMATS, folds

from ktmoe import MXFP4, Scale, WeightFormat, int4
from ktmoe._native import core
from ktmoe.weights.elements import E2M1, E4M3, INT4, INT8
from ktmoe.weights.formats import FP8_PER_ROW, MXFP8, fp8, int8, nvfp4, uint4
from ktmoe.weights.order import AWQ, GPTQ, Order
from ktmoe.weights.scales import Factor


@pytest.fixture(scope="module", params=[name for name, subject in ways.SUBJECTS.items() if subject.activations == "bf16"])
def backend(request, emulator_folder):
    with ways.chosen(ways.SUBJECTS[request.param], emulator_folder) as name:
        yield name


#: Orders of no loader: every field of Order.
ORDERS = [
    GPTQ,
    AWQ,
    Order("rows, pairs swapped", nibbles=(1, 0, 3, 2, 5, 4, 7, 6)),
    Order("rows, eights reversed", nibbles=tuple(range(7, -1, -1))),
    Order("gptq, permuted", transposed=True, nibbles=(0, 2, 4, 6, 1, 3, 5, 7)),
    Order("awq, not permuted", "n", True),
    Order("awq, a cycle", "n", True, (3, 4, 5, 6, 7, 0, 1, 2)),
]
PER_MATRIX, PER_ROW = Factor(per_row=False), Factor(per_row=True)
DIVIDED, DIVIDED_PER_ROW = Factor(per_row=False, divides=True), Factor(per_row=True, divides=True)
SERVED = {
    **FORMATS,
    **OTHER_ZEROS,
    "no scales": WeightFormat(E2M1),
    "no scales, f8": WeightFormat(E4M3),
    "int4-fp16-128": int4(128, "fp16"),
    "zero points in rows": uint4(32),
    "zero points, bf16, plus 1": uint4(64, "bf16", plus=1),
    "zero points, gptq, bf16": uint4(32, "bf16", GPTQ, 1),
    "awq, plus 1": uint4(64, order=AWQ, plus=1),
    "zero points, factor": replace(uint4(64, order=AWQ), factor=PER_ROW),
    "int4 divided per row": replace(int4(64), factor=DIVIDED_PER_ROW),
    "mxfp4 factor": replace(MXFP4, factor=PER_MATRIX),
    "mxfp8 divided per row": replace(MXFP8, factor=DIVIDED_PER_ROW),
    "nvfp4 per row": replace(nvfp4(), factor=PER_ROW),
    "e4m3 scales alone": replace(nvfp4(), factor=None),
    "fp8 divided": replace(fp8(), factor=DIVIDED),
    "fp8 per row, divided": replace(FP8_PER_ROW, factor=DIVIDED_PER_ROW),
    "fp8 per matrix": replace(FP8_PER_ROW, factor=PER_MATRIX),
    "fp8-e4m3": fp8("e4m3"),
    "fp8-ue8m0": fp8("ue8m0"),
    "fp8-fp16": fp8("fp16"),
    "no scales, int8": WeightFormat(INT8),
    "int8-block-bf16": int8(64, "bf16", rows=64),
    "int8 divided": replace(int8(32, "fp16"), factor=DIVIDED),
    "b16 factor": replace(FORMATS["b16"], factor=PER_ROW),
    "b16 divided": replace(FORMATS["b16"], factor=DIVIDED),
    **{order.name: int4(32, order=order) for order in ORDERS[2:]},
    **{f"{order.name}, zero points": uint4(32, order=order) for order in ORDERS[2:]},
    "mxfp4, gptq": replace(MXFP4, order=GPTQ),
    "nvfp4, awq": replace(nvfp4(), order=AWQ),
}
#: n >= k for down, the other way round for gate and up; the sizes cut groups of 16 into blocks of 32, groups of 32 to 128, and
#: blocks of 128x128 along both.
SHAPES = [(48, 16), (72, 48), (130, 66), (136, 80), (264, 136), (320, 200)]


def arrays_of(rng, weight_format, n, k, powers=2):
    """codes, scales, zero points of a matrix whose sums with x of 3 bits are exact in every order: f8 has 7 bits of code and
    int8 8, both 3 of scale; the others have 5 and 5; 9 are of length. n, k are rounded up to what the format can have."""
    rows, columns = weight_format.code_unit
    n, k = -(-n // rows) * rows, -(-k // columns) * columns
    largest = 3 if weight_format.element.bits == 8 or weight_format.super_scale else 7
    codes = random_codes(rng, n, k, weight_format)
    scales = odd_scales(rng, n, k, weight_format, largest, powers)
    if scales is not None and weight_format.scale.kind == "ue8m0" and weight_format.family == "f8":
        scales = np.clip(scales, 126, 128)
    return codes, scales, random_zero_points(rng, n, k, weight_format)


def rounded(h):
    """float32 numbers as bfloat16, to nearest even."""
    return h.astype(np.float32).astype(BF16).astype(float)


@pytest.mark.cover("values")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_dense(backend, name, shape):
    """All three matrices, few rows and many. A factor is any float32 number: what it makes of exact sums is rounded once. h of
    gate and up is rounded to bfloat16 in addition, once."""
    rng = np.random.default_rng(shape)
    weight_format = SERVED[name]
    for projection in ("gate", "up", "down"):
        codes, scales, points = arrays_of(rng, weight_format, *(shape if projection == "down" else shape[::-1]))
        n, k = codes.shape
        factor = random_factor(rng, n, weight_format)
        weights = weights_of(codes, scales, weight_format, points)
        more = {"zero_points": points, "factor": factor}
        bias = 1
        if projection == "down":
            layer = down_layer(backend, codes, scales, weight_format, **more)
        else:
            largest = 7 * np.abs(weights).sum(axis=1).max() * (1 if factor is None else 2.0**4)
            bias = 2.0 ** np.ceil(np.log2(largest + 1))  # keeps the gate above 0
            layer = visible_layer(backend, projection, codes, scales, weight_format, bias, **more)
        with layer:
            for tokens in (1, 3, 20):
                x = np.zeros((tokens, layer.hidden))
                x[:, :k] = rng.integers(-7, 8, (tokens, k))
                expected = scaled_by(x[:, :k] @ weights.T, weight_format, factor)
                if projection != "down":
                    expected = rounded((expected + bias if projection == "gate" else expected).astype(np.float32))
                y = forward(layer, x)[:, :n]
                assert np.array_equal(y, expected), projection
                assert np.count_nonzero(y) > y.size / 2


@pytest.mark.cover("values")
@pytest.mark.parametrize("projection", ["up", "down"])
@pytest.mark.parametrize("name", SERVED)
def test_every_weight_by_itself(backend, name, projection):
    """Token k is the unit vector k."""
    rng = np.random.default_rng(5)
    weight_format = SERVED[name]
    codes, scales, points = arrays_of(rng, weight_format, *((152, 144) if projection == "down" else (136, 144)))
    n, k = codes.shape
    expected = weights_of(codes, scales, weight_format, points).T
    factor = None if weight_format.factor is None else np.full(weight_format.factor.shape(n), -0.5, np.float32)
    if factor is not None:
        expected = expected / -0.5 if weight_format.factor.divides else expected * -0.5
    if projection == "up":  # 8 bits of int8 times a scale
        expected = rounded(expected)
    make = (
        down_layer if projection == "down" else lambda backend, *matrix, **more: visible_layer(backend, "up", *matrix, **more)
    )
    with make(backend, codes, scales, weight_format, zero_points=points, factor=factor) as layer:
        one_hot = np.eye(k, layer.hidden)
        assert np.array_equal(forward(layer, one_hot)[:, :n], expected)
        for first in range(0, k, 4 * 7):
            assert np.array_equal(forward(layer, one_hot[first : first + 4])[:, :n], expected[first : first + 4])


# E4M3


def e4m3_rows(rng, count, columns=256):
    """[count, 256]: every code in every row, those that are no numbers replaced by 0 and -0; or some columns of that."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (count, 1))
    codes[codes & 127 == 127] &= 0x80
    return np.ascontiguousarray(rng.permuted(codes, axis=1)[:, :columns])


@pytest.mark.parametrize("projection", ["up", "down"])
@pytest.mark.parametrize(("low", "high"), [(10, 148), (0, 148), (9, 148), (107, 246), (107, 254), (107, 247)], ids=str)
def test_every_e4m3_code_with_every_ue8m0_byte(backend, low, high, projection):
    """A row for each byte, every code in each; one product a sum, which x keeps in float32's normal range. Bytes from 10 to 246
    fold; one that does not keeps the others from it."""
    codes = e4m3_rows(np.random.default_rng(low), 256)
    scales = np.resize(np.arange(low, high + 1), 256).astype(np.uint8)[:, None].repeat(8, axis=1)
    shift = 96 if low < 107 else -96
    make = down_layer if projection == "down" else lambda backend, *matrix: visible_layer(backend, "up", *matrix, 1, "bf16")
    with make(backend, codes, scales, MXFP8) as layer:
        assert core.folded(layer.packed)[0, projection] == folds(layer, low >= 10 and high <= 246)
        y = forward(layer, np.ldexp(np.eye(256), shift))
    assert np.array_equal(y, np.ldexp(weights_of(codes, scales, MXFP8).T, shift))
    assert np.count_nonzero(y) == 252 * 256


@pytest.mark.parametrize("name", ["mxfp8", "fp8", "fp8-row", "no scales, f8"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_e4m3s_denormals_in_sums(backend, name, tokens):
    """Only denormal codes and the least normal ones, with x of 1 bit: a multiple of 2**-9 counts as such."""
    rng = np.random.default_rng(6)
    weight_format = SERVED[name]
    codes = (rng.integers(0, 16, (136, 136)) | rng.integers(0, 2, (136, 136)) << 7).astype(np.uint8)
    scales = odd_scales(rng, 136, 136, weight_format)
    factor = random_factor(rng, 136, weight_format)
    with down_layer(backend, codes, scales, weight_format, factor=factor) as layer:
        x = rng.integers(-1, 2, (tokens, 136)).astype(float)
        expected = scaled_by(x @ weights_of(codes, scales, weight_format).T, weight_format, factor)
        assert np.array_equal(forward(layer, x), expected)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("kind", ["ue8m0", "e4m3", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", [(129, 258), (300, 126), (200, 130)], ids=str)
def test_every_block_has_a_scale_of_its_own(backend, kind, shape, tokens):
    """Of as many bits as its kind has; one product a sum, which the scale rounds to float32, once."""
    rng = np.random.default_rng(shape)
    weight_format = fp8(kind)
    n, k = shape
    codes = rng.choice(E4M3_CODES, (n, k))
    count = weight_format.scale.shape(n, k)
    if kind == "ue8m0":
        scales = rng.permutation(np.arange(100, 150))[: count[0] * count[1]].reshape(count).astype(np.uint8)
    elif kind == "e4m3":
        scales = rng.permutation(E4M3_CODES[E4M3_CODES & 127 != 0])[: count[0] * count[1]].reshape(count)
    else:
        scales = (rng.standard_normal(count) * 2.0 ** rng.integers(-12, 12, count)).astype(weight_format.scale.dtype)
    assert len(set(scale_numbers(scales, kind).ravel())) == scales.size
    weights = weights_of(codes, scales, weight_format)
    with down_layer(backend, codes, scales, weight_format) as layer:
        at = rng.permutation(np.union1d([0, 127, 128, k - 1], rng.choice(k, 20)) % k)[:tokens]
        x = np.zeros((len(at), layer.hidden))
        x[np.arange(len(at)), at] = 1
        assert np.array_equal(forward(layer, x)[:, :n], weights.T[at].astype(np.float32))


@pytest.mark.parametrize("element", [E2M1, INT4], ids=lambda element: element.name)
@pytest.mark.parametrize("some", ["all", "positive and normal"])
def test_every_e4m3_scale_with_every_code(backend, some, element):
    """A row for each byte of the first 16 k, another byte for the others: a token sees one of the two groups, in which x is a
    small integer, and another token every weight by itself. `amx` has a way of its own where scales are positive and normal."""
    rng = np.random.default_rng(7)
    normal = np.maximum(np.arange(7, 127, dtype=np.uint8), 8)  # one twice, for an even number of rows
    bytes_ = E4M3_CODES if some == "all" else normal
    rows, nonzero = len(bytes_), np.count_nonzero(bytes_ & 127)
    for k in (16, 32, 48, 80):
        groups = k // 16
        codes = rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (rows, groups, 1)), axis=2).reshape(rows, k)
        scales = np.stack([rng.permutation(bytes_) for _ in range(groups)], axis=1)
        weight_format = WeightFormat(element, Scale("e4m3", (1, 16)))
        weights = weights_of(codes, scales, weight_format)
        with down_layer(backend, codes, scales, weight_format) as layer:
            assert core.folded(layer.packed)[0, "down"] == (backend == "amx")
            x = np.zeros((2 * groups, layer.hidden))
            for token in range(2 * groups):
                first = 16 * (token // 2)
                x[token, first : first + 16] = rng.integers(-7, 8, 16)
            for tokens in (x, np.eye(k, layer.hidden), x[:1], x[-3:]):
                y = forward(layer, tokens)
                assert np.array_equal(y[:, :rows], tokens[:, :k] @ weights.T)
        assert np.count_nonzero(weights) == np.count_nonzero(element.values) * groups * nonzero


# Zero points


ZERO_POINTS = {
    "rows": uint4(32),
    "plus 1": uint4(32, plus=1),
    "gptq": uint4(32, order=GPTQ, plus=1),
    "awq": uint4(32, order=AWQ),
}


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("weight_format", ZERO_POINTS.values(), ids=ZERO_POINTS)
def test_every_zero_point_with_every_code(backend, weight_format, kind):
    """16 rows, in which group after group has the next zero point. What is stored is plus less."""
    rng = np.random.default_rng(8)
    weight_format = replace(weight_format, scale=Scale(kind, (1, 32)))
    n, k = 16, 512
    codes = rng.permuted(np.tile(np.arange(32, dtype=np.uint8) % 16, (n, 16, 1)), axis=2).reshape(n, k)
    points = (np.arange(n)[:, None] + np.arange(16)) % 16
    scales = odd_scales(rng, n, k, weight_format)
    scales[scales == 0] = 1
    weights = weights_of(codes, scales, weight_format, points)
    pairs = {(code, point) for code, point in zip(codes.ravel(), points.repeat(32, axis=1).ravel(), strict=True)}
    assert len(pairs) == 256
    x = rng.integers(-7, 8, (18, k)).astype(float)
    with down_layer(backend, codes, scales, weight_format, zero_points=points) as layer:
        for tokens in (x, x[:1], x[:3], np.eye(k)[rng.permutation(k)[:64]]):
            assert np.array_equal(forward(layer, tokens)[:, :n], tokens @ weights.T)


# Factors


@pytest.mark.cover("values")
@pytest.mark.parametrize("factor", [PER_MATRIX, PER_ROW, DIVIDED, DIVIDED_PER_ROW], ids=lambda factor: factor.description)
@pytest.mark.parametrize("name", ["mxfp4", "int4-32", "awq-128", "nvfp4", "mxfp8", "fp8", "fp8-row", "int8-row", "b16"])
def test_factors(backend, name, factor):
    """Powers of two change no bit of a sum but its exponent; a product or a quotient of any other number is rounded once, to
    nearest even, which 1/3 multiplied would not be. Rows may have factors far from each other's."""
    rng = np.random.default_rng(9)
    weight_format = replace(FORMATS[name], factor=factor)
    codes, scales, points = arrays_of(rng, weight_format, 72, 64)
    totals_of = weights_of(codes, scales, weight_format, points).T
    n = len(codes)
    x = np.zeros((13, n))
    x[:, :64] = rng.integers(-7, 8, (13, 64))
    totals = x[:, :64] @ totals_of
    count = factor.shape(n)
    powers = np.ldexp(rng.choice([-1.0, 1.0], count), rng.integers(-40, 40, count)).astype(np.float32)
    for given in (
        powers,
        np.full(count, 3, np.float32),
        np.full(count, np.float32(1) / 3),
        random_factor(rng, n, weight_format),
    ):
        with down_layer(backend, codes, scales, weight_format, zero_points=points, factor=given) as layer:
            for tokens in (1, 13):
                assert np.array_equal(forward(layer, x[:tokens]), scaled_by(totals[:tokens], weight_format, given))
    assert np.array_equal(scaled_by(totals, weight_format, powers), totals / powers if factor.divides else totals * powers)
    if factor.divides:  # what this tells from a product with the reciprocal
        multiplied = totals.astype(np.float32) * (1 / given)
        assert not np.array_equal(scaled_by(totals, weight_format, given), multiplied.astype(float))


@pytest.mark.parametrize("factor", [PER_MATRIX, DIVIDED, PER_ROW, DIVIDED_PER_ROW], ids=lambda factor: factor.description)
@pytest.mark.parametrize("name", ["nvfp4", "fp8-row"])
def test_the_bias_comes_after_the_factor(backend, name, factor):
    """A gate of total * 4 + 64, or total / 0.25 + 64, and neither (total + 64) * 4 nor 64 times anything."""
    rng = np.random.default_rng(10)
    weight_format = replace(FORMATS[name], factor=factor)
    codes, scales, _ = arrays_of(rng, weight_format, 64, 80)
    if weight_format.family == "f8":
        codes = codes & 0x87 | 4 << 3
    weights = weights_of(codes, scales, weight_format)
    given = np.full(factor.shape(64), 0.25 if factor.divides else 4, np.float32)
    bias = 2.0 ** np.ceil(np.log2(4 * np.abs(weights).max()))
    with visible_layer(backend, "gate", codes, scales, weight_format, bias, factor=given) as layer:
        y = forward(layer, np.eye(80))
    assert np.array_equal(y[:, :64], rounded((4 * weights.T + bias).astype(np.float32)))


# The largest sums


@pytest.mark.cover("values")
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(
    "name",
    [
        *("nvfp4", "mxfp8", "fp8", "fp8-row", "int8-row", "int8+128", "int8-block"),
        *("int5 fp16", "int2 super-256", "gptq-32", "awq-128", "int4-fp16"),
    ],
)
def test_the_largest_sums(backend, name, tokens):
    """x of 255, all of one sign, the codes that are farthest from 0 (or from their zero points), of one sign or of both, with
    the largest scales that keep the sums exact."""
    weight_format, k = FORMATS[name], 64
    values = [value if value is not None else 0.0 for value in weight_format.element.values]
    top, bottom = int(np.argmax(values)), int(np.argmin(values))
    codes = np.array([top, bottom, top, bottom, top, bottom, top, bottom], np.uint8)[:, None].repeat(k, 1)
    codes[2:4, 1::2] = [[bottom], [top]]
    points = None
    if weight_format.offset:
        points = np.where(codes[:, :1] == bottom, 15, 0).repeat(weight_format.offset.shape(8, k)[1], axis=1)
    scales = None
    if weight_format.scale:
        largest = {"ue8m0": 150, "e4m3": 0x78, "fp16": 2.0**15, "fp32": 2.0**60}[weight_format.scale.kind]
        scales = np.full(weight_format.scale.shape(8, k), largest).astype(weight_format.scale.dtype)
    factor = None if weight_format.factor is None else np.full(weight_format.factor.shape(8), 2.0**60, np.float32)
    weights = weights_of(codes, scales, weight_format, points)
    x = np.concatenate([np.full((1, k), 255.0), np.full((1, k), -255.0), np.resize([255.0, -255.0], (5, k))])[:tokens]
    expected = scaled_by(x @ weights.T, weight_format, factor)
    with down_layer(backend, codes, scales, weight_format, zero_points=points, factor=factor) as layer:
        assert np.array_equal(forward(layer, x)[:, :8], expected)
    assert np.abs(x @ weights.T).max() == 255 * k * np.abs(weights).max()


# These tests, tested


MISTAKES = {
    "code": ("codes", lambda codes: codes ^ np.pad([[1]], ((5, 66), (40, 103))).astype(np.uint8)),
    "sign": ("codes", lambda codes: codes ^ np.pad([[8 if codes.max() < 16 else 128]], ((5, 66), (40, 103))).astype(np.uint8)),
    "column": ("codes", lambda codes: np.roll(codes, 1, axis=0)),
    "k": ("codes", lambda codes: np.roll(codes, 16, axis=1)),
    "pairs": ("codes", lambda codes: codes.reshape(72, -1, 2)[..., ::-1].reshape(codes.shape)),
    "group": ("scales", lambda scales: np.roll(scales, 1, axis=1)),
    "row": ("scales", lambda scales: np.roll(scales, 1, axis=0)),
    "last bit": ("scales", lambda scales: (scales.view(f"u{scales.itemsize}") ^ 1).view(scales.dtype)),
    "zero point": ("zero_points", lambda points: points ^ np.pad([[1]], ((5, 66), (0, points.shape[1] - 1)))),
    "zero points": ("zero_points", lambda points: np.roll(points, 1, axis=1)),
    "factor": ("factor", lambda factor: np.nextafter(factor, np.float32(100))),
    "factors": ("factor", lambda factor: np.roll(factor, 1)),
}
#: The mistakes that a format can make.
MADE = {
    "nvfp4": ("code", "sign", "column", "k", "pairs", "group", "row", "last bit", "factor"),
    "mxfp8": ("code", "sign", "column", "k", "pairs", "group", "row", "last bit"),
    "fp8": ("code", "sign", "group", "last bit"),
    "fp8-row": ("code", "column", "factor", "factors"),
    "int8-row": ("code", "sign", "column", "k", "pairs", "factor"),
    "int8+128": ("code", "sign", "k", "group", "row", "last bit"),
    "gptq-32": ("code", "k", "pairs", "group", "row", "last bit", "zero point", "zero points"),
    "int4-fp16": ("code", "sign", "group", "last bit"),
    "int5 fp16": ("code", "column", "k", "pairs", "group", "row", "last bit"),
    "int2 super-256": ("code", "column", "k", "pairs", "row", "last bit"),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize(("name", "mistake"), [(name, mistake) for name in MADE for mistake in MADE[name]])
def test_mistakes_are_seen(backend, name, mistake):
    rng = np.random.default_rng(11)
    weight_format = FORMATS[name]
    codes, scales, points = arrays_of(rng, weight_format, 72, 144)
    if scales is not None:
        scales[scales == 0] = 1
    if name == "fp8":
        scales[:] = [[1.5, 2]]
    given = {"codes": codes, "scales": scales, "zero_points": points, "factor": random_factor(rng, 72, weight_format)}
    weights = weights_of(codes, scales, weight_format, points)

    def run(codes, scales, **more):
        with down_layer(backend, codes, scales, weight_format, **more) as layer:
            return forward(layer, x)[:, :72]

    x = rng.choice([-3.0, -1.0, 2.0, 5.0], (3, 144))
    expected = scaled_by(x @ weights.T, weight_format, given["factor"])
    assert np.array_equal(run(**given), expected)
    which, change = MISTAKES[mistake]
    assert not np.array_equal(run(**(given | {which: np.ascontiguousarray(change(given[which]))})), expected)
