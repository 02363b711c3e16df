"""kt-kernel's roundings, restated in numpy, beside ktmoe: both are within their bounds of the same result, on every backend.

That the restatement is kt-kernel's own is what test_kt_kernel.py proves, where that can be installed.
"""

from dataclasses import replace

import numpy as np
import pytest
import rounding
from cases import CASES, FORMATS, batches, expected, experts, forward, loaded

from ktmoe import ExpertWeights

#: What runs by default: the others take kernels and roundings that these have.
QUICK = ("MXFP4", "RAWINT4", "BF16")


def quick(name, *others):
    return pytest.param(name, *others, marks=() if name in QUICK else pytest.mark.exhaustive)


@pytest.mark.cover("values")
@pytest.mark.parametrize(("name", "clamps"), [quick(*case) for case in CASES])
def test_ktmoe_agrees(backend, name, clamps):
    ours, off = forward(name, clamps, backend)
    for way in set(FORMATS[name].kinds.values()):
        theirs, apart = expected(name, clamps, way)
        returned = rounding.round_bfloat16(theirs.y)  # which is what the bound is for
        assert (np.abs(ours - returned) <= apart + off).all(), way


@pytest.mark.parametrize("name", [quick(name) for name in FORMATS])
def test_where_it_rounds_shows(name):
    """Another way of rounding leaves the bound: without it for g, u and d, with or without 8 bits, of another group."""
    weights, (*_, batch) = loaded(name), batches()
    for way in set(FORMATS[name].kinds.values()):
        right = rounding.forward(weights, *batch, way)
        others = [rounding.KTMOE, replace(way, int8_group=64), rounding.KT_KERNEL]
        for other in others:
            if other != way:
                wrong = rounding.forward(weights, *batch, other)
                assert right.worst(rounding.round_bfloat16(wrong.y)) > 1, other
        assert right.worst(rounding.round_bfloat16(right.y)) <= 1


def test_a_wrong_scale_shows():
    weights, (*_, batch) = experts("MXFP4"), batches()

    def read(expert, projection):
        matrix = weights.matrix(expert, projection)
        if (expert, projection) != (3, "up"):
            return matrix
        scales = matrix.scales.copy()
        scales[40:48] += 1
        return replace(matrix, scales=scales)

    sizes = weights.num_experts, weights.hidden, weights.intermediate
    wrong = rounding.forward(ExpertWeights(*sizes, read, weights.formats), *batch, rounding.KT_KERNEL)
    assert rounding.forward(weights, *batch, rounding.KT_KERNEL).worst(rounding.round_bfloat16(wrong.y)) > 1


def test_parts_and_what_was_there_before():
    """Two shards have d rounded by themselves; a sum begins with the bfloat16 numbers that stood in the output."""
    weights, (_, _, batch, *_) = experts("MXFP4"), batches()
    whole = rounding.forward(weights, *batch, rounding.KT_KERNEL)
    halves = rounding.forward(weights, *batch, rounding.KT_KERNEL, shards=2)
    exact = [rounding.forward(weights, *batch, rounding.KT_KERNEL, shards=shards, exact=True) for shards in (1, 2)]
    assert (whole.y != halves.y).any()
    assert np.allclose(exact[0].y, exact[1].y, rtol=0, atol=1e-12)
    assert exact[1].worst(halves.y) <= 1
    before = batch[0] * 8
    added = rounding.forward(weights, *batch, rounding.KT_KERNEL, before=before)
    assert np.allclose(added.y - whole.y, before.astype(float), rtol=0, atol=1e-12)
