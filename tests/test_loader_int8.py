"""The int8 loader beyond what tests/test_loader_schemes.py asks of all: writers, which scales mean what."""

import numpy as np
import pytest
from checkpoints import PROJ, SCHEMES, numbers, per_expert, write
from integer_checkpoints import int8

from ktmoe import loaders
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.weights import formats
from ktmoe.weights.elements import INT8
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.scales import Factor, Scale

EXPERT = "model.layers.0.mlp.experts.0"


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    assert find_loader(checkpoint) is loaders.get("int8")
    return loaders.get("int8").load(checkpoint, 0)


@pytest.mark.parametrize("axis", ["rows", "blocks"])
def test_against_a_writer(tmp_path, axis):
    """scale = amax / 127 of a row or of 128x128, weight = the nearest integer to w / scale."""
    tensors, expected, random = {}, {}, np.random.default_rng(5)
    for projection, stem in PROJ.items():
        n, k = (160, 288) if projection == "down" else (288, 160)
        w = random.standard_normal((n, k)) * random.uniform(0.01, 3, (n, 1))
        size = (1, k) if axis == "rows" else (128, 128)
        starts = [range(0, length, step) for length, step in zip((n, k), size, strict=True)]
        codes, scales = np.empty((n, k), np.int8), np.empty([len(each) for each in starts], np.float32)
        expected[projection] = np.empty((n, k))
        for i, row in enumerate(starts[0]):
            for j, column in enumerate(starts[1]):
                part = slice(row, row + size[0]), slice(column, column + size[1])
                scales[i, j] = np.abs(w[part]).max() / 127
                codes[part] = np.clip(np.round(w[part] / scales[i, j]), -127, 127)
                expected[projection][part] = codes[part].astype(np.float64) * float(scales[i, j])
        assert (np.abs(expected[projection] - w) <= np.abs(w).max() / 253).all()
        tensors[f"{EXPERT}.{stem}.weight"] = ["I8", codes]
        tensors[f"{EXPERT}.{stem}.weight_scale{'' if axis == 'rows' else '_inv'}"] = ["F32", scales]
    weights = load(tmp_path, tensors)
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(numbers(weights.matrix(0, projection)), expected[projection])


PER_ROW = WeightFormat(INT8, factor=Factor(per_row=True))
BLOCKS = (lambda n, k: (-(-n // 128), -(-k // 128)), {"weight_block_size": [128, 128]})
# label: (dtype of scales, their shape by (n, k), config, format)
SCALES = {
    "column of rows": ("F32", lambda n, k: (n, 1), {}, PER_ROW),
    "rows": ("BF16", lambda n, k: (n,), {}, PER_ROW),
    "matrix": ("F16", lambda n, k: (1,), {}, WeightFormat(INT8, factor=Factor(per_row=False))),
    "groups": ("BF16", lambda n, k: (n, k // 32), {}, formats.int8(32, "bf16")),
    "stated groups": ("F16", lambda n, k: (n, k // 32), {"group_size": 32}, formats.int8(32, "fp16")),
    "blocks": ("BF16", BLOCKS[0], {}, WeightFormat(INT8, Scale("bf16", (128, 128)))),
    "stated blocks": ("F32", *BLOCKS, WeightFormat(INT8, Scale("fp32", (128, 128)))),
}


@pytest.mark.parametrize("label", SCALES)
@pytest.mark.parametrize("ending", [".weight_scale", ".weight_scale_inv"])
def test_scales(tmp_path, label, ending):
    dtype, shape, stated, expected = SCALES[label]
    scheme = per_expert("int8", *int8(ending, dtype, shape))
    tensors = scheme.layer("model.layers.0")
    weights = load(tmp_path, tensors, {"quantization_config": stated})
    assert weights.formats == dict.fromkeys(PROJECTIONS, expected)
    scheme.check(weights, tensors, "model.layers.0")


def test_every_integer(tmp_path):
    """-128 among them, which symmetric writers leave out."""
    tensors = SCHEMES["int8 per row"].layer("model.layers.0", hidden=256)
    tensors[f"{EXPERT}.gate_proj.weight"][1][3] = np.arange(-128, 128)
    matrix = load(tmp_path, tensors).matrix(0, "gate")
    assert (numbers(matrix)[3] / float(matrix.factor[3])).tolist() == list(range(-128, 128))


@pytest.mark.parametrize("ending", ["input_scale", "input_zero_point"])
def test_the_inputs_scales_are_not_used(tmp_path, ending):
    tensors = SCHEMES["int8 per row"].layer("model.layers.0")
    more = {f"{EXPERT}.{stem}.{ending}": ["F32", np.float32([np.nan])] for stem in PROJ.values()}
    SCHEMES["int8 per row"].check(load(tmp_path, tensors | more), tensors, "model.layers.0")
