"""Order: where the code of (n, k) stands in a checkpoint's arrays. Packing turns it into rows; here numpy says what that means.

Rows are what the packed layouts are made from: codes along k, n after n, as many a byte as fit, lower bits first.
Methods that name no size of codes are for 4-bit ones; WeightFormat asks them for those alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_EIGHT = tuple(range(8))


@dataclass(frozen=True)
class Order:
    """The order of 4-bit codes, eight in each int32, of rows, or of rows of the transposed matrix.

    along: the axis along which codes are neighbours, as are a dword's eight: "k" or "n".
    transposed: k is the first axis of codes, and the groups along k are the first one of scales and zero points.
    nibbles: nibble i of a dword, from its lowest bits up, is code nibbles[i] of its eight.
    4-bit rows: uint8 [n, k/2]. Along k, transposed: int32 [k/8, n]. Along n, transposed: int32 [k, n/8].
    Codes of 8 and 16 bits are an item each: [n, k], or, along n and transposed, [k, n]. They have no other order.
    """

    name: str
    along: str = "k"
    transposed: bool = False
    nibbles: tuple[int, ...] = _EIGHT

    #: Whether scales and minima stand with the codes, as ktmoe.weights.records has them.
    of_records = False

    @property
    def rows(self) -> bool:
        """Whether codes are rows as they stand."""
        return self.along == "k" and not self.transposed and self.nibbles == _EIGHT

    @property
    def of_items(self) -> bool:
        """Whether codes of 8 and 16 bits may have it, too."""
        return self.rows or (self.along == "n" and self.transposed and self.nibbles == _EIGHT)

    @property
    def description(self) -> str:
        return f"in {self.name} order"

    @property
    def unit(self) -> tuple[int, int]:
        """(rows, columns) of the matrix that may not be cut; of 4-bit codes."""
        return (1, 2) if self.rows else (8, 8) if self.along == "n" else (1, 8)

    def codes_shape(self, n: int, k: int) -> tuple[int, int]:
        """The shape of the stored codes."""
        if not self.transposed:
            return n, k // 2
        return (k // 8, n) if self.along == "k" else (k, n // 8)

    def shape(self, codes_shape: tuple[int, int]) -> tuple[int, int]:
        """(n, k) of the matrix whose stored codes have that shape."""
        first, second = codes_shape
        if not self.transposed:
            return first, 2 * second
        return (second, 8 * first) if self.along == "k" else (8 * second, first)

    @property
    def codes_dtype(self) -> np.dtype:
        return np.dtype(np.int32 if self.transposed else np.uint8)

    def to_rows(self, stored: np.ndarray, n: int, k: int) -> np.ndarray:
        """Stored codes as rows, uint8 [n, k/2]."""
        codes = self._codes(stored, n, k)
        return codes[:, 0::2] | codes[:, 1::2] << 4

    def from_rows(self, rows: np.ndarray, n: int, k: int) -> np.ndarray:
        """The inverse of to_rows()."""
        codes = np.stack([rows & 15, rows >> 4], axis=-1).reshape(n, k)
        lines = codes if self.along == "k" else codes.T  # a dword's eight codes are neighbours
        nibbles = lines.reshape(len(lines), -1, 8)[:, :, list(self.nibbles)].astype(np.uint32)
        dwords = np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=2)
        if self.along == "k" and self.transposed:
            dwords = dwords.T
        return np.ascontiguousarray(dwords).view(self.codes_dtype).reshape(self.codes_shape(n, k))

    def _codes(self, stored: np.ndarray, n: int, k: int) -> np.ndarray:
        dwords = np.ascontiguousarray(stored).view(np.uint32)
        if self.along == "k" and self.transposed:
            dwords = dwords.T
        codes = np.empty((*dwords.shape, 8), np.uint8)
        for nibble, code in enumerate(self.nibbles):
            codes[:, :, code] = dwords >> 4 * nibble & 15
        lines = codes.reshape(len(dwords), -1)
        return lines if self.along == "k" else np.ascontiguousarray(lines.T)

    def groups_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of stored scales, where there are so many along n and along k."""
        return (columns, rows) if self.transposed else (rows, columns)

    def groups(self, stored: np.ndarray) -> np.ndarray:
        """Stored scales, one after another along k; its own inverse."""
        return np.ascontiguousarray(stored.T) if self.transposed else stored

    def zero_points_shape(self, n: int, groups: int) -> tuple[int, int]:
        """The shape of stored zero points: uint8, or eight in each int32, along n."""
        return (groups, n // 8) if self.transposed else (n, groups)

    def zero_points(self, stored: np.ndarray) -> np.ndarray:
        """Stored zero points as uint8 [n, groups]."""
        if not self.transposed:
            return stored
        eights = [stored.view(np.uint32) >> 4 * self.nibbles.index(code) & 15 for code in _EIGHT]
        return np.ascontiguousarray(np.stack(eights, axis=-1).reshape(len(stored), -1).T.astype(np.uint8))

    def stored_zero_points(self, points: np.ndarray) -> np.ndarray:
        """The inverse of zero_points()."""
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
