"""Experts of quantized checkpoints: a row of FORMATS is a method class of vLLM, its parameters, and the format that they have.

| vLLM's method | parameters behind w13_ and w2_ | format |
|---|---|---|
| GptOssMxfp4MoEMethod, Mxfp4MoEMethod | weight U8, weight_scale U8, bias | MXFP4 |
| CompressedTensorsW4A4Mxfp4MoEMethod | weight_packed U8, weight_scale U8 | MXFP4 |
| QuarkOCP_MX_MoEMethod | weight U8, weight_scale U8 | MXFP4, where that is what it has |
| ModelOptMxFp8FusedMoE, CompressedTensorsW8A8Mxfp8MoEMethod | weight E4M3, weight_scale U8 | MXFP8 |
| Fp8MoEMethod | weight E4M3, weight_scale_inv F32 of blocks; or weight_scale F32 of matrices | FP8 |
| CompressedTensorsW8A8Fp8MoEMethod | weight E4M3, weight_scale F32 of blocks, rows or matrices | FP8 |
| ModelOptFp8MoEMethod | weight E4M3, weight_scale F32 of matrices | FP8 |
| CompressedTensorsWNA16MoEMethod | weight_packed I32, weight_scale, weight_zero_point I32 | INT4, INT8 + 128 |
| AutoGPTQMoEMethod | qweight I32, scales; qzeros are not read, since these are symmetric | INT4 in GPTQ's order |
| AutoAWQMoEMethod | qweight I32, scales, qzeros I32 | UINT4 in AWQ's order |
| CompressedTensorsW4A4Nvfp4MoEMethod | weight_packed U8, weight_scale E4M3, weight_global_scale F32 | NVFP4, divided |
| ModelOptNvFp4FusedMoE | weight U8, weight_scale E4M3, weight_scale_2 F32 | NVFP4 |

Scales of an expert's input may be there and are not read: activations stay bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.quantization import QuantizationStrategy
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQMoEMethod
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4,
    compressed_tensors_moe_w4a4_nvfp4,
    compressed_tensors_moe_w8a8_fp8,
    compressed_tensors_moe_w8a8_mxfp8,
    compressed_tensors_moe_wna16,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8MoEMethod,
    ModelOptMxFp8FusedMoE,
    ModelOptNvFp4FusedMoE,
)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod, Mxfp4MoEMethod
from vllm.model_executor.layers.quantization.quark.quark_moe import QuarkOCP_MX_MoEMethod

from ktmoe.backends.choice import choose_backend
from ktmoe.errors import FormatError, UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.vllm.layers import Layer
from ktmoe.vllm.parameters import Parameters, scale_kind
from ktmoe.vllm.served import Format, Served
from ktmoe.weights.elements import INT4, INT8_PLUS_128
from ktmoe.weights.formats import FP8_PER_MATRIX, FP8_PER_ROW, MXFP4, MXFP8, Factor, WeightFormat, fp8, int4, int8, nvfp4, uint4
from ktmoe.weights.order import AWQ, GPTQ

CompressedTensorsW4A4Mxfp4MoEMethod = compressed_tensors_moe_w4a4_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod
CompressedTensorsW4A4Nvfp4MoEMethod = compressed_tensors_moe_w4a4_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod
CompressedTensorsW8A8Fp8MoEMethod = compressed_tensors_moe_w8a8_fp8.CompressedTensorsW8A8Fp8MoEMethod
CompressedTensorsW8A8Mxfp8MoEMethod = compressed_tensors_moe_w8a8_mxfp8.CompressedTensorsW8A8Mxfp8MoEMethod
CompressedTensorsWNA16MoEMethod = compressed_tensors_moe_wna16.CompressedTensorsWNA16MoEMethod

#: Kinds of scales that integers of 4 and 8 bits have.
_KINDS = ("bf16", "fp16")
_ELEMENTS = {4: INT4, 8: INT8_PLUS_128}
_MODELOPT = {"codes": "weight", "scales": "weight_scale"}
_PACKED = {"codes": "weight_packed", "scales": "weight_scale"}

#: A layer's method and its parameters -> what they are. Before there are parameters, none are given.
_Read = Callable[[FusedMoEMethodBase, Mapping[str, np.ndarray]], Parameters]


@dataclass(frozen=True)
class Quantized(Format):
    """read: what a layer's parameters are. exact_scales: whether create_weights() gives scales the model's dtype, which would
    round others.

    The class keeps its name: vLLM's loaders look at it.
    """

    read: _Read | None = None
    exact_scales: bool = False

    def served(self) -> type[FusedMoEMethodBase]:
        return type(self.method.__name__, (_Made, Served, self.method), {"format": self})


class _Made:
    """What differs before Served packs a layer."""

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **attributes):
        """Make vLLM's parameters, with scales in float32, which has every number of a checkpoint's.

        A format that no backend has is refused.
        """
        sizes = num_experts, hidden_size, intermediate_size_per_partition
        if self.refused is None:
            try:
                choose_backend("auto", ExpertWeights(*sizes, _unread, self.format.read(self, {}).format), "auto")
            except UnavailableError as error:
                self.refused = str(error)
        dummy = get_current_vllm_config().load_config.load_format == "dummy"  # random numbers, which would be no bfloat16
        exact = self.format.exact_scales and self.refused is None and not dummy
        super().create_weights(layer, *sizes, torch.float32 if exact else params_dtype, **attributes)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        """vLLM's config for its own kernels; None for a layer that none of them computes."""
        return super().get_fused_moe_quant_config(layer) if self.refused is not None else None


def _unread(expert: int, projection: str) -> Matrix:
    raise AssertionError(f"{projection} of expert {expert} is asked for before there are weights")


def _weights(read: _Read, layer: Layer) -> ExpertWeights:
    """The layer's experts. Raises FormatError for parameters that are not what read() says."""
    named = layer.module.named_parameters(recurse=False)
    arrays = {name: _array(parameter) for name, parameter in named if name.startswith(("w13_", "w2_"))}
    try:
        found = read(layer.module.quant_method, arrays)
    except FormatError as error:
        raise FormatError(f"{layer.name}: {error}") from None
    biased = any(arrays[name].any() for name in ("w13_bias", "w2_bias") if name in arrays)  # GPTQ's are always there
    endings = {**found.endings, **({"bias": "bias"} if biased else {})}
    sizes = layer.hidden, layer.intermediate
    found = Parameters(found.format, endings, layer.interleaved)
    return found.experts(arrays, *sizes, layer.activation, layer.name, layer.router_weight)


def _array(parameter: torch.Tensor) -> np.ndarray:
    """A parameter as an array that shares its memory; bfloat16 as ml_dtypes', dtypes of 8 bits that numpy has not as bytes."""
    tensor = parameter.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor).numpy()


def _kind(arrays: Mapping[str, np.ndarray], ending: str) -> str:
    """The kind of scales; without scales, it may be any of _KINDS."""
    if not arrays:
        return _KINDS[0]
    return scale_kind(ending, (arrays[f"w13_{ending}"], arrays[f"w2_{ending}"]), _KINDS)


def _always(parameters: Parameters) -> _Read:
    return lambda method, arrays: parameters


def _fp8(method: Fp8MoEMethod, arrays: Mapping[str, np.ndarray]) -> Parameters:
    if method.block_quant:
        return Parameters(_blocks(method.moe_block_shape), {"codes": "weight", "scales": method.weight_scale_name})
    return Parameters(FP8_PER_MATRIX, {"codes": "weight", "factor": method.weight_scale_name})


def _blocks(shape: list[int]) -> WeightFormat:
    return fp8("fp32", (shape[0], shape[1]))


def _compressed_fp8(method: CompressedTensorsW8A8Fp8MoEMethod, arrays: Mapping[str, np.ndarray]) -> Parameters:
    if method.block_quant:
        return Parameters(_blocks(method.weight_block_size), _MODELOPT)
    per_row = method.weight_quant.strategy == QuantizationStrategy.CHANNEL
    return Parameters(FP8_PER_ROW if per_row else FP8_PER_MATRIX, {"codes": "weight", "factor": "weight_scale"})


def _integers(method: CompressedTensorsWNA16MoEMethod, arrays: Mapping[str, np.ndarray]) -> Parameters:
    if method.strategy == QuantizationStrategy.CHANNEL:
        per_row = WeightFormat(_ELEMENTS[method.num_bits], factor=Factor(per_row=True))
        return Parameters(per_row, {"codes": "weight_packed", "factor": "weight_scale"})
    kind = _kind(arrays, "weight_scale")
    if not method.symmetric:
        return Parameters(uint4(method.group_size, kind), {**_PACKED, "offsets": "weight_zero_point"})
    four = method.num_bits == 4
    return Parameters(int4(method.group_size, kind) if four else int8(method.group_size, kind, INT8_PLUS_128), _PACKED)


def _gptq(method: AutoGPTQMoEMethod, arrays: Mapping[str, np.ndarray]) -> Parameters:
    size = method.quant_config.group_size
    if size == -1:
        per_row = WeightFormat(INT4, factor=Factor(per_row=True), order=GPTQ)
        return Parameters(per_row, {"codes": "qweight", "factor": "scales"})
    return Parameters(int4(size, _kind(arrays, "scales"), GPTQ), {"codes": "qweight", "scales": "scales"})


def _awq(method: AutoAWQMoEMethod, arrays: Mapping[str, np.ndarray]) -> Parameters:
    found = uint4(method.quant_config.group_size, _kind(arrays, "scales"), AWQ)
    return Parameters(found, {"codes": "qweight", "scales": "scales", "offsets": "qzeros"})


def _row(
    method: type[FusedMoEMethodBase], read: _Read, exact_scales: bool = False, once: bool = False, **without_kernel: object
) -> Quantized:
    attributes = {"experts_cls": None, **without_kernel}
    return Quantized(method, functools.partial(_weights, read), attributes, once, read, exact_scales)


#: The backend decides how sizes are padded: as for CPUs, to multiples of 32.
_MXFP4_BACKEND = {"mxfp4_backend": Mxfp4MoeBackend.CPU}
FORMATS = (
    _row(GptOssMxfp4MoEMethod, _always(Parameters(MXFP4, _MODELOPT)), **_MXFP4_BACKEND),
    _row(Mxfp4MoEMethod, _always(Parameters(MXFP4, _MODELOPT)), **_MXFP4_BACKEND),
    _row(CompressedTensorsW4A4Mxfp4MoEMethod, _always(Parameters(MXFP4, _PACKED))),
    _row(QuarkOCP_MX_MoEMethod, _always(Parameters(MXFP4, _MODELOPT)), **_MXFP4_BACKEND),
    _row(ModelOptMxFp8FusedMoE, _always(Parameters(MXFP8, _MODELOPT))),
    _row(CompressedTensorsW8A8Mxfp8MoEMethod, _always(Parameters(MXFP8, _MODELOPT))),
    _row(Fp8MoEMethod, _fp8),
    _row(CompressedTensorsW8A8Fp8MoEMethod, _compressed_fp8),
    _row(ModelOptFp8MoEMethod, _always(Parameters(FP8_PER_MATRIX, {"codes": "weight", "factor": "weight_scale"}))),
    _row(CompressedTensorsWNA16MoEMethod, _integers, exact_scales=True, once=True),
    _row(AutoGPTQMoEMethod, _gptq, exact_scales=True, once=True),
    _row(AutoAWQMoEMethod, _awq, exact_scales=True),
    _row(
        CompressedTensorsW4A4Nvfp4MoEMethod,
        _always(Parameters(nvfp4(divides=True), {**_PACKED, "factor": "weight_global_scale"})),
        use_global_sf=False,
    ),
    _row(
        ModelOptNvFp4FusedMoE,
        _always(Parameters(nvfp4(), {**_MODELOPT, "factor": "weight_scale_2"})),
        use_global_sf=False,
    ),
)
#: vLLM's class -> the one that stands before it.
SERVED = {row.method: row.served() for row in FORMATS}
