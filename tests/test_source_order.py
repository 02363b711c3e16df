"""A source order that C does not have costs one class: it is packed, computed and exported as rows are."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from helpers import random_batch, random_experts, same_bits

from ktmoe import ExpertWeights, Matrix, MoELayer
from ktmoe.dequantization import dequantize
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.weights.formats import MXFP8, int4, uint4
from ktmoe.weights.order import Order, SourceOrder


@dataclass(frozen=True)
class Halves(SourceOrder):
    """Of 32 codes along k, the first half in low nibbles, the others in high ones; scales [groups, n]; zero points
    [groups, n/2], those of even rows in low nibbles."""

    name: str = "halves"

    def check(self, parts):
        if parts.element.bits != 4:
            raise FormatError(f"order halves is one of 4-bit codes, found {parts.element.name}")

    def unit(self, parts):
        return 2, 32

    def arrays(self, parts, n, k):
        arrays = {label: (scale.dtype, scale.shape(n, k)[::-1]) for label, scale in parts.scales.items()}
        points = {"offsets": (np.dtype(np.uint8), (k // parts.points, n // 2))} if parts.points else {}
        return {"codes": (np.dtype(np.uint8), (n, k // 2))} | arrays | points

    def shape(self, parts, codes_shape):
        return codes_shape[0], 2 * codes_shape[1]

    def to_rows(self, parts, stored, n, k):
        halves = stored["codes"].reshape(-1, 16)
        codes = np.concatenate([halves & 15, halves >> 4], axis=1).reshape(n, k)
        return {"codes": codes[:, 0::2] | codes[:, 1::2] << 4} | self.group_rows(parts, stored)

    def from_rows(self, parts, arrays, n, k):
        codes = np.stack([arrays["codes"] & 15, arrays["codes"] >> 4], axis=-1).reshape(-1, 32)
        return {"codes": (codes[:, :16] | codes[:, 16:] << 4).reshape(n, -1)} | self.stored_groups(parts, arrays)

    def group_rows(self, parts, stored):
        groups = {label: np.ascontiguousarray(stored[label].T) for label in parts.scales}
        if parts.points:
            pairs = np.ascontiguousarray(stored["offsets"].T)
            groups["offsets"] = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1, pairs.shape[1])
        return groups

    def stored_groups(self, parts, arrays):
        groups = {label: np.ascontiguousarray(arrays[label].T) for label in parts.scales}
        if parts.points:
            points = arrays["offsets"]
            groups["offsets"] = np.ascontiguousarray((points[0::2] | points[1::2] << 4).T)
        return groups


def in_order(experts, order):
    """The same weights in another order."""
    ours = replace(experts.formats["gate"], order=order)

    def read(expert, projection):
        matrix = experts.matrix(expert, projection)
        return Matrix(matrix.name, ours, matrix.shape, **ours.from_rows(matrix.stored, *matrix.shape), bias=matrix.bias)

    return ExpertWeights(experts.num_experts, experts.hidden, experts.intermediate, read, ours)


@pytest.mark.parametrize("weight_format", [int4(32), int4(), uint4(32)], ids=lambda of: of.description)
def test_one_class_is_enough(weight_format):
    rng = np.random.default_rng(1)
    rows = random_experts(rng, 3, 128, 192, formats=weight_format, biases=True)
    halves = in_order(rows, Halves())
    halves.matrix(0, "gate").refuse()
    assert same_bits(dequantize(halves.matrix(0, "gate")), dequantize(rows.matrix(0, "gate")))
    x, ids, weights = random_batch(rng, rows, 5, 2)
    with MoELayer(rows, "fp32_lut") as expected, MoELayer(halves, "fp32_lut") as layer:
        assert same_bits(layer.forward(x, ids, weights), expected.forward(x, ids, weights))
        parts = layer.export_expert(1, parts=3)
        for i, part in enumerate(expected.export_expert(1, parts=3)):
            for projection, matrix in part.items():
                ours = halves.formats[projection].from_rows(matrix.stored, *matrix.shape)
                assert all(np.array_equal(parts[i][projection].stored[label], ours[label]) for label in ours)
        layer.replace_expert(0, {p: halves.matrix(1, p) for p in PROJECTIONS})
        expected.replace_expert(0, {p: rows.matrix(1, p) for p in PROJECTIONS})
        assert same_bits(layer.forward(x, ids, weights), expected.forward(x, ids, weights))


def test_its_refusals_are_a_formats():
    with pytest.raises(FormatError, match="order halves is one of 4-bit codes, found E4M3"):
        replace(MXFP8, order=Halves())
    assert "in halves order" in replace(int4(32), order=Halves()).description


@dataclass(frozen=True)
class Together(Halves):
    """Halves, with the scales of a row, fp16, behind its codes: no array of their own holds them."""

    name: str = "together"

    def arrays(self, parts, n, k):
        return {"codes": (np.dtype(np.uint8), (n, k // 2 + k // 16))}

    def shape(self, parts, codes_shape):
        return codes_shape[0], codes_shape[1] // 18 * 32

    def group_rows(self, parts, stored):
        return {"scales": np.ascontiguousarray(stored["codes"][:, -(stored["codes"].shape[1] // 9) :]).view(np.float16)}

    def stored_groups(self, parts, arrays):
        return {}


def test_scales_that_stand_with_codes_are_named():
    weight_format = int4(32, "fp16", Together())
    codes = np.zeros((2, 36), np.uint8)
    codes[1, -2:] = np.array([np.inf], np.float16).view(np.uint8)
    matrix = Matrix("w", weight_format, (2, 64), codes)
    with pytest.raises(FormatError, match=r"w: scale \[1, 1\] is inf; expected a finite number"):
        matrix.refuse()


@dataclass(frozen=True)
class Short(Halves):
    """Halves whose to_rows() leaves the last row out."""

    def to_rows(self, parts, stored, n, k):
        rows = super().to_rows(parts, stored, n, k)
        return rows | {"codes": rows["codes"][:-1]}


def test_too_few_codes_are_not_read_past_their_end():
    short = in_order(random_experts(np.random.default_rng(1), 1, 64, 64, formats=int4(32)), Short())
    with pytest.raises(FormatError, match="codes in rows: expected 2048 bytes, found 2016"):
        MoELayer(short, "fp32_lut")


def test_a_unit_is_of_whole_bytes_of_rows():
    """Rows of 4-bit codes have two a byte, whatever the order says."""

    class Single(Halves):
        def unit(self, parts):
            return 1, 1

    weight_format = int4(order=Single())
    assert weight_format.code_unit == (1, 2)
    with pytest.raises(FormatError, match="k a multiple of 2"):
        Matrix("w", weight_format, (4, 33), np.zeros((4, 17), np.uint8), factor=np.ones(4, np.float32))


@dataclass(frozen=True)
class Mirrored(Order):
    """An Order by its class, whose rows stand from the last to the first."""

    rows = False

    def to_rows(self, components, stored, n, k):
        return {label: np.ascontiguousarray(array[::-1]) for label, array in stored.items() if label != "factor"}

    from_rows = to_rows


def test_a_subclass_of_an_order_is_not_packed_as_that():
    rng = np.random.default_rng(1)
    rows = random_experts(rng, 2, 64, 64, formats=int4())
    x, ids, weights = random_batch(rng, rows, 5, 2)
    with MoELayer(rows, "fp32_lut") as expected, MoELayer(in_order(rows, Mirrored("mirrored")), "fp32_lut") as layer:
        assert same_bits(layer.forward(x, ids, weights), expected.forward(x, ids, weights))
