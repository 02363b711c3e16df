"""Linear in exact arithmetic: every partial sum is exact in float32, so that y is the integers' product, bit for bit.

Where it fits its error bound, one wrong weight among thousands may still fit; here it cannot.
"""

import numpy as np
import pytest
import ways
from exact import exact_matrix
from helpers import BF16, FORMATS

from ktmoe import MXFP4, Linear, LinearGroup
from ktmoe._native import core

NAMES = (
    "mxfp4",
    "int4-64",
    "int4-fp16",
    "gptq-32",
    "awq-128",
    "fp8",
    "fp8-row",
    "int8-64",
    "super-32 minima",
    "b16",
    "f16",
    "f32",
)


@pytest.fixture(scope="module", params=[name for name, subject in ways.SUBJECTS.items() if subject.activations != "int8"])
def backend(request, emulator_folder):
    """Each backend in each mode that leaves this x as it is."""
    with ways.chosen(ways.SUBJECTS[request.param], emulator_folder) as name:
        yield name


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "k"), [(8, 64), (200, 160)], ids=str)
def test_integers(backend, is_emulated, name, n, k):
    """One row, few, and many; 200 outputs are three panels and a tail. A bias comes last, in float32, and one rounding to
    bfloat16 follows."""
    rng = np.random.default_rng((n, k))
    bias = rng.integers(-99, 100, n).astype(np.float32)
    matrix, weights = exact_matrix(rng, n, k, FORMATS[name], bias)
    with Linear(matrix, backend, "auto") as linear:
        for tokens in (1, 3) if is_emulated else (1, 3, 40):
            x = rng.integers(-7, 8, (tokens, k)).astype(float)
            wanted = x @ weights.T + bias
            assert np.array_equal(linear.forward(x.astype(BF16), dtype=np.float32), wanted)
            assert np.array_equal(linear.forward(x.astype(BF16)), wanted.astype(np.float32).astype(BF16))


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", ["mxfp4", "fp8", "b16"])
def test_every_weight_by_itself(backend, is_emulated, name):
    """Row k of x is the unit vector k, so that y is W's transpose: each weight stands where it should, and only there."""
    rng = np.random.default_rng(1)
    n, k = (72, 64) if is_emulated else (200, 160)
    matrix, weights = exact_matrix(rng, n, k, FORMATS[name])
    with Linear(matrix, backend, "auto") as linear:
        for only_many in (False, True):
            core.tune(only_many=only_many)
            assert np.array_equal(linear.forward(np.eye(k, dtype=np.float32)), weights.T)


def test_groups(backend):
    """Matrices of one to four panels beside each other, and with an x each: nothing of one goes to another."""
    rng = np.random.default_rng(2)
    made = [exact_matrix(rng, n, 64, MXFP4) for n in (200, 8, 64, 136)]
    x = rng.integers(-7, 8, (5, 64)).astype(np.float32)
    linears = [Linear(matrix, backend, "auto") for matrix, _ in made]
    for y, (_, weights) in zip(LinearGroup(linears).forward(x), made, strict=True):
        assert np.array_equal(y, x @ weights.T)
    made = [exact_matrix(rng, 72, 64, MXFP4) for _ in range(3)]
    x = rng.integers(-7, 8, (5, 3, 64)).astype(np.float32)
    linears = [Linear(matrix, backend, "auto") for matrix, _ in made]
    y = LinearGroup(linears, "own").forward(x)
    assert np.array_equal(y, np.stack([x[:, i] @ weights.T for i, (_, weights) in enumerate(made)], axis=1))
