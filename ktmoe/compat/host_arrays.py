"""A caller's arrays as copies on the host, and results as the kind that the caller has: numpy's or torch's, from any device."""

from __future__ import annotations

import sys

import numpy as np

from ktmoe import arrays
from ktmoe.compat.host import expect_floats
from ktmoe.errors import InputError
from ktmoe.messages import show


def bits(name: str, value) -> np.ndarray:
    """A copy as bfloat16 bits, uint16: floats are rounded to nearest even. Raises InputError."""
    if arrays.is_torch(value):
        return arrays.view(_on_cpu(name, value, "bfloat16", floating=True), name).array
    array = arrays.as_numpy(value, name)
    if array.dtype != np.uint16:
        expect_floats(name, array)
        array = array.astype(arrays.BF16, copy=False).view(np.uint16)
    return np.array(array, order="C")


def floats(name: str, value) -> np.ndarray:
    """A copy as float32. Raises InputError."""
    if arrays.is_torch(value):
        return _on_cpu(name, value, "float32", floating=True).numpy()
    array = arrays.as_numpy(value, name)
    expect_floats(name, array)
    return array.astype(np.float32, order="C")


def integers(name: str, value) -> np.ndarray:
    """A copy as int64. Raises InputError."""
    if arrays.is_torch(value):
        return _on_cpu(name, value, "int64", floating=False).numpy()
    array = arrays.as_numpy(value, name)
    if array.dtype.kind not in "iu":
        raise InputError(f"{name} must be integers, found {array.dtype}")
    return array.astype(np.int64, order="C")


def like(given, array: np.ndarray, device=None):
    """An array of float32 or bfloat16 bits (uint16) as what was given is: a tensor, on a device if one is named, or an array.

    bfloat16 is ml_dtypes', or uint16 where that was given.
    """
    if arrays.is_torch(given):
        torch = sys.modules["torch"]
        of_bits = array.dtype == np.uint16
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if of_bits else torch.from_numpy(array)
        return tensor if device is None else tensor.to(device=device)
    return array.view(arrays.BF16) if array.dtype == np.uint16 and given.dtype != np.uint16 else array


def is_parameter(value) -> bool:
    """Whether a value is a Parameter of torch, which is not imported for this."""
    return arrays.is_torch(value) and isinstance(value, sys.modules["torch"].nn.Parameter)


def _on_cpu(name: str, tensor, dtype: str, floating: bool):
    if tensor.is_floating_point() != floating or tensor.is_complex():
        raise InputError(f"{name} must be a tensor of {'floats' if floating else 'integers'}, found {show(tensor.dtype)}")
    return tensor.detach().to(device="cpu", dtype=getattr(sys.modules["torch"], dtype), copy=True).contiguous()
