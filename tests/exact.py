"""Layers whose every partial sum is exact in float32, and one linear map of theirs made visible.

h = g * sigmoid(alpha * g) * u is exactly u where a bias makes g = 1, and exactly g where a bias makes u = 1 and g > 0, since
ALPHA saturates the sigmoid; and identities carry x to h, or h to y.
"""

import numpy as np
from helpers import B16, BF16, pack_nibbles

from ktmoe import MXFP4, ExpertWeights, GatedActivation, Matrix, MoELayer
from ktmoe.experts import PROJECTIONS
from ktmoe.weights.elements import E2M1, INT4, Element
from ktmoe.weights.formats import Scale, WeightFormat

ALPHA = 2.0**30


#: The largest values that int16 knows.
SIXTEENS = WeightFormat(Element("sixteens", "q4", (-16.0, 16.0, *INT4.values[2:])), Scale("bf16", (1, 64)))


def zeros(n, k, weight_format=MXFP4):
    """codes, scales of a matrix that is zero; of a format that every layer can have."""
    return np.full((n, k), weight_format.element.values.index(0), np.uint8), np.full((n, -(-k // 32)), 127, np.uint8)


def identity(n):
    return E2M1.values.index(1) * np.eye(n, dtype=np.uint8), zeros(n, n)[1]


def weights_of(codes, scales, weight_format=MXFP4):
    """float64 [n, k]."""
    if weight_format == B16:
        return codes.astype(float)
    values = np.ldexp(1.0, scales.astype(int) - 127) if scales.dtype == np.uint8 else scales.astype(float)
    group = weight_format.scale.extent[1]
    return weight_format.element.numbers(codes) * np.repeat(values, group, axis=1)[:, : codes.shape[1]]


def make_layer(backend, gate, up, down, gate_bias, up_bias, activations="auto", rounding="exact"):
    """One expert, from (codes [n, k], scales, its format or MXFP4) and the biases' one value."""
    intermediate, hidden = gate[0].shape
    biases = {"gate": gate_bias, "up": up_bias}
    matrices = {}
    for projection, (codes, scales, *rest) in zip(PROJECTIONS, (gate, up, down), strict=True):
        (weight_format,) = rest or (MXFP4,)
        stored = pack_nibbles(codes) if weight_format.family == "q4" else codes
        bias = np.full(intermediate, biases[projection], np.float32) if projection in biases else None
        matrices[projection] = Matrix(projection, weight_format, codes.shape, stored, scales, bias)
    formats = {projection: matrix.format for projection, matrix in matrices.items()}
    activation = GatedActivation(alpha=ALPHA)
    experts = ExpertWeights(1, hidden, intermediate, lambda _, projection: matrices[projection], formats, activation)
    return MoELayer(experts, backend, activations, rounding=rounding)


def forward(layer, x):
    """y in float64, with x exactly a bfloat16 number and router weights of 1, so that float32 outputs show all there is."""
    x32 = x.astype(np.float32)
    assert np.array_equal(x32.astype(BF16).astype(np.float64), x)
    y = layer.forward(x32, np.zeros((len(x), 1), int), np.ones((len(x), 1), np.float32))
    return y.astype(np.float64)


def down_layer(backend, codes, scales, weight_format=MXFP4, rounding="exact"):
    """y = x W^T: gate is 1 by its bias, up an identity."""
    hidden, intermediate = codes.shape
    if hidden < intermediate:  # x has as many numbers as y: pad W with rows of zeros, or of anything
        codes = np.pad(codes, ((0, intermediate - hidden), (0, 0)))
        if scales is not None:
            scales = np.pad(scales, ((0, intermediate - hidden), (0, 0)), mode="edge")
    hidden = len(codes)
    up = identity(hidden)
    up = (up[0][:intermediate], up[1][:intermediate])
    return make_layer(backend, zeros(intermediate, hidden), up, (codes, scales, weight_format), 1, 0, rounding=rounding)


def visible_layer(backend, projection, codes, scales, weight_format=MXFP4, gate_bias=1, activations="auto", rounding="exact"):
    """y = x W^T for W = up; y = x W^T + gate_bias for W = gate. Down is an identity: y has as many numbers as x, at least as
    many as h; those that are more are zero."""
    n, k = codes.shape
    down = identity(k)
    down = np.ascontiguousarray(down[0][:, :n]), np.ascontiguousarray(down[1][:, : -(-n // 32)])
    shown = codes, scales, weight_format
    if projection == "up":
        return make_layer(backend, zeros(n, k), shown, down, 1, 0, activations, rounding)
    return make_layer(backend, shown, zeros(n, k), down, gate_bias, 1, activations, rounding)


def shift_for(byte):
    """Exponent of x that keeps sums of x * value * 2**(byte - 127) in float32's normal range."""
    return int(np.clip(127 - byte, -96, 96))


def random_codes(rng, n, k, weight_format):
    """Codes [n, k], or for b16 integers of at most 4 bits."""
    if weight_format == B16:
        return rng.integers(-15, 16, (n, k)).astype(BF16)
    return rng.integers(0, 16, (n, k), dtype=np.uint8)


def odd_scales(rng, n, k, weight_format, largest=7):
    """Scales with as many significant bits as largest has, of both signs, some zero; None for b16."""
    if weight_format == B16:
        return None
    values = rng.choice([v for v in range(-largest, largest + 1) if v % 2] + [0], weight_format.scale.shape(n, k))
    return values.astype(weight_format.scale.dtype)
