"""Operands of the transposed product: those of every kernel that has one, byte by byte against weights in float64; and the kernels
that multiply them, against sums in float64."""

import zlib

import ml_dtypes
import numpy as np
import pytest
from helpers import BF16, FORMATS, random_arrays, same_bits
from test_packing import fits, pack

from ktmoe import Matrix
from ktmoe.errors import InputError
from ktmoe.reference_weights import ROUNDED_KINDS, read, round_bfloat16

PANEL, BLOCK = 64, 32
#: (folded, tuned_for) of the kernels that a format may have.
CHOICES = ((0, "decode"), (1, "decode"), (1, "prefill"), (2, "prefill"))
#: Two panels of which the second is cut short, and k: of one block, of odd blocks, of several groups and super-scales.
SHAPES = ((70, 32), (66, 96), (65, 480))


def made(weight_format, n, k):
    """A matrix of weights that any kernel takes, and its panels."""
    rng = np.random.default_rng((n, k))
    n, k = fits(weight_format, n, k)
    stored = {label: array[0] for label, array in random_arrays(rng, weight_format, 1, n, k).items()}
    return Matrix("w", weight_format, (n, k), **stored), pack(weight_format, (n, k), **stored).packed_bytes(0, "gate")


def folds(weight_format, folded, matrix):
    """Whether a kernel whose weights hold scales is for such a matrix."""
    return not folded == 2 or (matrix.scales > 0).all()


def numbers(family, operands):
    """float64 [64 n, 64 k] of each term."""
    if family == "f32":
        return [one.view(np.float32).reshape(PANEL, PANEL).astype(float) for one in operands]
    pairs = [one.view(ml_dtypes.bfloat16).reshape(PANEL // 2, PANEL, 2) for one in operands]
    return [one.transpose(0, 2, 1).reshape(PANEL, PANEL).astype(float) for one in pairs]


def rounded(matrix, folded):
    """What an operand's terms add up to: exact, but for products and differences of more than 24 bits."""
    weights = read(matrix)
    values = weights.scaled.astype(np.float32)
    if weights.minima is not None:
        values -= weights.minima.astype(np.float32)
    scale = matrix.format.scale
    return round_bfloat16(values) if folded == 1 and scale.kind in ROUNDED_KINDS else values.astype(float)


def served(table, weight_format):
    """CHOICES that differ in the kernel that serves them."""
    listed = [key for key in CHOICES if key[0] == 0 or table.folds(weight_format, "bf16", "folded", key[1]) == key[0]]
    return [key for key in listed if key != (1, "prefill") or (1, "decode") not in listed]


@pytest.mark.parametrize("weight_format", FORMATS.values(), ids=FORMATS)
def test_every_operand(table, weight_format):
    """Each kernel of a table; of both panels, each 64 k, those beyond the last k included."""
    if not table.serves(weight_format, "bf16"):
        pytest.skip("its kernels are of integers")
    for n, k in SHAPES:
        matrix, panels = made(weight_format, n, k)
        (n, k), padded = matrix.shape, -(-matrix.shape[1] // BLOCK) * BLOCK
        for folded, tuned_for in served(table, weight_format):
            if folded == 2:
                matrix = Matrix("w", weight_format, (n, k), codes=matrix.codes, scales=np.abs(matrix.scales))
                panels = pack(weight_format, (n, k), **matrix.stored).packed_bytes(0, "gate")
            want = np.zeros((len(panels) * PANEL, -(-k // PANEL) * PANEL))
            want[:n, :k] = rounded(matrix, folded)
            for (i, panel), first in ((one, first) for one in enumerate(panels) for first in range(0, padded, PANEL)):
                family, operands = table.operand(weight_format, "bf16", panel, padded, first, folded, tuned_for)
                terms = numbers(family, operands)
                assert len(terms) == (2 if folded == 2 else 1) or table.name == "amx"
                got = sum(terms)
                inside = slice(0, max(0, min(PANEL, n - i * PANEL))), slice(0, max(0, min(PANEL, k - first)))
                assert np.array_equal(got[inside], want[i * PANEL :, first:][inside])
                assert np.isfinite(got).all(), "columns that pad are multiplied by zeros"
                assert not got[:, max(0, padded - first) :].any(), "k beyond the last"
