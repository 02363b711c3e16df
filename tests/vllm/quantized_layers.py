"""Layers of quantized experts that vLLM makes and fills, by the schemes of tests/checkpoints.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import checkpoints
import numpy as np

NAME = "model.layers.0"


def compressed(form: str, inputs: dict | None = None, **weights) -> dict:
    """What config.json says of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


_W1 = {"ckpt_names": ("w1", "w2", "w3")}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


QUARK = {
    "quant_method": "quark",
    "export": {"kv_cache_group": [], "pack_method": "reorder"},
    "exclude": ["lm_head"],
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "global_quant_config": {
        "weight": {
            "dtype": "fp4",
            "qscheme": "per_group",
            "group_size": 32,
            "is_dynamic": False,
            "scale_format": "e8m0",
            "ch_axis": -1,
        },
        "input_tensors": None,
        "output_tensors": None,
        "bias": None,
    },
}


@dataclass(frozen=True)
class Case:
    """scheme: of checkpoints.SCHEMES. quantization: vLLM's name of it. stated: config.json's. method: vLLM's class.

    endings: what vLLM's model renames. arguments: of the layer. model: what else config.json says that vLLM looks at.
    """

    scheme: str
    quantization: str
    stated: dict
    method: str
    endings: dict = field(default_factory=dict)
    arguments: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)


_V4 = {".scale": ".weight_scale"}
_V4_BASE = {".scale": ".weight_scale_inv"}
_GPT_OSS = {"activation": "swigluoai", "has_bias": True}
_WNA16 = "CompressedTensorsWNA16MoEMethod"
CASES = {
    "gpt-oss": Case("gpt_oss", "gpt_oss_mxfp4", {}, "GptOssMxfp4MoEMethod", {}, _GPT_OSS),
    "DeepSeek-V4": Case("deepseek_v4", "deepseek_v4_fp8", BLOCKS, "Mxfp4MoEMethod", _V4, {**_W1, "swiglu_limit": 10.0}),
    "MXFP4": Case(
        "mxfp4 packed",
        "compressed-tensors",
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        "CompressedTensorsW4A4Mxfp4MoEMethod",
        {},
        _W1,
    ),
    "MXFP4 by Quark": Case("mxfp4 quark", "quark", QUARK, "QuarkOCP_MX_MoEMethod"),
    "MXFP8": Case("mxfp8 weight_scale", "mxfp8", {"quant_method": "mxfp8"}, "ModelOptMxFp8FusedMoE"),
    "MXFP8 by compressed-tensors": Case(
        "mxfp8 weight_scale",
        "compressed-tensors",
        compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"),
        "CompressedTensorsW8A8Mxfp8MoEMethod",
    ),
    "FP8": Case("fp8", "fp8", BLOCKS, "Fp8MoEMethod"),
    "FP8, bf16 scales": Case("fp8 bf16", "fp8", BLOCKS, "Fp8MoEMethod"),
    "DeepSeek-V4 base": Case(
        "deepseek_v4 base", "deepseek_v4_fp8", BLOCKS, "Fp8MoEMethod", _V4_BASE, _W1, {"expert_dtype": "fp8"}
    ),
    "MXFP4 by its vLLM name": Case("mxfp4 quark", "mxfp4", {}, "Mxfp4MoEMethod"),
    "FP8 per matrix": Case("fp8 per matrix", "fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}, "Fp8MoEMethod"),
    "FP8 of blocks by compressed-tensors": Case(
        "fp8 weight_scale",
        "compressed-tensors",
        compressed("float-quantized", TOKENS, num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        "CompressedTensorsW8A8Fp8MoEMethod",
    ),
    "FP8 per row": Case(
        "fp8 per row",
        "compressed-tensors",
        compressed("float-quantized", TOKENS, num_bits=8, type="float", strategy="channel"),
        "CompressedTensorsW8A8Fp8MoEMethod",
    ),
    "FP8 per matrix by compressed-tensors": Case(
        "fp8 per matrix",
        "compressed-tensors",
        compressed("float-quantized", _TENSOR, num_bits=8, type="float", strategy="tensor"),
        "CompressedTensorsW8A8Fp8MoEMethod",
    ),
    "FP8 by ModelOpt": Case(
        "fp8 per matrix", "modelopt", {"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOptFp8MoEMethod"
    ),
    "INT4": Case("int4", "compressed-tensors", compressed("pack-quantized", **INT4), _WNA16),
    "INT4, zero points": Case(
        "int4 zero points", "compressed-tensors", compressed("pack-quantized", **INT4, symmetric=False), _WNA16
    ),
    "INT4 per row": Case(
        "int4 per row", "compressed-tensors", compressed("pack-quantized", num_bits=4, type="int", strategy="channel"), _WNA16
    ),
    "INT8": Case("int8 packed", "compressed-tensors", compressed("pack-quantized", **{**INT4, "num_bits": 8}), _WNA16),
    "INT8 per row": Case(
        "int8 packed per row",
        "compressed-tensors",
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
        _WNA16,
    ),
    "GPTQ": Case(
        "gptq",
        "gptq",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        "AutoGPTQMoEMethod",
    ),
    "AWQ": Case(
        "awq",
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        "AutoAWQMoEMethod",
    ),
    "NVFP4": Case(
        "nvfp4",
        "modelopt_fp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": {"group_size": 16}}}},
        "ModelOptNvFp4FusedMoE",
    ),
    "NVFP4 by compressed-tensors": Case(
        "nvfp4 divided",
        "compressed-tensors",
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "CompressedTensorsW4A4Nvfp4MoEMethod",
    ),
}


def filled(layers, case: Case, tensors: checkpoints.Tensors, hidden: int, intermediate: int):
    """A layer that vLLM has filled with a checkpoint's tensors, and not processed."""
    layers.model_says(**case.model)
    config = layers.quantization(case.quantization, case.stated)
    layer = layers.make(config, checkpoints.EXPERTS, hidden, intermediate, base(case), **case.arguments)
    fill(layers, layer, case, tensors)
    return layer


def base(case: Case) -> str:
    return f"{NAME}.{checkpoints.SCHEMES[case.scheme].module}"


def fill(layers, layer, case: Case, tensors: checkpoints.Tensors) -> None:
    """Fill a layer as vLLM does with a checkpoint's tensors."""
    read = {name.removeprefix(f"{base(case)}."): layers.tensor(*tensor) for name, tensor in tensors.items()}
    if case.scheme == "gpt_oss":
        fill_gpt_oss(layer, read)
        return
    read = {name: each for name, each in read.items() if not name.endswith("g_idx")}  # vLLM's models leave them out
    for old, new in case.endings.items():
        read = {name.removesuffix(old) + new if name.endswith(old) else name: each for name, each in read.items()}
    loaded = set(layer.load_weights(iter(read.items())))
    missing = {name for name, _ in layer.named_parameters()} - loaded
    assert all("input" in name or name.endswith(("bias", "weight_shape")) for name in missing)  # a checkpoint may lack them


def fill_gpt_oss(layer, read) -> None:
    """Fill a layer as vLLM's model does, which names all experts at once."""
    for stem, parameter in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        for ending, kind in (("_blocks", "_weight"), ("_scales", "_weight_scale"), ("_bias", "_bias")):
            stored = read[stem + ending].flatten(2) if ending == "_blocks" else read[stem + ending]
            target = getattr(layer, parameter + kind)
            target.weight_loader(target, stored, weight_name=parameter + kind, shard_id=None, expert_id=None)


def sane(tensors: checkpoints.Tensors) -> checkpoints.Tensors:
    """The tensors with scales of powers of two near 1, so that outputs are finite."""
    made = {}
    for name, (dtype, array) in tensors.items():
        powers = "scale" in name and array.dtype == np.uint8 and dtype in ("U8", "F8_E8M0")
        made[name] = [dtype, (array % 8 + 118).astype(np.uint8) if powers else array]
    return made


def config_of(case: Case) -> dict:
    """A checkpoint's config.json, for ktmoe's own loader."""
    model = {"gpt_oss": {"model_type": "gpt_oss"}, "deepseek_v4": {"swiglu_limit": 10.0}}.get(case.scheme, {})
    count = checkpoints.SCHEMES[case.scheme].count
    return {count: checkpoints.EXPERTS, "hidden_act": "silu", "quantization_config": case.stated, **model}


def said(caplog) -> list[str]:
    """The lines about layers that are vLLM's."""
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("ktmoe leaves")]
