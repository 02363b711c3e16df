"""vLLM's parameters as numpy arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch


def arrays_of(module: torch.nn.Module, beginnings: tuple[str, ...] = ("",)) -> dict[str, np.ndarray]:
    """The module's own parameters whose names begin like this, as arrays that share their memory: bfloat16 as ml_dtypes', and
    dtypes of 8 bits that numpy has not as bytes."""
    named = module.named_parameters(recurse=False)
    return {name: _array(parameter.detach()) for name, parameter in named if name.startswith(beginnings)}


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor).numpy()
