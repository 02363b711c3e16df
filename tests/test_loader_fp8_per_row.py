"""The fp8_per_row loader beyond what tests/test_loader_schemes.py asks of all: its scales' dtypes and shapes."""

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import drop, write_file
from checkpoints import PROJ, SCHEMES, fp8_per_row, numbers, per_expert, write, zeros

from ktmoe import loaders
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.weights.activation import SILU
from ktmoe.weights.formats import FP8_PER_MATRIX, FP8_PER_ROW

EXPERT = "model.layers.0.mlp.experts.0"


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    assert find_loader(checkpoint) is loaders.get("fp8_per_row")
    return loaders.get("fp8_per_row").load(checkpoint, 0)


def test_against_a_writer(tmp_path):
    """Quantized row by row: scale = amax / 448 in bfloat16, weight = E4M3 of w / scale."""
    tensors, expected, random = {}, {}, np.random.default_rng(5)
    for projection, stem in PROJ.items():
        w = random.standard_normal((96, 64) if projection == "down" else (64, 96)).astype(np.float32)
        scales = (np.abs(w).max(1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
        codes = np.clip(w / scales.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{EXPERT}.{stem}.weight"] = ["F8_E4M3", codes.view(np.uint8)]
        tensors[f"{EXPERT}.{stem}.weight_scale"] = ["BF16", scales]
        expected[projection] = codes.astype(np.float64) * scales.astype(np.float64)
        assert np.abs(expected[projection] - w).max() < np.abs(w).max() / 16
    weights = load(tmp_path, tensors)
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(numbers(weights.matrix(0, projection)), expected[projection])


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("columns", [(), (1,)])
def test_scales(tmp_path, dtype, columns):
    scheme = per_expert("fp8_per_row", *fp8_per_row(dtype, *columns))
    tensors = scheme.layer("model.layers.0")
    weights = load(tmp_path, tensors)
    assert weights.formats == dict.fromkeys(PROJECTIONS, FP8_PER_ROW)
    assert weights.activation == SILU
    scheme.check(weights, tensors, "model.layers.0")
    matrix = weights.matrix(2, "up")
    assert matrix.factor.dtype == np.float32
    assert matrix.factor.shape == (64,)
    assert np.array_equal(matrix.factor, tensors[f"{EXPERT[:-1]}2.up_proj.weight_scale"][1].astype(np.float32).ravel())


@pytest.mark.parametrize("before", range(1, 5))
def test_scales_are_aligned_wherever_they_are(tmp_path, before):
    """A file's tensors may begin at any byte."""
    scheme = SCHEMES["fp8 per row, flat"]
    tensors = scheme.layer("model.layers.0")
    stored = {name: (dtype, list(array.shape), array.tobytes()) for name, (dtype, array) in tensors.items()}
    file = write_file(tmp_path / "model.safetensors", {"before": ("U8", [before], bytes(before))} | stored)
    drop(file)  # so that it is read past the page cache, in whole pages, where the file system can
    weights = loaders.get("fp8_per_row").load(Checkpoint(tmp_path), 0)
    scheme.check(weights, tensors, "model.layers.0")
    assert all(weights.matrix(expert, "up").factor.flags.aligned for expert in range(3))


@pytest.mark.parametrize("name", ["fp8 per matrix", "fp8 per matrix, inverse", "fp8 mistral"])
def test_one_scale_per_matrix(tmp_path, name):
    tensors = SCHEMES[name].layer("layers.0")
    weights = load(tmp_path, tensors)
    assert weights.formats == dict.fromkeys(PROJECTIONS, FP8_PER_MATRIX)
    assert weights.matrix(1, "up").factor.shape == (1,)


@pytest.mark.parametrize("ending", ["input_scale", "activation_scale", "qscale_act"])
@pytest.mark.parametrize("name", ["fp8 per row", "fp8 per matrix"])
def test_the_inputs_scales_are_not_used(tmp_path, name, ending):
    """Whatever they hold, and where only some experts were calibrated."""
    tensors = SCHEMES[name].layer("model.layers.0")
    more = {f"{EXPERT}.{stem}.{ending}": ["F32", np.float32([np.nan])] for stem in ("gate_proj", "down_proj")}
    SCHEMES[name].check(load(tmp_path, tensors | more), tensors, "model.layers.0")


def test_a_scale_that_nobody_has(tmp_path):
    tensors = SCHEMES["fp8 per row"].layer("model.layers.0")
    tensors |= {name: zeros("F32", 3) for name in tensors if name.endswith("scale")}
    with pytest.raises(FormatError, match=rf"fp8_per_row: {EXPERT}.gate_proj.weight_scale: shape: expected .*, found \[3\]"):
        find_loader(write(tmp_path, tensors))
