"""What must hold of a tensor's header; every error names the tensor, what was expected and what was found."""

from __future__ import annotations

from ktmoe.errors import FormatError
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.messages import show


def dtype(info: TensorInfo, *dtypes: str) -> None:
    """Raise FormatError if its dtype is none of these."""
    if info.dtype not in dtypes:
        raise FormatError(f"{info.name}: dtype: expected {' or '.join(dtypes)}, found {describe(info)}")


def dimensions(info: TensorInfo, count: int) -> None:
    """Raise FormatError if it has not as many dimensions, or no elements."""
    if len(info.shape) != count or 0 in info.shape:
        number = {2: "two", 3: "three", 4: "four"}[count]
        raise FormatError(f"{info.name}: shape: expected {number} dimensions above 0, found {show(list(info.shape))}")


def shape(info: TensorInfo, expected: tuple[int, ...], why: str) -> None:
    """Raise FormatError, which says why, if its shape is another."""
    if info.shape != expected:
        raise FormatError(f"{info.name}: shape: expected {list(expected)} ({why}), found {show(list(info.shape))}")


def describe(info: TensorInfo) -> str:
    """A tensor's dtype and shape as text: 'BF16 [64, 96]'."""
    return f"{info.dtype} {show(list(info.shape))}"
