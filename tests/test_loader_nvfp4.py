"""The nvfp4 loader beyond what tests/test_loader_schemes.py asks of all: writers, the inputs' scales."""

import ml_dtypes
import numpy as np
import pytest
from checkpoints import PROJ, SCHEMES, numbers, write

from ktmoe import loaders
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.weights.activation import SILU
from ktmoe.weights.formats import nvfp4

EXPERT = "model.layers.0.mlp.experts.0"
BOTH = {"nvfp4": False, "nvfp4 divided": True}


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    assert find_loader(checkpoint) is loaders.get("nvfp4")
    return loaders.get("nvfp4").load(checkpoint, 0)


@pytest.mark.parametrize("name", BOTH)
def test_formats(tmp_path, name):
    tensors = SCHEMES[name].layer("model.layers.0")
    weights = load(tmp_path, tensors)
    assert weights.formats == dict.fromkeys(PROJECTIONS, nvfp4(divides=BOTH[name]))
    assert weights.activation == SILU
    matrix = weights.matrix(1, "up")
    assert (matrix.factor.dtype, matrix.factor.shape) == (np.float32, (1,))


@pytest.mark.parametrize("divides", [False, True])
def test_against_a_writer(tmp_path, divides):
    """Two levels: amax / (6 * 448) for the matrix, amax / 6 in units of that for 16, E2M1 for the rest, ties to even."""
    tensors, expected, random = {}, {}, np.random.default_rng(5)
    for projection, stem in PROJ.items():
        n, k = (96, 64) if projection == "down" else (64, 96)
        w = random.standard_normal((n, k)).astype(np.float32)
        groups = w.reshape(n, -1, 16)
        whole = np.abs(w).max() / np.float32(6 * 448)
        scales = (np.abs(groups).max(2) / 6 / whole).astype(ml_dtypes.float8_e4m3fn)
        codes = (groups / (scales.astype(np.float32) * whole)[:, :, None]).astype(ml_dtypes.float4_e2m1fn)
        nibbles = codes.reshape(n, k).view(np.uint8)
        name = f"{EXPERT}.{stem}"
        packed = ["U8", nibbles[:, 0::2] | nibbles[:, 1::2] << 4]
        tensors[f"{name}.weight_packed" if divides else f"{name}.weight"] = packed
        tensors[f"{name}.weight_scale"] = ["F8_E4M3", scales.view(np.uint8)]
        stored = (np.float32(1) / whole if divides else whole).reshape(1)
        tensors[f"{name}.weight_global_scale" if divides else f"{name}.weight_scale_2"] = ["F32", stored]
        product = codes.astype(np.float64) * scales.astype(np.float64)[:, :, None]
        expected[projection] = (product / float(stored[0]) if divides else product * float(stored[0])).reshape(n, k)
        assert np.abs(expected[projection] - w).max() < np.abs(w).max() / 5
    weights = load(tmp_path, tensors)
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(numbers(weights.matrix(0, projection)), expected[projection])


@pytest.mark.parametrize(("name", "ending"), [("nvfp4", "input_scale"), ("nvfp4 divided", "input_global_scale")])
def test_the_inputs_scales_are_not_used(tmp_path, name, ending):
    tensors = SCHEMES[name].layer("model.layers.0")
    matrices = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    with_them = tensors | {f"{matrix}.{ending}": ["F32", np.float32([np.nan])] for matrix in matrices}
    SCHEMES[name].check(load(tmp_path, with_them), tensors, "model.layers.0")
