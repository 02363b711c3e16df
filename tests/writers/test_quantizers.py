"""Experts that a quantizer's own code wrote: what ktmoe reads is what that code makes of them, with scales in float64."""

import re

import numpy as np
import pytest
from served import check_layer, claimed, numbers
from writing import EXPERTS, HIDDEN, STEMS

from ktmoe import load_matrix
from ktmoe.errors import KtmoeError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint

#: script -> case -> loader, or what the message of a refusal says. A script is named as its environment, with _ for -.
CASES = {
    "compressed_tensors": {
        "W4A16": "compressed_tensors",
        "W4A16 group 32": "compressed_tensors",
        "W4A16 channel": "compressed_tensors",
        "W4A16_ASYM": "compressed_tensors",
        "W4AFP8": "int8",  # codes of 4 bits, a byte each
        "W8A16": "compressed_tensors",
        "W8A16 group": "compressed_tensors",
        "INT8": "int8",
        "FP8": "fp8_per_row",
        "FP8_DYNAMIC": "fp8_per_row",
        "FP8_BLOCK": "fp8",
        "NVFP4": "nvfp4",
        "NVFP4A16": "nvfp4",
        "MXFP4": "mxfp4",
        "MXFP4A16": "mxfp4",
        "MXFP8": "mxfp8",
    },
    "modelopt": {
        "FP8": "fp8_per_row",
        "FP8 per channel": "fp8_per_row",
        "FP8 per block": "fp8",
        "NVFP4": "nvfp4",
        "MXFP8": "mxfp8",
        "MXFP4": "mxfp4",
    },
    "quark": {
        "MXFP4": "mxfp4",
        "FP8": "fp8_per_row",
        "FP8 per channel": "fp8_per_row",
        "INT8 per channel": "int8",
        "INT4 per group": re.compile(r"down_proj\.weight' I32 \[128, 32\]"),
    },
    "autoawq": {"group 32": "awq", "group 128": "awq"},
    "gptqmodel": {
        "sym": "gptq",
        "asym": "gptq",
        "v2": "gptq",
        "per row": "gptq",
        "8 bits": re.compile(r"gptq: .*quantization_config\.bits: expected 4, found 8"),
    },
}
READ = [(script, name) for script, of in CASES.items() for name, found in of.items() if isinstance(found, str)]
REFUSED = [(script, name) for script, of in CASES.items() for name in of if (script, name) not in READ]
#: The error of float64's roundings: a scale divided by another, that times the code, and the same the other way round.
ROUNDINGS = 4 * 2.0**-53


@pytest.mark.smoke("all")
@pytest.mark.parametrize(("script", "name"), READ)
def test_numbers(case, script, name):
    folder = case(script.replace("_", "-"), script, name)
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    loader, checkpoint = claimed(folder, CASES[script][name])
    experts = loader.load(checkpoint, 0)
    assert len(expected) == EXPERTS * len(PROJECTIONS)
    for key, wanted in expected.items():
        expert, _, projection = key.partition(".")
        np.testing.assert_allclose(numbers(experts.matrix(int(expert), projection)), wanted, rtol=ROUNDINGS)
        dense = load_matrix(checkpoint, f"model.layers.0.mlp.experts.{expert}.{STEMS[projection]}")
        np.testing.assert_allclose(numbers(dense), wanted, rtol=ROUNDINGS)
    check_layer(folder, 0, EXPERTS, HIDDEN)


@pytest.mark.smoke
@pytest.mark.parametrize(("script", "name"), REFUSED)
def test_refused(case, script, name):
    checkpoint = Checkpoint(case(script.replace("_", "-"), script, name))
    with pytest.raises(KtmoeError, match=CASES[script][name]):
        find_loader(checkpoint).load(checkpoint, 0)
