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
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from ktmoe.errors import UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.vllm import schemes
from ktmoe.vllm.experts_layer import Layer
from ktmoe.vllm.experts_method import Format, Served
from ktmoe.vllm.parameters import Parameters
from ktmoe.vllm.tensors import arrays_of

CompressedTensorsW4A4Mxfp4MoEMethod = compressed_tensors_moe_w4a4_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod
CompressedTensorsW4A4Nvfp4MoEMethod = compressed_tensors_moe_w4a4_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod
CompressedTensorsW8A8Fp8MoEMethod = compressed_tensors_moe_w8a8_fp8.CompressedTensorsW8A8Fp8MoEMethod
CompressedTensorsW8A8Mxfp8MoEMethod = compressed_tensors_moe_w8a8_mxfp8.CompressedTensorsW8A8Mxfp8MoEMethod
CompressedTensorsWNA16MoEMethod = compressed_tensors_moe_wna16.CompressedTensorsWNA16MoEMethod

#: A layer's method -> what its parameters are.
_Read = Callable[[FusedMoEMethodBase], Parameters]


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
                choose_backend("auto", ExpertWeights(*sizes, _unread, self.format.read(self).format), "auto")
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
    arrays = arrays_of(layer.module, ("w13_", "w2_"))
    biased = any(arrays[name].any() for name in ("w13_bias", "w2_bias") if name in arrays)  # GPTQ's are always there
    found = read(layer.module.quant_method).fitted(arrays, ("w13_", "w2_"), layer.name)
    found = replace(schemes.biased(found) if biased else found, interleaved=layer.interleaved)
    return found.experts(arrays, layer.hidden, layer.intermediate, layer.activation, layer.name, layer.router_weight)


def _always(parameters: Parameters) -> _Read:
    return lambda method: parameters


def _fp8(method: Fp8MoEMethod) -> Parameters:
    scales = method.weight_scale_name
    return schemes.fp8_of_blocks(method.moe_block_shape, scales) if method.block_quant else schemes.fp8_of_matrices(scales)


def _compressed_fp8(method: CompressedTensorsW8A8Fp8MoEMethod) -> Parameters:
    if method.block_quant:
        return schemes.fp8_of_blocks(method.weight_block_size)
    per_row = method.weight_quant.strategy == QuantizationStrategy.CHANNEL
    return schemes.fp8_of_rows() if per_row else schemes.fp8_of_matrices()


def _integers(method: CompressedTensorsWNA16MoEMethod) -> Parameters:
    return schemes.integers(method.num_bits, method.strategy, method.group_size, method.symmetric)


def _gptq(method: AutoGPTQMoEMethod) -> Parameters:
    return schemes.gptq(4, method.quant_config.group_size)


def _awq(method: AutoAWQMoEMethod) -> Parameters:
    return schemes.awq(4, method.quant_config.group_size)


def _row(
    method: type[FusedMoEMethodBase], read: _Read, exact_scales: bool = False, once: bool = False, **without_kernel: object
) -> Quantized:
    attributes = {"experts_cls": None, **without_kernel}
    return Quantized(method, functools.partial(_weights, read), attributes, once, read, exact_scales)


#: The backend decides how sizes are padded: as for CPUs, to multiples of 32.
_MXFP4_BACKEND = {"mxfp4_backend": Mxfp4MoeBackend.CPU}
FORMATS = (
    _row(GptOssMxfp4MoEMethod, _always(schemes.MXFP4_WEIGHT), **_MXFP4_BACKEND),
    _row(Mxfp4MoEMethod, _always(schemes.MXFP4_WEIGHT), **_MXFP4_BACKEND),
    _row(CompressedTensorsW4A4Mxfp4MoEMethod, _always(schemes.MXFP4_PACKED)),
    _row(QuarkOCP_MX_MoEMethod, _always(schemes.MXFP4_WEIGHT), **_MXFP4_BACKEND),
    _row(ModelOptMxFp8FusedMoE, _always(schemes.MXFP8_WEIGHT)),
    _row(CompressedTensorsW8A8Mxfp8MoEMethod, _always(schemes.MXFP8_WEIGHT)),
    _row(Fp8MoEMethod, _fp8),
    _row(CompressedTensorsW8A8Fp8MoEMethod, _compressed_fp8),
    _row(ModelOptFp8MoEMethod, _always(schemes.fp8_of_matrices())),
    _row(CompressedTensorsWNA16MoEMethod, _integers, exact_scales=True, once=True),
    _row(AutoGPTQMoEMethod, _gptq, exact_scales=True, once=True),
    _row(AutoAWQMoEMethod, _awq, exact_scales=True),
    _row(CompressedTensorsW4A4Nvfp4MoEMethod, _always(schemes.NVFP4_PACKED), use_global_sf=False),
    _row(ModelOptNvFp4FusedMoE, _always(schemes.NVFP4_WEIGHT), use_global_sf=False),
)
#: vLLM's class -> the one that stands before it.
SERVED = {row.method: row.served() for row in FORMATS}
