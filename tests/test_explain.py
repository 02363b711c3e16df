"""What is said of a checkpoint that no loader reads: each loader's reason, how it is quantized, what its experts are called."""

import pytest
from checkpoints import SCHEMES, write, write_index, zeros

from ktmoe import loaders
from ktmoe.errors import CheckpointError, FormatError, MissingTensorError, UnavailableError
from ktmoe.loaders.base import explain, find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.unknown import METHODS

EXPERT = "model.layers.0.mlp.experts.0.gate_proj"


def refused(checkpoint, error=UnavailableError):
    with pytest.raises(error) as caught:
        find_loader(checkpoint)
    return str(caught.value)


def strange(name="codebooks"):
    return {f"{EXPERT}.{name}": zeros("I32", 5, 7)}


def test_the_loader_that_reads_it_comes_first(tmp_path):
    found = explain(write(tmp_path, SCHEMES["fp8"].layer("model.layers.0")))
    assert [finding.loader for finding in found if finding.score > 0] == [found[0].loader] == ["fp8"]
    assert {finding.loader for finding in found} == set(loaders.names())
    assert found[0].reason == ""
    reasons = {finding.loader: finding.reason for finding in found[1:]}
    assert reasons["mxfp8"] == f"{EXPERT}.weight_scale_inv: dtype: expected F8_E8M0 or U8, found F32 [1, 1]"
    assert reasons["gptq"] == "no tensor has its names"
    assert reasons["bf16"] == "its names in layers 0, but other weights"


def test_reasons_of_those_that_have_the_names(tmp_path):
    """And of no others: shapes that no FP8 has."""
    tensors = SCHEMES["fp8 per row"].layer("model.layers.0")
    for name in tensors:
        if name.endswith("scale"):
            tensors[name] = zeros("F32", 7, 5)
    checkpoint = write(tmp_path, tensors, {"quantization_config": {"quant_method": "fbgemm_fp8"}})
    message = refused(checkpoint, FormatError)
    shape = f"{EXPERT}.weight_scale: shape: expected"
    assert message.startswith(f"{tmp_path}: no loader reads these experts: ")
    assert f"fp8: {shape} [1, 1] (one scale per 128x128), found [7, 5]" in message
    assert f"fp8_per_row: {shape} " in message
    assert f"mxfp8: {EXPERT}.weight_scale: dtype: expected F8_E8M0 or U8, found F32 [7, 5]" in message
    assert message.endswith("; config.json says quant_method 'fbgemm_fp8'")
    assert not any(f"{other}: " in message for other in ("bf16", "nvfp4", "gptq", "deepseek_v4"))


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_one_that_says_no_by_its_shapes(tmp_path, name):
    tensors = SCHEMES[name].layer("model.layers.0")
    tensors |= {each: zeros("F16", 5, 64) for each in tensors if each.endswith("gate_proj.scales")}
    message = refused(write(tmp_path, tensors), FormatError)
    assert f"{name}: {EXPERT}.scales: shape: expected a number of rows that divides k = 96" in message


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("method", [*METHODS, "auto_round", "AQLM"])
def test_ways_of_quantizing_that_are_known_by_name(tmp_path, method, nested):
    stated = {"quantization_config": {"quant_method": method}}
    message = refused(write(tmp_path, strange(), {"text_config": stated} if nested else stated))
    assert (
        f"config.json says quant_method {method!r}, which is {METHODS[method.lower().replace('_r', '-r')]}, and is not"
        in message
    )
    assert f"experts with tensors such as '{EXPERT}.codebooks' I32 [5, 7]" in message


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"quant_method": "mine"}, "config.json says quant_method 'mine'."),
        ({"quant_method": ["x"]}, "config.json says quant_method ['x']."),
        ({}, "I32 [5, 7]."),
        ([], "I32 [5, 7]."),
        (None, "I32 [5, 7]."),
    ],
)
def test_ways_of_quantizing_that_are_not(tmp_path, stated, said):
    assert said in refused(write(tmp_path, strange(), {"quantization_config": stated}))


@pytest.mark.parametrize("name", ["transformer.h.3.moe.experts_w1", "blocks.3.expert_gate", "layers.0.block_sparse_moe.w1"])
def test_names_that_no_loader_knows(tmp_path, name):
    tensors = {"model.embed.weight": zeros("BF16", 8, 8), "a.shared_expert.w": zeros("BF16", 2), name: zeros("F32", 4, 2, 2)}
    message = refused(write(tmp_path, tensors))
    assert f"Found experts with tensors such as '{name}' F32 [4, 2, 2]. Pass loader=..." in message


#: What these write for an expert's matrix [64, 96], by the name of the way of quantizing.
WRITTEN = {
    "bitsandbytes": {"weight": zeros("U8", 3072, 1), "weight.absmax": zeros("F32", 96), "weight.quant_map": zeros("F32", 16)},
    "hqq": {"W_q": zeros("U8", 32, 96), "scale": zeros("F16", 96, 1), "zero": zeros("F16", 96, 1)},
    "eetq": {"weight": zeros("I8", 96, 64), "weight_scales": zeros("F16", 64)},
    "exl3": {"trellis": zeros("I16", 6, 4, 64), "suh": zeros("F16", 96), "svh": zeros("F16", 64)},
    "vptq": {"indices": zeros("I32", 1, 96, 4), "centroids.weight": zeros("F16", 1, 65536)},
}


@pytest.mark.parametrize("method", WRITTEN)
def test_what_others_write_is_refused_by_name(tmp_path, method):
    tensors = {
        f"model.layers.0.mlp.experts.0.{stem}.{ending}": tensor
        for stem in ("gate_proj", "up_proj", "down_proj")
        for ending, tensor in WRITTEN[method].items()
    }
    message = refused(write(tmp_path, tensors, {"quantization_config": {"quant_method": method}}))
    assert "no loader recognises this checkpoint" in message
    assert f"config.json says quant_method {method!r}, which is {METHODS[method]}, and is not supported" in message


def test_a_dense_model(tmp_path):
    tensors = {f"model.layers.{layer}.mlp.gate_proj.weight": zeros("BF16", 8, 8) for layer in range(3)}
    message = refused(write(tmp_path, tensors, {"quantization_config": {"quant_method": "hqq"}}))
    assert "Found no tensor of routed experts among 3: a dense model; config.json says quant_method 'hqq'" in message


def test_a_file_that_has_not_been_downloaded(tmp_path):
    write_index(tmp_path, dict.fromkeys(strange(), "1.safetensors"))
    assert f"'{EXPERT}.codebooks' ({tmp_path}/1.safetensors: expected by" in refused(Checkpoint(tmp_path))
    write_index(tmp_path, dict.fromkeys(SCHEMES["fp8"].layer("model.layers.0"), "1.safetensors"))
    checkpoint = Checkpoint(tmp_path)
    refused(checkpoint, MissingTensorError)
    found = {finding.loader: finding for finding in explain(checkpoint)}
    assert (found["fp8"].score, found["gptq"].reason) == (0, "no tensor has its names")
    assert "found no such file" in found["fp8"].reason


@pytest.mark.parametrize(
    ("file", "about"),
    [("pytorch_model.bin", "pickled"), ("consolidated.00.pth", "pickled")],
)
def test_files_of_other_kinds(tmp_path, file, about):
    (tmp_path / file).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=rf"expected .* found '{file}': .*{about}"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"expected a folder, .* or a .gguf file, found \.\w+: .*{about}"):
        Checkpoint(tmp_path / file)
