"""Experts that a quantizer's own code wrote: what ktmoe reads is what that code, its scales in float64, turns them back into."""

import numpy as np
import pytest
from served import check_layer, claimed, numbers
from writing import EXPERTS, HIDDEN

from ktmoe.errors import KtmoeError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint

#: (environment, script, case) -> loader.
READ = {
    ("compressed-tensors", "compressed_tensors", "W4A16"): "compressed_tensors",
    ("compressed-tensors", "compressed_tensors", "W4A16 group 32"): "compressed_tensors",
    ("compressed-tensors", "compressed_tensors", "W4A16 channel"): "compressed_tensors",
    ("compressed-tensors", "compressed_tensors", "W4A16_ASYM"): "compressed_tensors",
    ("compressed-tensors", "compressed_tensors", "W4AFP8"): "int8",
    ("compressed-tensors", "compressed_tensors", "W8A16"): "compressed_tensors",
    ("compressed-tensors", "compressed_tensors", "W8A16 group"): "compressed_tensors",
    ("compressed-tensors", "compressed_tensors", "INT8"): "int8",
    ("compressed-tensors", "compressed_tensors", "FP8"): "fp8_per_row",
    ("compressed-tensors", "compressed_tensors", "FP8_DYNAMIC"): "fp8_per_row",
    ("compressed-tensors", "compressed_tensors", "FP8_BLOCK"): "fp8",
    ("compressed-tensors", "compressed_tensors", "NVFP4"): "nvfp4",
    ("compressed-tensors", "compressed_tensors", "NVFP4A16"): "nvfp4",
    ("compressed-tensors", "compressed_tensors", "MXFP4"): "mxfp4",
    ("compressed-tensors", "compressed_tensors", "MXFP4A16"): "mxfp4",
    ("compressed-tensors", "compressed_tensors", "MXFP8"): "mxfp8",
}
#: (environment, script, case) -> what the message says.
REFUSED = {}
#: Of float64: a scale divided by another, that times the code, and the same the other way round.
ROUNDINGS = 4 * 2.0**-53


def identify(case):
    return "-".join(case[1:])


@pytest.mark.parametrize("written_case", READ, ids=identify)
def test_numbers(case, written_case):
    folder = case(*written_case)
    expected = np.load(folder / "expected.npz")
    loader, checkpoint = claimed(folder, READ[written_case])
    experts = loader.load(checkpoint, 0)
    assert len(expected) == EXPERTS * len(PROJECTIONS)
    for expert in range(EXPERTS):
        for projection in PROJECTIONS:
            found = numbers(experts.matrix(expert, projection))
            np.testing.assert_allclose(found, expected[f"{expert}.{projection}"], rtol=ROUNDINGS)
    check_layer(folder, 0, EXPERTS, HIDDEN)


@pytest.mark.parametrize("written_case", REFUSED, ids=identify)
def test_refused(case, written_case):
    checkpoint = Checkpoint(case(*written_case))
    with pytest.raises(KtmoeError, match=REFUSED[written_case]):
        find_loader(checkpoint).load(checkpoint, 0)
