"""A source order that C does not have costs one class: it is packed, computed and exported as rows are."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from helpers import random_batch, random_experts, same_bits

from ktmoe import ExpertWeights, Matrix, MoELayer
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.weights.formats import MXFP8, int4, uint4
from ktmoe.weights.order import SourceOrder


@dataclass(frozen=True)
class Halves(SourceOrder):
    """Of 32 codes along k, the first half in low nibbles, the others in high ones; numbers of groups [groups, n]."""

    name: str = "halves"

    def check(self, parts):
        if parts.element.bits != 4:
            raise FormatError(f"order halves is one of 4-bit codes, found {parts.element.name}")

    def unit(self, parts):
        return 1, 32

    def arrays(self, parts, n, k):
        arrays = {label: (scale.dtype, scale.shape(n, k)[::-1]) for label, scale in parts.scales.items()}
        points = {"offsets": (np.dtype(np.uint8), (k // parts.points, n))} if parts.points else {}
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
        labels = [*parts.scales, *["offsets"] * (parts.points > 0)]
        return {label: np.ascontiguousarray(stored[label].T) for label in labels}

    stored_groups = group_rows


def in_halves(experts):
    """The same weights in that order."""
    ours = replace(experts.formats["gate"], order=Halves())

    def read(expert, projection):
        matrix = experts.matrix(expert, projection)
        return Matrix(matrix.name, ours, matrix.shape, **ours.from_rows(matrix.stored, *matrix.shape), bias=matrix.bias)

    return ExpertWeights(experts.num_experts, experts.hidden, experts.intermediate, read, ours)


@pytest.mark.parametrize("weight_format", [int4(32), int4(), uint4(32)], ids=lambda of: of.description)
def test_one_class_is_enough(weight_format):
    rng = np.random.default_rng(1)
    rows = random_experts(rng, 3, 128, 192, formats=weight_format, biases=True)
    halves = in_halves(rows)
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
