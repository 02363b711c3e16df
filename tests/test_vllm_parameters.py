"""ktmoe.vllm.parameters without vLLM: stacked arrays of all experts, and what is wrong with some."""

import ml_dtypes
import numpy as np
import pytest
from helpers import random_experts

from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.vllm.parameters import Parameters, scale_kind
from ktmoe.weights.formats import FORMATS, MXFP4, fp8, int4

BF16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, 3


def stacked(experts, weight_format, interleaved=False) -> dict[str, np.ndarray]:
    """Matrices as vLLM keeps them: gate and up in one array, along rows."""
    arrays: dict[str, list] = {}
    columns = weight_format.order.transposed
    for expert in range(experts.num_experts):
        gate, up, down = (experts.matrix(expert, projection) for projection in PROJECTIONS)
        for label in gate.stored:
            pair = gate.stored[label], up.stored[label]
            axis = int(bool(columns and pair[0].ndim == 2))
            rows = np.stack(pair, 1).reshape(-1, *pair[0].shape[1:])
            both = rows if interleaved else np.concatenate(pair, axis)
            arrays.setdefault(f"w13_{label}", []).append(both)
            arrays.setdefault(f"w2_{label}", []).append(down.stored[label])
    return {name: np.stack(each) for name, each in arrays.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name):
    weight_format = FORMATS[name]
    experts = random_experts(np.random.default_rng(0), EXPERTS, HIDDEN, INTERMEDIATE, formats=weight_format)
    arrays = stacked(experts, weight_format)
    endings = {label: label for label in weight_format.arrays(8, 8)}
    found = Parameters(weight_format, endings).experts(arrays, HIDDEN, INTERMEDIATE)
    assert found.num_experts == EXPERTS
    for expert in range(EXPERTS):
        for projection in PROJECTIONS:
            expected, matrix = experts.matrix(expert, projection), found.matrix(expert, projection)
            for label, array in expected.stored.items():
                np.testing.assert_array_equal(matrix.stored[label].view(np.uint8), array.view(np.uint8))


def test_rows_that_alternate():
    experts = random_experts(np.random.default_rng(0), EXPERTS, HIDDEN, INTERMEDIATE, formats=MXFP4)
    arrays = stacked(experts, MXFP4, interleaved=True)
    bias = np.arange(EXPERTS * 2 * INTERMEDIATE).astype(BF16).reshape(EXPERTS, -1)
    arrays |= {"w13_bias": bias, "w2_bias": np.zeros((EXPERTS, HIDDEN), BF16)}
    endings = {label: label for label in ("codes", "scales", "bias")}
    found = Parameters(MXFP4, endings, interleaved=True).experts(arrays, HIDDEN, INTERMEDIATE)
    for first, projection in enumerate(("gate", "up")):
        matrix = found.matrix(1, projection)
        np.testing.assert_array_equal(matrix.codes, experts.matrix(1, projection).codes)
        np.testing.assert_array_equal(matrix.bias, bias[1, first::2].astype(np.float32))


def test_what_is_refused():
    arrays = {"w13_codes": np.zeros((1, 8, 4), np.uint8), "w2_codes": np.zeros((1, 8, 2), np.uint8)}
    with pytest.raises(FormatError, match="layer: expected parameters w13_scales, w2_scales, found w13_codes, w2_codes"):
        Parameters(MXFP4, {"codes": "codes", "scales": "scales"}).experts(arrays, 8, 4, name="layer")
    scales = {"w13_scales": np.full((1, 1, 1), 1.1, np.float32), "w2_scales": np.ones((1, 1, 1), np.float32)}
    codes = {"codes": "codes", "scales": "scales"}
    with pytest.raises(FormatError, match="w13_scales: expected scales that are bf16 numbers"):
        Parameters(int4(32), codes).experts(arrays | scales, 8, 4)
    small = Parameters(fp8(), codes).experts(arrays | scales, 8, 4)
    with pytest.raises(FormatError, match=r"experts\.0\.down codes: expected shape \[8, 4\], found \[8, 2\]"):
        small.matrix(0, "down")


def test_the_kind_of_scales():
    """The first that has all the numbers; one array is enough to rule a kind out."""
    both, wide = np.array([[1.5]], np.float32), np.array([[2.0**20]], np.float32)
    fine = np.array([[1 + 2.0**-10]], np.float32)
    assert scale_kind("s", [both, wide], ("bf16", "fp16")) == "bf16"
    assert scale_kind("s", [both, fine], ("bf16", "fp16")) == "fp16"
    assert scale_kind("s", [both, np.array([[np.nan]], np.float32)], ("bf16", "fp16")) == "bf16"
    with pytest.raises(FormatError, match="s: expected scales that are all bf16 or all fp16 numbers, found others"):
        scale_kind("s", [fine, wide], ("bf16", "fp16"))
