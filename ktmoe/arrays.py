"""bfloat16 in its guises: what a user hands in becomes bits or float32 for the backend, and goes back as it came."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np

from ktmoe.errors import InputError

BF16 = np.dtype(ml_dtypes.bfloat16)
A = TypeVar("A", bound="AnyArray")
_KIND_OF = {np.dtype(np.uint16): "uint16 array", np.dtype(np.float32): "float32 array"}  # str(dtype) is 12 calls of Python
_KINDS = "bfloat16 (ml_dtypes), uint16 holding bfloat16 bits, float32, or a torch CPU tensor of bfloat16 or float32"


class AnyArray(Protocol):
    """What functions take for numbers: a numpy array or a torch CPU tensor. It is for type checkers alone."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class FloatArray:
    """array: uint16 (bfloat16 bits) or float32, a view of what was given. kind: what was given, for messages.
    restore: turns an array like it into the kind that was given, sharing memory."""

    array: np.ndarray
    kind: str
    restore: Callable[[np.ndarray], Any]


def view(value: Any, name: str) -> FloatArray:
    """Raises InputError for any other type or dtype."""
    if isinstance(value, np.ndarray):
        if value.dtype == BF16:
            return FloatArray(value.view(np.uint16), "bfloat16 array", bfloat16_like(value))
        if value.dtype in _KIND_OF:
            return FloatArray(value, _KIND_OF[value.dtype], lambda a: a)
        raise InputError(f"{name} must be {_KINDS}; found an array of {value.dtype}")
    if is_torch(value):
        return _view_torch(value, name)
    raise InputError(f"{name} must be {_KINDS}; found {type(value).__name__}")


def is_torch(value: Any) -> bool:
    """Whether value is a torch tensor; torch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _view_torch(tensor: Any, name: str) -> FloatArray:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise InputError(f"{name} must be on the CPU; found a torch tensor on {tensor.device}")
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        # numpy has no bfloat16 of torch's, so the bits pass as int16.
        bits = _torch_to_numpy(tensor, name, torch.int16).view(np.uint16)
        return FloatArray(bits, "torch bfloat16 tensor", bfloat16_like(tensor))
    if tensor.dtype == torch.float32:
        return FloatArray(_torch_to_numpy(tensor, name), "torch float32 tensor", torch.from_numpy)
    raise InputError(f"{name} must be {_KINDS}; found a torch tensor of {tensor.dtype}")


def _torch_to_numpy(tensor: Any, name: str, dtype: Any = None) -> np.ndarray:
    """dtype: of torch, of the same size, that the items are taken for."""
    try:
        return (tensor if dtype is None else tensor.view(dtype)).numpy()
    except (TypeError, RuntimeError) as error:  # a dtype or a layout that numpy does not have
        raise InputError(f"{name}: numpy cannot view a torch tensor of {tensor.dtype}, {tensor.layout}: {error}") from None


def float32_like(x: Any) -> Callable[[np.ndarray], Any]:
    """Turns a float32 array into one of x's library, sharing memory."""
    return sys.modules["torch"].from_numpy if is_torch(x) else lambda array: array


def bfloat16_like(x: Any) -> Callable[[np.ndarray], Any]:
    """Turns bits of bfloat16, uint16, into bfloat16 numbers of x's library, sharing memory."""
    if not is_torch(x):
        return lambda bits: bits.view(BF16)
    torch = sys.modules["torch"]
    return lambda bits: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def as_numpy(value: Any, name: str, dtype: Any = None) -> np.ndarray:
    """An array or a torch CPU tensor as an array; InputError for anything else.

    dtype: of torch, of the same size, that a tensor's items are taken for.
    """
    if is_torch(value):
        if value.device.type != "cpu":
            raise InputError(f"{name} must be on the CPU; found a torch tensor on {value.device}")
        return _torch_to_numpy(value.detach(), name, dtype)
    if isinstance(value, np.ndarray):
        return value
    raise InputError(f"{name} must be a numpy array or a torch CPU tensor; found {type(value).__name__}")


def contiguous(array: np.ndarray, dtype: Any = None) -> np.ndarray:
    """C-contiguous and aligned to its items, as native code reads it; copied only if need be."""
    array = np.ascontiguousarray(array, dtype)
    return array if array.flags.aligned else array.copy()


def expect_native(name: str, array: np.ndarray, *, written: bool = True) -> None:
    """Raise InputError for an array whose own memory native code cannot read, or write into."""
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned and (flags.writeable or not written)):
        wanted = "C-contiguous, aligned and writeable" if written else "C-contiguous and aligned"
        found = f"strides {array.strides}, aligned {flags.aligned}, writeable {flags.writeable}"
        raise InputError(f"{name} must be {wanted}; found {found}")


def expect_shape(name: str, array: np.ndarray, shape: tuple[int | None, ...]) -> None:
    """Raise InputError unless the array has that shape; None is any size."""
    fits = array.ndim == len(shape) and all(want in (None, have) for want, have in zip(shape, array.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{name} must have shape [{wanted}], found {list(array.shape)}")
