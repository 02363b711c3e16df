"""The routed experts and the dense matrices of Mixture-of-Experts models on x86-64 CPUs, from the checkpoint's own weights.

    import numpy as np, ktmoe

    with ktmoe.MoELayer.from_checkpoint("DeepSeek-V4-Flash", layer=3) as layer:  # finds the loader and the best backend
        x = np.ones((1, layer.hidden), np.float32)                               # [tokens, hidden]
        ids, weights = np.array([[0, 1, 2, 3]]), np.full((1, 4), 0.25, np.float32)  # the router's: [tokens, top_k]
        y = layer.forward(x, ids, weights)                                       # [tokens, hidden]

The examples of docstrings go on from this one: x, ids and weights are those above, and layer is open. experts, matrix and
linear are what load_experts(), load_matrix() and Linear give. What an example's own package exports is imported by name.

Importing starts no thread and changes no state of the process, but for handlers that run when it forks.
"""

from typing import TYPE_CHECKING

from ktmoe import backends, loaders, quantization
from ktmoe.config import get_include, show_config
from ktmoe.conversion import convert
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.linear import Linear
from ktmoe.linear_group import LinearGroup
from ktmoe.loaders.base import load_experts
from ktmoe.loaders.dense import load_matrix, load_mlp
from ktmoe.machine.threads import get_num_threads, set_num_threads
from ktmoe.matrix import Matrix
from ktmoe.model import MoEModel
from ktmoe.quantization import quantize
from ktmoe.version import installed_version
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.elements import Element
from ktmoe.weights.formats import (
    BF16,
    FP8_PER_MATRIX,
    FP8_PER_ROW,
    MXFP4,
    MXFP8,
    WeightFormat,
    fp8,
    int4,
    int8,
    nvfp4,
    uint4,
)
from ktmoe.weights.offsets import Minimum, ZeroPoint
from ktmoe.weights.order import Order
from ktmoe.weights.scales import Factor, Scale

__all__ = [
    "BF16",
    "FP8_PER_MATRIX",
    "FP8_PER_ROW",
    "MXFP4",
    "MXFP8",
    "SILU",
    "Element",
    "ExpertWeights",
    "Factor",
    "GatedActivation",
    "Linear",
    "LinearGroup",
    "Matrix",
    "Minimum",
    "MoELayer",
    "MoEModel",
    "Order",
    "Scale",
    "WeightFormat",
    "ZeroPoint",
    "__version__",
    "backends",
    "convert",
    "fp8",
    "get_include",
    "get_num_threads",
    "int4",
    "int8",
    "load_experts",
    "load_matrix",
    "load_mlp",
    "loaders",
    "nvfp4",
    "quantization",
    "quantize",
    "set_num_threads",
    "show_config",
    "uint4",
]


__version__: str

if not TYPE_CHECKING:  # for a type checker, a module with __getattr__ has every name

    def __getattr__(name: str) -> str:
        if name == "__version__":
            return installed_version()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public, and what every module has."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
