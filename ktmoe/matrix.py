"""Matrix: one weight matrix in its checkpoint's own bytes. Loaders make them, backends pack them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ktmoe.arrays import contiguous
from ktmoe.errors import FormatError
from ktmoe.messages import show
from ktmoe.weights.elements import NUMBERS
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.offsets import ZeroPoint
from ktmoe.weights.order import Order, SourceOrder

#: The arrays that a Matrix may have besides its bias.
ARRAYS = ("codes", "scales", "super_scales", "offsets", "super_offsets", "factor")

#: Numbers of an array that Matrix.refuse() makes float64 at a time: all of them are much more than the matrix.
LOOKED_AT_ONCE = 2**16


@dataclass(frozen=True)
class Matrix:
    """One weight matrix [n outputs, k inputs] in its checkpoint's own bytes.

    name: the tensor's name, for messages. bias: float32 [n], or None.
    codes, scales, offsets, factor, super_scales, super_offsets: C-contiguous, of the dtypes and shapes of format.arrays(n, k);
    None for those that the format has not. Bytes are viewed as these dtypes and never cast. An array is copied only if it is
    not aligned to its items.
    Raises FormatError, which names the tensor, on a wrong dtype, shape or layout. The bytes are checked when packed.

    Examples:
        >>> ktmoe.Matrix("a", ktmoe.BF16, (4, 64), np.ones((4, 64), ml_dtypes.bfloat16))
        Matrix('a', BF16 [4, 64])
    """

    name: str
    format: WeightFormat
    shape: tuple[int, int]
    codes: np.ndarray
    scales: np.ndarray | None = None
    bias: np.ndarray | None = None
    offsets: np.ndarray | None = None
    factor: np.ndarray | None = None
    super_scales: np.ndarray | None = None
    super_offsets: np.ndarray | None = None

    def __post_init__(self) -> None:
        n, k = self.shape
        rows, columns = self.format.code_unit
        if n < 1 or k < 1 or n % rows or k % columns:
            wanted = " and ".join(f"{name} a multiple of {unit}" for name, unit in (("n", rows), ("k", columns)) if unit > 1)
            raise FormatError(
                f"{self.name}: {self.format.description} needs n and k of at least 1{f', {wanted}' if wanted else ''}, "
                f"found {self.shape}"
            )
        expected = self.format.arrays(n, k)
        for label in ARRAYS:
            array = getattr(self, label)
            if label in expected:
                self._take(label, *expected[label])
            elif array is not None:
                raise FormatError(f"{self.name} {label}: expected none for {self.format.description}, found {show(array)}")
        if self.bias is not None:
            self._take("bias", np.float32, (n,))

    def _take(self, label: str, dtype: np.dtype | type, shape: tuple[int, ...]) -> None:
        array = getattr(self, label)
        _expect(f"{self.name} {label}", array, dtype, shape)
        object.__setattr__(self, label, contiguous(array))

    def __repr__(self) -> str:
        bias = ", with a bias" if self.bias is not None else ""
        return f"Matrix({self.name!r}, {self.format.description} {list(self.shape)}{bias})"

    @property
    def stored(self) -> dict[str, np.ndarray]:
        """The format's arrays, by name."""
        return {label: getattr(self, label) for label in self.format.arrays(*self.shape)}

    def in_order(self, order: SourceOrder) -> Matrix:
        """The same weights in another source order. Raises FormatError for a number that it has no bits for.

        Examples:
            >>> codes, scales = np.zeros((8, 16), np.uint8), np.ones((8, 1), ml_dtypes.bfloat16)
            >>> rows = ktmoe.Matrix("a", ktmoe.int4(32), (8, 32), codes, scales)
            >>> rows.in_order(ktmoe.weights.order.GPTQ).codes.shape
            (4, 8)
        """
        if order == self.format.order:
            return self
        other = replace(self.format, order=order)
        arrays: dict[str, Any] = other.from_rows(self.format.rows(self.stored, *self.shape), *self.shape)
        return replace(self, format=other, **arrays)

    def refuse(self) -> None:
        """Raise FormatError for the first number that stands for no real one; it names the tensor, the array and the place.

        Examples:
            >>> ktmoe.Matrix("a", ktmoe.BF16, (1, 2), np.array([[1, np.nan]], ml_dtypes.bfloat16)).refuse()
            Traceback (most recent call last):
            ktmoe.errors.FormatError: a: weight [0, 1] is nan; expected a finite number
        """
        element, offset, stored = self.format.element, self.format.offset, self.stored
        groups = self.format.shown_groups(stored)
        for label, scale in self.format.scales.items():
            _refuse(f"{self.name}: {label.removesuffix('s')}", groups[label], scale.numbers)
        if at := self.format.order.first_spare(self.codes):
            raise FormatError(f"{self.name}: record {at[0]} has bits that mean nothing in byte {at[1]}, which is {at[2]}")
        too_wide = element.bits < element.row_bits and isinstance(self.format.order, Order)  # records have no such codes
        if element.family in NUMBERS or None in element.values or too_wide:
            _refuse(f"{self.name}: weight", self.codes, element.numbers)
        if self.format.factor:
            factor = stored["factor"]
            _refuse(f"{self.name}: factor", factor)
            if self.format.factor.divides and not factor.all():
                raise FormatError(f"{self.name}: factor {np.argwhere(factor == 0)[0].tolist()} is 0, which cannot divide")
        if isinstance(offset, ZeroPoint):
            points = self.format.group_rows(stored)["offsets"]
            if (wrong := np.argwhere(points > 15)).size:
                raise FormatError(f"{self.name}: zero point {wrong[0].tolist()} is {points[tuple(wrong[0])]}; expected 0 to 15")
        if self.bias is not None:
            _refuse(f"{self.name}: bias", self.bias)


def _refuse(name: str, stored: np.ndarray, numbers: Callable[[np.ndarray], np.ndarray] = np.asarray) -> None:
    """numbers: what stored items stand for; by default themselves."""
    rows = max(1, LOOKED_AT_ONCE // math.prod(stored.shape[1:]))
    for first in range(0, len(stored), rows):
        finite = np.isfinite(numbers(stored[first : first + rows]))
        if not finite.all():
            row, *others = np.argwhere(~finite)[0].tolist()
            place = [first + row, *others]
            found = stored[tuple(place)]
            meaning = f"byte {found}, which is NaN or infinite" if stored.dtype == np.uint8 else f"{found}"
            raise FormatError(f"{name} {place} is {meaning}; expected a finite number")


def _expect(name: str, array: np.ndarray | None, dtype: np.dtype | type, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise FormatError(f"{name}: expected a numpy array, found {type(array).__name__}")
    if array.dtype != dtype:
        raise FormatError(f"{name}: expected dtype {np.dtype(dtype).name}, found {array.dtype}")
    if array.shape != shape:
        raise FormatError(f"{name}: expected shape {list(shape)}, found {list(array.shape)}")
    if not array.flags.c_contiguous:
        raise FormatError(f"{name}: expected a C-contiguous array, found strides {array.strides}")
