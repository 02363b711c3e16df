"""Exact arithmetic: experts made so that every partial sum is exact in float32, compared bit for bit with float64.

Where it fits its error bound, a kernel with one wrong weight among thousands may still fit; here it cannot. One linear map at
a time is made visible: h = g * sigmoid(alpha * g) * u is exactly u where a bias makes g = 1, and exactly g where a bias makes
u = 1 and g > 0, since ALPHA saturates the sigmoid; and identities carry x to h, or h to y.
"""

import numpy as np
import pytest
from helpers import BF16, folds, pack_nibbles

from ktmoe import ExpertWeights, GatedActivation, MoELayer
from ktmoe.formats import E2M1

ALPHA = 2.0**30
ONE = 2  # the code of 1
VALUES = np.array(E2M1)
EVERY_BYTE = range(255)


def zeros(n, k):
    """codes, scales of a matrix that is zero."""
    return np.zeros((n, k), np.uint8), np.full((n, -(-k // 32)), 127, np.uint8)


def identity(n):
    return ONE * np.eye(n, dtype=np.uint8), zeros(n, n)[1]


def weights_of(codes, scales):
    """float64 [n, k]."""
    return VALUES[codes] * np.repeat(np.ldexp(1.0, scales.astype(int) - 127), 32, axis=1)[:, : codes.shape[1]]


def make_layer(backend, gate, up, down, gate_bias, up_bias, activations="auto"):
    """One expert, from (codes [n, k], scales) and the biases' one value."""
    intermediate, matrices = len(gate[0]), []
    for codes, scales in (gate, up, down):
        matrices.append((pack_nibbles(codes)[None], scales[None]))
    biases = {p: np.full((1, intermediate), value, np.float32) for p, value in (("gate", gate_bias), ("up", up_bias))}
    experts = ExpertWeights.from_arrays(*matrices, biases=biases, activation=GatedActivation(alpha=ALPHA))
    return MoELayer(experts, backend, activations)


def forward(layer, x):
    """y in float64, with x exactly a bfloat16 number and router weights of 1, so that float32 outputs show all there is."""
    x32 = x.astype(np.float32)
    assert np.array_equal(x32.astype(BF16).astype(np.float64), x)
    y = layer.forward(x32, np.zeros((len(x), 1), int), np.ones((len(x), 1), np.float32))
    return y.astype(np.float64)


def down_layer(backend, codes, scales):
    """y = x W^T: gate is 1 by its bias, up an identity."""
    hidden, intermediate = codes.shape
    if hidden < intermediate:  # x has as many numbers as y: pad W's rows with zeros
        codes = np.pad(codes, ((0, intermediate - hidden), (0, 0)))
        scales = np.pad(scales, ((0, intermediate - hidden), (0, 0)), constant_values=127)
    hidden = len(codes)
    up = identity(hidden)
    up = (up[0][:intermediate], up[1][:intermediate])
    return make_layer(backend, zeros(intermediate, hidden), up, (codes, scales), 1, 0)


def visible_layer(backend, projection, codes, scales, gate_bias=1, activations="auto"):
    """y = x W^T for W = up; y = x W^T + gate_bias for W = gate. Down is an identity: y and h have as many numbers."""
    n, k = codes.shape
    assert n == k
    if projection == "up":
        return make_layer(backend, zeros(n, k), (codes, scales), identity(n), 1, 0, activations)
    return make_layer(backend, (codes, scales), zeros(n, k), identity(n), gate_bias, 1, activations)


def shift_for(byte):
    """Exponent of x that keeps sums of x * codebook[code] * 2**(byte - 127) in float32's normal range."""
    return int(np.clip(127 - byte, -96, 96))


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
            assert layer._packed.kernels()[0, "down"] == folds(layer, low in (2, 125, 248))
            assert np.array_equal(forward(layer, x), x @ weights_of(codes, scales).T)


@pytest.mark.parametrize("block", range(0, 255, 15))
def test_every_scale_byte_in_down(backend, block):
    """15 bytes at a time, a row each; every code is in every row."""
    rng = np.random.default_rng(block)
    codes = rng.permuted(np.tile(np.arange(32, dtype=np.uint8) % 16, (15, 2)), axis=1)
    for byte in range(block, block + 15):
        scales = np.full((15, 2), byte, np.uint8)
        x = np.ldexp(rng.integers(-7, 8, (3, 64)).astype(float), shift_for(byte))
        with down_layer(backend, codes, scales) as layer:
            assert layer._packed.kernels()[0, "down"] == folds(layer, 2 <= byte <= 252)
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
    with visible_layer(backend, projection, codes, scales, bias or 1) as layer:
        assert np.array_equal(forward(layer, np.eye(size)), expected)
        for first in range(0, size, 4 * 7):
            tokens = slice(first, first + 4)
            assert np.array_equal(forward(layer, np.eye(size)[tokens]), expected[tokens])


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
        with visible_layer(backend, projection, codes, scales, bias if projection == "gate" else 1) as layer:
            expected = scaled @ weights_of(codes, scales).T + (bias if projection == "gate" else 0)
            assert np.array_equal(forward(layer, scaled), expected)


# The tests above, tested: what they must tell apart.


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
