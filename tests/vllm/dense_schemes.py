"""How checkpoints store dense matrices that vLLM reads, a Case for each scheme, and made-up matrices. It needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from linears import random_matrix
from quantized_layers import BLOCKS, INT4, QUARK, TOKENS, compressed

from ktmoe import Matrix
from ktmoe.weights.elements import INT4 as INT4_ELEMENT
from ktmoe.weights.elements import INT8, INT8_PLUS_128
from ktmoe.weights.formats import (
    BF16,
    FP8_PER_MATRIX,
    FP8_PER_ROW,
    MXFP4,
    MXFP8,
    Factor,
    WeightFormat,
    fp8,
    int4,
    int8,
    nvfp4,
    uint4,
)
from ktmoe.weights.order import AWQ, GPTQ, ROWS

NAME = "model.layers.0.mlp.proj"
#: Inputs of layers, which every scheme takes; the last one of FP8's blocks is half a block.
K = 320
#: A tensor of a checkpoint: a dtype of a safetensors header, and its array.
Tensor = tuple[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """How a checkpoint stores matrices.

    quantization, stated: vLLM's name of the scheme, and config.json's. format: of the matrices. endings: the tensors' names and
    dtypes, by the arrays' names in Matrix. words: arrays that are items of 32 bits in the checkpoint. more: other tensors, of a
    matrix [n, k]. head: whether the config quantizes an output layer.
    """

    quantization: str | None
    stated: dict
    format: WeightFormat
    endings: dict[str, tuple[str, str]]
    words: tuple[str, ...] = ()
    more: Callable[[int, int], Mapping[str, Tensor]] = field(default=lambda n, k: {})
    head: bool = False

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        """The matrix as the checkpoint has it, by the ends of names."""
        found = {}
        for label, (ending, dtype) in self.endings.items():
            array = matrix.stored[label]
            if label == "factor":
                turned = self.format.order.transposed
                array = array.reshape((1, -1) if turned else (-1, 1)) if self.format.factor.per_row else array.reshape(())
                array = array.astype({"F32": np.float32, "F16": np.float16}[dtype])
            elif label == "offsets" and label in self.words:
                n, groups = array.shape
                padded = np.zeros((-(-n // 8) * 8, groups), np.uint32)
                padded[:n] = array
                shifted = padded.reshape(-1, 8, groups) << np.arange(0, 32, 4, dtype=np.uint32)[:, None]
                array = np.bitwise_or.reduce(shifted, axis=1).view(np.int32)
            elif label in self.words:
                array = array.view(np.int32)
            elif label == "scales" and dtype == "F8_E8M0" and array.dtype == np.float32:
                array = (array.view(np.uint32) >> 23).astype(np.uint8)
            found[ending] = dtype, array
        return {**found, **self.more(*matrix.shape)}


def _shape(n, k):
    return {"weight_shape": ("I64", np.array([n, k]))}


def _inputs(name, *shape):
    return lambda n, k: {name: ("F32", np.full(shape, 0.125, np.float32))}


def _points(n, k, groups=None):
    return {"qzeros": ("I32", np.full((groups or -(-k // 32), n // 8), 0x77777777, np.int32))}


_WEIGHT = {"codes": ("weight", "F8_E4M3")}
_ROWS = {"factor": ("weight_scale", "F32")}
_PACKED = {"codes": ("weight_packed", "I32"), "scales": ("weight_scale", "BF16")}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "lm_head": True}
_STATIC = {**TOKENS, "strategy": "tensor", "dynamic": False}
_FLOAT = {"type": "float"}
_BITS8 = {"num_bits": 8, **_FLOAT}
_CHANNEL = {"type": "int", "strategy": "channel"}
_TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor"}


def _compressed(form: str, inputs: dict | None = None, **weights) -> tuple[str, dict]:
    stated = compressed(form, inputs, **weights)
    stated["config_groups"]["group_0"]["targets"] = ["Linear", "ParallelLMHead"]
    return "compressed-tensors", stated


CASES = {
    "bfloat16": Case(None, {}, BF16, {"codes": ("weight", "BF16")}, head=True),
    "FP8 of blocks": Case("fp8", BLOCKS, fp8(), {**_WEIGHT, "scales": ("weight_scale_inv", "F32")}),
    "FP8 of blocks, E8M0 scales": Case(
        "deepseek_v4_fp8", BLOCKS, fp8(), {**_WEIGHT, "scales": ("weight_scale_inv", "F8_E8M0")}
    ),
    "FP8 of blocks by compressed-tensors": Case(
        *_compressed("float-quantized", TOKENS, **_BITS8, strategy="block", block_structure=[128, 128]),
        fp8("bf16"),
        {**_WEIGHT, "scales": ("weight_scale", "BF16")},
    ),
    "FP8 per row": Case(
        *_compressed("float-quantized", TOKENS, **_BITS8, strategy="channel"), FP8_PER_ROW, {**_WEIGHT, **_ROWS}, head=True
    ),
    "FP8 per matrix": Case(
        "fp8",
        {"quant_method": "fp8", "activation_scheme": "static"},
        FP8_PER_MATRIX,
        {**_WEIGHT, **_ROWS},
        more=_inputs("input_scale"),
    ),
    "FP8 per matrix by compressed-tensors": Case(
        *_compressed("float-quantized", _STATIC, **_BITS8, strategy="tensor"),
        FP8_PER_MATRIX,
        {**_WEIGHT, **_ROWS},
        more=_inputs("input_scale", 1),
        head=True,
    ),
    "FP8 by ModelOpt": Case(
        "modelopt",
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        FP8_PER_MATRIX,
        {**_WEIGHT, **_ROWS},
        more=_inputs("input_scale"),
        head=True,
    ),
    "MXFP4": Case(
        *_compressed("mxfp4-pack-quantized", num_bits=4, **_FLOAT, strategy="group", group_size=32),
        MXFP4,
        {"codes": ("weight_packed", "U8"), "scales": ("weight_scale", "U8")},
        head=True,
    ),
    "MXFP4 by Quark": Case("quark", QUARK, MXFP4, {"codes": ("weight", "U8"), "scales": ("weight_scale", "U8")}),
    "MXFP8": Case("mxfp8", {"quant_method": "mxfp8"}, MXFP8, {**_WEIGHT, "scales": ("weight_scale", "U8")}, head=True),
    "MXFP8 by compressed-tensors": Case(
        *_compressed("mxfp8-quantized", **_BITS8, strategy="group", group_size=32, scale_dtype="torch.uint8"),
        MXFP8,
        {**_WEIGHT, "scales": ("weight_scale", "U8")},
        head=True,
    ),
    "NVFP4": Case(
        "modelopt_fp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": {"group_size": 16}}}},
        nvfp4(),
        {"codes": ("weight", "U8"), "scales": ("weight_scale", "F8_E4M3"), "factor": ("weight_scale_2", "F32")},
        more=_inputs("input_scale"),
        head=True,
    ),
    "NVFP4 by compressed-tensors": Case(
        *_compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, **_FLOAT, "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": "local"},
            num_bits=4,
            **_FLOAT,
            strategy="tensor_group",
            group_size=16,
        ),
        nvfp4(divides=True),
        {"codes": ("weight_packed", "U8"), "scales": ("weight_scale", "F8_E4M3"), "factor": ("weight_global_scale", "F32")},
        more=_inputs("input_global_scale", 1),
        head=True,
    ),
    "INT4": Case(*_compressed("pack-quantized", **INT4), int4(32), _PACKED, ("codes",), _shape, head=True),
    "INT4, float16 scales": Case(
        *_compressed("pack-quantized", **INT4),
        int4(32, "fp16"),
        {**_PACKED, "scales": ("weight_scale", "F16")},
        ("codes",),
        _shape,
    ),
    "INT4 per row": Case(
        *_compressed("pack-quantized", num_bits=4, **_CHANNEL),
        WeightFormat(INT4_ELEMENT, factor=Factor(per_row=True)),
        {"codes": _PACKED["codes"], **_ROWS},
        ("codes",),
        _shape,
        head=True,
    ),
    "INT4, zero points": Case(
        *_compressed("pack-quantized", **INT4, symmetric=False),
        uint4(32, "bf16"),
        {**_PACKED, "offsets": ("weight_zero_point", "I32")},
        ("codes", "offsets"),
        _shape,
        head=True,
    ),
    "INT8": Case(
        *_compressed("pack-quantized", **{**INT4, "num_bits": 8}),
        int8(32, element=INT8_PLUS_128),
        _PACKED,
        ("codes",),
        _shape,
        head=True,
    ),
    "INT8 per row": Case(
        *_compressed("pack-quantized", num_bits=8, **_CHANNEL),
        int8(element=INT8_PLUS_128),
        {"codes": _PACKED["codes"], **_ROWS},
        ("codes",),
        _shape,
        head=True,
    ),
    "INT8 with INT8 activations": Case(
        *_compressed("int-quantized", {**TOKENS, "type": "int"}, num_bits=8, **_CHANNEL),
        int8(element=INT8),
        {"codes": ("weight", "I8"), **_ROWS},
        head=True,
    ),
    "INT8 per matrix, static activations": Case(
        *_compressed(
            "int-quantized", {**_STATIC, "type": "int", "symmetric": False}, num_bits=8, type="int", strategy="tensor"
        ),
        WeightFormat(INT8, factor=Factor(per_row=False)),
        {"codes": ("weight", "I8"), **_ROWS},
        more=lambda n, k: {**_inputs("input_scale", 1)(n, k), "input_zero_point": ("I8", np.array([3], np.int8))},
        head=True,
    ),
    "GPTQ": Case(
        "gptq",
        _GPTQ,
        int4(32, "fp16", GPTQ),
        {"codes": ("qweight", "I32"), "scales": ("scales", "F16")},
        more=_points,
        head=True,
    ),
    "GPTQ per row": Case(
        "gptq",
        {**_GPTQ, "group_size": -1, "desc_act": True},
        WeightFormat(INT4_ELEMENT, factor=Factor(per_row=True), order=GPTQ),
        {"codes": ("qweight", "I32"), "factor": ("scales", "F16")},
        more=lambda n, k: _points(n, k, 1),
        head=True,
    ),
    "AWQ": Case(
        "awq",
        _AWQ,
        uint4(32, order=AWQ),
        {"codes": ("qweight", "I32"), "scales": ("scales", "F16"), "offsets": ("qzeros", "I32")},
        head=True,
    ),
}


def matrices(case: Case, rows: Sequence[int], k: int = K, seed: int = 0) -> list[Matrix]:
    """Random ones [n, k], of numbers that the checkpoint's dtypes have."""
    rng = np.random.default_rng(seed)
    return [_fitting(case, random_matrix(rng, n, k, case.format, name=NAME)) for n in rows]


def _fitting(case: Case, matrix: Matrix) -> Matrix:
    dtypes = {label: dtype for label, (_, dtype) in case.endings.items()}
    if dtypes.get("scales") == "F8_E8M0":
        return replace(matrix, scales=np.exp2(np.floor(np.log2(np.abs(matrix.scales) + np.float32(2**-9)))).astype(np.float32))
    if dtypes.get("factor") == "F16":
        return replace(matrix, factor=matrix.factor.astype(np.float16).astype(np.float32))
    return matrix


def joined(parts: Sequence[Matrix], bias: np.ndarray | None = None) -> Matrix:
    """Matrices one below the other. Each has its own factor."""
    first, weight_format = parts[0], parts[0].format
    n = sum(part.shape[0] for part in parts)
    columns = weight_format.order.transposed
    stored = {
        label: np.concatenate([part.stored[label] for part in parts], int(columns and label != "factor"))
        for label in first.stored
    }
    if weight_format.factor and not weight_format.factor.per_row:
        weight_format = replace(weight_format, factor=replace(weight_format.factor, per_row=True))
        stored["factor"] = np.concatenate([np.repeat(part.factor, part.shape[0]) for part in parts])
    return Matrix(NAME, weight_format, (n, first.shape[1]), bias=bias, **stored)


def cut(matrix: Matrix, axis: int, part: int, parts: int = 2) -> Matrix:
    """A part of the rows (0) or columns (1) of a matrix, from its arrays in rows."""
    n, k = matrix.shape
    arrays = matrix.in_order(ROWS).stored if not matrix.format.order.rows else matrix.stored
    size = [n, k]
    size[axis] //= parts
    found = {}
    for label, array in arrays.items():
        along = 0 if label == "factor" else axis
        whole = label == "factor" and (axis == 1 or not matrix.format.factor.per_row)
        found[label] = array if whole else np.ascontiguousarray(np.split(array, parts, along)[part])
    form = replace(matrix.format, order=ROWS)
    return Matrix(NAME, form, tuple(size), **found).in_order(matrix.format.order)
