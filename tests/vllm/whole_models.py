"""Models of which all is quantized that published checkpoints quantize, dense layers too, at sizes that vLLM's kernels take."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import checkpoints
import integer_checkpoints as integers
import ml_dtypes
import numpy as np
import quantized_checkpoints as packing
import torch
import whole_quantized as whole
from helpers import pack_nibbles
from quantized_checkpoints import BF16, PACKED, Packed, Tensors

#: Each scale of 128 x 128 has a matrix of its own, and each of vLLM's merged layers several.
SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
#: DeepSeek's attention, whose kernels in vLLM have these sizes built in.
_MLA = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
}
#: What a prompt's length is, and how many tokens a model is told to hold.
LENGTH = 48


@dataclass(frozen=True)
class Model:
    """packed: the checkpoint. meanings: what its packed matrices stand for, as write_float32() has them.

    experts, dense: how many layers ktmoe computes, the output layer too. length: tokens of a prompt. sizes: besides SIZES.
    options: of vllm.LLM. reference: what it changes in transformers' model.
    """

    packed: Packed
    meanings: Mapping[str, whole.Meaning]
    experts: int
    dense: int
    length: int = LENGTH
    sizes: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    reference: Callable[[torch.nn.Module], None] | None = None


def _fp8_per_row(weights: np.ndarray) -> Tensors:
    scales = (np.abs(weights).max(1, keepdims=True) / 448).astype(BF16)
    numbers = np.clip(weights / scales.astype(np.float64), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return {".weight": ["F8_E4M3", numbers.view(np.uint8)], ".weight_scale": ["BF16", scales]}


def _fp8_per_row_numbers(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return arrays[".weight"].view(ml_dtypes.float8_e4m3fn).astype(np.float64) * arrays[".weight_scale"].astype(np.float64)


def _symmetric(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n, k] -> codes from 0 to 15, whose zero is 8, and float16 scales, one for 32 along k."""
    groups = weights.reshape(len(weights), -1, 32)
    scales = (np.abs(groups).max(-1) / 7).astype(np.float16)
    codes = np.clip(np.rint(groups / scales[..., None].astype(np.float64)), -8, 7) + 8
    return codes.reshape(weights.shape).astype(np.uint8), scales


def _gptq(weights: np.ndarray) -> Tensors:
    codes, scales = _symmetric(weights)
    zeros = np.full((scales.shape[1], len(weights) // 8), 0x77777777, np.int32)
    index = np.arange(weights.shape[1], dtype=np.int32) // 32
    packed = np.ascontiguousarray(whole.dwords(codes).T)
    return {".qweight": ["I32", packed], ".qzeros": ["I32", zeros], ".scales": ["F16", scales.T], ".g_idx": ["I32", index]}


def _awq_of_gptq(weights: np.ndarray) -> Tensors:
    """The same numbers."""
    codes, scales = _symmetric(weights)
    zeros = np.full(scales.shape, 8, np.uint8)
    packed, offsets = (whole.dwords(each.T, integers.AWQ_PLACES) for each in (codes, zeros))
    return {".qweight": ["I32", packed], ".qzeros": ["I32", offsets], ".scales": ["F16", scales.T]}


def _nvfp4(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    groups = weights.reshape(len(weights), -1, 16)
    factor = np.float32(np.abs(weights).max() / 6 / 448)
    scales = np.maximum(np.abs(groups).max(-1) / 6 / factor, 2**-6).astype(ml_dtypes.float8_e4m3fn)
    numbers = np.clip(groups / (scales.astype(np.float64) * factor)[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return pack_nibbles(numbers.view(np.uint8).reshape(weights.shape)), scales.view(np.uint8), factor


def _modelopt(weights: np.ndarray) -> Tensors:
    codes, scales, factor = _nvfp4(weights)
    return {
        ".weight": ["U8", codes],
        ".weight_scale": ["F8_E4M3", scales],
        ".weight_scale_2": ["F32", np.array(factor)],
        ".input_scale": ["F32", np.array(np.float32(1))],
    }


def _llm_compressor(weights: np.ndarray) -> Tensors:
    codes, scales, factor = _nvfp4(weights)
    return {
        ".weight_packed": ["U8", codes],
        ".weight_scale": ["F8_E4M3", scales],
        ".weight_global_scale": ["F32", np.array([1 / factor], np.float32)],
        ".input_global_scale": ["F32", np.array([1], np.float32)],
    }


def _gpt_oss_numbers(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """[experts, inputs, outputs]."""
    found = [checkpoints.mxfp4(b.reshape(len(b), -1), s) for b, s in zip(arrays["_blocks"], arrays["_scales"], strict=True)]
    return np.stack(found).swapaxes(1, 2)


def _v4_experts_numbers(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return checkpoints.mxfp4(arrays[".weight"], arrays[".scale"])


def _v4_dense_numbers(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return checkpoints.blocks(arrays[".weight"], arrays[".scale"].view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


def _v4_published(name: str) -> str:
    """transformers saves DeepSeek-V4 by names that are not all those of its checkpoints."""
    name = name.removeprefix("model.")
    name = re.sub(r"(\.attn)\.norm\.", r"\1.kv_norm.", name)
    return {"embed_tokens.weight": "embed.weight"}.get(name, name.replace("hc_head.hc_", "hc_head_"))


def _keep_in_fp8(model: torch.nn.Module) -> None:
    """Round what attention keeps of a token as vLLM's cache of DeepSeek-V4 does: 64 numbers in E4M3 share a power of two, and
    those that are rotated stay."""

    def rounded(_module, _arguments, kept: torch.Tensor) -> torch.Tensor:
        numbers = kept[..., :-_ROTATED].unflatten(-1, (-1, 64))
        scales = torch.exp2(torch.ceil(torch.log2(numbers.abs().amax(-1, keepdim=True) / 448)))
        numbers = (numbers / scales).to(torch.float8_e4m3fn).float() * scales
        return torch.cat([numbers.flatten(-2), kept[..., -_ROTATED:]], -1)

    for name, module in model.named_modules():
        if name.endswith("kv_norm") and ".indexer." not in name:
            module.register_forward_hook(rounded)


_ROTATED = 64
_LINEAR = r"(.*_proj(?:_with_mqa)?)\.weight"
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def _compressed(form: str, weights: dict, inputs: dict | None = None) -> dict:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }


def _of(
    model_type: str,
    config: dict,
    pack: Callable[[np.ndarray], Tensors],
    numbers: whole.Meaning,
    dense: int = 5,
    *,
    experts: int = 2,
    names: str = _LINEAR,
    sizes: dict | None = None,
    changes: dict | None = None,
    more: dict | None = None,
    options: dict | None = None,
) -> Model:
    packed = Packed(model_type, config, {names: pack}, exact=False, changes=changes or {}, more=more or {})
    return Model(packed, {names: numbers}, experts, dense, sizes=sizes or {}, options=options or {})


def _routers(layers: int) -> list[str]:
    return ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(layers))]


#: vLLM's own operator for CPUs rotates MLA's keys, which are a part of a larger matrix, wrongly. By default vLLM takes torch's,
#: but not with enforce_eager.
_TORCH_ROPE = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
_FP8_ROWS = _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, _TOKENS)
_NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_FP8_PUBLISHED = packing.FP8_CONFIG
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_GLM = {"num_hidden_layers": 3}
_GPT_OSS = PACKED["gpt-oss MXFP4"]
_V4 = PACKED["DeepSeek-V4 FP4"]
_V4_EXPERTS, _ = _V4.rules
_V4_DENSE = r"(.*\.attn\.(?:wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|.*\.shared_experts\.w[123])\.weight"
_MINIMAX = r"(.*_proj|.*\.experts\.\d+\.w[123])\.weight"

MODELS = {
    "gpt-oss MXFP4": Model(_GPT_OSS, dict.fromkeys(_GPT_OSS.rules, _gpt_oss_numbers), 2, 5),
    "Qwen3-MoE FP8": _of(
        "qwen3_moe",
        _FP8_PUBLISHED | {"modules_to_not_convert": _routers(2)},
        whole.fp8_of_blocks,
        whole.fp8_numbers,
    ),
    "Qwen3-MoE FP8 per row": _of("qwen3_moe", _FP8_ROWS, _fp8_per_row, _fp8_per_row_numbers),
    "Qwen3-MoE AWQ": _of("qwen3_moe", _AWQ, whole.awq, whole.awq_numbers),
    "Qwen3-MoE GPTQ": _of(
        "qwen3_moe",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        _gptq,
        whole.gptq_numbers,
    ),
    "Qwen3-MoE NVFP4": _of(
        "qwen3_moe",
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            "ignore": _routers(2),
        },
        _modelopt,
        checkpoints.nvfp4("modelopt")[1],
    ),
    "Qwen3-MoE NVFP4 by compressed-tensors": _of(
        "qwen3_moe",
        _compressed("nvfp4-pack-quantized", _NVFP4_WEIGHTS, _NVFP4_WEIGHTS | {"symmetric": True, "dynamic": "local"}),
        _llm_compressor,
        checkpoints.nvfp4("llm-compressor")[1],
    ),
    "GLM-4-MoE FP8": _of("glm4_moe", _FP8_ROWS, _fp8_per_row, _fp8_per_row_numbers, 13, sizes=_GLM, changes={"head_dim": 64}),
    "GLM-4-MoE BF16": Model(Packed("glm4_moe", {}, {}, exact=True, changes={"head_dim": 64}), {}, 2, 13, sizes=_GLM),
    "MiniMax-M2 FP8": _of(
        "minimax_m2",
        _FP8_PUBLISHED | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        whole.fp8_of_blocks,
        whole.fp8_numbers,
        names=_MINIMAX,
        more={"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
        changes={"rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}},
    ),
    "DeepSeek-V3 FP8": _of(
        "deepseek_v3",
        _FP8_PUBLISHED,
        whole.fp8_of_blocks,
        whole.fp8_numbers,
        19,
        sizes=_MLA | {"num_hidden_layers": 3, "first_k_dense_replace": 1},
        changes={"head_dim": 64, "num_key_value_heads": 4},
        more={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        options=_TORCH_ROPE,
    ),
    "DeepSeek-V4": Model(
        Packed(
            "deepseek_v4",
            _V4.config,
            {_V4_EXPERTS: _V4.rules[_V4_EXPERTS], _V4_DENSE: list(_V4.rules.values())[1]},
            exact=True,
            changes={
                "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
                "mlp_layer_types": ["hash_moe", "moe", "moe"],
                "num_key_value_heads": 1,
                "o_groups": 2,
                "head_dim": 512,
                "qk_rope_head_dim": _ROTATED,
                "q_lora_rank": 128,
                "o_lora_rank": 128,
                "index_n_heads": 4,
                "index_head_dim": 128,
                "index_topk": 512,
            },
            more={
                "compress_ratios": [0, 4, 128],
                "num_hash_layers": 1,
                "topk_method": "noaux_tc",
                "layer_types": None,
                "mlp_layer_types": None,
            },
            published=_v4_published,
        ),
        {_V4_EXPERTS: _v4_experts_numbers, _V4_DENSE: _v4_dense_numbers},
        3,
        21,
        length=160,
        reference=_keep_in_fp8,
        # vLLM's operators for CPUs know 64, 128, 256 and 384 experts, of which 6 or 8 are chosen
        sizes={"num_hidden_layers": 3, "n_routed_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 6},
    ),
}
#: The numbers of "Qwen3-MoE GPTQ" in AWQ's layout.
TWIN = _of("qwen3_moe", _AWQ, _awq_of_gptq, whole.awq_numbers)


def write(model: Model, folder: Path, seed: int = 2) -> Path:
    """folder / "float32" is a checkpoint of the numbers that it stands for."""
    folder.mkdir()
    packing.write_packed(model.packed, folder, **SIZES | model.sizes, seed=seed)
    whole.write_float32(folder, model.meanings)
    return folder


def prompts(model: Model, count: int = 2) -> list[list[int]]:
    numbers = np.random.default_rng(4)
    return [numbers.integers(2, 128, model.length - 3 * i).tolist() for i in range(count)]
