"""What bench/engines writes as GGUF for llama.cpp: the numbers of its checkpoint, as the package gguf reads them."""

import gguf
import numpy as np
import pytest
from safetensors import safe_open

import ktmoe
from bench.engines import gguf_model, torch_model

CONFIGS = {
    "gpt_oss": {"num_local_experts": 3, "intermediate_size": 96, "head_dim": 32},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 96, "head_dim": 32},
}
COMMON = {"num_hidden_layers": 2, "vocab_size": 128, "hidden_size": 64, "num_experts_per_tok": 2}
COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 1}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def meaning(matrix):
    """Of MXFP4, float64 [n, k]."""
    codes, scales = np.asarray(matrix.codes).reshape(matrix.shape[0], -1), np.asarray(matrix.scales)
    values = np.concatenate([E2M1, -E2M1])[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(matrix.shape)
    return values * np.repeat(np.exp2(scales.view(np.uint8).astype(np.float64) - 127), 32, axis=1)


@pytest.mark.parametrize("dense", ["BF16", "Q8_0"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_same_numbers(tmp_path, kind, dense):
    folder, file = tmp_path / "model", tmp_path / "model.gguf"
    torch_model.write(folder, COMMON | CONFIGS[kind] | {"model_type": kind})
    nbytes = gguf_model.write(folder, file, dense)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    numbers = {name: gguf.dequantize(tensor.data, tensor.tensor_type) for name, tensor in found.items()}
    assert sum(nbytes.values()) == sum(int(tensor.n_bytes) for tensor in found.values())
    for layer in range(2):
        experts = ktmoe.load_experts(folder, layer)
        for name in ("gate", "up", "down"):
            matrices, stem = [experts.matrix(expert, name) for expert in range(3)], f"blk.{layer}.ffn_{name}_exps"
            np.testing.assert_array_equal(numbers.pop(f"{stem}.weight"), [meaning(matrix) for matrix in matrices])
            if kind == "gpt_oss":
                np.testing.assert_array_equal(numbers.pop(f"{stem}.bias"), [matrix.bias for matrix in matrices])
    with safe_open(next(folder.glob("others-*.safetensors")), "pt") as tensors:
        held = {name: tensors.get_tensor(name).float().numpy() for name in list(tensors.keys())}
    assert len(held) == len(numbers)  # besides experts, each once
    pairs = {"lm_head.weight": "output.weight", "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight"}
    for theirs, ours in pairs.items():
        bound = 0 if dense == "BF16" else np.abs(held[theirs]).max() / 127
        assert np.abs(numbers[ours] - held[theirs]).max() <= bound
    np.testing.assert_array_equal(numbers["token_embd.weight"], held["model.embed_tokens.weight"])
