"""Exact arithmetic: experts made so that every partial sum is exact in float32, compared bit for bit with float64.

Where it fits its error bound, a kernel with one wrong weight among thousands may still fit; here it cannot. exact.py has how
one linear map at a time is made visible.
"""

from itertools import product

import numpy as np
import pytest
import ways
from exact import (
    SIXTEENS,
    down_layer,
    forward,
    odd_scales,
    random_codes,
    random_zero_points,
    shift_for,
    visible_layer,
    weights_of,
)
from helpers import B16, BF16, FORMATS, LONGEST, folds, rounds

from ktmoe import MXFP4, int4
from ktmoe._native import core
from ktmoe.weights.elements import E2M1, INT4, INT8, Element
from ktmoe.weights.folding import ROUNDING
from ktmoe.weights.formats import WeightFormat, uint4
from ktmoe.weights.scales import Scale


@pytest.fixture(scope="module", params=[name for name, subject in ways.SUBJECTS.items() if subject.activations != "int8"])
def backend(request, emulator_folder):
    """Each backend in each mode that leaves these x and h as they are; test_exact_int8.py is for int8."""
    with ways.chosen(ways.SUBJECTS[request.param], emulator_folder) as name:
        yield name


#: What packs as nibbles, and what a group's length may be.
INTEGERS = {name: weight_format for name, weight_format in FORMATS.items() if name.startswith("int4")}
#: Formats of 8 bits, which have modes of integers, too.
EIGHT_BITS = {"int8": WeightFormat(INT8), "int8-64": FORMATS["int8-64"], "int8+128": FORMATS["int8+128"]}
#: Formats of 4 bits, with scales of 16, with zero points, or without scales.
FOUR_BITS = {
    "e4m3": WeightFormat(E2M1, Scale("e4m3", (1, 16))),
    "zero points, bf16": uint4(32, "bf16"),
    "zero points, fp16": uint4(128),
    "no scales": WeightFormat(INT4),
}
OTHERS = {**INTEGERS, **EIGHT_BITS, "b16": B16}


# Down: h is any small integers, and float32 outputs show 24 bits.


@pytest.mark.parametrize("tokens", [1, 5, 16], ids=lambda tokens: f"{tokens} tokens")
@pytest.mark.parametrize("size", [32, 100, 192])
def test_dense_integers(backend, size, tokens):
    """Scales differ by row and group: 3 bits of x, 4 of code, 4 of scale, 8 of length: 19, so that every order is exact."""
    rng = np.random.default_rng((size, tokens))
    codes = rng.integers(0, 16, (size, size), dtype=np.uint8)
    for low in (0, 2, 125, 248):
        scales = rng.integers(low, low + 5, (size, -(-size // 32)), dtype=np.uint8)
        x = np.ldexp(rng.integers(-7, 8, (tokens, size)).astype(float), shift_for(low))
        with down_layer(backend, codes, scales) as layer:
            assert core.folded(layer.packed)[0, "down"] == folds(layer, low in (2, 125, 248))
            assert np.array_equal(forward(layer, x), x @ weights_of(codes, scales).T)


@pytest.mark.parametrize("tokens", [1, 3, 16], ids=lambda tokens: f"{tokens} tokens")
@pytest.mark.parametrize("size", [32, 100, 320])
@pytest.mark.parametrize("weight_format", (OTHERS | FOUR_BITS).values(), ids=OTHERS | FOUR_BITS)
def test_dense_integers_of_other_formats(backend, weight_format, size, tokens):
    """3 bits of x, 4 of code, 3 of an odd scale and 2 of its exponent, 9 of length: 21; of int8, 7 * 128 * 28 * 320 < 2**23.
    Groups are cut short by every size."""
    rng = np.random.default_rng((size, tokens))
    codes, scales = random_codes(rng, size, size, weight_format), odd_scales(rng, size, size, weight_format, powers=3)
    points = random_zero_points(rng, size, size, weight_format)
    x = rng.integers(-7, 8, (tokens, size)).astype(float)
    for rounding in ROUNDING:  # products of a code and a scale have 6 bits
        with down_layer(backend, codes, scales, weight_format, rounding, points) as layer:
            assert np.array_equal(forward(layer, x), x @ weights_of(codes, scales, weight_format, points).T)


@pytest.mark.parametrize(
    "weight_format",
    [MXFP4, LONGEST, SIXTEENS, *EIGHT_BITS.values(), B16],
    ids=["mxfp4", "int4", "sixteens", *EIGHT_BITS, "b16"],
)
@pytest.mark.parametrize("tokens", [1, 7])
def test_the_largest_sums(backend, weight_format, tokens):
    """x of 255, all of one sign, and the largest codes of either: of int16's sums, the greatest that there are."""
    k, row = 64, np.arange(4)
    if weight_format == B16:
        codes, scales = np.array([15, -15, 3, -7])[row][:, None].repeat(k, 1).astype(BF16), None
    else:
        values = np.array(weight_format.element.values)
        ends = [values.argmin(), values.argmax(), weight_format.element.values.index(0), values.argmax()]
        codes = np.array(ends, np.uint8)[row][:, None].repeat(k, 1)
        codes[3, 1::2] = values.argmin()
        scales = None
        if scale := weight_format.scale:
            scales = np.full(scale.shape(4, k), 127 if weight_format == MXFP4 else 1).astype(scale.dtype)
    x = np.concatenate([np.full((1, k), 255.0), np.full((1, k), -255.0), np.resize([255.0, -255.0], (5, k))])[:tokens]
    expected = x @ weights_of(codes, scales, weight_format).T
    with down_layer(backend, codes, scales, weight_format) as layer:
        assert np.array_equal(forward(layer, x)[:, :4], expected)
    assert np.abs(expected).max() >= 255 * k * 6


EXPONENTS_AT_ONCE = 8


@pytest.mark.cover("values")
@pytest.mark.parametrize("first", range(0, 255, 4 * EXPONENTS_AT_ONCE))
def test_every_bfloat16_scale(backend, first):
    """A row for each mantissa and sign, a group for each exponent, and a token that sees that group alone: every finite scale
    with every code. 3 bits of x, 4 of code, 8 of scale, 5 of length: 20. Where scales may be folded, products are rounded once,
    to nearest even."""
    rng = np.random.default_rng(first)
    weight_format = int4(32)
    for low in range(first, min(first + 4 * EXPONENTS_AT_ONCE, 255), EXPONENTS_AT_ONCE):
        fields = np.arange(low, min(low + EXPONENTS_AT_ONCE, 255))
        k = 32 * len(fields)
        codes = rng.permuted(np.tile(np.arange(32, dtype=np.uint8) % 16, (256, len(fields))).reshape(256, -1, 32), axis=2)
        codes = codes.reshape(256, k)
        mantissas = np.arange(256)[:, None]
        scales = (mantissas >> 7 << 15 | fields << 7 | mantissas & 127).astype(np.uint16).view(BF16)
        x = np.zeros((len(fields), 256))
        for token, field in enumerate(fields):
            x[token, 32 * token : 32 * token + 32] = np.ldexp(rng.integers(-7, 8, 32).astype(float), shift_for(field))
        weights = weights_of(codes, scales, weight_format)
        for rounding in ROUNDING:
            with down_layer(backend, codes, scales, weight_format, rounding) as layer:
                y = forward(layer, x)
                assert layer.rounding == ("folded" if rounds(layer, rounding) and low > 0 and max(fields) < 250 else "exact")
                seen = weights.astype(np.float32).astype(BF16).astype(float) if layer.rounding == "folded" else weights
            assert np.array_equal(y, x[:, :k] @ seen.T)
            assert np.count_nonzero(y) > 0.9 * y.size


@pytest.mark.cover("values")
@pytest.mark.parametrize("first", range(0, 31, 2))
def test_every_fp16_scale(backend, first):
    """Two exponents with every mantissa and sign: 1024 rows, two groups for each, and a token for each group, which sees it
    alone: every finite scale with every code. 3 bits of x, 4 of code, 11 of scale, 5 of length: 23. Where scales may be folded,
    products are rounded once, to nearest even."""
    rng = np.random.default_rng(first)
    weight_format = int4(32, "fp16")
    fields = np.repeat(np.arange(first, min(first + 2, 31)), 2)
    k = 32 * len(fields)
    codes = rng.permuted(np.tile(np.arange(32, dtype=np.uint8) % 16, (1024, len(fields), 1)), axis=2).reshape(1024, k)
    signs = np.arange(len(fields)) % 2
    scales = (signs << 15 | fields << 10 | np.arange(1024)[:, None]).astype(np.uint16).view(np.float16)
    assert len(set(scales.view(np.uint16).ravel())) == scales.size
    x = np.zeros((len(fields), 1024))
    for token in range(len(fields)):
        x[token, 32 * token : 32 * token + 32] = rng.integers(-7, 8, 32)
    weights = weights_of(codes, scales, weight_format)
    for rounding in ROUNDING:
        with down_layer(backend, codes, scales, weight_format, rounding) as layer:
            y = forward(layer, x)
            assert layer.rounding == ("folded" if rounds(layer, rounding) else "exact")
            seen = weights.astype(np.float32).astype(BF16).astype(float) if layer.rounding == "folded" else weights
        assert np.array_equal(y, x[:, :k] @ seen.T)
        assert np.count_nonzero(y) > 0.9 * y.size


@pytest.mark.cover("values")
@pytest.mark.parametrize("block", range(0, 255, 15))
def test_every_scale_byte_in_down(backend, block):
    """15 bytes at a time, a row each; every code is in every row."""
    rng = np.random.default_rng(block)
    codes = rng.permuted(np.tile(np.arange(32, dtype=np.uint8) % 16, (15, 2)), axis=1)
    for byte in range(block, block + 15):
        scales = np.full((15, 2), byte, np.uint8)
        x = np.ldexp(rng.integers(-7, 8, (3, 64)).astype(float), shift_for(byte))
        with down_layer(backend, codes, scales) as layer:
            assert core.folded(layer.packed)[0, "down"] == folds(layer, 2 <= byte <= 252)
            y = forward(layer, x)
            assert np.array_equal(y[:, :15], x @ weights_of(codes, scales).T)
            assert not y[:, 15:].any()


def test_all_scale_bytes_in_one_matrix(backend):
    """One group per byte, one token per group: a column of 255 rows sees byte 254 as well as byte 0."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (256, 32), dtype=np.uint8)
    scales = (np.arange(256) % 255).astype(np.uint8)[:, None]
    expected = weights_of(codes, scales)
    for low, high, shift in ((0, 128, 90), (100, 255, -60)):
        x = np.zeros((4, 256))
        x[:, :32] = np.ldexp(rng.integers(-3, 4, (4, 32)).astype(float), shift)
        with down_layer(backend, codes, scales) as layer:
            y = forward(layer, x)
        rows = slice(low, high)
        assert np.array_equal(y[:, rows], (x[:, :32] @ expected.T)[:, rows])


@pytest.mark.parametrize("byte", [0, 1, 2, 3])
def test_denormal_outputs(backend, byte):
    """x of 1: sums below 2**-126. A scale that is not folded multiplies a normal sum, and its denormal product is kept; a
    folded weight is normal itself, down to 0.5 * 2**-125."""
    rng = np.random.default_rng(byte)
    codes = rng.integers(0, 16, (64, 64), dtype=np.uint8)
    scales = np.full((64, 2), byte, np.uint8)
    x = rng.integers(-1, 2, (9, 64)).astype(float)
    with down_layer(backend, codes, scales) as layer:
        y = forward(layer, x)
    assert np.array_equal(y, x @ weights_of(codes, scales).T)
    if byte < 2:
        assert ((y != 0) & (np.abs(y) < 2.0**-126)).any()


# Gate and up: h is a bfloat16 number, so that sums must fit 8 bits: one-hot tokens show one weight each.


@pytest.mark.parametrize("projection", ["gate", "up"])
@pytest.mark.parametrize("size", [32, 66, 160])
def test_every_weight_by_itself(backend, projection, size):
    """Token k is the unit vector k, so y is W's transpose; 4 tokens, and all at once (few() and many())."""
    rng = np.random.default_rng(size)
    codes = rng.integers(0, 16, (size, size), dtype=np.uint8)
    scales = rng.integers(126, 129, (size, -(-size // 32)), dtype=np.uint8)
    bias = 16 if projection == "gate" else 0  # keeps the gate above 0: multiples of 1/4 up to 28
    expected = weights_of(codes, scales).T + bias
    with visible_layer(backend, projection, codes, scales, gate_bias=bias or 1) as layer:
        assert np.array_equal(forward(layer, np.eye(size)), expected)
        for first in range(0, size, 4 * 7):
            tokens = slice(first, first + 4)
            assert np.array_equal(forward(layer, np.eye(size)[tokens]), expected[tokens])


@pytest.mark.parametrize("projection", ["gate", "up"])
@pytest.mark.parametrize("shape", [(34, 34), (66, 70), (64, 290)], ids=str)
@pytest.mark.parametrize("weight_format", OTHERS.values(), ids=OTHERS)
def test_every_weight_of_other_formats_by_itself(backend, projection, shape, weight_format):
    """Weights are integers of at most 56, or 896, and the gate's bias keeps it above 0; h is rounded to bfloat16. Of many k,
    those at ends of blocks and groups and some others."""
    rng = np.random.default_rng(shape)
    n, size = shape
    codes, scales = random_codes(rng, *shape, weight_format), odd_scales(rng, *shape, weight_format)
    bias = (1024 if weight_format.family == "int" else 64) if projection == "gate" else 0
    k = np.arange(size) if size < 100 else np.unique([0, 31, 32, 63, 64, 127, 128, 255, 256, size - 1, *rng.choice(size, 30)])
    expected = (weights_of(codes, scales, weight_format).T[k] + bias).astype(BF16).astype(float)
    with visible_layer(backend, projection, codes, scales, weight_format, bias or 1) as layer:
        assert np.array_equal(forward(layer, np.eye(size)[k])[:, :n], expected)
        for first in range(0, len(k), 4 * 7):
            tokens = slice(first, first + 4)
            assert np.array_equal(forward(layer, np.eye(size)[k[tokens]])[:, :n], expected[tokens])


@pytest.mark.parametrize("first", range(0, 255, 32))
def test_every_bfloat16_weight(backend, first):
    """Column k of W has one exponent for each k, a row for each mantissa and sign; token k is a power of two at k. What is
    denormal is taken as zero by those that multiply in bfloat16, and kept by the others."""
    fields = np.arange(first, min(first + 32, 255))
    mantissas = np.arange(256)[:, None]
    codes = (mantissas >> 7 << 15 | fields << 7 | mantissas & 127).astype(np.uint16).view(BF16)
    x = np.zeros((len(fields), 256))
    x[np.arange(len(fields)), np.arange(len(fields))] = [2.0 ** shift_for(field) for field in fields]
    expected = x[:, : len(fields)] @ codes.astype(float).T
    if backend in ("avx512_bf16", "amx"):
        expected[fields == 0] = 0
    assert np.count_nonzero(expected) >= 254 * (len(fields) - 1)
    with down_layer(backend, codes, None, B16) as layer:
        assert np.array_equal(forward(layer, x), expected)
    if first in (0, 128):
        square = np.zeros((256, 256), BF16)
        square[:, : len(fields)] = codes
        with visible_layer(backend, "up", square, None, B16) as layer:
            assert np.array_equal(forward(layer, x), expected)


@pytest.mark.parametrize("tokens", [1, 127])
@pytest.mark.parametrize(("of", "power"), [("x", 0), ("x", -8), ("values", -133)], ids=["x", "x, small units", "values"])
def test_denormal_factors(backend, of, power, tokens):
    """Of x and of an element's values: zero for those that multiply in bfloat16, kept by the others. amx is one of these here:
    scales that are bfloat16 numbers do not fold, so that it has sums in float32."""
    rng = np.random.default_rng(5)
    element = Element("small", "q4", tuple(np.ldexp(n, power) for n in range(-8, 8)))
    weight_format = WeightFormat(element, Scale("bf16", (1, 64)))
    codes = rng.integers(0, 16, (64, 128), dtype=np.uint8)
    scales = np.full((64, 2), 2.0**100).astype(BF16)
    x = np.zeros((tokens, 128))
    numbers = np.arange(1.0, tokens + 1) * (-1) ** np.arange(tokens)
    x[np.arange(tokens), np.arange(tokens)] = np.ldexp(numbers, -133 if of == "x" else 0)
    expected = (x @ weights_of(codes, scales, weight_format).T).astype(np.float32).astype(BF16).astype(float)
    assert expected.any()
    with visible_layer(backend, "up", codes, scales, weight_format, activations="bf16") as layer:
        y = forward(layer, x)
    assert np.array_equal(y[:, :64], expected if backend != "avx512_bf16" else np.zeros_like(expected))
    if of == "x":  # one number in a group: its integer is exact
        with visible_layer(backend, "up", codes, scales, weight_format) as layer:
            assert np.array_equal(forward(layer, x), y)
    with visible_layer(backend, "up", codes, scales, weight_format, activations="bf16", rounding="folded") as layer:
        if layer.rounding == "folded" and of == "x":
            y = np.zeros_like(y)  # a denormal value still makes a normal weight
        assert np.array_equal(forward(layer, x), y)


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
@pytest.mark.parametrize("tokens", [1, 63])
def test_denormal_x(backend, tokens, fold):
    """With UE8M0 scales, which those that multiply in bfloat16 fold: then amx, too, takes it as zero."""
    codes = np.random.default_rng(6).integers(0, 16, (64, 64), dtype=np.uint8)
    scales = np.full((64, 2), 227, np.uint8)
    scales[-1, -1] = 227 if fold else 0
    x = np.zeros((tokens, 64))
    x[np.arange(tokens), np.arange(tokens)] = np.ldexp(np.arange(1.0, tokens + 1), -133)
    expected = (x @ weights_of(codes, scales).T).astype(np.float32).astype(BF16).astype(float)
    assert expected.any()
    with visible_layer(backend, "up", codes, scales, activations="bf16") as layer:
        assert core.folded(layer.packed)[0, "up"] == folds(layer, fold)
        if folds(layer, fold) or backend == "avx512_bf16":
            expected[:] = 0
        assert np.array_equal(forward(layer, x), expected)


@pytest.mark.parametrize("low", [0, 60, 127, 190, 246])
@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("group", [32, 128])
def test_up_with_bfloat16_scales_far_apart(backend, group, low, tokens):
    """One product a sum: 8 bits of scale and 4 of code, which h rounds to bfloat16, once."""
    rng = np.random.default_rng(low)
    codes = rng.integers(0, 16, (192, 192), dtype=np.uint8)
    shape = (192, -(-192 // group))
    fields = rng.integers(low, min(low + 64, 254), shape, dtype=np.uint16, endpoint=True)
    signs_and_mantissas = rng.integers(0, 256, shape, dtype=np.uint16)
    scales = (signs_and_mantissas >> 7 << 15 | fields << 7 | signs_and_mantissas & 127).view(BF16)
    x = np.zeros((tokens, 192))
    x[np.arange(tokens), rng.choice(192, tokens, replace=False)] = 2.0 ** shift_for(low + 32)
    expected = (x @ weights_of(codes, scales, int4(group)).T).astype(np.float32)  # exact: 12 bits
    with visible_layer(backend, "up", codes, scales, int4(group), activations="bf16") as layer:
        assert np.array_equal(forward(layer, x), expected.astype(BF16).astype(float))


@pytest.mark.parametrize("low", [0, 60, 127, 190, 247])
@pytest.mark.parametrize("tokens", [5, 40])
def test_up_with_scales_far_apart(backend, low, tokens):
    """One product a sum, so that any mixture of scale bytes is exact: a scale of a wrong row or group shows."""
    rng = np.random.default_rng(low)
    codes = rng.integers(0, 16, (128, 128), dtype=np.uint8)
    scales = rng.integers(low, min(low + 64, 255), (128, 4), dtype=np.uint8)
    k = rng.choice(128, tokens, replace=False)
    x = np.zeros((tokens, 128))
    x[np.arange(tokens), k] = 2.0 ** shift_for(low + 32)
    # h, whose numbers are as far apart as the scales, is exact only in bfloat16.
    with visible_layer(backend, "up", codes, scales, activations="bf16") as layer:
        assert np.array_equal(forward(layer, x), x @ weights_of(codes, scales).T)


@pytest.mark.cover("values")
@pytest.mark.parametrize("projection", ["gate", "up"])
@pytest.mark.parametrize("block", range(0, 255, 17))
def test_every_scale_byte_in_gate_and_up(backend, projection, block):
    """Sums of 4 products of x in -2..2 and a code: multiples of 1/2 up to 36, exact in bfloat16 with the gate's bias of 64."""
    rng = np.random.default_rng(block)
    codes = rng.permuted(np.tile(np.arange(32, dtype=np.uint8) % 16, (32, 1)), axis=1)
    x = rng.permuted(np.tile([2, -2, 1, -1] + [0] * 28, (6, 1)), axis=1).astype(float)
    for byte in range(block, block + 17):
        scales = np.full((32, 1), byte, np.uint8)
        shift = shift_for(byte)
        bias = 2.0 ** (6 + byte - 127 + shift)
        scaled = np.ldexp(x, shift)
        with visible_layer(backend, projection, codes, scales, gate_bias=bias if projection == "gate" else 1) as layer:
            expected = scaled @ weights_of(codes, scales).T + (bias if projection == "gate" else 0)
            assert np.array_equal(forward(layer, scaled), expected)


# The tests above, tested: what they must tell apart.


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    "mistake",
    [
        lambda codes, scales: (codes.reshape(64, 32, 2)[..., ::-1].reshape(64, 64), scales),  # the other nibble first
        lambda codes, scales: (codes ^ (8 * np.eye(64, dtype=np.uint8)), scales),  # 64 of 4096 signs
        lambda codes, scales: (codes ^ np.pad([[8]], ((5, 58), (40, 23))).astype(np.uint8), scales),  # one sign
        lambda codes, scales: (codes, scales[:, ::-1].copy()),  # another group's scale
        lambda codes, scales: (codes, np.roll(scales, 1, axis=0)),  # another row's scale
        lambda codes, scales: (codes, scales + np.uint8(1)),  # another exponent's bias
        lambda codes, scales: (np.roll(codes, 1, axis=0), scales),
    ],
    ids=["nibbles", "signs", "one sign", "group", "row", "bias", "column"],
)
def test_mistakes_are_seen(backend, mistake):
    rng = np.random.default_rng(4)
    codes = rng.integers(1, 8, (64, 64), dtype=np.uint8) + 8 * rng.integers(0, 2, (64, 64), dtype=np.uint8)
    scales = rng.integers(120, 130, (64, 2), dtype=np.uint8)
    x = rng.choice([-3.0, -1.0, 2.0, 5.0], (3, 64))
    expected = x @ weights_of(codes, scales).T
    with down_layer(backend, codes, scales) as layer:
        assert np.array_equal(forward(layer, x), expected)
    with down_layer(backend, *mistake(codes, scales)) as layer:
        assert not np.array_equal(forward(layer, x), expected)


def swap_pairs(codes):
    return codes.reshape(len(codes), -1, 2)[..., ::-1].reshape(codes.shape)


def change_one(codes):
    codes = codes.copy()
    codes[37, 53] = codes[codes != codes[37, 53]][0]
    return codes


OF_CODES = {
    "pairs": lambda codes, scales: (swap_pairs(codes), scales),
    "one code": lambda codes, scales: (change_one(codes), scales),
    "column": lambda codes, scales: (np.roll(codes, 1, axis=0), scales),
    "k": lambda codes, scales: (np.roll(codes, 32, axis=1), scales),
}
OF_SCALES = {
    "group": lambda codes, scales: (codes, np.roll(scales, 1, axis=1)),
    "row": lambda codes, scales: (codes, np.roll(scales, 1, axis=0)),
    "sign": lambda codes, scales: (codes, np.abs(scales)),
    "last bit": lambda codes, scales: (codes, (scales.view(np.uint16) ^ np.eye(*scales.shape, dtype=np.uint16)).view(BF16)),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    ("name", "mistake"), [*product(("int4-32", "int4-128", "int8-64"), {**OF_CODES, **OF_SCALES}), *product(("b16",), OF_CODES)]
)
def test_mistakes_are_seen_in_other_formats(backend, name, mistake):
    rng = np.random.default_rng(4)
    weight_format = FORMATS[name]
    codes, scales = random_codes(rng, 64, 288, weight_format), odd_scales(rng, 64, 288, weight_format)
    if scales is not None:
        scales[scales == 0] = 1  # what they scale counts
    x = rng.choice([-3.0, -1.0, 2.0, 5.0], (3, 288))
    expected = x @ weights_of(codes, scales, weight_format).T
    with down_layer(backend, codes, scales, weight_format) as layer:
        assert np.array_equal(forward(layer, x)[:, :64], expected)
    with down_layer(backend, *(OF_CODES | OF_SCALES)[mistake](codes, scales), weight_format) as layer:
        assert not np.array_equal(forward(layer, x)[:, :64], expected)
