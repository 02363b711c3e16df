"""The side on which a caller's arrays are: numpy or torch on the CPU, or a CUDA device."""

from __future__ import annotations

import functools

import numpy as np

from ktmoe import arrays
from ktmoe.compat.cuda import Cuda
from ktmoe.compat.host import Numpy, Side, TorchHost
from ktmoe.errors import InputError

_NUMPY, _TORCH = Numpy(), TorchHost()
_cuda = functools.cache(Cuda)


def side_of(x) -> Side:
    """Raises InputError for what no side takes."""
    if isinstance(x, np.ndarray):
        return _NUMPY
    if arrays.is_torch(x):
        if x.device.type == "cpu":
            return _TORCH
        if x.device.type == "cuda":
            return _cuda(x.device)
        raise InputError(f"hidden_states must be on the CPU or a CUDA device, found a torch tensor on {x.device}")
    raise InputError(f"hidden_states must be a numpy array or a torch tensor, found {type(x).__name__}")
