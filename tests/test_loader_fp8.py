"""The fp8 loader beyond what tests/test_loader_schemes.py asks of all: blocks, their size, the scale's dtypes."""

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import drop, write_file
from checkpoints import PROJ, SCHEMES, numbers, per_expert, scores, write
from checkpoints import fp8 as made_fp8

from ktmoe import loaders
from ktmoe.errors import CheckpointError, FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.weights.activation import SILU
from ktmoe.weights.formats import fp8

EXPERT = "model.layers.0.mlp.experts.0"
SIZES = {"hidden": 288, "intermediate": 160}  # three blocks and two; the last of each is cut


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    assert find_loader(checkpoint) is loaders.get("fp8")
    return loaders.get("fp8").load(checkpoint, 0)


def config(**quantization):
    return {"quantization_config": {"quant_method": "fp8", **quantization}}


def test_against_a_writer(tmp_path):
    """Quantized block by block, as the models' own code does it: scale = amax / 448, weight = E4M3 of w / scale."""
    tensors, expected, random = {}, {}, np.random.default_rng(5)
    for projection, stem in PROJ.items():
        n, k = (288, 160) if projection == "down" else (160, 288)
        w = random.standard_normal((n, k)).astype(np.float32) * random.uniform(0.01, 3, (n, 1)).astype(np.float32)
        codes, scales = np.empty((n, k), ml_dtypes.float8_e4m3fn), np.empty((-(-n // 128), -(-k // 128)), np.float32)
        expected[projection] = np.empty((n, k))
        for i in range(0, n, 128):
            for j in range(0, k, 128):
                block = (slice(i, i + 128), slice(j, j + 128))
                scale = scales[i // 128, j // 128] = np.abs(w[block]).max() / np.float32(448)
                codes[block] = (w[block] / scale).astype(ml_dtypes.float8_e4m3fn)
                expected[projection][block] = codes[block].astype(np.float64) * float(scale)
        tensors[f"{EXPERT}.{stem}.weight"] = ["F8_E4M3", codes.view(np.uint8)]
        tensors[f"{EXPERT}.{stem}.weight_scale_inv"] = ["F32", scales]
        assert np.abs(expected[projection] - w).max() < np.abs(w).max() / 16
    weights = load(tmp_path, tensors)
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(numbers(weights.matrix(0, projection)), expected[projection])


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.loader == "fp8" and not scheme.stacked])
def test_blocks_that_are_cut(tmp_path, name):
    scheme = SCHEMES[name]
    tensors = scheme.layer("model.layers.0", **SIZES)
    weights = load(tmp_path, tensors, config(weight_block_size=[128, 128]))
    kind = "fp32" if tensors[next(name for name in tensors if "scale" in name)][0] == "F32" else "bf16"
    assert weights.formats == dict.fromkeys(PROJECTIONS, fp8(kind))
    assert weights.activation == SILU
    assert weights.matrix(0, "down").scales.shape == (3, 2)
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(
            numbers(weights.matrix(1, projection)), scheme.meaning(tensors, weights.name, 1, projection)[0]
        )


@pytest.mark.parametrize("nested", [False, True])
def test_another_block(tmp_path, nested):
    scheme = per_expert("fp8", *made_fp8(".weight_scale_inv", "F32", 64))
    tensors, stated = scheme.layer("model.layers.0", **SIZES), config(weight_block_size=[64, 64])
    weights = load(tmp_path, tensors, {"text_config": stated} if nested else stated)
    assert weights.formats["up"].scale.extent == (64, 64)
    np.testing.assert_array_equal(numbers(weights.matrix(0, "up")), scheme.meaning(tensors, weights.name, 0, "up")[0])


@pytest.mark.parametrize("stated", [[128], [128, 0], [128, -1], [128, 128.0], "128", [True, 128], {}, 128, [2**40, 1]])
def test_a_bad_block_size(tmp_path, stated):
    checkpoint = write(tmp_path, SCHEMES["fp8"].layer("model.layers.0"), config(weight_block_size=stated))
    with pytest.raises(FormatError, match=r"weight_block_size of config.json: expected two counts, found"):
        loaders.get("fp8").load(checkpoint, 0)


def test_a_config_that_is_no_object(tmp_path):
    checkpoint = write(tmp_path, SCHEMES["fp8"].layer("model.layers.0"), {"quantization_config": [1]})
    with pytest.raises(CheckpointError, match=r"quantization_config: expected an object, found \[1\]"):
        loaders.get("fp8").load(checkpoint, 0)
    with pytest.raises(FormatError, match=r"no loader reads these experts: fp8: .* expected an object, found \[1\]"):
        find_loader(checkpoint)


def test_a_block_size_that_contradicts_the_tensors(tmp_path):
    checkpoint = write(tmp_path, SCHEMES["fp8"].layer("model.layers.0", **SIZES), config(weight_block_size=[64, 64]))
    assert scores(checkpoint)["fp8"] == 0
    with pytest.raises(
        FormatError, match=r"weight_scale_inv: shape: expected \[3, 5\] \(one scale per 64x64\), found \[2, 3\]"
    ):
        loaders.get("fp8").load(checkpoint, 0)


def test_scales_as_modelopt_has_them(tmp_path):
    """Each axis of blocks has one of ones behind it."""
    tensors = SCHEMES["fp8 weight_scale"].layer("model.layers.0", **SIZES)
    for name in tensors:
        if name.endswith("scale"):
            tensors[name] = ["F32", np.ascontiguousarray(tensors[name][1].astype(np.float32)[:, None, :, None])]
    weights = load(tmp_path, tensors)
    for projection in PROJECTIONS:
        name = f"{EXPERT}.{PROJ[projection]}"
        flat = {".weight": tensors[f"{name}.weight"][1], ".weight_scale": tensors[f"{name}.weight_scale"][1][:, 0, :, 0]}
        expected = made_fp8(".weight_scale", "F32")[1](flat)
        np.testing.assert_array_equal(numbers(weights.matrix(0, projection)), expected)


def test_a_config_of_fp8_says_nothing_of_the_experts(tmp_path):
    """V4-Flash's says fp8, and its experts are MXFP4."""
    checkpoint = write(tmp_path, SCHEMES["deepseek_v4"].layer("layers.0"), config(weight_block_size=[128, 128]))
    assert scores(checkpoint)["fp8"] == 0
    assert find_loader(checkpoint) is loaders.get("deepseek_v4")


@pytest.mark.parametrize("before", range(1, 5))
def test_scales_are_aligned_wherever_they_are(tmp_path, before):
    """A file's tensors may begin at any byte."""
    tensors = SCHEMES["fp8"].layer("model.layers.0", **SIZES)
    stored = {name: (dtype, list(array.shape), array.tobytes()) for name, (dtype, array) in tensors.items()}
    file = write_file(tmp_path / "model.safetensors", {"before": ("U8", [before], bytes(before))} | stored)
    drop(file)  # so that it is read past the page cache, in whole pages, where the file system can
    weights = loaders.get("fp8").load(Checkpoint(tmp_path), 0)
    for expert in range(3):
        matrix = weights.matrix(expert, "up")
        assert matrix.scales.flags.aligned
        np.testing.assert_array_equal(numbers(matrix), SCHEMES["fp8"].meaning(tensors, weights.name, expert, "up")[0])
