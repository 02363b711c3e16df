"""The awq loader beyond what tests/test_loader_schemes.py asks of all: a writer, config, GPTQ beside it."""

import numpy as np
import pytest
from checkpoints import BF16, PROJ, SCHEMES, numbers, scores, write

from ktmoe import loaders
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.weights.formats import uint4
from ktmoe.weights.order import AWQ

EXPERT = "model.layers.0.mlp.experts.0"


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    assert find_loader(checkpoint) is loaders.get("awq")
    return loaders.get("awq").load(checkpoint, 0)


def config(**changes):
    stated = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    return {"quantization_config": {key: value for key, value in (stated | changes).items() if value != "absent"}}


def pack(numbers_):
    """[rows, n] -> int32 [rows, n/8], as AutoAWQ's loops do it: nibble i of a dword is that of n = order[i]."""
    packed = np.zeros((len(numbers_), numbers_.shape[1] // 8), np.uint32)
    for column in range(packed.shape[1]):
        for i, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            packed[:, column] |= numbers_[:, 8 * column + place].astype(np.uint32) << np.uint32(4 * i)
    return packed.view(np.int32)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("stated", [False, True])
def test_against_a_writer(tmp_path, group, stated):
    tensors, expected, random = {}, {}, np.random.default_rng(5)
    for projection, stem in PROJ.items():
        n, k = (256, 128) if projection == "down" else (128, 256)
        w = (random.standard_normal((n, k)) + 0.3).astype(np.float32).reshape(n, -1, group)
        low, high = w.min(2), w.max(2)
        scales = (np.maximum(high - low, 1e-5) / 15).astype(np.float16)
        z = np.clip(-np.round(low / scales), 0, 15)
        q = np.clip(np.round(w / scales[:, :, None]) + z[:, :, None], 0, 15)
        expected[projection] = ((q - z[:, :, None]) * scales.astype(np.float64)[:, :, None]).reshape(n, k)
        name = f"{EXPERT}.{stem}"
        tensors[f"{name}.qweight"] = ["I32", pack(q.reshape(n, k).T)]
        tensors[f"{name}.qzeros"] = ["I32", pack(z.T)]
        tensors[f"{name}.scales"] = ["F16", np.ascontiguousarray(scales.T)]
    weights = load(tmp_path, tensors, config(group_size=group) if stated else None)
    assert weights.formats == dict.fromkeys(PROJECTIONS, uint4(group, "fp16", AWQ))
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(numbers(weights.matrix(0, projection)), expected[projection])


def test_bfloat16_scales(tmp_path):
    tensors = SCHEMES["awq"].layer("model.layers.0")
    for name, tensor in tensors.items():
        if name.endswith("scales"):
            tensor[:] = ["BF16", tensor[1].astype(BF16)]
    weights = load(tmp_path, tensors)
    assert weights.formats["up"] == uint4(32, "bf16", AWQ)
    SCHEMES["awq"].check(weights, tensors, "model.layers.0")


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_shapes_tell_it_from_gptq(tmp_path, name, method):
    """Whatever the config says, and where n = k, too."""
    tensors = SCHEMES[name].layer("model.layers.0", hidden=64, intermediate=64)
    tensors = {each: tensor for each, tensor in tensors.items() if "g_idx" not in each}
    checkpoint = write(tmp_path, tensors, {"quantization_config": {"quant_method": method}})
    found = scores(checkpoint)
    assert {each: found[each] for each in ("gptq", "awq")} == {"gptq": 0.0, "awq": 0.0} | {name: 0.9}
    if name != method:
        with pytest.raises(FormatError, match=rf"quant_method: expected '{name}' or 'auto-round', found '{method}'"):
            find_loader(checkpoint).load(checkpoint, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 8}, "bits: expected 4, found 8"),
        ({"version": "gemv"}, "version: expected 'gemm' or 'GEMM', found 'gemv'"),
        ({"version": "marlin"}, "version: expected 'gemm' or 'GEMM', found 'marlin'"),
        ({"zero_point": "no"}, "zero_point: expected True or False, found 'no'"),
        (
            {"packing_format": "auto_round"},
            "packing_format: expected 'auto_round:auto_awq' or 'auto_round:awq', found 'auto_round'",
        ),
        ({"quant_method": "gptq"}, "quant_method: expected 'awq' or 'auto-round', found 'gptq'"),
        ({"group_size": -1}, "group_size: expected a count of columns, found -1"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_configs_that_are_refused(tmp_path, changes, words, nested):
    stated = {"text_config": config(**changes)} if nested else config(**changes)
    with pytest.raises(FormatError) as caught:
        load(tmp_path, SCHEMES["awq"].layer("model.layers.0"), stated)
    assert f"quantization_config.{words}" in str(caught.value)


@pytest.mark.parametrize(
    "stated",
    [
        config(version="GEMM"),
        config(version="absent", zero_point="absent"),
        config(zero_point=False),
        config(quant_method="auto-round", packing_format="auto_round:auto_awq", version="absent"),
        {},
    ],
)
def test_configs_that_agree(tmp_path, stated):
    tensors = SCHEMES["awq"].layer("model.layers.0")
    SCHEMES["awq"].check(load(tmp_path, tensors, stated), tensors, "model.layers.0")
