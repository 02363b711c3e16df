"""The mxfp8 loader beyond what tests/test_loader_schemes.py asks of all: a writer, MiniMax-M3's activation."""

import ml_dtypes
import numpy as np
import pytest
from checkpoints import PROJ, SCHEMES, W, numbers, scores, write, zeros

from ktmoe import loaders
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import MXFP8

M3 = {"hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
EXPERT = "language_model.model.layers.0.block_sparse_moe.experts.0"


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    assert find_loader(checkpoint) is loaders.get("mxfp8")
    return loaders.get("mxfp8").load(checkpoint, 0)


def test_against_a_writer(tmp_path):
    """As OCP MX v1.0, 6.3, quantizes: X = 2**(floor(log2(amax)) - 8), and elements w / X, clamped to E4M3's largest."""
    tensors, expected, random = {}, {}, np.random.default_rng(5)
    for projection, stem in W.items():
        n, k = (96, 64) if projection == "down" else (64, 96)
        w = (random.standard_normal((n, k)) * np.exp2(random.integers(-9, 9, (n, 1)))).astype(np.float32)
        groups = w.reshape(n, -1, 32)
        exponents = np.frexp(np.abs(groups).max(2))[1] - 1 - 8
        scaled = np.clip(groups / np.exp2(exponents.astype(np.float32))[:, :, None], -448, 448)
        codes = scaled.astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{EXPERT}.{stem}.weight"] = ["F8_E4M3", codes.reshape(n, k).view(np.uint8)]
        tensors[f"{EXPERT}.{stem}.weight_scale_inv"] = ["U8", (exponents + 127).astype(np.uint8)]
        expected[projection] = (codes.astype(np.float64) * np.exp2(exponents.astype(np.float64))[:, :, None]).reshape(n, k)
        assert (np.abs(expected[projection] - w) <= np.abs(groups).max(2).repeat(32, 1) / 8).all()
    weights = load(tmp_path, tensors)
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(numbers(weights.matrix(0, projection)), expected[projection])


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 weight_scale"])
@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_dtypes_that_hold_the_same_bytes(tmp_path, name, dtype):
    scheme = SCHEMES[name]
    tensors = scheme.layer("language_model.model.layers.0")
    for ending, tensor in tensors.items():
        tensor[0] = tensor[0] if ending.endswith("weight") else dtype
    weights = load(tmp_path, tensors, M3)
    assert weights.formats == dict.fromkeys(PROJECTIONS, MXFP8)
    assert weights.activation == GatedActivation(1.702, 7.0, 1.0)
    scheme.check(weights, tensors, "language_model.model.layers.0")


def test_without_the_activation_of_minimax_m3(tmp_path):
    assert load(tmp_path, SCHEMES["mxfp8"].layer("layers.0")).activation == SILU


@pytest.mark.parametrize("key", ["swiglu_alpha", "swiglu_limit"])
def test_another_activation(tmp_path, key):
    with pytest.raises(FormatError, match=rf"{key} of config.json: expected none for this scheme"):
        load(tmp_path, SCHEMES["mxfp8"].layer("layers.0"), {"hidden_act": "silu", key: 2.0})


def test_names_of_others_with_these_tensors_are_mxfp8(tmp_path):
    """gate_proj and so on, F8_E8M0: neither fp8 nor fp8_per_row takes them."""
    tensors = {}
    for projection, stem in PROJ.items():
        n, k = (96, 64) if projection == "down" else (64, 96)
        name = f"model.layers.0.mlp.experts.0.{stem}"
        tensors |= {f"{name}.weight": zeros("F8_E4M3", n, k), f"{name}.weight_scale_inv": zeros("F8_E8M0", n, k // 32)}
    checkpoint = write(tmp_path, tensors, {"quantization_config": {"quant_method": "fp8"}})
    found = scores(checkpoint)
    assert found.pop("mxfp8") > 0.5
    assert not any(found.values())
