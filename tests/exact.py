"""Layers whose every partial sum is exact in float32, and one linear map of theirs made visible.

h = g * sigmoid(alpha * g) * u is exactly u where a bias makes g = 1, and exactly g where a bias makes u = 1 and g > 0, since
ALPHA saturates the sigmoid; and identities carry x to h, or h to y.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
from helpers import BF16, integers, minima_of, super_scaled

from ktmoe import MXFP4, ExpertWeights, GatedActivation, Matrix, MoELayer
from ktmoe.experts import PROJECTIONS
from ktmoe.weights.elements import E2M1, INT4, Element
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.offsets import Minimum, ZeroPoint
from ktmoe.weights.order import ROWS
from ktmoe.weights.scales import Scale

ALPHA = 2.0**30


#: The largest values that int16 knows.
SIXTEENS = WeightFormat(Element("sixteens", "q4", (-16.0, 16.0, *INT4.values[2:])), Scale("bf16", (1, 64)))
#: Integers of fewer than 8 bits whose code of 0 is no GGUF type's, where kernels may decode alike what they add up in two ways.
OTHER_ZEROS = {
    "int2 less 3, minima": super_scaled(integers(2, 3), 16, True, "uint4"),
    "int2 less 2": WeightFormat(integers(2, 2), Scale("fp16", (1, 256))),
    "int3 less 0": super_scaled(integers(3, 0), 16, kind="int6"),
    "int5 less 7": WeightFormat(integers(5, 7), Scale("fp16", (1, 32))),
    "int5 less 16, minima": minima_of(integers(5, 16)),
    "int5 less 31, super-32 minima": super_scaled(integers(5, 31), 32, True),
    "int6 less 0": super_scaled(integers(6, 0), 16),
}
#: E4M3's codes that are numbers.
E4M3_CODES = np.array([code for code in range(256) if code & 127 != 127], np.uint8)


def zeros(n, k, weight_format=MXFP4):
    """codes, scales of a matrix that is zero; of a format that every layer can have."""
    return np.full((n, k), weight_format.element.values.index(0), np.uint8), np.full((n, -(-k // 32)), 127, np.uint8)


def identity(n):
    return E2M1.values.index(1) * np.eye(n, dtype=np.uint8), zeros(n, n)[1]


def scale_numbers(scales, kind):
    """Stored scales as float64."""
    if kind == "ue8m0":
        return np.ldexp(1.0, scales.astype(int) - 127)
    return (scales.view(ml_dtypes.float8_e4m3fn) if kind == "e4m3" else scales).astype(float)


def weights_of(codes, scales, weight_format=MXFP4, zero_points=None):
    """float64 [n, k], without a factor. scales: the array, or all arrays of groups, by name, where there are super-scales or
    minima. zero_points: the integers that are subtracted, [n, groups]."""
    if not weight_format.element.values:
        return codes.astype(float)
    if weight_format.family == "f8":
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(float)
    elif weight_format.element.name.startswith("INT8"):
        values = codes.view(np.int8).astype(float) if weight_format.element.name == "INT8" else codes.astype(float) - 128
    else:
        values = np.array(weight_format.element.values)[codes]
    n, k = codes.shape
    if zero_points is not None:
        values = values - np.repeat(zero_points, weight_format.offset.extent[1], axis=1)[:, :k]
    if weight_format.scale is None:
        return values

    def of_weights(scale, stored):
        rows, columns = scale.extent
        numbers = scale_numbers(stored, scale.kind)
        return np.repeat(np.repeat(numbers, rows, axis=0)[:n], columns, axis=1)[:, :k]

    arrays, offset = scales if isinstance(scales, dict) else {"scales": scales}, weight_format.offset
    weights = values * of_weights(weight_format.scale, arrays["scales"])
    if weight_format.super_scale:
        weights *= of_weights(weight_format.super_scale, arrays["super_scales"])
    if isinstance(offset, Minimum):
        minima = of_weights(offset.scale, arrays["offsets"])
        if offset.super_scale:
            minima *= of_weights(offset.super_scale, arrays["super_offsets"])
        weights += minima if offset.added else -minima
    return weights


def matrix_of(name, codes, scales, weight_format=MXFP4, zero_points=None, factor=None, bias=None):
    """A Matrix in its format's order, from codes [n, k], one an item, scales and zero points as weights_of() has them."""
    q4 = weight_format.family == "q4"
    arrays = {"codes": codes[:, 0::2] | codes[:, 1::2] << 4 if q4 else codes}  # low nibble = even k
    arrays |= {"factor": factor} | (scales if isinstance(scales, dict) else {"scales": scales})
    if zero_points is not None:
        arrays["offsets"] = ((zero_points - weight_format.offset.plus) % 16).astype(np.uint8)
    stored = weight_format.from_rows({label: array for label, array in arrays.items() if array is not None}, *codes.shape)
    return Matrix(name, weight_format, codes.shape, **stored, bias=bias)


def make_layer(backend, gate, up, down, gate_bias, up_bias, activations="auto", rounding="exact", **settings):
    """One expert, from (codes [n, k], scales, its format or MXFP4, zero points, factor) and the biases' one value."""
    intermediate, hidden = gate[0].shape
    biases = {"gate": gate_bias, "up": up_bias}
    matrices = {}
    for projection, shown in zip(PROJECTIONS, (gate, up, down), strict=True):
        bias = np.full(intermediate, biases[projection], np.float32) if projection in biases else None
        matrices[projection] = matrix_of(projection, *shown, bias=bias)
    formats = {projection: matrix.format for projection, matrix in matrices.items()}
    activation = GatedActivation(alpha=ALPHA)
    experts = ExpertWeights(1, hidden, intermediate, lambda _, projection: matrices[projection], formats, activation)
    return MoELayer(experts, backend, activations, rounding=rounding, **settings)


def forward(layer, x):
    """y in float64, with x exactly a bfloat16 number and router weights of 1, so that float32 outputs show all there is."""
    x32 = x.astype(np.float32)
    assert np.array_equal(x32.astype(BF16).astype(np.float64), x)
    y = layer.forward(x32, np.zeros((len(x), 1), int), np.ones((len(x), 1), np.float32))
    return y.astype(np.float64)


def _with_rows(array, rows):
    """An array with so many rows: the last one comes again and again."""
    return array if array is None else np.pad(array, ((0, rows - len(array)), *([(0, 0)] * (array.ndim - 1))), mode="edge")


def down_layer(
    backend, codes, scales, weight_format=MXFP4, rounding="exact", zero_points=None, factor=None, activations="auto", **settings
):
    """y = x W^T: gate is 1 by its bias, up an identity."""
    hidden, intermediate = codes.shape
    if hidden < intermediate:  # x has as many numbers as y: pad W with rows of zeros, or of anything
        hidden = intermediate
        codes, zero_points = np.pad(codes, ((0, hidden - len(codes)), (0, 0))), _with_rows(zero_points, hidden)
        if isinstance(scales, dict):
            scales = {label: _with_rows(array, hidden) for label, array in scales.items()}
        elif scales is not None:
            scales = _with_rows(scales, weight_format.scale.shape(hidden, intermediate)[0])
        if factor is not None and weight_format.factor.per_row:
            factor = _with_rows(factor, hidden)
    up = identity(hidden)
    up = (up[0][:intermediate], up[1][:intermediate])
    down = codes, scales, weight_format, zero_points, factor
    return make_layer(backend, zeros(intermediate, hidden), up, down, 1, 0, activations, rounding, **settings)


def visible_layer(
    backend,
    projection,
    codes,
    scales,
    weight_format=MXFP4,
    gate_bias=1,
    activations="auto",
    rounding="exact",
    zero_points=None,
    factor=None,
):
    """y = x W^T for W = up; y = x W^T + gate_bias for W = gate. Down is an identity: y has as many numbers as x, at least as
    many as h; those that are more are zero."""
    n, k = codes.shape
    down = identity(k)
    down = np.ascontiguousarray(down[0][:, :n]), np.ascontiguousarray(down[1][:, : -(-n // 32)])
    shown = codes, scales, weight_format, zero_points, factor
    if projection == "up":
        return make_layer(backend, zeros(n, k), shown, down, 1, 0, activations, rounding)
    return make_layer(backend, shown, zeros(n, k), down, gate_bias, 1, activations, rounding)


def shift_for(byte):
    """Exponent of x that keeps sums of x * value * 2**(byte - 127) in float32's normal range."""
    return int(np.clip(127 - byte, -96, 96))


def random_codes(rng, n, k, weight_format):
    """Codes [n, k]; where these are numbers, integers of at most 4 bits; for int any; for f8 four exponents next to each
    other, of which all is a multiple of one power of two, by at most 7 bits."""
    if not weight_format.element.values:
        return rng.integers(-15, 16, (n, k)).astype(weight_format.element.codes_dtype)
    if weight_format.family == "f8":
        fields = rng.integers(0, 12) + rng.integers(0, 4, (n, k))
        return (rng.integers(0, 2, (n, k)) << 7 | fields << 3 | rng.integers(0, 8, (n, k))).astype(np.uint8)
    return rng.integers(0, 1 << weight_format.element.bits, (n, k), dtype=np.uint8)


def odd_scales(rng, n, k, weight_format, largest=7, powers=1):
    """Scales with as many significant bits as largest has, of both signs if the kind has any, times 2 to the power of less than
    `powers`; some are zero, unless rows share them. UE8M0's, which have no bits, in five exponents. None without scales. All
    arrays of groups, by name, where there are super-scales, powers of two, or minima, which are like scales."""
    scale, offset = weight_format.scale, weight_format.offset
    if weight_format.super_scale or isinstance(offset, Minimum):
        plain = replace(weight_format, super_scale=None, offset=None, order=ROWS)  # records could not leave them out
        arrays = {"scales": odd_scales(rng, n, k, plain, largest, powers)}
        if isinstance(offset, Minimum):
            arrays["offsets"] = odd_scales(rng, n, k, replace(plain, scale=offset.scale), largest, powers)
        for label in [label for label in ("super_scales", "super_offsets") if label in weight_format.arrays(n, k)]:
            shape = weight_format.super_scale.shape(n, k)
            arrays[label] = (rng.choice([-1, 1], shape) * 2.0 ** rng.integers(-2, 1, shape)).astype(np.float16)
        return arrays
    if scale is None:
        return None
    shape = scale.shape(n, k)
    if scale.kind == "ue8m0":
        return rng.integers(125, 130, shape).astype(np.uint8)
    least = 0 if scale.kind == "uint4" else -largest
    values = rng.choice([v for v in range(least, largest + 1) if v % 2 or (v == 0 and scale.extent[0] == 1)], shape)
    values = np.ldexp(values.astype(float), rng.integers(0, powers, shape))
    return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) if scale.kind == "e4m3" else values.astype(scale.dtype)


def random_zero_points(rng, n, k, weight_format):
    """[n, groups]; None without zero points."""
    return rng.integers(0, 16, weight_format.offset.shape(n, k)) if isinstance(weight_format.offset, ZeroPoint) else None


def random_factor(rng, n, weight_format):
    """Any float32 numbers of both signs, from 2**-4 to 2**4; None for a format without."""
    if weight_format.factor is None:
        return None
    count = weight_format.factor.shape(n)
    return (np.exp2(rng.uniform(-4, 4, count)) * rng.choice([-1, 1], count)).astype(np.float32)


def scaled_by(totals, weight_format, factor):
    """What the factor makes of exact sums [tokens, n], float64: one rounding of float32, whether it multiplies or divides."""
    if factor is None:
        return totals
    totals32 = totals.astype(np.float32)
    assert np.array_equal(totals32, totals)  # else this would be another rounding
    return (totals32 / factor if weight_format.factor.divides else totals32 * factor).astype(float)


def exact_matrix(rng, n, k, weight_format, bias=None):
    """A Matrix of small integers, and its weights in float64, factor included."""
    codes, scales = random_codes(rng, n, k, weight_format), odd_scales(rng, n, k, weight_format)
    points, factor = random_zero_points(rng, n, k, weight_format), None
    weights = weights_of(codes, scales, weight_format, points)
    if weight_format.factor:
        factor = 2.0 ** rng.integers(-2, 3, weight_format.factor.shape(n)).astype(np.float32)
        weights = weights * factor[:, None]
    return matrix_of("w", codes, scales, weight_format, points, factor, bias), weights
