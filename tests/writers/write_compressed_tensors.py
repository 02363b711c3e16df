"""write_compressed_tensors.py FOLDER: experts in the formats of compressed-tensors' presets, and its own way back."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import writing
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.model_compressors import ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

#: case -> preset, and what its weights have instead.
CASES = {
    "W4A16": ("W4A16", {}),
    "W4A16 group 32": ("W4A16", {"group_size": 32}),
    "W4A16 channel": ("W4A16", {"strategy": "channel", "group_size": None}),
    "W4A16_ASYM": ("W4A16_ASYM", {}),
    "W8A16": ("W8A16", {}),
    "W8A16 group": ("W8A16", {"strategy": "group", "group_size": 128}),
    "INT8": ("INT8", {}),
    "FP8": ("FP8", {}),
    "FP8_DYNAMIC": ("FP8_DYNAMIC", {}),
    "FP8_BLOCK": ("FP8_BLOCK", {}),
    "NVFP4": ("NVFP4", {}),
    "NVFP4A16": ("NVFP4A16", {}),
    "MXFP4": ("MXFP4", {}),
    "MXFP4A16": ("MXFP4A16", {}),
    "MXFP8": ("MXFP8", {}),
    "W4AFP8": ("W4AFP8", {}),
}


def write(folder: Path, preset: str, changes: dict) -> dict[str, np.ndarray]:
    model = writing.experts(torch.bfloat16)
    scheme = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[preset])
    scheme = scheme.model_copy(update={"weights": type(scheme.weights)(**{**scheme.weights.model_dump(), **changes})})
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}))
    for linear in writing.linears(model).values():
        calibrate(linear, scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    writing.save(folder, model.state_dict())
    compressor.update_config(folder)
    return {name: numbers(linear) for name, linear in writing.linears(model).items()}


def calibrate(linear: torch.nn.Linear, arguments) -> None:
    """Fills in the scales: by the largest and smallest number of what shares one."""
    w = linear.weight.data
    n, k = w.shape
    groups = {
        "tensor": w.reshape(1, 1, -1),
        "channel": w.reshape(n, 1, -1),
        "group": w.reshape(n, -1, arguments.group_size or k),
        "tensor_group": w.reshape(n, -1, arguments.group_size or k),
        "block": w.reshape(n // 128, 128, k // 128, 128).transpose(1, 2).flatten(2),
    }[arguments.strategy]
    whole = None
    if hasattr(linear, "weight_global_scale"):
        whole = generate_gparam(w.min(), w.max())
        linear.weight_global_scale.data.copy_(whole)
    scale, zero_point = calculate_qparams(groups.amin(2), groups.amax(2), arguments, whole)
    linear.weight_scale.data.copy_(scale.reshape(linear.weight_scale.shape))
    if hasattr(linear, "weight_zero_point"):
        linear.weight_zero_point.data.copy_(zero_point.reshape(linear.weight_zero_point.shape))
    for name in ("input_scale", "input_global_scale"):
        if hasattr(linear, name):
            getattr(linear, name).data.fill_(1)


def numbers(linear: torch.nn.Linear) -> np.ndarray:
    """The numbers by the writer's own way back, with scales in float64 so that it does not round."""
    scheme, state = linear.quantization_scheme, dict(linear.state_dict())
    for name in ("weight_scale", "weight_global_scale"):
        if name in state and state[name].is_floating_point():
            state[name] = state[name].double()
    if "weight_global_scale" in state:  # whose own decompress() rounds to bfloat16
        n, half = state["weight_packed"].shape
        codes = unpack_fp4_from_uint8(state["weight_packed"], n, 2 * half, dtype=torch.float64)
        scale, whole = state["weight_scale"], state["weight_global_scale"]
        weights = dequantize(codes, scale, args=scheme.weights, global_scale=whole, dtype=torch.float64)
    else:
        kind = infer_module_format(type(linear), scheme)
        weights = BaseCompressor.get_value_from_registry(kind.value).decompress(state, scheme)["weight"]
    return weights.double().numpy()


if __name__ == "__main__":
    writing.main({name: partial(write, preset=preset, changes=changes) for name, (preset, changes) in CASES.items()})
