"""The deepseek_v4 loader beyond what tests/test_loader_schemes.py asks of all: MTP layers, dtypes, the clamp, its refusals."""

import json
import math

import numpy as np
import pytest
from checkpoints import EXPERTS, HIDDEN, INTERMEDIATE, SCHEMES, W, check_matrix, scores, write, zeros

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders import registry
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import MXFP4, fp8

SCHEME = SCHEMES["deepseek_v4"]
CONFIG = {"n_routed_experts": EXPERTS, "swiglu_limit": 10.0}


def check_bytes(checkpoint, tensors):
    """Every matrix that comes out holds the very bytes that went in."""
    weights = find_loader(checkpoint).load(checkpoint, 0)
    assert weights.formats == dict.fromkeys(PROJECTIONS, MXFP4)
    for expert in range(EXPERTS):
        for projection, stem in W.items():
            name = f"layers.0.ffn.experts.{expert}.{stem}"
            matrix = weights.matrix(expert, projection)
            assert matrix.name == name
            np.testing.assert_array_equal(matrix.codes, tensors[f"{name}.weight"][1])
            np.testing.assert_array_equal(matrix.scales, tensors[f"{name}.scale"][1])


def test_mtp_layers(tmp_path):
    tensors = {layer: SCHEME.layer(layer, seed) for seed, layer in enumerate(["mtp.1", "mtp.0", "layers.10", "layers.2"])}
    checkpoint = write(tmp_path, {name: tensor for layer in tensors.values() for name, tensor in layer.items()}, CONFIG)
    assert find_loader(checkpoint).layers(checkpoint) == [2, 10, "mtp.0", "mtp.1"]
    for layer in ("mtp.0", "mtp.1"):
        SCHEME.check(find_loader(checkpoint).load(checkpoint, layer), tensors[layer], layer)


@pytest.mark.parametrize("weight_dtype", ["I8", "U8", "F4"])
@pytest.mark.parametrize("scale_dtype", ["F8_E8M0", "U8"])
def test_dtypes_that_hold_the_same_bytes(tmp_path, weight_dtype, scale_dtype):
    tensors = SCHEME.layer("layers.0")
    for name, tensor in tensors.items():
        tensor[0] = weight_dtype if name.endswith("weight") else scale_dtype
    checkpoint = write(tmp_path, tensors)
    if weight_dtype == "F4":
        assert checkpoint.info("layers.0.ffn.experts.0.w1.weight").shape == (INTERMEDIATE, HIDDEN)
    check_bytes(checkpoint, tensors)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"swiglu_limit": 10.0}, GatedActivation(limit=10.0)),
        ({"swiglu_limit": 7}, GatedActivation(limit=7.0)),
        ({"text_config": {"swiglu_limit": 3.5}}, GatedActivation(limit=3.5)),
        ({"swiglu_limit": 10.0, "text_config": {"swiglu_limit": 3.5}}, GatedActivation(limit=10.0)),
        ({"text_config": None}, SILU),
        ({"swiglu_limit": 0}, SILU),
        ({"swiglu_limit": None}, SILU),
        ({}, SILU),
        (None, SILU),
    ],
)
def test_swiglu_limit(tmp_path, config, activation):
    checkpoint = write(tmp_path, SCHEME.layer("layers.0"), config)
    found = find_loader(checkpoint).load(checkpoint, 0).activation
    assert found == activation
    assert type(found.limit) is float


@pytest.mark.parametrize("limit", ["10", [10.0], {}, True, -1.0, math.nan, math.inf, -math.inf, 1e39, 10**400])
@pytest.mark.parametrize("nested", [False, True])
def test_bad_swiglu_limit(tmp_path, limit, nested):
    config = {"swiglu_limit": limit}
    checkpoint = write(tmp_path, SCHEME.layer("layers.0"), {"text_config": config} if nested else config)
    with pytest.raises(CheckpointError) as caught:
        find_loader(checkpoint).load(checkpoint, 0)
    words = (str(tmp_path), "swiglu_limit", "expected a float32 number, 0 or more", f"found {show(limit)}")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_weights_without_scales_are_another_format(tmp_path):
    checkpoint = write(tmp_path, {name: tensor for name, tensor in SCHEME.layer("layers.0").items() if name.endswith("weight")})
    assert scores(checkpoint)["deepseek_v4"] == 0


# label: (tensor of expert 0, what it is instead, what the message must hold)
NOT_MXFP4 = {
    "FP8 weight": ("w1.weight", zeros("F8_E4M3", 64, 96), ["w1.scale", "expected [1, 1]", "one scale per 128x128", "[64, 3]"]),
    "BF16 weight": ("w3.weight", zeros("BF16", 64, 96), ["dtype", "expected I8 or U8 or F4", "BF16 [64, 96]"]),
    "BF16 scale": ("w2.scale", zeros("BF16", 96, 2), ["dtype", "expected F8_E8M0 or U8", "BF16 [96, 2]"]),
    "E4M3 scale": ("w1.scale", zeros("F8_E4M3", 64, 3), ["dtype", "expected F8_E8M0 or U8", "F8_E4M3 [64, 3]"]),
    "int8, not packed": ("w1.weight", zeros("I8", 64, 96), ["w1.scale", "[64, 6]", "one scale per 32", "[64, 3]"]),
    "group of 16": ("w1.scale", zeros("F8_E8M0", 64, 6), ["shape", "expected [64, 3]", "found [64, 6]"]),
    "blocks of 128": ("w2.scale", zeros("F8_E8M0", 1, 1), ["shape", "expected [96, 2]", "found [1, 1]"]),
    "flat scale": ("w2.scale", zeros("F8_E8M0", 192), ["shape", "expected [96, 2]", "found [192]"]),
    "flat weight": ("w1.weight", zeros("I8", 64 * 48), ["shape", "expected two dimensions", "found [3072]"]),
    "stacked weight": ("w1.weight", zeros("I8", 1, 64, 48), ["shape", "expected two dimensions", "found [1, 64, 48]"]),
    "no rows": ("w1.weight", zeros("I8", 0, 48), ["shape", "two dimensions above 0", "found [0, 48]"]),
}


@pytest.mark.parametrize("label", NOT_MXFP4)
def test_not_mxfp4(tmp_path, label):
    suffix, tensor, words = NOT_MXFP4[label]
    name = f"layers.0.ffn.experts.0.{suffix}"
    checkpoint = write(tmp_path, SCHEME.layer("layers.0") | {name: tensor})
    loader = registry.get("deepseek_v4")
    assert scores(checkpoint)["deepseek_v4"] == 0
    with pytest.raises(FormatError) as caught:
        loader.load(checkpoint, 0)
    named = name.rsplit(".", 2)[0]
    assert all(word in str(caught.value) for word in [named, "expected", "found", *words]), str(caught.value)


def test_odd_f4_rows_would_share_a_byte(tmp_path):
    """64 x 95 codes fill whole bytes as a tensor, but not as rows."""
    header = {}
    for stem in W.values():
        for kind, dtype, shape, nbytes in (("weight", "F4", [64, 95], 64 * 95 // 2), ("scale", "F8_E8M0", [64, 3], 64 * 3)):
            start = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
            entry = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + nbytes]}
            header[f"layers.0.ffn.experts.0.{stem}.{kind}"] = entry
    text, data = json.dumps(header).encode(), bytes(start + nbytes)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    checkpoint = Checkpoint(tmp_path)
    assert scores(checkpoint)["deepseek_v4"] == 0
    with pytest.raises(FormatError, match=r"w1.weight: shape: expected an even number of F4 columns, found \[64, 95\]"):
        registry.get("deepseek_v4").load(checkpoint, 0)


@pytest.mark.parametrize("scale_dtype", ["F8_E8M0", "U8"])
def test_flash_base_is_fp8(tmp_path, scale_dtype):
    """V4-Flash-Base has the same names, and experts in E4M3 with one E8M0 scale per 128x128, whose last blocks are cut."""
    scheme = SCHEMES["deepseek_v4 base"]
    tensors = scheme.layer("layers.0", hidden=256 + 32, intermediate=128 + 32)
    for name, tensor in tensors.items():
        tensor[0] = scale_dtype if name.endswith("scale") else tensor[0]
    weights = find_loader(write(tmp_path, tensors, CONFIG)).load(Checkpoint(tmp_path), 0)
    assert weights.formats == dict.fromkeys(PROJECTIONS, fp8("ue8m0"))
    assert weights.activation == GatedActivation(limit=10.0)
    assert weights.matrix(0, "down").scales.shape == (3, 2)
    for projection in PROJECTIONS:
        check_matrix(weights.matrix(2, projection), *scheme.meaning(tensors, weights.name, 2, projection))


def test_detection_needs_no_config(tmp_path):
    checkpoint = write(tmp_path, SCHEME.layer("layers.0"), {"model_type": "something_else"})
    assert registry.get("deepseek_v4").detect(checkpoint) > 0.5


@pytest.mark.parametrize(
    ("stem", "n", "k", "words"),
    [
        ("w3", 64, 64, ["w3.weight", "expected [n, k] = [64, 96]", "found [64, 64]"]),
        ("w2", 64, 96, ["w2.weight", "expected [n, k] = [96, 64]", "found [64, 96]"]),
    ],
)
def test_projections_that_do_not_fit(tmp_path, stem, n, k, words):
    tensors = SCHEME.layer("layers.0")
    for expert in range(EXPERTS):
        tensors[f"layers.0.ffn.experts.{expert}.{stem}.weight"] = zeros("I8", n, k // 2)
        tensors[f"layers.0.ffn.experts.{expert}.{stem}.scale"] = zeros("F8_E8M0", n, k // 32)
    checkpoint = write(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        find_loader(checkpoint).load(checkpoint, 0)
    assert all(word in str(caught.value) for word in ["layers.0.ffn.experts.0", *words]), str(caught.value)
