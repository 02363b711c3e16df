"""ktmoe.vllm.parameters without vLLM: stacked arrays of experts, merged ones of a dense layer, and what is wrong with some."""

import ml_dtypes
import numpy as np
import pytest
from helpers import random_experts, same_bits
from linears import random_matrix

from ktmoe.dequantization import dequantize
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.vllm.parameters import Parameters
from ktmoe.weights.elements import INT4
from ktmoe.weights.formats import FORMATS, MXFP4, WeightFormat, fp8, int4, uint4
from ktmoe.weights.order import GPTQ
from ktmoe.weights.scales import Factor

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
    parameters = Parameters(int4(32), {"codes": "codes", "scales": "s"}, kinds=("bf16", "fp16"))

    def kind(*arrays):
        named = dict(zip(("w13_s", "w2_s"), arrays, strict=True))
        return parameters.fitted(named, ("w13_", "w2_"), "layer").format.scale.kind

    both, wide = np.array([[1.5]], np.float32), np.array([[2.0**20]], np.float32)
    fine = np.array([[1 + 2.0**-10]], np.float32)
    assert kind(both, wide) == "bf16"
    assert kind(both, fine) == "fp16"
    assert kind(both, np.array([[np.nan]], np.float32)) == "bf16"
    with pytest.raises(FormatError, match="layer: s: expected scales that are all bf16 or all fp16 numbers, found others"):
        kind(fine, wide)
    assert parameters.fitted({"s": fine}).format.scale.kind == "fp16"  # of a dense layer


@pytest.mark.parametrize("name", FORMATS)
def test_a_dense_matrix(name):
    """Of any format: alone, and of two matrices that vLLM has merged, each with its own factor."""
    weight_format, rng = FORMATS[name], np.random.default_rng(0)
    parts = [random_matrix(rng, n, HIDDEN, weight_format) for n in (INTERMEDIATE, 2 * INTERMEDIATE)]
    endings = {label: f"weight_{label}" for label in parts[0].stored}
    bias = rng.standard_normal(3 * INTERMEDIATE).astype(np.float32)
    columns = weight_format.order.transposed
    merged = {
        f"weight_{label}": np.concatenate([part.stored[label] for part in parts], int(columns and label != "factor"))
        for label in endings
    }
    sizes = [part.shape[0] for part in parts]
    found = Parameters(weight_format, endings).matrix(merged, (sum(sizes), HIDDEN), sizes, "layer", bias)
    assert (found.name, found.bias is bias) == ("layer", True)
    np.testing.assert_array_equal(dequantize(found), np.concatenate([dequantize(part) for part in parts]))
    named = {f"weight_{label}": array for label, array in parts[1].stored.items()}
    alone = Parameters(weight_format, endings).matrix(named, parts[1].shape, sizes[1:], "layer", None)
    assert (alone.format, alone.bias) == (weight_format, None)
    for label, array in parts[1].stored.items():
        assert same_bits(alone.stored[label], array)


def test_scales_that_are_no_numbers_of_the_kind():
    """vLLM has them in float32, whatever the checkpoint's dtype is; one matrix's own kind is not looked for."""
    arrays = {"weight": np.zeros((8, 16), np.uint8), "scale": np.full((8, 1), 1.1, np.float32)}
    parameters = Parameters(int4(32), {"codes": "weight", "scales": "scale"})
    with pytest.raises(FormatError, match="layer: scale: expected scales that are bf16 numbers, found others"):
        parameters.matrix(arrays, (8, 32), [8], "layer", None)
    found = parameters.matrix(arrays | {"scale": np.full((8, 1), 1.5, np.float32)}, (8, 32), [8], "layer", None)
    assert same_bits(found.scales, np.full((8, 1), 1.5, BF16))


def test_zero_points_in_words():
    """Eight of a column in 32 bits: the last word of ten rows has two."""
    points = np.random.default_rng(0).integers(0, 16, (16, 3), np.uint32)
    words = np.bitwise_or.reduce(points.reshape(2, 8, 3) << np.arange(0, 32, 4, dtype=np.uint32)[:, None], axis=1)
    arrays = {"weight": np.zeros((10, 12), np.int32), "scale": np.ones((10, 3), np.float32), "point": words.view(np.int32)}
    endings = {"codes": "weight", "scales": "scale", "offsets": "point"}
    found = Parameters(uint4(32, "bf16"), endings, words=("codes", "offsets")).matrix(arrays, (10, 96), [10], "layer", None)
    np.testing.assert_array_equal(found.offsets, points[:10])


def test_what_stays_together():
    """Where processes may cut a matrix, and where one may end that another is merged with."""
    assert Parameters(fp8(), {}).units == (128, 128)
    assert Parameters(uint4(32, "bf16"), {}, words=("codes", "offsets")).units == (8, 32)
    assert Parameters(WeightFormat(INT4, factor=Factor(per_row=True)), {}, words=("codes",)).units == (1, 8)
    assert Parameters(int4(32, order=GPTQ), {}, unread={"qzeros": "points"}).units == (8, 32)
