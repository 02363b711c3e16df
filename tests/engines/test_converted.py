"""What `ktmoe convert` writes, read by transformers and compressed-tensors: their numbers are ktmoe's, the rest is the same."""

import json
import re

import engine_models
import pytest
import torch
from checkpoints import numbers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name
from engine_models import logits, make, prompts, save
from safetensors.torch import load_file
from serving import assert_served
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

import ktmoe
import ktmoe.transformers as served
from ktmoe.errors import UnavailableError
from ktmoe.experts import PROJECTIONS

#: Sizes of which a matrix has several blocks of 128x128.
BLOCKS = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128}
#: case -> model, its sizes, what to convert to, and what tells transformers to make bfloat16 numbers of it.
CASES = {
    "mxfp4": ("qwen3_moe", {}, {"to": "mxfp4"}, CompressedTensorsConfig),
    "int4": ("qwen3_moe", {}, {"to": "int4"}, CompressedTensorsConfig),
    "int4 per row": ("qwen3_moe", {}, {"to": "int4", "group": "row"}, CompressedTensorsConfig),
    "int8": ("qwen3_moe", {}, {"to": "int8"}, CompressedTensorsConfig),
    "int8 in groups": ("qwen3_moe", {}, {"to": "int8", "group": 32}, CompressedTensorsConfig),
    "fp8": ("deepseek_v3", BLOCKS, {"to": "fp8"}, FineGrainedFP8Config),
    "fp8 per row": ("qwen3_moe", {}, {"to": "fp8", "group": "row"}, CompressedTensorsConfig),
    "mixtral": ("mixtral", {}, {"to": "mxfp4"}, CompressedTensorsConfig),
    "gpt-oss": ("gpt_oss", {}, {"to": "mxfp4"}, Mxfp4Config),
}
#: What compressed-tensors itself is asked for: also what transformers does not read.
STORED = {
    "mxfp4": {},
    "nvfp4": {},
    "mxfp8": {},
    "int8": {},
    "int8 in groups": {"group": 32},
    "int4": {},
    "int4 per row": {"group": "row"},
    "int4 asymmetric": {"symmetric": False},
    "fp8 per row": {"group": "row"},
    "fp8 per matrix": {"group": "matrix"},
}


@pytest.mark.smoke("one")
@pytest.mark.parametrize("case", CASES)
def test_transformers(case, tmp_path):
    model_type, sizes, options, config = CASES[case]
    model = make(model_type, **sizes)
    ktmoe.convert(save(model, tmp_path / "source"), tmp_path / "out", **options)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=config(dequantize=True)
    )
    for name, module in engine_models.experts(loaded):
        weights = ktmoe.load_experts(tmp_path / "out", int(re.search(r"layers\.(\d+)\.", name)[1]))
        for expert in range(weights.num_experts):
            dtype = module.down_proj.dtype  # float32 where scales are
            gate, up, down = (torch.from_numpy(numbers(weights.matrix(expert, p))).to(dtype) for p in PROJECTIONS)
            fused = torch.cat([gate, up]) if module.is_concatenated else torch.stack([gate, up], 1).flatten(0, 1)
            assert torch.equal(module.gate_up_proj[expert], fused.T if module.is_transposed else fused)
            assert torch.equal(module.down_proj[expert], down.T if module.is_transposed else down)
    before = dict(model.named_parameters())
    others = [name for name in before if ".experts." not in name]
    assert others
    for name in others:
        assert torch.equal(loaded.get_parameter(name), before[name]), name


@pytest.mark.smoke("one")
@pytest.mark.parametrize("case", STORED)
def test_compressed_tensors(case, tmp_path):
    """Its config is one that it takes, its targets are the experts, and its own way back gives ktmoe's numbers."""
    save(make("qwen3_moe"), tmp_path / "source")
    ktmoe.convert(tmp_path / "source", tmp_path / "out", case.partition(" ")[0], **STORED[case])
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(stated)
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = {name: tensor for path in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(path).items()}
    modules = {name.rpartition(".")[0] for name in tensors}
    targets = {name for name in modules if any(match_name(name, target) for target in scheme.targets)}
    assert targets == {name for name in modules if re.search(r"experts\.\d+\.", name)}
    assert not targets & set(config.ignore)
    weights = ktmoe.load_experts(tmp_path / "out", 1)
    for projection in PROJECTIONS:
        wanted = torch.from_numpy(numbers(weights.matrix(2, projection)))
        base = f"model.layers.1.mlp.experts.2.{projection}_proj."
        state = {name.removeprefix(base): tensor for name, tensor in tensors.items() if name.startswith(base)}
        found = compressor.decompress(state, scheme)["weight"]
        assert found.shape == wanted.shape
        # its products are rounded to bfloat16 or float32
        torch.testing.assert_close(found.double(), wanted, rtol=2.0**-7, atol=0)
        assert torch.equal(found.sign(), wanted.sign().to(found.dtype))


@pytest.mark.smoke("one")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_ktmoe_in_transformers(model_type, tmp_path):
    """Close to what the source says, as far as MXFP4 allows."""
    source = save(make(model_type), tmp_path / "source")
    ktmoe.convert(source, tmp_path / "out", "mxfp4")
    model = served.load(tmp_path / "out")
    assert_served(model)
    before, after = (logits(each, prompts()).float() for each in (served.load(source), model))
    assert 0 < (after - before).norm() / before.norm() < 0.5


def test_nvfp4_in_transformers(tmp_path):
    """transformers does not know ModelOpt's method: the report says so. ktmoe reads it, since nothing else is quantized."""
    source = save(make("qwen3_moe"), tmp_path / "source")
    assert not ktmoe.convert(source, tmp_path / "out", "nvfp4").note
    assert "transformers does not know" in ktmoe.convert(source, tmp_path / "modelopt", "nvfp4", rule="modelopt").note
    expected = logits(served.load(source), prompts()).float()
    for folder in ("out", "modelopt"):
        model = served.load(tmp_path / folder)
        assert_served(model)
        assert 0 < (logits(model, prompts()).float() - expected).norm() / expected.norm() < 0.25
    with pytest.raises(UnavailableError, match=r"quant_method 'modelopt' of config\.json: expected one"):
        served.load(tmp_path / "modelopt", dense="torch")


def test_a_model_whose_rest_is_fp8(checkpoint, tmp_path):
    """Its attention stays FP8, which transformers reads; its experts are rounded again, to four bits."""
    ktmoe.convert(checkpoint("DeepSeek-V3 FP8"), tmp_path, "mxfp4")
    model = served.load(tmp_path)
    assert_served(model)
    assert ktmoe.load_experts(tmp_path, 1).formats["up"] == ktmoe.MXFP4
    before, after = (logits(each, prompts()).float() for each in (served.load(checkpoint("DeepSeek-V3 FP8")), model))
    assert 0 < (after - before).norm() / before.norm() < 0.5
