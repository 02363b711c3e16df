"""Layers of routed experts as vLLM makes and fills them, without a model around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ktmoe.experts import ExpertWeights
from ktmoe.vllm.experts_layer import Layer
from ktmoe.vllm.experts_method import Served

#: The dtypes of a safetensors header -> torch's. The others are vLLM's tensors of the same bytes.
DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@contextmanager
def vllm_is_set_up(folder: Path) -> Iterator[None]:
    """One process, a new VllmConfig. folder: where the process finds itself."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/processes", 0, backend="gloo")
            initialize_model_parallel(1, 1)
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, quantization_config=None)
        yield


def model_says(**config: object) -> None:
    """What vLLM finds in the model's config.json."""
    get_current_vllm_config().model_config.hf_config = SimpleNamespace(**config)


def quantization(name: str, stated: Mapping[str, object]) -> QuantizationConfig:
    """vLLM's config by that name, of what quantization_config in config.json says."""
    config = get_quantization_config(name).from_config(dict(stated))
    config.packed_modules_mapping = {}
    return config


def make(
    config: QuantizationConfig | None, num_experts: int, hidden: int, intermediate: int, name: str, **arguments
) -> RoutedExperts:
    """A layer in bfloat16. arguments: more of FusedMoEFactory's."""
    torch.set_default_dtype(torch.bfloat16)  # as while vLLM makes a model
    try:
        runner = FusedMoEFactory(num_experts, 2, hidden, intermediate, quant_config=config, prefix=name, **arguments)
    finally:
        torch.set_default_dtype(torch.float32)
    return runner.routed_experts


def experts(layer: RoutedExperts) -> ExpertWeights:
    """What ktmoe reads from a layer that vLLM has filled."""
    return layer.quant_method.format.weights(Layer.of(layer))


def ours(layer: RoutedExperts) -> bool:
    """Whether ktmoe's class has the layer."""
    return isinstance(layer.quant_method, Served)


def has_kernel(layer: RoutedExperts) -> bool:
    """Whether vLLM could compute the layer itself."""
    return getattr(layer.quant_method, "experts_cls", None) is not None


def tensor(dtype: str, array: np.ndarray) -> torch.Tensor:
    """A tensor of a checkpoint as vLLM reads it."""
    found = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy()).view(DTYPES[dtype])
    last = [array.shape[-1] * array.itemsize // DTYPES[dtype].itemsize] if array.ndim else []
    return found.reshape([*array.shape[:-1], *last])


def apply(layer: RoutedExperts, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What a layer computes, bfloat16 like x."""
    x, ids, weights = (torch.from_numpy(array) for array in (x.view(np.int16), ids, weights))
    y = layer.quant_method.apply(layer, x.view(torch.bfloat16), weights, ids, None, None)
    return y.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
