"""Products of dense fp32 matrices, which adapters are computed by: against float64, and bit for bit where bits are promised."""

import itertools

import numpy as np
import pytest
from helpers import BF16, bits, same_bits

from ktmoe._native import core

#: Rows and columns around every tile, and k around the lanes, the turned strips and where the order of sums changes.
ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25)
COLUMNS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 130)
SUMMED = (1, 2, 3, 4, 5, 8, 15, 16, 17, 63, 64, 65, 130, 255, 256, 257, 270, 300, 515)
OPERATIONS = {"dense": False, "dense_rows": True}

either = pytest.mark.parametrize("rows", OPERATIONS.values(), ids=OPERATIONS.keys())


def multiply(table, a, b, rows, c=None):
    """a times b [k, n], whichever way the operation wants b."""
    return core.dense(table, a, np.ascontiguousarray(b.T) if rows else b, c, rows)


def integers(rng, *shape):
    """Whose products and sums float32 holds, in any order."""
    return rng.integers(-9, 10, shape).astype(np.float32)


def inside(array, rng):
    """The same numbers, each row apart from the next, with NaN all around."""
    padded = np.full((array.shape[0] + 2, array.shape[1] + rng.integers(1, 20)), np.nan, np.float32)
    part = padded[1:-1, 1 : 1 + array.shape[1]]
    part[:] = array
    return part


@either
def test_every_shape_gives_the_product(table, rows):
    """Integers, so that one number at a wrong place shows; NaN beside them, so that reading or writing there does, too."""
    rng = np.random.default_rng(1)
    shapes = [*itertools.product((1, 6, 13), COLUMNS, (3, 16, 257)), *itertools.product(ROWS, (5, 16, 70), (4, 16, 270))]
    for m, n, k in [*shapes, *((7, 21, k) for k in SUMMED)]:
        a, b, c = integers(rng, m, k), integers(rng, k, n), integers(rng, m, n)
        of_a, of_b = inside(a, rng), inside(b.T if rows else b, rng)
        product = a.astype(float) @ b
        assert np.array_equal(core.dense(table, of_a, of_b, rows=rows), product)
        out = inside(c, rng)
        whole = out.base.copy()
        assert np.array_equal(core.dense(table, of_a, of_b, out, rows), c + product)
        whole[1:-1, 1 : 1 + n] = out
        assert same_bits(out.base, whole)


@either
def test_no_inputs_give_zero(table, rows):
    """What an adapter's gradient is of no rows."""
    a, b = np.ones((3, 1), np.float32), np.ones((1, 20), np.float32)
    none = a[:, :0], b[:0] if not rows else b.T[:, :0]
    assert not core.dense(table, *none, rows=rows).any()


@either
@pytest.mark.parametrize("k", [16, 255, 256, 257, 2000])
def test_the_error_is_that_of_a_sum(table, rows, k):
    """At most a rounding of each product and of each addition, of which the last are the fewest: k + 1 for a term."""
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((13, k), (k, 37)))
    error = np.abs(multiply(table, a, b, rows) - a.astype(float) @ b)
    assert (error <= (k + 1) * 2.0**-24 * 1.001 * (np.abs(a).astype(float) @ np.abs(b))).all()


@either
@pytest.mark.parametrize("k", [16, 130, 256, 257, 515])
def test_bits_depend_on_no_other_row_or_column(table, rows, k):
    rng = np.random.default_rng(k)
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((25, k), (k, 70), (25, 70)))
    for held in (None, c):
        whole = multiply(table, a, b, rows, None if held is None else held.copy())
        for i, j in ((slice(0, 1), slice(0, 70)), (slice(3, 16), slice(5, 22)), (slice(24, 25), slice(69, 70))):
            part = multiply(table, a[i], b[:, j], rows, None if held is None else held[i, j].copy())
            assert same_bits(part, whole[i, j])


@either
@pytest.mark.parametrize("parts", [(1, 1, 14), (64, 64, 1), (100, 156)], ids=str)
def test_a_sum_can_be_continued(table, rows, parts):
    """As one chain over all k, wherever it is cut."""
    rng = np.random.default_rng(2)
    k = sum(parts)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, k), (k, 37)))
    out = np.zeros((9, 37), np.float32)
    for first, last in itertools.pairwise(np.cumsum((0, *parts))):
        multiply(table, np.ascontiguousarray(a[:, first:last]), b[first:last], rows, out)
    assert same_bits(out, multiply(table, a, b, rows))


@either
def test_a_sum_is_one_chain(table, rows):
    """2^24 + 1 is 2^24, and -2^24 + 1 is not -2^24: only one by one and from the first k on is it zero."""
    k = 200
    a, b = np.ones((7, k), np.float32), np.ones((k, 19), np.float32)
    b[0], b[-1] = 2.0**24, -(2.0**24)
    assert not multiply(table, a, b, rows).any()


def test_transposed_rows_may_be_taken(table):
    """By dense(): the gradient of an adapter sums over the rows."""
    rng = np.random.default_rng(3)
    for m, n, k in ((64, 16, 12), (16, 70, 9), (5, 3, 30)):
        a, b = rng.standard_normal((k, m)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
        assert same_bits(core.dense(table, a.T, b), core.dense(table, np.ascontiguousarray(a.T), b))


@either
@pytest.mark.parametrize("k", [20, 300])
def test_nan_and_infinity_stay_in_their_row_and_column(table, rows, k):
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((13, k)).astype(np.float32), rng.standard_normal((k, 21)).astype(np.float32)
    clean = multiply(table, a, b, rows)
    for value in (np.nan, np.inf):
        spoiled = a.copy()
        spoiled[5, k - 1] = value
        y = multiply(table, spoiled, b, rows)
        assert not np.isfinite(y[5]).any()
        assert same_bits(np.delete(y, 5, 0), np.delete(clean, 5, 0))
        spoiled = b.copy()
        spoiled[k - 1, 20] = value
        y = multiply(table, a, spoiled, rows)
        assert not np.isfinite(y[:, 20]).any()
        assert same_bits(y[:, :20], clean[:, :20])


@either
def test_denormal_numbers_count(table, rows):
    a, b = np.full((5, 40), 2.0**-70, np.float32), np.full((40, 18), 2.0**-70, np.float32)
    assert (multiply(table, a, b, rows) == 40 * 2.0**-140).all()


def test_bf16_is_widened(table):
    """Every bit pattern, of any length."""
    every = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(bits(core.widen(table, every)), every.astype(np.uint32) << 16)
    for count in range(40):
        assert same_bits(core.widen(table, every[1 : 1 + count]), every[1 : 1 + count].view(BF16).astype(np.float32))
