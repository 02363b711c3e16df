"""Checkpoints of models whose experts are packed, in layouts that vLLM reads, and transformers' models of the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import checkpoints
import ml_dtypes
import models
import numpy as np
import quantized_checkpoints
import torch
from helpers import pack_nibbles
from quantized_checkpoints import PACKED, Packed, Tensors
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktmoe
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import int4, uint4
from ktmoe.weights.order import AWQ, GPTQ

_EXPERTS = r"(.*\.experts\.\d+\.(?:gate|up|down)_proj)\.weight"


#: What the largest weight becomes in E4M3: 8 of its smallest steps, so that packing shows as much as with 4 bits.
_LARGEST = 2.0**-6


def _fp8_per_row(weights: np.ndarray) -> Tensors:
    scales = (np.abs(weights).max(1, keepdims=True) / _LARGEST).astype(np.float32)
    numbers = (weights / scales).astype(ml_dtypes.float8_e4m3fn)
    return {".weight": ["F8_E4M3", numbers.view(np.uint8)], ".weight_scale": ["F32", scales]}


def _fp8(weights: np.ndarray) -> Tensors:
    """The FP8 tensors of a matrix whose sizes 128 divides."""
    blocks = weights.reshape(len(weights) // 128, 128, -1, 128)
    scales = (np.abs(blocks).max((1, 3), keepdims=True) / _LARGEST).astype(np.float32)
    numbers = (blocks / scales).astype(ml_dtypes.float8_e4m3fn).reshape(weights.shape)
    return {".weight": ["F8_E4M3", numbers.view(np.uint8)], ".weight_scale_inv": ["F32", scales[:, 0, :, 0]]}


def _rows(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n, k] -> codes + 8, two a byte, and float16 scales, one for 32 along k."""
    groups = weights.reshape(len(weights), -1, 32)
    scales = (np.abs(groups).max(-1) / 7).astype(np.float16)
    codes = np.clip(np.rint(groups / scales[..., None].astype(np.float64)), -8, 7) + 8
    return pack_nibbles(codes.reshape(weights.shape)), scales


def _gptq(weights: np.ndarray) -> Tensors:
    codes, scales = _rows(weights)
    stored = int4(32, "fp16", GPTQ).from_rows({"codes": codes, "scales": scales}, *weights.shape)
    zeros = np.full((weights.shape[1] // 32, len(weights) // 8), 0x77777777, np.int32)
    return {".qweight": ["I32", stored["codes"]], ".scales": ["F16", stored["scales"]], ".qzeros": ["I32", zeros]}


def _awq(weights: np.ndarray) -> Tensors:
    codes, scales = _rows(weights)
    arrays = {"codes": codes, "scales": scales, "offsets": np.full(scales.shape, 8, np.uint8)}
    stored = uint4(32, order=AWQ).from_rows(arrays, *weights.shape)
    return {".qweight": ["I32", stored["codes"]], ".scales": ["F16", stored["scales"]], ".qzeros": ["I32", stored["offsets"]]}


def _nvfp4(weights: np.ndarray) -> Tensors:
    groups = weights.reshape(len(weights), -1, 16)
    whole = np.float32(np.abs(weights).max() / 6 / 448)
    scales = np.maximum(np.abs(groups).max(-1) / 6 / whole, 2**-6).astype(ml_dtypes.float8_e4m3fn)
    numbers = np.clip(groups / (scales.astype(np.float64) * whole)[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return {
        ".weight": ["U8", pack_nibbles(numbers.view(np.uint8).reshape(weights.shape))],
        ".weight_scale": ["F8_E4M3", scales.view(np.uint8)],
        ".weight_scale_2": ["F32", np.array(whole)],
        ".input_scale": ["F32", np.array(np.float32(1))],
    }


def _compressed(form: str, weights: dict, inputs: dict | None) -> dict:
    group = {"targets": ["re:.*experts.*"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _qwen3(config: dict, pack: Callable[[np.ndarray], Tensors], rest: str = "") -> Packed:
    """rest: of a regular expression, other tensors that are packed, too."""
    return Packed("qwen3_moe", config, {_EXPERTS: pack, **({rest: pack} if rest else {})}, exact=False)


_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_BLOCKS = {"moe_intermediate_size": 128, "intermediate_size": 128}
_ATTENTION = r"(.*\.self_attn\.[qkvo]_proj)\.weight"
_LAYERS = 2
#: What stays as it is, where a checkpoint has to name it.
_PLAIN = ["lm_head"] + [
    f"model.layers.{layer}.{name}"
    for layer in range(_LAYERS)
    for name in ("mlp.gate", *(f"self_attn.{projection}_proj" for projection in "qkvo"))
]
#: Kimi-K2's says which layers of its own model are not packed.
_KIMI = PACKED["Kimi INT4"].config | {"ignore": ["re:.*self_attn.*", "re:.*mlp.gate$", "lm_head"]}
#: Name -> (checkpoint, sizes besides models.SIZES).
MODELS = {
    "gpt-oss MXFP4": (PACKED["gpt-oss MXFP4"], {"hidden_size": 96}),
    "INT4": (replace(PACKED["Kimi INT4"], model_type="qwen3_moe", config=_KIMI), {}),
    "FP8": (
        _qwen3(
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": _PLAIN,
            },
            _fp8,
        ),
        _BLOCKS,
    ),
    "FP8 per row": (
        _qwen3(_compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, _TOKENS), _fp8_per_row),
        {},
    ),
    "GPTQ": (
        _qwen3({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}, _gptq, _ATTENTION),
        {},
    ),
    "AWQ": (
        _qwen3({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, _awq, _ATTENTION),
        {},
    ),
    "NVFP4": (
        _qwen3(
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
                "ignore": _PLAIN,
            },
            _nvfp4,
        ),
        {},
    ),
}


def write(name: str, folder: Path) -> Path:
    """One of MODELS."""
    packed, sizes = MODELS[name]
    folder.mkdir()
    sizes = models.SIZES | sizes | {"num_hidden_layers": _LAYERS}
    return quantized_checkpoints.write_packed(packed, folder, **sizes)


def exact(folder: Path, quantized: bool) -> PreTrainedModel:
    """transformers' model in float32, of the packed numbers, or of those that they were made from."""
    model = AutoModelForCausalLM.from_pretrained(folder / "bfloat16", dtype=torch.float32)
    if not quantized:
        return model
    checkpoint = Checkpoint(folder)
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, torch.nn.Parameter):
            experts = ktmoe.load_experts(folder, int(name.split(".")[2]))
            for expert in range(experts.num_experts):
                gate, up, down = (checkpoints.numbers(experts.matrix(expert, projection)) for projection in PROJECTIONS)
                if module.is_transposed:  # gpt-oss's, interleaved
                    both, down = np.stack([gate, up], 1).reshape(-1, gate.shape[1]).T, down.T
                else:
                    both = np.concatenate([gate, up])
                module.gate_up_proj.data[expert] = torch.from_numpy(both)
                module.down_proj.data[expert] = torch.from_numpy(down)
        elif f"{name}.qweight" in checkpoint:
            module.weight.data[:] = torch.from_numpy(_integers(checkpoint, name, module.weight.shape))
    return model


def _integers(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> np.ndarray:
    """The numbers of a matrix of GPTQ or AWQ."""
    arrays = {label: checkpoint.read(f"{name}.{ending}") for label, ending in (("codes", "qweight"), ("scales", "scales"))}
    awq = checkpoint.info(f"{name}.qweight").shape[1] < shape[0]
    form = uint4(32, order=AWQ) if awq else int4(32, "fp16", GPTQ)
    if awq:
        arrays["offsets"] = checkpoint.read(f"{name}.qzeros")
    expected = form.arrays(*shape)
    stored = {label: array.view(expected[label][0]).reshape(expected[label][1]) for label, array in arrays.items()}
    return checkpoints.numbers(Matrix(name, form, tuple(shape), **stored))
