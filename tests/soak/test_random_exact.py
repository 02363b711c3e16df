"""Random cases whose every sum is exact in float32: the result is the product of the integers, bit for bit.

Where it fits its error bound, one wrong weight among thousands may still fit; here it cannot.
"""

import math

import numpy as np
import pytest
import ways
from exact import ALPHA, identity, matrix_of, zeros
from helpers import BF16
from random_exact import integer_matrix, layer_of, products, random_format, random_x
from random_layers import one_of, random_size, random_threads, random_tuning

from ktmoe import GatedActivation, Linear, set_num_threads
from ktmoe._native import core
from ktmoe.reference import operand

pytestmark = [pytest.mark.usefixtures("three_nodes"), pytest.mark.cover("any backend")]
#: Cases that have a matrix in common, which is packed once.
AT_ONCE = 3
#: Of an emulated backend, which takes a hundred times as long, one case of so many.
EMULATED = 30
#: h is the gate where it is above 0, else 0, if up is 1; or it is up, if the gate is 1.
STEEP = GatedActivation(alpha=ALPHA)


@pytest.fixture
def subject(request):
    """The name in ways.SUBJECTS of what `backend` is."""
    return request.node.callspec.params["backend"]


@pytest.fixture
def mode(subject):
    return ways.SUBJECTS[subject].activations


@pytest.fixture
def total(is_emulated):
    return 300 // EMULATED if is_emulated else 300


def whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def test_dense_matrices(backend, subject, mode, is_emulated, total, repeat):
    """A bias comes last, in float32, and one rounding to bfloat16 follows."""
    linear = None
    for number in repeat(f"exact dense matrices: {subject}{', emulated' * is_emulated}", total):
        rng = np.random.default_rng((number, 2))
        if number % AT_ONCE == 0:
            bias = rng.integers(-99, 100, 160).astype(np.float32) if rng.integers(2) else None
            matrix = integer_matrix(rng, random_size(rng), random_size(rng), random_format(rng, mode != "bf16"), bias)
            linear = Linear(matrix, backend, "auto", numa_nodes=[0, 1] if matrix.shape[0] > 128 else None)
            set_num_threads(random_threads(rng))
        core.tune(**random_tuning(rng))
        x = random_x(rng, int(rng.integers(1, 21)), matrix, mode == "int8")
        x = np.ldexp(x, int(rng.integers(-20, 20)) if bias is None else 0)
        wanted = products(matrix, x).astype(np.float32)
        where = f"{matrix.format.description} {matrix.shape}"
        assert np.array_equal(linear.forward(x.astype(BF16), dtype=np.float32), wanted), where
        assert np.array_equal(linear.forward(x.astype(BF16)), wanted.astype(BF16)), where


def random_layer(rng, backend, mode):
    """A layer of one or two experts of which one projection is random, which one, and its matrices.

    down: h is x, since the gate is 1 by its bias and up an identity. gate or up: y is h, since down is an identity.
    """
    shown, weight_format = one_of(rng, ("gate", "up", "down")), random_format(rng, mode != "bf16")
    units, count = [math.lcm(2, unit) for unit in weight_format.code_unit], int(rng.integers(1, 3))
    n, k = (whole(random_size(rng), unit) for unit in units)
    if shown == "down":  # identities need a hidden size that is not below the intermediate one
        n = max(n, whole(k, units[0]))
    else:
        k = max(k, whole(n, units[1]))
    made = [integer_matrix(rng, n, k, weight_format) for _ in range(count)]
    intermediate, hidden = (k, n) if shown == "down" else (n, k)
    ones = np.ones(intermediate, np.float32)
    of_ones = matrix_of("ones", *zeros(intermediate, hidden), bias=ones)
    other = identity(hidden)
    if shown == "down":
        up = matrix_of("identity", other[0][:intermediate], other[1][:intermediate])
        matrices = {"gate": [of_ones] * count, "up": [up] * count, "down": made}
    else:
        blocks = -(-intermediate // 32)
        down = (np.ascontiguousarray(array) for array in (other[0][:, :intermediate], other[1][:, :blocks]))
        matrices = {"gate": [of_ones] * count, "up": [of_ones] * count, "down": [matrix_of("identity", *down)] * count}
        matrices[shown] = made
    return layer_of(backend, matrices, STEEP, numa_nodes=one_of(rng, ([0], [1]))), shown, made


def test_layers(backend, subject, mode, is_emulated, total, repeat):
    """One linear map of a layer, of one or two experts: their sums times router weights that are powers of two."""
    layer = None
    for number in repeat(f"exact layers: {subject}{', emulated' * is_emulated}", total):
        rng = np.random.default_rng((number, 3))
        if number % AT_ONCE == 0:
            if layer:
                layer.close()
            layer, shown, made = random_layer(rng, backend, mode)
            set_num_threads(random_threads(rng))
        core.tune(**random_tuning(rng))
        x = random_x(rng, int(rng.integers(1, 21)), made[0], layer.activations == "int8")
        ids = rng.integers(0, len(made), (len(x), 1))
        weights = np.exp2(rng.integers(-3, 4, ids.shape)).astype(np.float32)
        padded = np.zeros((len(x), layer.hidden), np.float32)
        padded[:, : x.shape[1]] = x
        h = np.stack([products(matrix, x) for matrix in made])[ids[:, 0], np.arange(len(x))]
        if shown != "down":
            h = (np.maximum(h, 0) if shown == "gate" else h).astype(np.float32).astype(BF16).astype(float)
            h = operand(h, h, h, layer.activations)[0]
        y = layer.forward(padded, ids, weights)[:, : h.shape[1]]
        assert np.array_equal(y, h * weights), f"{shown}, {made[0].format.description} {made[0].shape}"
    layer.close()
