"""vLLM's classes of dense layers: those that are not quantized, in bfloat16, are given to ktmoe where it is faster."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from ktmoe.vllm import schemes
from ktmoe.vllm.dense_choice import is_faster
from ktmoe.vllm.dense_method import PackedLinearMethod, reads_parameters
from ktmoe.vllm.experts_layer import LORA
from ktmoe.vllm.report import REPORT, leaves

CLASSES = (
    ReplicatedLinear,
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    ParallelLMHead,
)
_UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@register_weight_loader_v2_supported_method
class Bfloat16Method(PackedLinearMethod):
    """Of a layer that is not quantized. vLLM computes one whose weight its model reads, or has given another shape."""

    def __init__(self, own: QuantizeMethodBase):
        super().__init__(schemes.UNQUANTIZED)
        self._own = own

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if layer.weight.ndim == 2 and not reads_parameters(layer):
            super().process_weights_after_loading(layer)
            return
        layer.quant_method = self._own
        self._own.process_weights_after_loading(layer)
        REPORT.done(self)


class DenseLayer:
    """Stands before a class of vLLM's dense layers: its constructor chooses a method, and may be given another one here."""

    _method: QuantizeMethodBase | None = None

    @property
    def quant_method(self) -> QuantizeMethodBase | None:
        return self._method

    @quant_method.setter
    def quant_method(self, method: QuantizeMethodBase | None) -> None:
        first = self._method is None
        self._method = Bfloat16Method(method) if first and type(method) in _UNQUANTIZED and _is_ours(self) else method


def _is_ours(layer: torch.nn.Module) -> bool:
    """Whether ktmoe computes a layer that is being made and not quantized."""
    config = get_current_vllm_config_or_none()
    dtype = getattr(layer, "params_dtype", None) or torch.get_default_dtype()
    if dtype != torch.bfloat16 or config is None or (isinstance(layer, ParallelLMHead) and _is_read(config)):
        return False
    n = getattr(layer, "output_size_per_partition", layer.output_size)
    k = getattr(layer, "input_size_per_partition", layer.input_size)
    if is_faster(n, k):
        if config.lora_config is not None:
            leaves("dense layers", LORA)
        return config.lora_config is None
    REPORT.small()
    return False


def _is_read(config: VllmConfig) -> bool:
    """Whether vLLM reads an output layer's weight itself: to share it with a model that drafts, or for logits in float32."""
    model = config.model_config
    return config.speculative_config is not None or (model is not None and getattr(model, "head_dtype", None) == torch.float32)


def replacement(base: type) -> type:
    """A class for one of CLASSES. Its name is the same: configs of checkpoints may match layers by their classes' names."""
    return type(base.__name__, (DenseLayer, base), {})
