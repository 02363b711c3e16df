"""Linear.rows(): rows of packed weights, against the matrix that was packed, dequantised and rounded in float64."""

import threading

import numpy as np
import pytest
from cached import arenas_of
from helpers import BF16, FORMATS, TURNED, in_child, same_bits, unaligned
from linears import DENSE_FORMATS, random_matrix

from ktmoe import Linear, backends, linear_rows
from ktmoe.backends.base import PackedMatrix
from ktmoe.dequantization import dequantize
from ktmoe.errors import ClosedError, InputError, UnavailableError
from ktmoe.linear_weights import LinearWeights
from ktmoe.matrix import Matrix
from ktmoe.reference import round_bfloat16

pytestmark = pytest.mark.usefixtures("three_nodes")

N, K = 150, 64


def expected(matrix, ids, dtype=BF16):
    """float64 that has the numbers of dtype."""
    rows = dequantize(matrix)[np.asarray(ids)]
    return round_bfloat16(rows) if dtype == BF16 else rows.astype(np.float32).astype(np.float64)


def ids_of(n, rng):
    """All columns of a panel's fours, both ends of the matrix and of each panel, out of order; one twice."""
    return np.array([n - 1, 0, *rng.permutation(np.arange(60, min(n, 132))), 64, 64])


def some(name="b16", **options):
    return random_matrix(np.random.default_rng(1), N, K, FORMATS[name], name="lm_head", **options)


@pytest.fixture(scope="module")
def linear():
    with Linear(some(), "fp32_lut") as linear:
        yield linear


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", DENSE_FORMATS | TURNED)
@pytest.mark.parametrize("nodes", [None, [1, 0]], ids=str)
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
def test_of_every_format(name, nodes, dtype):
    """In all orders of bytes; of shards, too. k ends within a block of 32, and n within a panel."""
    rng, weight_format = np.random.default_rng(1), (DENSE_FORMATS | TURNED)[name]
    matrix = random_matrix(rng, 70 + max(128, weight_format.unit[0]), 167, weight_format)
    ids = ids_of(matrix.shape[0], rng)
    with Linear(matrix, "fp32_lut", numa_nodes=nodes) as linear:
        found = linear.rows(ids, dtype=None if dtype == BF16 else dtype)
        assert (found.dtype, found.shape) == (dtype, (len(ids), matrix.shape[1]))
        assert same_bits(found.astype(np.float64), expected(matrix, ids, dtype))
        for i in (0, 7):  # one alone takes another way
            assert same_bits(linear.rows(ids[i : i + 1]).astype(np.float64), expected(matrix, ids[i : i + 1]))


@pytest.mark.cover("any backend")
@pytest.mark.parametrize("name", ["b16", "int4-64"])
def test_of_every_backend(backend, name):
    """Whatever kernels round: rows are the checkpoint's numbers."""
    matrix, ids = some(name), np.array([3, 149, 64])
    with Linear(matrix, backend, "auto", rounding="folded") as linear:
        assert same_bits(linear.rows(ids).astype(np.float64), expected(matrix, ids))


def test_numbers_are_rounded_once():
    """Products of 8 and 24 bits beside the middle of two bfloat16 numbers, so near that float32 has the middle in their place;
    denormal ones, and those beyond the range."""
    middles = [1 + odd * 2.0**-8 for odd in range(1, 256, 2)]
    values = [(middle, code) for middle in middles for code in (3, 5, 7)]
    values += [(size, code) for size in (1e-40, 3e-45, 2.0**128 - 2.0**119, 2.0**128) for code in (3, 127)]
    factors = np.array([number / code for number, code in values], np.float32)
    codes = np.repeat(np.array([code for _, code in values], np.uint8)[:, None], 2, axis=1)
    codes[:, 1] = -codes[:, 1]
    matrix = Matrix("w", FORMATS["int8-row"], codes.shape, codes, factor=factors)
    ids = np.arange(len(values))
    with np.errstate(over="ignore"):
        once, twice = expected(matrix, ids), dequantize(matrix).astype(np.float32).astype(BF16).astype(np.float64)
        assert (once > twice).any()
        assert (once < twice).any()
        assert np.isinf(once).any()
        with Linear(matrix, "fp32_lut") as linear:
            assert same_bits(linear.rows(ids).astype(np.float64), once)
            assert same_bits(linear.rows(ids, dtype=np.float32).astype(np.float64), expected(matrix, ids, np.float32))


def test_more_rows_than_are_dequantised_at_once(monkeypatch):
    monkeypatch.setattr(linear_rows, "AT_ONCE", 5 * K + 1)
    matrix, ids = some("fp8-row"), np.arange(N)[::-1][:13]
    with Linear(matrix, "fp32_lut") as linear:
        assert same_bits(linear.rows(ids).astype(np.float64), expected(matrix, ids))


# Arguments


@pytest.mark.parametrize("dtype", [BF16, np.uint16, np.float32], ids=str)
def test_out(linear, dtype):
    """It is what is returned, and every number of it is written."""
    ids = np.array([7, 7, 149, 0], np.uint8)
    out = np.full((4, K), 77, dtype)
    assert linear.rows(ids, out=out) is out
    wide = linear.rows(ids, dtype="float32")
    assert wide.dtype == np.float32
    assert same_bits(out.view(BF16) if dtype == np.uint16 else out, wide.astype(BF16 if dtype == np.uint16 else dtype))


@pytest.mark.parametrize("name", ["b16", "nvfp4"])
def test_no_ids(name):
    with Linear(some(name), "fp32_lut") as linear:
        found = linear.rows(np.empty(0, np.int64))
        assert (found.shape, found.dtype) == ((0, K), BF16)
        assert linear.rows(np.empty(0, int), out=(out := np.empty((0, K), np.float32))) is out


def test_ids_of_any_layout(linear):
    ids = np.array([7, 149, 0, 64, 3])
    for given in (np.repeat(ids, 2)[::2], ids.astype(">i4"), unaligned(ids), ids.astype(np.uint64)):
        assert same_bits(linear.rows(given), linear.rows(ids))


IDS = np.array([1, 2])
REFUSED = [
    ({"ids": np.array([3, 150, -1])}, r"ids must be in \[0, 150\), found 150 at \[1\]"),
    ({"ids": np.array([-1], np.int8)}, r"ids must be in \[0, 150\), found -1 at \[0\]"),
    ({"ids": np.array([2**64 - 1], np.uint64)}, r"ids must be in \[0, 150\), found 18446744073709551615 at \[0\]"),
    ({"ids": np.array([1.0])}, "ids must be integers, found float64"),
    ({"ids": np.array([True])}, "ids must be integers, found bool"),
    ({"ids": np.array([[1]])}, r"ids must have shape \[any\], found \[1, 1\]"),
    ({"ids": np.array(1)}, r"ids must have shape \[any\], found \[\]"),
    ({"ids": [1]}, "ids must be a numpy array or a torch CPU tensor; found list"),
    ({"dtype": np.float16}, "dtype must be None or float32, found"),
    ({"out": np.empty((3, K), BF16)}, r"out must have shape \[2, 64\], found \[3, 64\]"),
    ({"out": np.empty((2, 2 * K), BF16)[:, ::2]}, "out must be C-contiguous, aligned and writeable; found strides"),
    ({"out": unaligned(np.empty((2, K), BF16))}, "out must be C-contiguous, aligned and writeable; found .*aligned False"),
    ({"out": np.empty((2, K))}, "out must be .*found an array of float64"),
    ({"out": np.empty((2, K), BF16), "dtype": np.float32}, "out must be of float32, as dtype is; found a bfloat16 array"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(linear, given, message):
    out = given.get("out")
    before = None if out is None else out.copy()
    with pytest.raises(InputError, match=message):
        linear.rows(**{"ids": IDS} | given)
    assert out is None or same_bits(out, before)


# Lives


def test_mapped_from_a_file(tmp_path):
    weights = LinearWeights(some("fp8-row"))
    ids = np.array([149, 70, 0])
    with Linear(weights, arenas=arenas_of(tmp_path, weights, [0, 1]), numa_nodes=[0, 1]) as linear:
        assert linear.mapped
        assert same_bits(linear.rows(ids).astype(np.float64), expected(weights.matrix(0, "weight"), ids))


def test_after_close():
    linear = Linear(some(), "fp32_lut")
    linear.close()
    with pytest.raises(ClosedError, match=r"lm_head: rows after close\(\)"):
        linear.rows(np.empty(0, int))


def test_rows_are_all_of_the_old_matrix_or_all_of_the_new():
    """While another thread replaces it."""
    matrices = [random_matrix(np.random.default_rng(seed), N, K, FORMATS["int8-row"]) for seed in (1, 2)]
    ids = np.arange(N)
    wanted = [expected(matrix, ids) for matrix in matrices]
    with Linear(matrices[0], "fp32_lut") as linear:
        stop, seen, torn = threading.Event(), set(), []

        def look():
            while not stop.is_set():
                found = linear.rows(ids).astype(np.float64)
                which = {i for i, known in enumerate(wanted) if same_bits(found, known)}
                seen.update(which)
                if len(which) != 1:
                    torn.append(found)

        reader = threading.Thread(target=look)
        reader.start()
        for turn in range(2000):
            linear.replace(matrices[turn % 2])
            if turn >= 60 and seen == {0, 1}:
                break
        stop.set()
        reader.join()
        assert not torn
        assert seen == {0, 1}


def test_in_a_forked_child(linear):
    ids = np.arange(N)
    here = linear.rows(ids)
    assert same_bits(in_child(lambda: linear.rows(ids)), here)


# Backends of third parties


class Exporting(PackedMatrix):
    """It has a layout of its own: the matrix as it came."""

    nbytes = 0

    def __init__(self, matrix):
        self.matrix = matrix

    def forward(self, x, out):
        raise AssertionError

    def close(self):
        pass

    def export(self, expert, parts):
        for label, array in parts[expert]["weight"].items():
            array[...] = self.matrix.stored[label]
        return {}


class Least(Exporting):
    export = PackedMatrix.export


@pytest.mark.parametrize("name", ["fp8", "gptq-64"])
def test_a_backend_that_exports(monkeypatch, name):
    matrix, ids = random_matrix(np.random.default_rng(4), 150, 256, FORMATS[name]), np.array([3, 149, 130, 3])
    backend = type(backends.get("fp32_lut"))
    monkeypatch.setattr(backend, "pack_linear", lambda self, weights, *_: Exporting(weights.matrix(0, "weight")))
    with Linear(matrix, "fp32_lut") as linear:
        assert same_bits(linear.rows(ids).astype(np.float64), expected(matrix, ids))
    monkeypatch.setattr(backend, "pack_linear", lambda self, weights, *_: Least(weights.matrix(0, "weight")))
    with Linear(matrix, "fp32_lut") as linear, pytest.raises(UnavailableError, match="cannot export a matrix"):
        linear.rows(ids)
