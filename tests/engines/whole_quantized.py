"""Checkpoints whose matrices are all quantized, attention and MLPs, too; and the float32 ones of the numbers they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import checkpoints
import integer_checkpoints as integers
import numpy as np
import torch
from quantized_checkpoints import BLOCKS, FP8_CONFIG, Packed, Tensors, fp8, int4, write_packed
from safetensors.numpy import save_file

from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.torch import DenseGroupedLinear, DenseLinear

_GROUP = 32
#: Every matrix but the router's, the embedding's and the output layer's.
_MATRICES = r"(.*_proj)\.weight"
Meaning = Callable[[Mapping[str, np.ndarray]], np.ndarray]


def _from_zero(weights: np.ndarray, least: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[n, k] -> codes of four bits [n, k], zero points from `least` on and float16 scales, both [n, k / 32]."""
    groups = weights.reshape(len(weights), -1, _GROUP)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scales = ((high - low) / (15 - least)).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales), least, 15)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, 15)
    return codes.reshape(weights.shape).astype(np.uint8), zeros.astype(np.uint8), scales


def dwords(codes: np.ndarray, places=range(8)) -> np.ndarray:
    """[rows, n] -> int32 [rows, n / 8], the code of n = 8i + j at 4 * places[j] of dword i."""
    packed = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for j, place in enumerate(places):
        packed |= codes[:, j::8].astype(np.uint32) << np.uint32(4 * place)
    return packed.view(np.int32)


def awq(weights: np.ndarray) -> Tensors:
    codes, zeros, scales = _from_zero(weights, 0)
    packed, offsets = (dwords(each.T, integers.AWQ_PLACES) for each in (codes, zeros))
    return {".qweight": ["I32", packed], ".qzeros": ["I32", offsets], ".scales": ["F16", scales.T]}


def awq_numbers(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    codes, zeros = (integers.along_n(arrays[name], integers.AWQ_PLACES) for name in (".qweight", ".qzeros"))
    return ((codes - zeros.repeat(_GROUP, 0)) * arrays[".scales"].astype(np.float64).repeat(_GROUP, 0)).T


def _gptq(weights: np.ndarray) -> Tensors:
    codes, zeros, scales = _from_zero(weights, 1)
    packed, offsets = np.ascontiguousarray(dwords(codes).T), dwords(np.ascontiguousarray(zeros.T) - 1)
    index = np.arange(weights.shape[1], dtype=np.int32) // _GROUP
    return {".qweight": ["I32", packed], ".qzeros": ["I32", offsets], ".scales": ["F16", scales.T], ".g_idx": ["I32", index]}


def gptq_numbers(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    zeros = integers.along_n(arrays[".qzeros"]) + 1
    codes = integers.along_k(arrays[".qweight"])
    return ((codes - zeros.repeat(_GROUP, 0)) * arrays[".scales"].astype(np.float64).repeat(_GROUP, 0)).T


def _int4(weights: np.ndarray) -> Tensors:
    packed, scales = int4(weights)
    shape = np.array(weights.shape, np.int64)
    return {".weight_packed": ["I32", packed], ".weight_scale": ["BF16", scales], ".weight_shape": ["I64", shape]}


def int4_numbers(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    scales = arrays[".weight_scale"].astype(np.float64)
    return (integers.along_n(arrays[".weight_packed"]) - 8) * scales.repeat(_GROUP, 1)


def fp8_of_blocks(weights: np.ndarray) -> Tensors:
    codes, scales = fp8(weights, power_of_two=False)
    return {".weight": ["F8_E4M3", codes], ".weight_scale_inv": ["F32", scales]}


def fp8_numbers(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return checkpoints.blocks(arrays[".weight"], arrays[".weight_scale_inv"])


_INT4_GROUPS = {
    "group_0": {
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP, "symmetric": True},
    }
}
_GLM = "glm4_moe"  # with a dense MLP, shared experts and biases in attention
#: name -> the checkpoint, what a matrix's tensors mean, and the bits of a code.
WHOLE: dict[str, tuple[Packed, Meaning, int]] = {
    "AWQ": (
        Packed(
            _GLM,
            {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm", "zero_point": True},
            {_MATRICES: awq},
            exact=False,
        ),
        awq_numbers,
        4,
    ),
    "GPTQ": (
        Packed(
            _GLM,
            {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": False},
            {_MATRICES: _gptq},
            exact=False,
        ),
        gptq_numbers,
        4,
    ),
    "compressed-tensors INT4": (
        Packed(
            _GLM,
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "config_groups": _INT4_GROUPS,
                "ignore": ["lm_head", r"re:.*mlp\.gate$"],
            },
            {_MATRICES: _int4},
            exact=False,
        ),
        int4_numbers,
        4,
    ),
    "Qwen3-MoE FP8": (Packed("qwen3_moe", FP8_CONFIG, {_MATRICES: fp8_of_blocks}, exact=False, sizes=BLOCKS), fp8_numbers, 8),
}


def write(name: str, folder: Path) -> Path:
    """One of WHOLE. folder / "float32" is a checkpoint of the numbers that it stands for."""
    packed, meaning, _ = WHOLE[name]
    write_packed(packed, folder)
    write_float32(folder, {_MATRICES: meaning})
    return folder


def write_float32(folder: Path, meanings: Mapping[str, Meaning]) -> Path:
    """Write folder / "float32" beside what write_packed() has written into folder.

    meanings: regular expression of a matrix's name, whose group 1 is the stem -> what the stem's tensors mean, by their
    endings.
    """
    plain, quantized, tensors = Checkpoint(folder / "bfloat16"), Checkpoint(folder), {}
    packed = [name for name in quantized.names() if not name.endswith(("bias", ".weight_shape"))]
    for tensor in plain.names():
        info = plain.info(tensor)
        for pattern, meaning in meanings.items():
            if found := re.fullmatch(pattern, tensor):
                stem = found[1]
                arrays = {n.removeprefix(stem): array_of(quantized, n) for n in packed if re.fullmatch(stem + r"[._]\w+", n)}
                tensors[tensor] = meaning(arrays).astype(np.float32)
                assert tensors[tensor].shape == tuple(info.shape)
                break
        else:
            array = array_of(plain, tensor)
            tensors[tensor] = array if array.dtype == np.int64 else array.astype(np.float32)
    (folder / "float32").mkdir()
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "float32" / "model.safetensors")
    config = json.loads((folder / "bfloat16" / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "float32" / "config.json").write_text(json.dumps(config))
    return folder / "float32"


_DTYPES = {
    "I8": np.uint8,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "BF16": integers.BF16,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
}


def array_of(checkpoint: Checkpoint, name: str) -> np.ndarray:
    info = checkpoint.info(name)
    return np.array(checkpoint.read(name)).view(np.uint8).reshape(-1).view(_DTYPES[info.dtype]).reshape(info.shape)


def formats(model) -> dict:
    """The format of each packed matrix, by its module's name."""
    modules = dict(model.named_modules())
    found = {name: module.linear.format for name, module in modules.items() if isinstance(module, DenseLinear)}
    return found | {name: m.group.linears[0].format for name, m in modules.items() if isinstance(m, DenseGroupedLinear)}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())
