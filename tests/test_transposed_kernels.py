"""Operands of the transposed product: those of every kernel, byte by byte against weights in float64; and the kernels that
multiply them, against sums in float64."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import ways
from helpers import BF16, FORMATS, random_arrays, same_bits

from ktmoe import SILU, ExpertWeights, Matrix
from ktmoe._native import core
from ktmoe._native.isa import ISAS
from ktmoe.backends import native
from ktmoe.backends.base import Plan
from ktmoe.dequantization import read
from ktmoe.errors import InputError
from ktmoe.reference.weights import ROUNDED_KINDS, round_bfloat16
from ktmoe.synthetic import gguf
from ktmoe.weights.ggml import GRIDS

PANEL, BLOCK = 64, 32
#: (folded, tuned_for) of the kernels that a format may have.
CHOICES = ((0, "decode"), (1, "decode"), (1, "prefill"), (2, "prefill"))
#: Two panels of which the second is cut short, and k: of one block, of odd blocks, of several groups and super-scales.
SHAPES = ((70, 32), (66, 96), (65, 480))


#: Instruction sets that have kernels of form bf16.
ROWS = [name for name, row in ISAS.items() if any("int" not in kernel for kernel in row.kernels)]


@pytest.fixture(scope="module", params=ROWS)
def table(request, emulator_folder):
    """The kernel table of each of ROWS that can be used."""
    with ways.prepared(request.param, emulator_folder):
        yield native.load_table(request.param)


def panels_of(matrix):
    """A matrix's packed panels, which are the same on every instruction set: uint8 [panels, bytes]."""
    n, k = matrix.shape
    experts = ExpertWeights(1, k, n, None, dict.fromkeys(("gate", "up", "down"), matrix.format), SILU)
    layer = core.PackedLayer(native.load_table("portable"), experts, Plan(), [(0, n)], 1)
    layer.pack(0, {"gate": matrix})
    return layer.packed_bytes(0, "gate")


def made(weight_format, n, k):
    """A matrix of random weights, of whole items of the format's arrays."""
    rng = np.random.default_rng((n, k))
    rows, columns = weight_format.code_unit
    n, k = -(-n // rows) * rows, -(-k // columns) * columns
    if weight_format.order.packed:
        codes = rng.integers(0, 256, weight_format.arrays(n, k)["codes"][1], np.uint8)
        gguf.weights(weight_format, k)(codes)
        return Matrix("w", weight_format, (n, k), codes)
    stored = {label: array[0] for label, array in random_arrays(rng, weight_format, 1, n, k).items()}
    return Matrix("w", weight_format, (n, k), **stored)


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
    listed = [key for key in CHOICES if key[0] == 0 or core.folds(table, weight_format, "bf16", "folded", key[1]) == key[0]]
    return [key for key in listed if key != (1, "prefill") or (1, "decode") not in listed]


@pytest.mark.parametrize("weight_format", (FORMATS | GRIDS).values(), ids=FORMATS | GRIDS)
def test_every_operand(table, weight_format):
    """Each kernel of a table; of both panels, each 64 k, those beyond the last k included."""
    for shape in SHAPES:
        matrix = made(weight_format, *shape)
        (n, k), padded = matrix.shape, -(-matrix.shape[1] // BLOCK) * BLOCK
        for folded, tuned_for in served(table, weight_format):
            if folded == 2:
                matrix = replace(matrix, scales=np.abs(matrix.scales))
            panels = panels_of(matrix)
            want = np.zeros((len(panels) * PANEL, -(-k // PANEL) * PANEL))
            want[:n, :k] = rounded(matrix, folded)
            for (i, panel), first in ((one, first) for one in enumerate(panels) for first in range(0, padded, PANEL)):
                family, operands = core.operand(table, weight_format, "bf16", panel, padded, first, folded, tuned_for)
                terms = numbers(family, operands)
                assert len(terms) == (2 if folded == 2 else 1) or table.name == "amx"
                got = sum(terms)
                inside = slice(0, max(0, min(PANEL, n - i * PANEL))), slice(0, max(0, min(PANEL, k - first)))
                assert np.array_equal(got[inside], want[i * PANEL :, first:][inside])
                assert np.isfinite(got).all(), "columns that pad are multiplied by zeros"
                assert not got[:, max(0, padded - first) :].any(), "k beyond the last"


def multiplied(table, family, x, operand, **how):
    return core.product(table, family, x.view(np.uint16), operand, **how)


@pytest.mark.parametrize("family", ["b16", "f32"])
def test_products_of_operands(table, family):
    """Sums are right, begin with what is there if they are to, and have one order, whatever the rows and the pieces are."""
    rng = np.random.default_rng(3)
    rows, k = 100, 2 * PANEL
    x = rng.standard_normal((rows, k), np.float32).astype(BF16)
    weights = rng.standard_normal((k, PANEL), np.float32)
    if family == "b16":
        weights = weights.astype(BF16)
        operand = weights.reshape(k // 2, 2, PANEL).transpose(0, 2, 1).copy()
    else:
        operand = weights
    operand = operand.view(np.uint8).reshape(k, -1)
    before = rng.standard_normal((rows, PANEL), np.float32)
    sums = multiplied(table, family, x, operand.reshape(-1))
    size = np.abs(x.astype(float)) @ np.abs(weights.astype(float))
    assert (np.abs(sums - x.astype(float) @ weights.astype(float)) <= (k + 2) * 2.0**-23 * size).all()
    added = multiplied(table, family, x, operand.reshape(-1), out=before)
    assert (np.abs(added - before - sums) <= (k + 2) * 2.0**-23 * (size + np.abs(before))).all()
    for first in (32, 64, 96):  # a chain goes on
        begun = multiplied(table, family, x[:, :first].copy(), operand[:first].reshape(-1))
        whole = multiplied(table, family, x[:, first:].copy(), operand[first:].reshape(-1), out=begun)
        assert same_bits(whole, sums)
    for m in (1, 2, 5, 7, 12, 16, 17, 33, 48, 96):
        for many in (False, True):
            assert same_bits(multiplied(table, family, x[:m], operand.reshape(-1), out=before[:m], many=many), added[:m])


@pytest.mark.parametrize("form", ["int16", "int8"])
def test_kernels_of_integers_have_none(form, emulator_folder):
    panels = panels_of(made(FORMATS["int4-32"], 64, 32))
    with ways.prepared("avx2", emulator_folder):
        assert core.operand(native.load_table("avx2"), FORMATS["int4-32"], form, panels[0], 32, 0) is None


def test_places_that_no_panel_has(table):
    panels = panels_of(made(FORMATS["b16"], 64, 96))
    for k, first in ((96, 32), (96, 128), (64, 0), (95, 0)):
        with pytest.raises(InputError, match=f"no operand from {first} of a panel of {k}"):
            core.operand(table, FORMATS["b16"], "bf16", panels[0], k, first)
