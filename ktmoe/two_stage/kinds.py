"""numpy arrays and torch CPU tensors: what comes in as bytes or bfloat16, and what goes back in the caller's kind."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from ktmoe import arrays
from ktmoe.errors import InputError
from ktmoe.machine import memory
from ktmoe.messages import show

#: dtypes of one byte, beside uint8, that codes and scales may have.
_BYTES = tuple(np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e8m0fnu") if hasattr(ml_dtypes, name))
_TORCH_BYTES = ("uint8", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2")
#: Bytes that are taken without asking whether they are available, which takes half a millisecond.
_UNASKED = 2**28


def as_bytes(value: Any, name: str) -> np.ndarray:
    """Codes or scales as uint8, a view. Raises InputError for what has no items of one byte, or is not on the CPU."""
    dtype = None
    if arrays.is_torch(value):
        torch = sys.modules["torch"]
        if value.dtype in [getattr(torch, dtype, None) for dtype in _TORCH_BYTES]:
            dtype = torch.uint8
    array = arrays.as_numpy(value, name, dtype)
    if array.dtype in _BYTES:
        array = array.view(np.uint8)
    if array.dtype != np.uint8:
        raise InputError(f"{name} must be uint8, or float8 or float4 codes, found {array.dtype}")
    return array


def integers(value: Any, name: str) -> np.ndarray:
    """An array of integers. Raises InputError for others."""
    array = arrays.as_numpy(value, name)
    if array.dtype.kind not in "iu":
        raise InputError(f"{name} must be integers, found {array.dtype}")
    return array


def whole(value: Any, name: str, least: int = 0, most: int = 2**31 - 1) -> int:
    """The value as an int. Raises InputError for what is no integer from least to most."""
    if not isinstance(value, int | np.integer) or not least <= value <= most:
        raise InputError(f"{name} must be an integer from {least} to {most}, found {show(value)}")
    return int(value)


def room_for(nbytes: int, what: str) -> None:
    """Raise OutOfMemoryError if nbytes are many and not available."""
    if nbytes > _UNASKED:
        memory.require(nbytes, what)


def as_bits(value: Any, name: str) -> np.ndarray:
    """The bits of bfloat16 numbers, uint16; float32 is rounded, to nearest even. Raises InputError as arrays.view() does."""
    array = arrays.view(value, name).array
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(arrays.BF16).view(np.uint16)


def give(array: np.ndarray, torch: bool) -> Any:
    """The array, or a tensor that shares its memory. uint16 is bits of bfloat16 numbers."""
    if array.dtype == np.uint16:
        array = array.view(arrays.BF16)
    if not torch:
        return array
    module = sys.modules["torch"]
    if array.dtype == arrays.BF16:
        return module.from_numpy(array.view(np.int16)).view(module.bfloat16)
    return module.from_numpy(array)
