"""Rules of rounding against the code whose rules they are: the same bytes."""

import ml_dtypes
import numpy as np
import pytest
from rounded import BLOCK

from ktmoe import BF16, Matrix, WeightFormat
from ktmoe.quantization import Quantizer
from ktmoe.weights.elements import FP32

#: script -> (environment, case -> the rule).
CASES = {
    "rounded_torch": (
        "torch",
        {
            "gguf MXFP4": Quantizer("mxfp4", rule="gguf"),
            "gguf Q8_0": Quantizer("int8", rule="gguf"),
            "torch cast": Quantizer("fp8", group="row", rule="nearest"),
            "torch blocks": Quantizer("fp8", group=BLOCK, rule="nearest"),
            "transformers FP8": Quantizer("fp8", group=BLOCK, rule="transformers"),
        },
    ),
    "rounded_modelopt": (
        "modelopt",
        {
            "MXFP4": Quantizer("mxfp4", rule="modelopt"),
            "MXFP8": Quantizer("mxfp8", rule="ceil"),
            "NVFP4": Quantizer("nvfp4", rule="modelopt"),
            "FP8 rows": Quantizer("fp8", group="row", rule="nearest"),
            "FP8 blocks": Quantizer("fp8", group=BLOCK, rule="nearest"),
        },
    ),
    "rounded_compressed_tensors": (
        "compressed-tensors",
        {
            "MXFP4": Quantizer("mxfp4", rule="even"),
            "MXFP8": Quantizer("mxfp8", rule="compressed-tensors"),
            "NVFP4": Quantizer("nvfp4", rule="compressed-tensors"),
            "FP8": Quantizer("fp8", group=(1, 512), rule="nearest", scales="bf16"),
            "INT8": Quantizer("int8", group=512, rule="compressed-tensors"),
            "W8A16 group": Quantizer("int8", group=128, rule="compressed-tensors"),
            "W4A16 group 32": Quantizer("int4", group=32, rule="compressed-tensors"),
            "W4A16_ASYM": Quantizer("int4", group=128, symmetric=False),
        },
    ),
    "rounded_torchao": (
        "torchao",
        {
            "MXFP4 RCEIL": Quantizer("mxfp4", rule="ceil"),
            "MXFP4 FLOOR": Quantizer("mxfp4", rule="floor"),
            "MXFP4 EVEN": Quantizer("mxfp4", rule="even"),
            "MXFP8 RCEIL": Quantizer("mxfp8", rule="ceil"),
            "MXFP8 FLOOR": Quantizer("mxfp8", rule="floor"),
            "MXFP8 EVEN": Quantizer("mxfp8", rule="even"),
        },
    ),
    "rounded_quark": ("quark", {"MXFP4": Quantizer("mxfp4", rule="quark")}),
}


def stored(quantizer: Quantizer, weights: np.ndarray) -> dict[str, np.ndarray]:
    """What becomes of a float32 matrix, or of each of several."""
    if weights.ndim > 2:
        made = [stored(quantizer, matrix) for matrix in weights]
        return {label: np.stack([each[label] for each in made]) for label in made[0]}
    narrow = weights.astype(ml_dtypes.bfloat16)
    format_, given = (BF16, narrow) if np.array_equal(narrow, weights) else (WeightFormat(FP32), weights)
    return dict(quantizer.matrix(Matrix("m", format_, weights.shape, given))[0].stored)


@pytest.mark.smoke
@pytest.mark.parametrize(("script", "name"), [(script, name) for script, (_, cases) in CASES.items() for name in cases])
def test_the_same_bytes(case, script, name):
    environment, cases = CASES[script]
    with np.load(case(environment, script, name) / "expected.npz") as arrays:
        expected = dict(arrays)
    weights = expected.pop("weights")
    found = stored(cases[name], weights)
    if cases[name].format.element.bits == 4 and expected["codes"].shape == weights.shape:  # integers, one an item
        codes = np.stack([found["codes"] & 15, found["codes"] >> 4], axis=-1).reshape(weights.shape)
        found["codes"] = codes - np.uint8(8)
        if "offsets" in found:
            found["offsets"] = found["offsets"].astype(np.int8) - np.int8(8)
    assert found.keys() == expected.keys()
    for label, wanted in expected.items():
        same = found[label].view(wanted.dtype) == wanted
        assert same.all(), f"{label}: {np.argwhere(~same)[:5].tolist()} of {(~same).sum()}"
