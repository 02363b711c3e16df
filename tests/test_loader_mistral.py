"""Mistral's own files: consolidated.safetensors and its index, params.json in the place of config.json, its names."""

import json
from dataclasses import replace

import pytest
from checkpoints import EXPERTS, SCHEMES, Scheme, W, int4, int4_meaning, nvfp4, per_expert, write

from ktmoe import loaders
from ktmoe.errors import CheckpointError, FormatError, MissingTensorError
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import MISTRAL_INDEX_NAME, Checkpoint

PARAMS = {"dim": 96, "n_layers": 1, "activation": "silu", "moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2}}
FP8 = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
INT4 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}


def written(folder, scheme, params, file="consolidated.safetensors"):
    tensors = scheme.layer("layers.0")
    write(folder, tensors, file=file).close()
    (folder / "params.json").write_text(json.dumps(params))
    return tensors


@pytest.mark.parametrize(
    ("scheme", "quantization"),
    [
        (SCHEMES["fp8 mistral"], FP8),  # Mistral-Large-3, Mistral-Small-4
        (SCHEMES["bf16 native"], None),
        (per_expert("nvfp4", *nvfp4("llm-compressor"), W, "experts"), {"quant_method": "compressed-tensors"}),
        (Scheme("compressed_tensors", "experts", "", int4(W), int4_meaning(W)), INT4),
        (replace(SCHEMES["bf16 w1"], module="feed_forward.experts"), None),  # Mixtral
    ],
)
def test_one_file(tmp_path, scheme, quantization):
    tensors = written(tmp_path, scheme, PARAMS | ({"quantization": quantization} if quantization else {}))
    checkpoint = Checkpoint(tmp_path)
    assert find_loader(checkpoint) is loaders.get(scheme.loader)
    scheme.check(find_loader(checkpoint).load(checkpoint, 0), tensors, "layers.0")


def test_an_index_of_its_own(tmp_path):
    scheme = SCHEMES["fp8 mistral"]
    tensors = written(tmp_path, scheme, PARAMS, "consolidated-00001-of-00002.safetensors")
    files = dict.fromkeys(tensors, "consolidated-00001-of-00002.safetensors")
    other = dict.fromkeys(scheme.layer("layers.1"), "consolidated-00002-of-00002.safetensors")
    (tmp_path / MISTRAL_INDEX_NAME).write_text(json.dumps({"weight_map": files | other}))
    checkpoint = Checkpoint(tmp_path)
    scheme.check(find_loader(checkpoint).load(checkpoint, 0), tensors, "layers.0")
    with pytest.raises(MissingTensorError, match=rf"00002-of-00002.safetensors: expected by {MISTRAL_INDEX_NAME} for tensor"):
        find_loader(checkpoint).load(checkpoint, 1)


def test_an_index_of_transformers_counts_more(tmp_path):
    """Where a folder has both, the tensors of one are enough."""
    scheme = SCHEMES["bf16"]
    written(tmp_path, SCHEMES["bf16 native"], PARAMS)
    tensors = scheme.layer("model.layers.0")
    write(tmp_path, tensors, {"num_experts": EXPERTS}, "model-00001-of-00001.safetensors").close()
    for name, names in ((MISTRAL_INDEX_NAME, ["x"]), ("model.safetensors.index.json", tensors)):
        (tmp_path / name).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    checkpoint = Checkpoint(tmp_path)
    assert "moe" not in checkpoint.config
    scheme.check(find_loader(checkpoint).load(checkpoint, 0), tensors, "model.layers.0")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"moe": {"num_experts": 4}}, CheckpointError, "expected 4 by num_experts of config.json, found 3 experts"),
        ({"activation": "gelu"}, FormatError, "hidden_act of config.json: expected 'silu', found 'gelu'"),
        ({"quantization": [1]}, CheckpointError, "quantization_config: expected an object, found [1]"),
        ({"quantization": {"transform_config": {"config_groups": {"a": 1}}}}, FormatError, "transform_config: expected none"),
    ],
)
def test_params_that_are_refused(tmp_path, changes, error, words):
    written(tmp_path, SCHEMES["fp8 mistral"], PARAMS | changes)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(error) as caught:
        find_loader(checkpoint).load(checkpoint, 0)
    assert words in str(caught.value)


@pytest.mark.parametrize("params", [{}, {"moe": None}, {"moe": [1]}, {"moe": {}, "activation": None, "quantization": None}])
def test_params_that_say_nothing(tmp_path, params):
    tensors = written(tmp_path, SCHEMES["fp8 mistral"], params)
    checkpoint = Checkpoint(tmp_path)
    SCHEMES["fp8 mistral"].check(find_loader(checkpoint).load(checkpoint, 0), tensors, "layers.0")


def test_params_that_are_no_json(tmp_path):
    written(tmp_path, SCHEMES["fp8 mistral"], PARAMS)
    (tmp_path / "params.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"params.json: expected a JSON object, found malformed JSON"):
        Checkpoint(tmp_path)
