"""SourceOrder: where a checkpoint's arrays have the code of (n, k) and the numbers of groups. Order is one; Records is another.

Rows are what the packed layouts are made from: codes along k, n after n, as many a byte as fit, lower bits first, and arrays of
numbers likewise. Packing turns every order into rows; here numpy says what that means.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.weights.elements import Element
from ktmoe.weights.scales import Scale

#: dtype and shape of arrays, by their names in a Matrix; and such arrays.
Shapes = dict[str, tuple[np.dtype, tuple[int, ...]]]
Arrays = dict[str, np.ndarray]


class Components(NamedTuple):
    """What a format says of its codes and of what groups share. points: k that share a zero point; 0: there are none."""

    element: Element
    scales: Mapping[str, Scale]
    points: int = 0


class SourceOrder(ABC):
    """How a matrix [n, k] stands in a checkpoint's arrays: its codes and the numbers of groups, but not its factor.

    name: for messages. rows: whether all arrays are rows as they stand. transposed: whether k is the first axis of each array.
    packed: the family that matrices of this order are packed as, as they stand: only GridRecords and TernaryRecords have one.
    The driver has these, Order and Records in C, and takes from any other what to_rows() and from_rows() give.
    """

    name: str
    rows: bool = False
    transposed: bool = False
    packed: str | None = None

    @property
    def description(self) -> str:
        return f"in {self.name} order"

    @abstractmethod
    def check(self, components: Components) -> None:
        """Raise FormatError for components that cannot stand in this order."""

    @abstractmethod
    def unit(self, components: Components) -> tuple[int, int]:
        """(rows, columns) of the matrix that may not be cut, and of which n and k are multiples."""

    @abstractmethod
    def arrays(self, components: Components, n: int, k: int) -> Shapes:
        """dtype and shape of each array of a matrix [n, k], by its name in Matrix: codes, scales, super_scales, offsets,
        super_offsets."""

    @abstractmethod
    def shape(self, components: Components, codes_shape: tuple[int, int]) -> tuple[int, int]:
        """(n, k) of the matrix whose codes have that shape."""

    @abstractmethod
    def to_rows(self, components: Components, stored: Mapping[str, np.ndarray], n: int, k: int) -> Arrays:
        """All arrays in the order of rows: codes uint8 [n, k/2] (4 bits) or [n, k], scales [n/rows, k/columns], zero points
        uint8 [n, groups]."""

    @abstractmethod
    def from_rows(self, components: Components, arrays: Mapping[str, np.ndarray], n: int, k: int) -> Arrays:
        """The inverse of to_rows(). Raises FormatError for a number that this order has no bits for."""

    @abstractmethod
    def group_rows(self, components: Components, stored: Mapping[str, np.ndarray]) -> Arrays:
        """What to_rows() gives, without the codes."""

    @abstractmethod
    def stored_groups(self, components: Components, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """The arrays that hold numbers of groups alone, from those of group_rows()."""

    def shown_groups(self, components: Components, stored: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Numbers of groups, at least, at the places that messages name: by default those of the arrays that hold them, else of
        group_rows()."""
        return stored if components.scales.keys() <= stored.keys() else self.group_rows(components, stored)

    def first_spare(self, stored: np.ndarray) -> tuple[list[int], int, int] | None:
        """Where stored codes have the first bit that means nothing: [row, record], its byte, and what that is. By default all
        bits mean something."""
        return None


_EIGHT = tuple(range(8))


@dataclass(frozen=True)
class Order(SourceOrder):
    """The order of 4-bit codes, eight in each int32, of rows, or of rows of the transposed matrix.

    along: the axis along which codes are neighbours, as are a dword's eight: "k" or "n".
    transposed: k is the first axis of codes, and the groups along k are the first one of scales and zero points.
    nibbles: nibble i of a dword, from its lowest bits up, is code nibbles[i] of its eight.
    4-bit rows: uint8 [n, k/2]. Along k, transposed: int32 [k/8, n]. Along n, transposed: int32 [k, n/8].
    Codes of 8 and 16 bits are an item each: [n, k], or, along n and transposed, [k, n]. They have no other order.

    Examples:
        >>> ktmoe.uint4(128, order=ktmoe.weights.order.AWQ).arrays(256, 128)["codes"]
        (dtype('int32'), (128, 32))
    """

    name: str
    along: str = "k"
    transposed: bool = False
    nibbles: tuple[int, ...] = _EIGHT

    @property
    def rows(self) -> bool:  # type: ignore[override]  # nobody sets it
        """Whether codes are rows as they stand."""
        return self.along == "k" and not self.transposed and self.nibbles == _EIGHT

    @property
    def of_items(self) -> bool:
        """Whether codes of 8 and 16 bits may have it, too."""
        return self.rows or (self.along == "n" and self.transposed and self.nibbles == _EIGHT)

    def check(self, components: Components) -> None:
        if components.element.bits != 4 and not self.of_items:
            raise FormatError(f"order {self.name!r} is one of 4-bit codes, found {components.element.name}")

    def unit(self, components: Components) -> tuple[int, int]:
        rows, columns = 1, 1
        if components.element.bits == 4:
            rows, columns = (1, 2) if self.rows else (8, 8) if self.along == "n" else (1, 8)
        # zero points are eight an int32, along n
        return (math.lcm(rows, 8), columns) if components.points and self.transposed else (rows, columns)

    def arrays(self, components: Components, n: int, k: int) -> Shapes:
        arrays: Shapes = {"codes": (self._codes_dtype(components.element), self._codes_shape(components.element, n, k))}
        for label, scale in components.scales.items():
            rows, columns = scale.shape(n, k)
            arrays[label] = scale.dtype, (columns, rows) if self.transposed else (rows, columns)
        if components.points:
            groups = -(-k // components.points)
            whole = np.dtype(np.int32), (groups, n // 8)
            arrays["offsets"] = whole if self.transposed else (np.dtype(np.uint8), (n, groups))
        return arrays

    def shape(self, components: Components, codes_shape: tuple[int, int]) -> tuple[int, int]:
        first, second = codes_shape
        if components.element.bits != 4:
            return (second, first) if self.transposed else (first, second)
        if not self.transposed:
            return first, 2 * second
        return (second, 8 * first) if self.along == "k" else (8 * second, first)

    def to_rows(self, components: Components, stored: Mapping[str, np.ndarray], n: int, k: int) -> Arrays:
        if self.rows:
            return dict(stored)
        codes = stored["codes"]
        rows = self._nibble_rows(codes, n, k) if components.element.bits == 4 else np.ascontiguousarray(codes.T)
        return {"codes": rows} | self.group_rows(components, stored)

    def from_rows(self, components: Components, arrays: Mapping[str, np.ndarray], n: int, k: int) -> Arrays:
        if self.rows:
            return dict(arrays)
        rows = arrays["codes"]
        codes = self._nibbles(rows, n, k) if components.element.bits == 4 else np.ascontiguousarray(rows.T)
        return {"codes": codes} | self.stored_groups(components, arrays)

    def group_rows(self, components: Components, stored: Mapping[str, np.ndarray]) -> Arrays:
        arrays = {label: self._turned(stored[label]) for label in components.scales}
        return arrays | ({"offsets": self._point_rows(stored["offsets"])} if components.points else {})

    def stored_groups(self, components: Components, arrays: Mapping[str, np.ndarray]) -> Arrays:
        stored = {label: self._turned(arrays[label]) for label in components.scales}
        return stored | ({"offsets": self._points(arrays["offsets"])} if components.points else {})

    def _turned(self, scales: np.ndarray) -> np.ndarray:
        """Stored scales, one after another along k; its own inverse."""
        return np.ascontiguousarray(scales.T) if self.transposed else scales

    def _codes_shape(self, element: Element, n: int, k: int) -> tuple[int, int]:
        if element.bits != 4:
            return (k, n) if self.transposed else (n, k)
        if not self.transposed:
            return n, k // 2
        return (k // 8, n) if self.along == "k" else (k, n // 8)

    def _codes_dtype(self, element: Element) -> np.dtype:
        if element.bits != 4:
            return element.codes_dtype
        return np.dtype(np.int32 if self.transposed else np.uint8)

    def _nibble_rows(self, stored: np.ndarray, n: int, k: int) -> np.ndarray:
        """Stored 4-bit codes as rows, uint8 [n, k/2]."""
        codes = self._nibbles_of(stored)
        return codes[:, 0::2] | codes[:, 1::2] << 4

    def _nibbles(self, rows: np.ndarray, n: int, k: int) -> np.ndarray:
        """The inverse of _nibble_rows()."""
        codes = np.stack([rows & 15, rows >> 4], axis=-1).reshape(n, k)
        lines = codes if self.along == "k" else codes.T  # a dword's eight codes are neighbours
        nibbles = lines.reshape(len(lines), -1, 8)[:, :, list(self.nibbles)].astype(np.uint32)
        dwords = np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=2)
        if self.along == "k" and self.transposed:
            dwords = dwords.T
        stored = np.ascontiguousarray(dwords)
        return stored.view(np.int32) if self.transposed else stored.view(np.uint8).reshape(n, k // 2)

    def _nibbles_of(self, stored: np.ndarray) -> np.ndarray:
        """Stored 4-bit codes, one an item [n, k]."""
        dwords = np.ascontiguousarray(stored).view(np.uint32)
        if self.along == "k" and self.transposed:
            dwords = dwords.T
        codes = np.empty((*dwords.shape, 8), np.uint8)
        for nibble, code in enumerate(self.nibbles):
            codes[:, :, code] = dwords >> 4 * nibble & 15
        lines = codes.reshape(len(dwords), -1)
        return lines if self.along == "k" else np.ascontiguousarray(lines.T)

    def _point_rows(self, stored: np.ndarray) -> np.ndarray:
        """Stored zero points as uint8 [n, groups]."""
        if not self.transposed:
            return stored
        eights = [stored.view(np.uint32) >> 4 * self.nibbles.index(code) & 15 for code in _EIGHT]
        return np.ascontiguousarray(np.stack(eights, axis=-1).reshape(len(stored), -1).T.astype(np.uint8))

    def _points(self, points: np.ndarray) -> np.ndarray:
        """The inverse of _point_rows()."""
        if not self.transposed:
            return points
        eights = points.T.reshape(points.shape[1], -1, 8)[:, :, list(self.nibbles)].astype(np.uint32)
        return np.ascontiguousarray(np.bitwise_or.reduce(eights << np.arange(0, 32, 4, dtype=np.uint32), axis=2)).view(np.int32)


#: Codes along k, low nibble = even k.
ROWS = Order("rows")
#: AutoGPTQ: qweight int32 [k/8, n], qzeros int32 [groups, n/8], scales [groups, n].
GPTQ = Order("gptq", transposed=True)
#: AutoAWQ: qweight int32 [k, n/8], qzeros int32 [groups, n/8], in the order that its kernels unpack; scales [groups, n].
AWQ = Order("awq", "n", True, (0, 2, 4, 6, 1, 3, 5, 7))
#: Rows of the transposed matrix, which x is multiplied with as they stand: codes [k, n], scales [groups, n].
TRANSPOSED = Order("transposed", "n", True)
