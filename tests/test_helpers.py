"""Random experts of every format: their arrays are the format's, their numbers are numbers, their weights are moderate."""

import numpy as np
import pytest
from helpers import ALL_FORMATS, FLOATS, FORMATS, MIXED, WEIGHTS, random_arrays, random_experts, random_floats

from ktmoe import Matrix, Scale, reference
from ktmoe.experts import PROJECTIONS


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_every_format_has_random_experts(name):
    experts = random_experts(np.random.default_rng(1), 3, 100, 72, formats=ALL_FORMATS[name], biases=True)
    assert experts.hidden in (100, 104)
    for expert in range(3):
        for projection in PROJECTIONS:
            matrix = experts.matrix(expert, projection)
            matrix.refuse()
            assert matrix.stored.keys() == ALL_FORMATS[name].arrays(8, 8).keys()
            assert all(len(np.unique(array)) > 1 for array in matrix.stored.values() if array.size > 1)
            assert 0.005 < np.sqrt(np.mean(reference.dequantize(matrix) ** 2)) < 2


@pytest.mark.parametrize("weights", [*WEIGHTS.values(), *MIXED.values()], ids=[*WEIGHTS, *MIXED])
def test_every_case_has_random_experts(weights):
    experts = random_experts(np.random.default_rng(1), 1, 128, 96, **weights)
    for projection in PROJECTIONS:
        experts.matrix(0, projection).refuse()


@pytest.mark.parametrize("kind", FLOATS)
def test_random_floats_have_the_exponents_that_are_asked_for(kind):
    for low, high in ((121, 126), (127, 127), (0, 254)):
        stored = random_floats(np.random.default_rng(2), kind, (4000,), low, high)
        numbers = Scale(kind, (1, 32)).numbers(stored)
        assert np.isfinite(numbers).all()
        assert (numbers == 0).any()
        assert {-1, 1} <= set(np.sign(numbers))
        if low:
            exponents = np.frexp(np.abs(numbers[numbers != 0]))[1] - 1
            assert (exponents.min(), exponents.max()) == (low - 127, high - 127)


def test_a_matrix_that_must_not_fold_has_byte_0():
    for name in ("mxfp4", "mxfp8"):
        arrays = random_arrays(np.random.default_rng(3), FORMATS[name], 2, 64, 64, fold=False)
        assert (arrays["scales"] == 0).sum() == 2
        assert random_arrays(np.random.default_rng(3), FORMATS[name], 2, 64, 64)["scales"].min() > 100
        Matrix("w", FORMATS[name], (64, 64), **{label: array[0] for label, array in arrays.items()}).refuse()
