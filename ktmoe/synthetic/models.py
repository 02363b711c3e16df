"""The routed experts of known models as data: names, dtypes, shapes, values and config.json.

What all write_* functions share. path: a new or empty folder. num_experts: in each layer. hidden, intermediate: multiples of
the format's group. layers: `layers.{L}`, with `prefix` ("", "model." or another) before it. top_k, swiglu_limit: go into
config.json. writing: `seed`, `shard_bytes` and `progress`, see ktmoe.synthetic.files.write.
Weights have a standard deviation of about 1/sqrt(k), so that activations neither vanish nor blow up.
They raise InputError for a size that is not possible and for a folder that already holds a model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ktmoe.errors import InputError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders.naming import NUMBERED_STEMS, PROJ_STEMS
from ktmoe.synthetic.files import Model, check, load, write
from ktmoe.synthetic.tensors import Tensor, bf16_numbers, constant, scales, uniform
from ktmoe.weights.formats import MXFP4, int4

#: (name, n, k) of one expert's matrices.
_Matrices = Iterator[tuple[str, int, int]]


def write_deepseek_v4(
    path: str | os.PathLike[str],
    *,
    num_experts: int = 32,
    hidden: int = 4096,
    intermediate: int = 2048,
    layers: int = 1,
    mtp_layers: int = 0,
    prefix: str = "",
    swiglu_limit: float | None = 10.0,
    top_k: int = 6,
    **writing: Any,
) -> None:
    """DeepSeek-V4: MXFP4 in I8 and F8_E8M0. mtp_layers: `mtp.{M}`. swiglu_limit: None leaves it out of config.json.

    Examples:
        >>> synthetic.write_deepseek_v4("deepseek_v4", num_experts=2, hidden=64, intermediate=64)
        >>> ktmoe.load_experts("deepseek_v4", 0).num_experts
        2
    """
    for name, value in (("layers", layers), ("mtp_layers", mtp_layers)):
        if value < 0:
            raise InputError(f"{name}: expected at least 0, found {value}")
    if not layers + mtp_layers:
        raise InputError("layers: expected at least one layer or MTP layer, found 0 and 0")
    names = [f"{prefix}layers.{i}" for i in range(layers)] + [f"{prefix}mtp.{i}" for i in range(mtp_layers)]
    model = _deepseek_v4(names, num_experts, hidden, intermediate)
    limit = {} if swiglu_limit is None else {"swiglu_limit": swiglu_limit}
    model.config.update(limit, num_experts_per_tok=top_k, num_hidden_layers=layers, num_nextn_predict_layers=mtp_layers)
    write(path, model, **writing)


def deepseek_v4_experts(
    *, num_experts: int = 32, hidden: int = 4096, intermediate: int = 2048, swiglu_limit: float = 10.0, seed: int = 0
) -> ExpertWeights:
    """Layer 0 of write_deepseek_v4, without a file.

    Examples:
        >>> synthetic.deepseek_v4_experts(num_experts=2, hidden=64, intermediate=64).formats["down"].description
        'E2M1 with ue8m0 scales per 1x32'
    """
    model = _deepseek_v4(["layers.0"], num_experts, hidden, intermediate)
    model.config.update(swiglu_limit=swiglu_limit)
    return load(model, seed)


def _deepseek_v4(layers: list[str], num_experts: int, hidden: int, intermediate: int) -> Model:
    check(hidden=(hidden, 32), intermediate=(intermediate, 32), num_experts=(num_experts, 1))
    tensors = []
    for base in layers:
        for name, n, k in matrices(f"{base}.ffn.experts", NUMBERED_STEMS, num_experts, hidden, intermediate):
            tensors += [
                Tensor(f"{name}.weight", "I8", (n, k // 2), uniform),
                Tensor(f"{name}.scale", "F8_E8M0", MXFP4.scales["scales"].shape(n, k), scales(MXFP4, k)),
            ]
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "expert_dtype": "fp4",
        # model-wide, and true of the attention and the shared experts only: just as misleading as in the real files
        "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    }
    return Model("deepseek_v4", config, tensors)


def write_gpt_oss(
    path: str | os.PathLike[str],
    *,
    num_experts: int = 32,
    hidden: int = 2880,
    intermediate: int = 2880,
    layers: int = 1,
    prefix: str = "model.",
    swiglu_limit: float = 7.0,
    top_k: int = 4,
    **writing: Any,
) -> None:
    """gpt-oss: MXFP4 with biases, gate and up interleaved, all experts of a layer in one tensor, made expert by expert.

    Examples:
        >>> synthetic.write_gpt_oss("gpt_oss", num_experts=2, hidden=64, intermediate=64)
        >>> ktmoe.load_experts("gpt_oss", 0).num_experts
        2
    """
    model = _gpt_oss(bases(prefix, layers), num_experts, hidden, intermediate)
    model.config.update(swiglu_limit=swiglu_limit, num_experts_per_tok=top_k, num_hidden_layers=layers)
    write(path, model, **writing)


def gpt_oss_experts(
    *, num_experts: int = 32, hidden: int = 2880, intermediate: int = 2880, swiglu_limit: float = 7.0, seed: int = 0
) -> ExpertWeights:
    """Layer 0 of write_gpt_oss, without a file.

    Examples:
        >>> synthetic.gpt_oss_experts(num_experts=2, hidden=64, intermediate=64).formats["down"].description
        'E2M1 with ue8m0 scales per 1x32'
    """
    model = _gpt_oss(bases("model.", 1), num_experts, hidden, intermediate)
    model.config.update(swiglu_limit=swiglu_limit)
    return load(model, seed)


def _gpt_oss(layers: list[str], num_experts: int, hidden: int, intermediate: int) -> Model:
    check(hidden=(hidden, 32), intermediate=(intermediate, 32), num_experts=(num_experts, 1))
    tensors = []
    for base in layers:
        for stem, n, k in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
            name, rows = f"{base}.mlp.experts.{stem}", (num_experts, n)
            tensors += [
                Tensor(f"{name}_blocks", "U8", (*rows, k // 32, 16), uniform, slabs=num_experts),
                Tensor(f"{name}_scales", "U8", (*rows, k // 32), scales(MXFP4, k), slabs=num_experts),
                Tensor(f"{name}_bias", "BF16", rows, bf16_numbers(0.5), slabs=num_experts),
            ]
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_local_experts": num_experts,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    }
    return Model("gpt_oss", config, tensors)


def write_kimi_k2(
    path: str | os.PathLike[str],
    *,
    num_experts: int = 32,
    hidden: int = 7168,
    intermediate: int = 2048,
    group: int = 32,
    layers: int = 1,
    prefix: str = "model.",
    top_k: int = 8,
    **writing: Any,
) -> None:
    """Kimi-K2-Thinking: symmetric INT4 of compressed-tensors, one bfloat16 scale per `group` along k.

    Examples:
        >>> synthetic.write_kimi_k2("kimi_k2", num_experts=2, hidden=64, intermediate=64)
        >>> ktmoe.load_experts("kimi_k2", 0).num_experts
        2
    """
    model = _kimi_k2(bases(prefix, layers), num_experts, hidden, intermediate, group)
    model.config.update(num_experts_per_tok=top_k, num_hidden_layers=layers)
    write(path, model, **writing)


def kimi_k2_experts(
    *, num_experts: int = 32, hidden: int = 7168, intermediate: int = 2048, group: int = 32, seed: int = 0
) -> ExpertWeights:
    """Layer 0 of write_kimi_k2, without a file.

    Examples:
        >>> synthetic.kimi_k2_experts(num_experts=2, hidden=64, intermediate=64).formats["down"].description
        'INT4 with bf16 scales per 1x32'
    """
    return load(_kimi_k2(bases("model.", 1), num_experts, hidden, intermediate, group), seed)


def _kimi_k2(layers: list[str], num_experts: int, hidden: int, intermediate: int, group: int) -> Model:
    check(group=(group, 1), num_experts=(num_experts, 1))
    check(hidden=(hidden, math.lcm(group, 8)), intermediate=(intermediate, math.lcm(group, 8)))
    weight_format = int4(group)
    tensors = []
    for base in layers:
        for name, n, k in matrices(f"{base}.mlp.experts", PROJ_STEMS, num_experts, hidden, intermediate):
            tensors += [
                Tensor(f"{name}.weight_packed", "I32", (n, k // 8), uniform),
                Tensor(f"{name}.weight_scale", "BF16", weight_format.scales["scales"].shape(n, k), scales(weight_format, k)),
                Tensor(f"{name}.weight_shape", "I32", (2,), constant(np.array([n, k], "<i4"))),
            ]
    weights = {"num_bits": 4, "group_size": group, "strategy": "group", "symmetric": True, "type": "int", "actorder": None}
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
    }
    return Model("compressed_tensors", config, tensors)


def write_qwen3(
    path: str | os.PathLike[str],
    *,
    num_experts: int = 32,
    hidden: int = 4096,
    intermediate: int = 1536,
    layers: int = 1,
    prefix: str = "model.",
    top_k: int = 8,
    **writing: Any,
) -> None:
    """Qwen3-MoE (235B-A22B): bfloat16. hidden, intermediate: any.

    Examples:
        >>> synthetic.write_qwen3("qwen3", num_experts=2, hidden=64, intermediate=64)
        >>> ktmoe.load_experts("qwen3", 0).num_experts
        2
    """
    model = _qwen3(bases(prefix, layers), num_experts, hidden, intermediate)
    model.config.update(num_experts_per_tok=top_k, num_hidden_layers=layers)
    write(path, model, **writing)


def qwen3_experts(*, num_experts: int = 32, hidden: int = 4096, intermediate: int = 1536, seed: int = 0) -> ExpertWeights:
    """Layer 0 of write_qwen3, without a file.

    Examples:
        >>> synthetic.qwen3_experts(num_experts=2, hidden=64, intermediate=64).formats["down"].description
        'BF16'
    """
    return load(_qwen3(bases("model.", 1), num_experts, hidden, intermediate), seed)


def _qwen3(layers: list[str], num_experts: int, hidden: int, intermediate: int) -> Model:
    check(hidden=(hidden, 1), intermediate=(intermediate, 1), num_experts=(num_experts, 1))
    tensors = [
        Tensor(f"{name}.weight", "BF16", (n, k), bf16_numbers(1 / math.sqrt(k)))
        for base in layers
        for name, n, k in matrices(f"{base}.mlp.experts", PROJ_STEMS, num_experts, hidden, intermediate)
    ]
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": num_experts,
        "norm_topk_prob": True,
    }
    return Model("bf16", config, tensors)


def bases(prefix: str, layers: int) -> list[str]:
    """What the names of each layer's tensors begin with."""
    check(layers=(layers, 1))
    return [f"{prefix}layers.{layer}" for layer in range(layers)]


def matrices(base: str, stems: Mapping[str, str], num_experts: int, hidden: int, intermediate: int) -> _Matrices:
    """Yield (name, n, k) of all matrices of a layer."""
    for expert in range(num_experts):
        for projection in ("gate", "down", "up"):
            n, k = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
            yield f"{base}.{expert}.{stems[projection]}", n, k
