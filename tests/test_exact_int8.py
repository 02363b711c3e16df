"""Exact arithmetic in int8: x whose groups all have a maximum of 127 times a power of two are its integers, so that every sum
is exact in float32 and compared bit for bit. h is quantised by arithmetic of this file's own.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import ways
from exact import (
    OTHER_ZEROS,
    SIXTEENS,
    down_layer,
    forward,
    identity,
    make_layer,
    odd_scales,
    random_codes,
    random_factor,
    random_zero_points,
    scaled_by,
    weights_of,
    zeros,
)
from helpers import BF16, FORMATS, SUPER_SCALED

from ktmoe import MXFP4, WeightFormat, int4
from ktmoe.weights.elements import INT8
from ktmoe.weights.formats import nvfp4, uint4
from ktmoe.weights.order import AWQ

#: Formats that have kernels of integers.
INTEGERS = {name: weight_format for name, weight_format in FORMATS.items() if weight_format.family == "q4"}
INTEGERS |= {"int4-row": int4(), "zero points, bf16": uint4(32, "bf16"), "nvfp4, awq": replace(nvfp4(), order=AWQ)}
INTEGERS |= {"int8": WeightFormat(INT8), "int8-64": FORMATS["int8-64"], "int8+128": FORMATS["int8+128"]}
INTEGERS |= {name: weight_format for name, weight_format in SUPER_SCALED.items() if weight_format.family == "int"}
INTEGERS |= OTHER_ZEROS
#: Rows of an expert that are served apart: few() in passes of each size, many() in tiles of each.
TOKENS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 21)


@pytest.fixture(scope="module", params=[name for name, subject in ways.SUBJECTS.items() if subject.activations == "int8"])
def backend(request, emulator_folder):
    with ways.chosen(ways.SUBJECTS[request.param], emulator_folder) as name:
        yield name


def integers(rng, tokens, k, power=0):
    """x [tokens, k] of integers up to 127 times 2**power, with a maximum of 127 in each group of 32."""
    x = rng.integers(-127, 128, (tokens, k)).astype(float)
    for start in range(0, k, 32):
        x[np.arange(tokens), rng.integers(start, min(start + 32, k), tokens)] = rng.choice([-127.0, 127.0], tokens)
    return np.ldexp(x, power)


def scales_of(rng, n, k, weight_format):
    """Odd ones; powers of two for codes of 5 to 8 bits, so that 127 * 128 * 2 * 290 < 2**24. None without scales."""
    if weight_format.super_scale:
        return odd_scales(rng, n, k, weight_format, 1 if weight_format.element.bits > 4 else 3)
    return odd_scales(
        rng, n, k, weight_format, *((1, 2) if weight_format.element.bits > 4 and weight_format.family == "int" else ())
    )


def arrays_of(rng, n, k, weight_format):
    """codes, scales, zero points, factor of a matrix; n, k are rounded up to what the format can have."""
    rows, columns = weight_format.code_unit
    n, k = -(-n // rows) * rows, -(-k // columns) * columns
    codes, scales = random_codes(rng, n, k, weight_format), scales_of(rng, n, k, weight_format)
    return codes, scales, random_zero_points(rng, n, k, weight_format), random_factor(rng, n, weight_format)


def quantised(h):
    """bfloat16 numbers [tokens, n] as int8 takes them; none is below 2**-111."""
    padded = np.pad(h, ((0, 0), (0, -h.shape[1] % 32)))
    groups = padded.reshape(len(h), -1, 32)
    steps = (np.abs(groups).max(axis=2, keepdims=True) / 127).astype(np.float32).astype(BF16).astype(float)
    steps[steps == 0] = 1
    return (np.rint(groups / steps) * steps).reshape(padded.shape)[:, : h.shape[1]]


@pytest.mark.cover("values")
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", INTEGERS)
def test_down(backend, name, tokens):
    rng = np.random.default_rng(tokens)
    weight_format = INTEGERS[name]
    for n, k in ((64, 32), (70, 70), (66, 290)):
        codes, scales, points, factor = arrays_of(rng, n, k, weight_format)
        n, k = codes.shape
        with down_layer(backend, codes, scales, weight_format, zero_points=points, factor=factor) as layer:
            assert layer.activations == "int8"
            x = np.zeros((tokens, layer.hidden))
            x[:, :k] = integers(rng, tokens, k, -3)
            y = forward(layer, x)
        weights = weights_of(codes, scales, weight_format, points)
        assert np.array_equal(y[:, :n], scaled_by(x[:, :k] @ weights.T, weight_format, factor))


@pytest.mark.cover("values")
@pytest.mark.parametrize("projection", ["gate", "up"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", INTEGERS)
def test_gate_and_up(backend, projection, name, tokens):
    """Both panels at once; h is rounded to bfloat16 and quantised, and down is an identity."""
    rng = np.random.default_rng(tokens)
    weight_format = INTEGERS[name]
    n, k = 96, 160
    codes, scales, points, factor = arrays_of(rng, n, k, weight_format)
    down = identity(k)
    down = np.ascontiguousarray(down[0][:, :n]), np.ascontiguousarray(down[1][:, : n // 32])
    x = integers(rng, tokens, k, -7)
    h = scaled_by(x @ weights_of(codes, scales, weight_format, points).T, weight_format, factor)
    shown, zero = (codes, scales, weight_format, points, factor), zeros(n, k)
    bias = 1.0
    if projection == "gate":  # keeps the gate above 0
        bias = 2.0 ** (np.ceil(np.log2(np.abs(h).max())) + 1)
        h = (h + bias).astype(np.float32).astype(float)
        layer = make_layer(backend, shown, zero, down, bias, 1)
    else:
        layer = make_layer(backend, zero, shown, down, 1, 0)
    with layer:
        y = forward(layer, x)
    expected = quantised(h.astype(np.float32).astype(BF16).astype(float))
    assert np.array_equal(y[:, :n], expected)
    assert not y[:, n:].any()


@pytest.mark.cover("values")
@pytest.mark.parametrize("tokens", [1, 2, 12, 40])
@pytest.mark.parametrize("weight_format", INTEGERS.values(), ids=INTEGERS)
def test_every_weight_by_itself(backend, is_emulated, weight_format, tokens):
    """Token k is 127 at k. Where that is emulated, k are 0, 5 and so on: each of a block's 32 places is one of them once."""
    rng = np.random.default_rng(5)
    codes, scales, points, factor = arrays_of(rng, 160, 160, weight_format)
    expected = scaled_by(127 * weights_of(codes, scales, weight_format, points).T, weight_format, factor)
    with down_layer(backend, codes, scales, weight_format, zero_points=points, factor=factor) as layer:
        which = np.arange(0, 160, 5 if is_emulated else 1)
        for first in range(0, len(which), tokens):
            k = which[first : first + tokens]
            assert np.array_equal(forward(layer, 127 * np.eye(160)[k]), expected[k])


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize(("code", "other"), [(0, 0), (1, 1), (0, 1), (7, 7), (15, 0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums(backend, sign, code, other, tokens):
    """x of 127, all of one sign, and codes of 16 and -16: 16 products of one word are +-32512."""
    x = np.full((tokens, 256), 127.0 * sign)
    codes = np.where(np.arange(256) % 2, other, code).astype(np.uint8) * np.ones((64, 1), np.uint8)
    scales = np.ones((64, 4), BF16)
    with down_layer(backend, codes, scales, SIXTEENS) as layer:
        y = forward(layer, x)
    assert np.array_equal(y[:, :64], x @ weights_of(codes, scales, SIXTEENS).T)


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize(("code", "point"), [(0, 0), (15, 0), (0, 15), (15, 15), (7, 8)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_with_zero_points(backend, sign, code, point, tokens):
    """x of 127, of one sign or of both in turns of 16 k, and codes that are up to 15 more or less than the zero point."""
    weight_format = uint4(32, "bf16")
    codes, scales = np.full((64, 256), code, np.uint8), np.ones((64, 8), BF16)
    points = np.full((64, 8), point)
    weights = weights_of(codes, scales, weight_format, points)
    with down_layer(backend, codes, scales, weight_format, zero_points=points) as layer:
        for turns in (1, 1 - 2 * (np.arange(256) // 16 % 2)):
            x = np.full((tokens, 256), 127.0 * sign) * turns
            assert np.array_equal(forward(layer, x)[:, :64], x @ weights.T)


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("codes_", [(7, 7), (15, 15), (7, 15)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_16(backend, sign, codes_, tokens):
    """x of 127, of one sign or of both in turns of 16 k; each half of a block has a scale of its own."""
    weight_format = replace(nvfp4(), factor=None)
    codes = np.tile(np.array(codes_, np.uint8), (64, 128))
    scales = np.tile(np.array([1.0, -3.0]), (64, 8)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    weights = weights_of(codes, scales, weight_format)
    with down_layer(backend, codes, scales, weight_format) as layer:
        for turns in (1, 1 - 2 * (np.arange(256) // 16 % 2)):
            x = np.full((tokens, 256), 127.0 * sign) * turns
            assert np.array_equal(forward(layer, x)[:, :64], x @ weights.T)


@pytest.mark.cover("values")
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["int8", "int8-64", "int8+128"])
def test_the_largest_sums_of_8_bits(backend, name, sign, tokens):
    """x of 127, of one sign or of both, and codes of the largest size: pairs of products reach 32512."""
    weight_format = INTEGERS[name]
    pairs = np.array([[-128, -128], [127, 127], [-128, 127], [0, -128]])
    codes = (np.tile(pairs, (16, 64)) + (128 if name == "int8+128" else 0)).astype(np.uint8)  # two's complement, else plus 128
    scales = None if weight_format.scale is None else np.ones(weight_format.scale.shape(64, 128), weight_format.scale.dtype)
    weights = weights_of(codes, scales, weight_format)
    with down_layer(backend, codes, scales, weight_format) as layer:
        for pair in ([127.0, 127.0], [127.0, -127.0]):
            x = np.tile(np.array(pair) * sign, (tokens, 64))
            assert np.array_equal(forward(layer, x)[:, :64], x @ weights.T)
            assert np.abs(x @ weights.T).max() >= 128 * 127 * 127


@pytest.mark.parametrize("byte", [0, 1, 60, 127, 200, 253, 254])
@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_scale_bytes(backend, byte, tokens):
    rng = np.random.default_rng(byte)
    codes, scales = random_codes(rng, 64, 64, MXFP4), np.full((64, 2), byte, np.uint8)
    x = integers(rng, tokens, 64, int(np.clip(127 - byte, -96, 96)))
    with down_layer(backend, codes, scales) as layer:
        assert np.array_equal(forward(layer, x), x @ weights_of(codes, scales).T)


def test_groups_of_very_different_sizes(backend):
    """Each group has a scale of its own, which no other group sees; zero groups add nothing."""
    rng = np.random.default_rng(7)
    codes, scales = random_codes(rng, 64, 256, MXFP4), np.full((64, 8), 127, np.uint8)
    for tokens in (1, 2, 6, 30):
        x = np.zeros((tokens, 256))
        for token in range(tokens):
            group = token % 8
            x[token, 32 * group : 32 * group + 32] = integers(rng, 1, 32, -100 + 6 * token)
        with down_layer(backend, codes, scales) as layer:
            assert np.array_equal(forward(layer, x)[:, :64], x @ weights_of(codes, scales).T)


MISTAKES = {
    "nibbles": lambda codes, scales: (codes.reshape(64, 32, 2)[..., ::-1].reshape(64, 64), scales),
    "one sign": lambda codes, scales: (codes ^ np.pad([[8]], ((5, 58), (40, 23))).astype(np.uint8), scales),
    "group": lambda codes, scales: (codes, scales[:, ::-1].copy()),
    "row": lambda codes, scales: (codes, np.roll(scales, 1, axis=0)),
    "column": lambda codes, scales: (np.roll(codes, 1, axis=0), scales),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(backend, mistake):
    rng = np.random.default_rng(4)
    codes = rng.integers(1, 8, (64, 64), dtype=np.uint8) + 8 * rng.integers(0, 2, (64, 64), dtype=np.uint8)
    scales = rng.integers(120, 130, (64, 2), dtype=np.uint8)
    x = integers(rng, 3, 64)
    expected = x @ weights_of(codes, scales).T
    with down_layer(backend, *MISTAKES[mistake](codes, scales)) as layer:
        assert not np.array_equal(forward(layer, x), expected)
