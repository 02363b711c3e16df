"""Checkpoints whose matrices are all quantized: no package of their writers is needed, and nothing of them is dequantized."""

import sys

import pytest
import torch
import whole_quantized
from engine_models import logits, prompts
from serving import assert_served, recorded, replayed
from transformers import AutoModelForCausalLM
from whole_quantized import WHOLE, distance, formats

import ktmoe.transformers as served

#: The largest error, as a multiple of that of eager bfloat16 on the same numbers.
AT_MOST = 1.2
#: Packages of those who write such checkpoints.
PACKAGES = ("awq", "gptqmodel", "auto_gptq", "compressed_tensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A name of WHOLE -> the folder of its checkpoint, written once."""
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = whole_quantized.write(name, tmp_path_factory.mktemp("whole"))
        return folders[name]

    return folder


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", WHOLE)
def test_logits(whole, monkeypatch, name):
    """As near to float32 on the numbers that the codes stand for as eager bfloat16 is, with float32's routing."""
    folder, ids = whole(name), prompts(batch=8)
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    model = served.load(folder, activations="bf16", dtype=torch.bfloat16)
    assert_served(model)
    found = formats(model)
    assert len(found) > 12
    for module, weight_format in found.items():
        assert weight_format.element.bits == (16 if module == "lm_head" else WHOLE[name][2]), module
    full, eager = (
        AutoModelForCausalLM.from_pretrained(folder / "float32", dtype=dtype, experts_implementation="eager")
        for dtype in (torch.float32, torch.bfloat16)
    )
    with recorded(full) as routing:
        expected = logits(full, ids)
    errors = []
    for each in (eager, model):
        with replayed(each, routing):
            errors.append(distance(logits(each, ids), expected))
    assert errors[1] <= AT_MOST * errors[0]
    assert errors[0] < 0.1
