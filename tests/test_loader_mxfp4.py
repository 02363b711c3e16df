"""The mxfp4 loader beyond what tests/test_loader_schemes.py asks of all: a writer, dtypes."""

import ml_dtypes
import numpy as np
import pytest
from checkpoints import PROJ, SCHEMES, numbers, write

from ktmoe import loaders
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.weights.formats import MXFP4

EXPERT = "model.layers.0.mlp.experts.0"


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    assert find_loader(checkpoint) is loaders.get("mxfp4")
    return loaders.get("mxfp4").load(checkpoint, 0)


@pytest.mark.parametrize("ending", ["weight", "weight_packed"])
def test_against_a_writer(tmp_path, ending):
    """As OCP MX v1.0, 6.3, quantizes: X = 2**(floor(log2(amax)) - 2), elements w / X, clamped to 6, ties to even."""
    tensors, expected, random = {}, {}, np.random.default_rng(5)
    for projection, stem in PROJ.items():
        n, k = (96, 64) if projection == "down" else (64, 96)
        w = (random.standard_normal((n, k)) * np.exp2(random.integers(-9, 9, (n, 1)))).astype(np.float32)
        groups = w.reshape(n, -1, 32)
        exponents = np.frexp(np.abs(groups).max(2))[1] - 1 - 2
        codes = np.clip(groups / np.exp2(exponents.astype(np.float32))[:, :, None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
        nibbles = codes.reshape(n, k).view(np.uint8)
        tensors[f"{EXPERT}.{stem}.{ending}"] = ["U8", nibbles[:, 0::2] | nibbles[:, 1::2] << 4]
        tensors[f"{EXPERT}.{stem}.weight_scale"] = ["U8", (exponents + 127).astype(np.uint8)]
        expected[projection] = (codes.astype(np.float64) * np.exp2(exponents.astype(np.float64))[:, :, None]).reshape(n, k)
        assert (np.abs(expected[projection] - w) <= np.abs(groups).max(2).repeat(32, 1) / 4).all()
    weights = load(tmp_path, tensors)
    assert weights.formats == dict.fromkeys(PROJECTIONS, MXFP4)
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(numbers(weights.matrix(0, projection)), expected[projection])


@pytest.mark.parametrize("codes", ["U8", "F4"])
@pytest.mark.parametrize("scales", ["U8", "F8_E8M0"])
@pytest.mark.parametrize("name", ["mxfp4 quark", "mxfp4 packed"])
def test_dtypes_that_hold_the_same_bytes(tmp_path, name, codes, scales):
    tensors = SCHEMES[name].layer("layers.0")
    for each, tensor in tensors.items():
        tensor[0] = scales if each.endswith("scale") else codes
    SCHEMES[name].check(load(tmp_path, tensors), tensors, "layers.0")


def test_a_config_of_quark(tmp_path):
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
    stated = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "algo_config": None}
    tensors = SCHEMES["mxfp4 quark"].layer("model.layers.0")
    SCHEMES["mxfp4 quark"].check(load(tmp_path, tensors, {"quantization_config": stated}), tensors, "model.layers.0")


@pytest.mark.parametrize("key", ["situ_beta", "activation_situ_beta"])
def test_an_activation_that_is_not_silu(tmp_path, key):
    """Kimi-K3 has these names and weights, and a function of its own."""
    tensors = SCHEMES["mxfp4 packed"].layer("language_model.model.layers.0")
    with pytest.raises(FormatError, match=rf"{key} of config.json: expected none for this scheme, found 4.0"):
        load(tmp_path, tensors, {"text_config": {key: 4.0}})
