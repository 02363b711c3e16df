"""Checkpoints in the published layouts of packed formats, made from a bfloat16 one: each weight becomes the nearest code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import checkpoints
import engine_models
import ml_dtypes
import numpy as np
from helpers import pack_nibbles

from ktmoe.loaders.checkpoint import Checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)
#: name's ending -> (dtype as safetensors calls it, array).
Tensors = Mapping[str, list]


def mxfp4(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., n, k] -> E2M1 codes, two a byte, and bytes of UE8M0, one for 32 along k: the largest weight becomes 4 to 6."""
    groups = weights.reshape(*weights.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    numbers = np.clip(groups / np.exp2(exponents)[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return pack_nibbles(numbers.view(np.uint8).reshape(weights.shape)), (exponents + 127).astype(np.uint8)


def fp8(weights: np.ndarray, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """[n, k] -> E4M3 and a scale for each 128x128, float32 or UE8M0: the largest weight becomes 448, or 224 to 448."""
    n, k = weights.shape
    padded = np.zeros((-(-n // 128) * 128, -(-k // 128) * 128))
    padded[:n, :k] = weights
    scales = (np.abs(padded.reshape(padded.shape[0] // 128, 128, -1, 128)).max((1, 3)) / 448).astype(np.float32)
    if power_of_two:
        scales = np.exp2(np.ceil(np.log2(scales)))
    numbers = np.clip(weights / scales.repeat(128, 0)[:n].repeat(128, 1)[:, :k], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return numbers.view(np.uint8), scales.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8) if power_of_two else scales


def int4(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n, k] -> codes + 8, eight an int32, lowest bits first, and bfloat16 scales, one for 32 along k."""
    groups = weights.reshape(len(weights), -1, 32)
    scales = (np.abs(groups).max(-1) / 7).astype(BF16)
    codes = np.clip(np.rint(groups / scales[..., None].astype(np.float64)), -8, 7) + 8
    return pack_nibbles(codes.reshape(weights.shape)).view(np.int32), scales


def _gpt_oss(weights: np.ndarray) -> Tensors:
    codes, scales = mxfp4(weights.swapaxes(1, 2))  # [experts, inputs, outputs]
    return {"_blocks": ["U8", codes.reshape(*scales.shape, 16)], "_scales": ["U8", scales]}


def _deepseek_v4(weights: np.ndarray) -> Tensors:
    codes, scales = mxfp4(weights)
    return {".weight": ["I8", codes], ".scale": ["F8_E8M0", scales]}


def _fp8(ending: str, dtype: str) -> Callable[[np.ndarray], Tensors]:
    def tensors(weights: np.ndarray) -> Tensors:
        codes, scales = fp8(weights, dtype == "F8_E8M0")
        return {".weight": ["F8_E4M3", codes], ending: [dtype, scales]}

    return tensors


def _int4(weights: np.ndarray) -> Tensors:
    packed, scales = int4(weights)
    shape = np.array(weights.shape, np.int32)
    return {".weight_packed": ["I32", packed], ".weight_scale": ["BF16", scales], ".weight_shape": ["I32", shape]}


@dataclass(frozen=True)
class Packed:
    """model_type, sizes: engine_models.make()'s. config: the checkpoint's quantization_config.

    rules: regular expression of a tensor's name, whose group 1 is the stem -> what the tensor becomes, by the stem's endings.
    exact: whether every weight, scale included, is a bfloat16 number. changes: what the model's config is told besides.
    more: what config.json says besides; None takes a key away.
    published: what a tensor is called, where transformers saves it by another name.
    """

    model_type: str
    config: dict
    rules: Mapping[str, Callable[[np.ndarray], Tensors]]
    exact: bool
    sizes: dict = field(default_factory=dict)
    changes: dict = field(default_factory=dict)
    more: dict = field(default_factory=dict)
    published: Callable[[str], str] = str


FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_PROJECTIONS = r"(?:gate|up|down)_proj"
#: DeepSeek-V3's sizes, so that a matrix has several blocks of 128x128.
BLOCKS = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128}
#: The formats that people have.
PACKED = {
    "gpt-oss MXFP4": Packed(
        "gpt_oss",
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        {r"(.*\.experts\.(?:gate_up|down)_proj)": _gpt_oss},
        exact=True,
    ),
    "DeepSeek-V4 FP4": Packed(
        "deepseek_v4",
        FP8_CONFIG | {"scale_fmt": "ue8m0"},
        {
            r"(.*\.ffn\.experts\.\d+\.w[123])\.weight": _deepseek_v4,
            r"(.*\.attn\.(?:wq_a|wq_b|wkv|wo_a|wo_b)|.*\.shared_experts\.w[123])\.weight": _fp8(".scale", "F8_E8M0"),
        },
        exact=True,
    ),
    "DeepSeek-V3 FP8": Packed(
        "deepseek_v3",
        FP8_CONFIG,
        {rf"(.*\.self_attn\.\w+proj\w*|.*\.{_PROJECTIONS})\.weight": _fp8(".weight_scale_inv", "F32")},
        exact=False,
        sizes=BLOCKS,
    ),
    "Kimi INT4": Packed(
        "deepseek_v3",
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
                }
            },
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", rf"re:.*mlp\.{_PROJECTIONS}.*"],
        },
        {rf"(.*\.experts\.\d+\.{_PROJECTIONS})\.weight": _int4},
        exact=False,
    ),
}


def write(name: str, folder: Path, **sizes: object) -> Path:
    """One of PACKED. sizes: more of them."""
    return write_packed(PACKED[name], folder, **sizes)


def write_packed(packed: Packed, folder: Path, **sizes: object) -> Path:
    """Write a checkpoint with packed weights. folder / "bfloat16" is what it was made from."""
    plain = _write_plain(packed, folder / "bfloat16", sizes)
    checkpoint, tensors = Checkpoint(plain), {}
    for tensor in checkpoint.names():
        info = checkpoint.info(tensor)
        array = checkpoint.read(tensor).reshape(*info.shape, -1)
        for pattern, pack in packed.rules.items():
            if found := re.fullmatch(pattern, tensor):
                made = pack(array.view(BF16)[..., 0].astype(np.float64))
                tensors |= {found[1] + ending: [dtype, np.ascontiguousarray(part)] for ending, (dtype, part) in made.items()}
                break
        else:
            tensors[tensor] = [info.dtype, array.reshape(*info.shape[:-1], -1)]
    config = json.loads((plain / "config.json").read_text())
    checkpoints.write(folder, tensors, config | ({"quantization_config": packed.config} if packed.config else {}))
    return folder


def _write_plain(packed: Packed, folder: Path, sizes: dict) -> Path:
    changes = {"changes": packed.changes} if packed.changes else {}
    model = engine_models.make(packed.model_type, **packed.sizes | changes | sizes)
    engine_models.save(model, folder)
    config = json.loads((folder / "config.json").read_text()) | packed.more
    config = {key: value for key, value in config.items() if value is not None or key not in packed.more}
    checkpoint = Checkpoint(folder)
    tensors = {}
    for name in checkpoint.names():
        info = checkpoint.info(name)
        array = np.array(checkpoint.read(name)).reshape(*info.shape, -1)
        tensors[packed.published(name)] = [info.dtype, array.reshape(*info.shape[:-1], -1)]
    checkpoints.write(folder, tensors, config)
    return folder
