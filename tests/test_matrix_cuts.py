"""Rows and columns of a matrix, and matrices joined: the same numbers and bytes, in every format and order; what cannot be."""

import numpy as np
import pytest
from ggml_records import IN_RECORDS, random_codes
from helpers import random_arrays

from ktmoe import BF16, FP8_PER_MATRIX, FP8_PER_ROW, Matrix, fp8, int4, nvfp4, uint4
from ktmoe.dequantization import dequantize
from ktmoe.errors import FormatError
from ktmoe.matrix_cuts import join_rows, joined_format, take_columns, take_rows
from ktmoe.weights.formats import FORMATS
from ktmoe.weights.order import AWQ, GPTQ, TRANSPOSED
from ktmoe.weights.scales import Factor

MORE = {
    "FP8 per matrix": FP8_PER_MATRIX,
    "BF16, transposed": BF16.__class__(BF16.element, order=TRANSPOSED),
    "AWQ, scales per 64": uint4(64, order=AWQ),
    "GPTQ, per row": int4(order=GPTQ),
}
ALL = FORMATS | MORE | IN_RECORDS
K = 256


def made(weight_format, n, seed=0, k=K, bias=False, name="m") -> Matrix:
    rng = np.random.default_rng([seed, n])
    if weight_format in IN_RECORDS.values():
        arrays = {"codes": random_codes(rng, weight_format, 1, n, k)[0]}
        if weight_format.factor:
            arrays["factor"] = np.ones(1, np.float32)
    else:
        arrays = {label: array[0] for label, array in random_arrays(rng, weight_format, 1, n, k).items()}
    of = rng.standard_normal(n).astype(np.float32) if bias else None
    return Matrix(name, weight_format, (n, k), bias=of, **arrays)


@pytest.mark.parametrize("name", ALL)
def test_rows(name):
    """Some in the middle, and the last ones, which may be fewer than share a scale."""
    matrix = made(ALL[name], 328, bias=True)
    weights = dequantize(matrix)
    for first, last in ((128, 256), (256, 328), (0, 328)):
        taken = take_rows(matrix, first, last)
        assert (taken.name, taken.format, taken.shape) == (f"m[{first}:{last}]", matrix.format, (last - first, K))
        np.testing.assert_array_equal(dequantize(taken), weights[first:last])
        np.testing.assert_array_equal(taken.bias, matrix.bias[first:last])


@pytest.mark.parametrize("name", ALL)
def test_columns(name):
    """Some in the middle, and the last ones, which may be fewer than share a scale."""
    k = 768 if name in IN_RECORDS else 776
    matrix = made(ALL[name], 256, k=k, bias=True)
    weights = dequantize(matrix)
    for first, last in ((256, 512), (512, k), (0, k)):
        taken = take_columns(matrix, first, last)
        assert (taken.name, taken.format, taken.shape) == (f"m[:, {first}:{last}]", matrix.format, (256, last - first))
        np.testing.assert_array_equal(dequantize(taken), weights[:, first:last])
        np.testing.assert_array_equal(taken.bias, matrix.bias)


@pytest.mark.parametrize(("first", "last"), [(16, 64), (0, 48), (64, 64), (0, 257), (-32, 32)])
def test_columns_that_cannot_be_cut(first, last):
    message = rf"^m: .*: expected columns within 0 to 256 in multiples of 32, found {first} to {last}$"
    with pytest.raises(FormatError, match=message):
        take_columns(made(FORMATS["MXFP4"], 64), first, last)


@pytest.mark.parametrize("name", ALL)
def test_joined(name):
    """Of different sizes, one with a bias. Factors of matrices are each row's then, and nothing is rounded."""
    parts = [made(ALL[name], n, seed, bias=seed == 1) for seed, n in enumerate((256, 128, 72))]
    whole = join_rows(parts, "whole")
    assert (whole.name, whole.shape) == ("whole", (456, K))
    np.testing.assert_array_equal(dequantize(whole), np.concatenate([dequantize(part) for part in parts]))
    np.testing.assert_array_equal(whole.bias, np.concatenate([np.zeros(256), parts[1].bias, np.zeros(72)]))
    assert whole.format == joined_format([(part.name, part.format, part.shape) for part in parts])
    if not parts[0].format.factor:
        assert whole.format == parts[0].format
        for label, array in whole.stored.items():
            taken = take_rows(whole, 256, 384)
            assert getattr(taken, label).tobytes() == getattr(parts[1], label).tobytes(), array.shape


def test_factors_of_a_matrix_and_of_rows():
    """Joined, both are factors of rows; a divisor stays one."""
    per_matrix, per_row = made(FP8_PER_MATRIX, 8, 0), made(FP8_PER_ROW, 4, 1)
    whole = join_rows([per_matrix, per_row], "w")
    assert whole.format == FP8_PER_ROW
    np.testing.assert_array_equal(whole.factor, np.concatenate([per_matrix.factor.repeat(8), per_row.factor]))
    assert join_rows([made(nvfp4(divides=True), 8, seed) for seed in (0, 1)], "w").format.factor == Factor(True, divides=True)
    assert join_rows([per_matrix], "w").format == FP8_PER_MATRIX


def test_one_matrix_without_biases_has_none():
    assert join_rows([made(BF16, 2), made(BF16, 3)], "w").bias is None


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("FP8 per 128x128", (64, 128), "multiples of 128, found 64 to 128 of 256"),
        ("FP8 per 128x128", (0, 64), "multiples of 128, found 0 to 64 of 256"),
        ("AWQ", (0, 12), "multiples of 8, found 0 to 12 of 256"),
        ("BF16", (0, 257), "rows within 0 to 256, found 0 to 257"),
        ("BF16", (8, 8), "rows within 0 to 256, found 8 to 8"),
        ("BF16", (-8, 8), "rows within 0 to 256, found -8 to 8"),
    ],
)
def test_rows_that_cannot_be_taken(name, rows, expected):
    with pytest.raises(FormatError, match=rf"^m: .*expected (rows in )?{expected}"):
        take_rows(made(FORMATS[name], 256), *rows)


def test_matrices_that_cannot_be_joined():
    blocks = made(fp8(), 64, name="a")
    with pytest.raises(FormatError, match=r"^a: .*: expected a multiple of 128 rows to join others to, found 64$"):
        join_rows([blocks, made(fp8(), 128, name="b")], "w")
    with pytest.raises(
        FormatError, match=r"^b: expected E4M3 with fp32 .* k = 256 as a is, to be joined with it, found BF16 with"
    ):
        join_rows([blocks, made(BF16, 128, name="b")], "w")
    with pytest.raises(FormatError, match=r"^b: expected .* k = 256 as a is, to be joined with it, found BF16 with k = 128$"):
        join_rows([made(BF16, 8, name="a"), made(BF16, 8, k=128, name="b")], "w")
    with pytest.raises(FormatError, match=r"^b: expected E4M3 with fp32 .* found E4M3 with bf16"):
        join_rows([made(fp8(), 128, name="a"), made(fp8("bf16"), 128, name="b")], "w")
