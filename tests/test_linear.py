"""Linear.forward against the float64 reference, on every backend: formats, shapes, rows, modes, ends of the range."""

import numpy as np
import pytest
from helpers import B16, BF16, FORMATS, LONGEST, TURNED, bits, rounds, same_bits
from linears import DENSE_FORMATS, DENSE_KINDS, assert_within, random_matrix, random_x

from ktmoe import MXFP4, Linear, int4
from ktmoe._native import core
from ktmoe.errors import UnavailableError
from ktmoe.weights.formats import F32

NAN, INF = np.nan, np.inf
#: n, k: one output, less than a panel, a whole one, one more, three; less than a block of k, tails of blocks and of groups.
SHAPES = [(1, 34), (63, 64), (64, 100), (65, 2), (130, 290), (192, 32), (2, 2880)]
ODD_SHAPES = [(1, 1), (33, 7), (65, 129), (259, 1)]


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", DENSE_FORMATS | TURNED)
def test_every_format(backend, name):
    """With a bias and without one; rows for few() and for many()."""
    rng = np.random.default_rng(1)
    for bias, tokens in ((False, 1), (True, 30)):
        matrix = random_matrix(rng, 70, 160, (DENSE_FORMATS | TURNED)[name], bias=bias)
        with Linear(matrix, backend, "auto") as linear:
            assert_within(linear, matrix, random_x(rng, tokens, matrix.shape[1], np.float32))


@pytest.mark.cover("values")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_shapes(backend, shape, kind):
    rng = np.random.default_rng(shape)
    matrix = random_matrix(rng, *shape, **DENSE_KINDS[kind])
    with Linear(matrix, backend, "auto") as linear:
        for tokens, dtype in ((1, BF16), (3, BF16), (9, np.float32)):
            assert_within(linear, matrix, random_x(rng, tokens, matrix.shape[1], dtype))
        assert linear.forward(np.empty((0, matrix.shape[1]), BF16)).shape == (0, matrix.shape[0])


@pytest.mark.cover("values")
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("name", ["b16", "f16", "mxfp8", "fp8", "fp8-row", "int8-row"])
def test_odd_shapes(backend, shape, name):
    """Not of 4-bit codes, since two of them make a byte."""
    rng = np.random.default_rng(shape)
    matrix = random_matrix(rng, *shape, FORMATS[name], bias=True)
    with Linear(matrix, backend, "auto") as linear:
        for tokens, dtype in ((1, BF16), (7, BF16), (2, np.float32)):
            assert_within(linear, matrix, random_x(rng, tokens, shape[1], dtype))


@pytest.mark.cover("values")
@pytest.mark.parametrize("tokens", [2, 5, 6, 13, core.ROWS_MAX, core.ROWS_MAX + 1, 2 * core.ROWS_MAX + 1])
@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "b16"])
def test_rows_of_a_call(backend, is_emulated, tokens, kind):
    rng = np.random.default_rng(tokens)
    matrix = random_matrix(rng, 64 if is_emulated else 136, 64, **DENSE_KINDS[kind])
    with Linear(matrix, backend, "auto") as linear:
        assert_within(linear, matrix, random_x(rng, tokens, 64))


def test_y_is_rounded_once(backend):
    """float32 outputs are what bfloat16 ones are rounded from. x's kind says what y is, and float32 x is rounded first."""
    rng = np.random.default_rng(2)
    matrix = random_matrix(rng, 70, 100, bias=True)
    exact = rng.standard_normal((5, 100)).astype(np.float32)
    x = exact.astype(BF16)
    with Linear(matrix, backend, "auto") as linear:
        full = linear.forward(exact)
        assert same_bits(linear.forward(x, dtype=np.float32), full)
        assert (full.astype(BF16).astype(np.float32) != full).any()
        y = linear.forward(x)
        assert same_bits(y, full.astype(BF16))
        assert same_bits(linear.forward(x.view(np.uint16)), bits(y))
        for out in (np.full((5, 70), NAN, np.float32), np.full((5, 70), NAN, BF16)):
            assert linear.forward(x, out=out) is out
            assert same_bits(out, full if out.dtype == np.float32 else y)


# Modes


def test_the_default_mode_is_exact(backend):
    """Also where experts' default is int16."""
    matrix = random_matrix(np.random.default_rng(3), 64, 64, int4(32))
    with Linear(matrix, backend) as linear:
        assert linear.activations == "bf16"
        assert_within(linear, matrix, random_x(np.random.default_rng(4), 3, 64))


@pytest.mark.cover("values")
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "mxfp4:quark", "mxfp8/mxfp4", "bf16/mxfp8"])
@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_modes_of_blocks(backend, is_emulated, mode, kind):
    """Of which x's side counts, in every form of rows."""
    rng = np.random.default_rng(5)
    matrix = random_matrix(rng, 70, 100, **DENSE_KINDS[kind])
    with Linear(matrix, backend, mode) as linear:
        assert linear.activations == mode
        for tokens, dtype in ((1, BF16), (2 if is_emulated else 20, np.float32)):
            x = random_x(rng, tokens, matrix.shape[1], dtype)
            x[0] *= np.exp2(rng.integers(-9, 9, x.shape[1])).astype(dtype)
            y = assert_within(linear, matrix, x)
            if mode == "bf16/mxfp8":  # what h would be rounded to is no matter
                with Linear(matrix, backend, "bf16") as plain:
                    assert same_bits(plain.forward(x), y)


def test_integers_need_weights_that_allow_them(backend):
    matrix = random_matrix(np.random.default_rng(6), 64, 64, B16)
    with pytest.raises(UnavailableError, match=rf"{backend}.* no activation mode 'int16' for these weights, only bf16"):
        Linear(matrix, backend, "int16")


# Policies


@pytest.mark.cover("values")
@pytest.mark.parametrize("weight_format", [int4(32), LONGEST, int4(32, "fp16")], ids=lambda given: given.description)
def test_folded_weights(backend, weight_format):
    """Each weight is rounded where a backend does that; without being asked, none is."""
    rng = np.random.default_rng(7)
    matrix = random_matrix(rng, 70, 160, weight_format)
    x = random_x(rng, 20, 160, np.float32)
    with Linear(matrix, backend, "auto", rounding="folded") as linear, Linear(matrix, backend, "auto") as exact:
        assert (linear.rounding, exact.rounding) == ("folded" if rounds(linear) else "exact", "exact")
        assert_within(linear, matrix, x)
        assert_within(exact, matrix, x)


def test_tuned_for_many_rows(backend):
    """Weights that are sums of two numbers, on amx; the rows of a batch agree with each alone."""
    rng = np.random.default_rng(8)
    matrix = random_matrix(rng, 70, 160, int4(32))
    matrix.scales[:] = np.abs(matrix.scales)
    x = random_x(rng, 20, 160, np.float32)
    with Linear(matrix, backend, "auto", tuned_for="prefill") as linear, Linear(matrix, backend, "auto") as other:
        y = assert_within(linear, matrix, x)
        assert same_bits(other.forward(x), y) == (backend != "amx")
        assert same_bits(linear.forward(x[3:4]), y[3:4])


# Ends of the range


@pytest.mark.parametrize(
    ("scales", "power"), [((0, 2), 119), ((252, 254), -110), ((1, 3), -6)], ids=["least", "most", "denormal y"]
)
def test_scales_at_the_ends(backend, scales, power):
    """Bytes that do not fold among them. x brings sums back to about 1, or y is denormal."""
    rng = np.random.default_rng(9)
    matrix = random_matrix(rng, 70, 96, MXFP4, scales=scales)
    with Linear(matrix, backend, "auto") as linear:
        for tokens in (1, 20):
            x = random_x(rng, tokens, 96, np.float32) * np.float32(2.0**power)
            y = assert_within(linear, matrix, x)
        assert power != -6 or (np.abs(y) < 2.0**-126).any()


@pytest.mark.parametrize("weight_format", [B16, F32], ids=["b16", "f32"])
def test_sums_that_overflow(backend, weight_format):
    """To infinity of their sign, in float32 and in bfloat16, and each by itself: one float32 sum fits, and its rounding does
    not."""
    codes = np.zeros((70, 64), weight_format.element.codes_dtype)
    codes[:, 0] = 2.0**100
    codes[1, 0] = -(2.0**100)
    codes[2, 0] = 1.0
    codes[3] = 2.0**90
    codes[3, 0] = 2.0**100
    matrix = random_matrix(np.random.default_rng(0), 70, 64, weight_format)
    matrix.codes[:] = codes
    x = np.zeros((2, 64), BF16)
    x[0, 0] = x[1, 0] = 2.0**28
    with Linear(matrix, backend, "auto") as linear:
        for dtype in (None, np.float32):
            y = linear.forward(x, dtype=dtype).astype(float)
            assert (y[:, 0] == INF).all()
            assert (y[:, 1] == -INF).all()
            assert (y[:, 2] == 2.0**28).all()
        matrix.codes[:] = 0
        matrix.codes[:, :2] = 2.0**100
        matrix.codes[:, 1] *= 1 - 2.0**-8
        x[:, :2] = 2.0**27
        linear.replace(matrix)  # the sum is 2**128 (1 - 2**-9): the next bfloat16 is 2**128
        assert np.isfinite(linear.forward(x, dtype=np.float32)).all()
        assert (linear.forward(x).astype(float) == INF).all()


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", DENSE_KINDS)
@pytest.mark.parametrize("tokens", [2, 20])
def test_nan_and_infinity_touch_only_their_own_row(backend, kind, tokens):
    rng = np.random.default_rng(10)
    matrix = random_matrix(rng, 70, 100, **DENSE_KINDS[kind])
    x, bad = random_x(rng, tokens, matrix.shape[1]), tokens // 2
    with Linear(matrix, backend, "auto") as linear:
        clean = linear.forward(x)
        for value in (NAN, INF, -INF):
            for at in (0, x.shape[1] - 1):
                spoilt = x.copy()
                spoilt[bad, at] = value
                y = linear.forward(spoilt)
                assert same_bits(np.delete(y, bad, 0), np.delete(clean, bad, 0))
                found = y[bad].astype(float)
                assert (
                    np.isnan(found).all() if np.isnan(value) or linear.activations != "bf16" else not np.isfinite(found).all()
                )


def test_what_earlier_calls_left_in_the_scratch_does_not_matter(backend):
    """NaN everywhere, from a Linear of other sizes: padding that nobody wrote would make of it NaN times zero."""
    rng = np.random.default_rng(11)
    matrix = random_matrix(rng, 70, 100, int4(32))
    with Linear(matrix, backend, "auto") as linear, Linear(random_matrix(rng, 192, 416, int4(32)), backend, "auto") as other:
        for tokens in (1, 20):
            x = random_x(rng, tokens, 100)
            clean = linear.forward(x)
            other.forward(np.full((40, 416), NAN, BF16))
            assert same_bits(linear.forward(x), clean)
