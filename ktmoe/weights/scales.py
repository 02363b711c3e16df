"""Scale kinds, how one stored scale reads; Scale, which weights share one; Factor, which multiplies finished sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ktmoe.errors import FormatError

_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class ScaleKind:
    """How stored scales read.

    dtype: of the array that holds the checkpoint's bytes, which are viewed as it and never cast.
    field: the bits of the exponent; with all of them set, an item is no real number. 0: every item is one.
    signed: whether the highest bit is a sign.
    bits: the significant bits that a product has more by it; a power of two adds none.
    packed_bits: those of an integer that is packed in fewer than 8; else 0. least: the least of these integers.
    numbers: such an array as float64, NaN or infinite where an item is no real number. stored: the inverse.
    """

    name: str
    dtype: np.dtype
    field: int
    signed: bool = True
    bits: int = 24
    numbers: Callable[[np.ndarray], np.ndarray] = dataclasses.field(
        default=lambda stored: stored.astype(np.float64), compare=False
    )
    stored: Callable[[np.ndarray], np.ndarray] | None = dataclasses.field(default=None, compare=False)
    packed_bits: int = 0
    least: int = 0

    @property
    def magnitude(self) -> int:
        """All bits but the sign."""
        return (1 << 8 * self.dtype.itemsize - self.signed) - 1

    @property
    def one(self) -> int:
        """The bits of 1."""
        return int.from_bytes(self.of_numbers(np.ones(1)).tobytes(), "little")

    def of_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of this kind as they are stored."""
        return self.stored(numbers) if self.stored else numbers.astype(self.dtype)


def _of_ue8m0(numbers: np.ndarray) -> np.ndarray:
    return (np.frexp(numbers)[1] + 126).astype(np.uint8)


def _ue8m0(stored: np.ndarray) -> np.ndarray:
    return np.where(stored == 255, np.nan, np.ldexp(1.0, stored.astype(np.int32) - 127))


def _of_e4m3(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _within(least: int, most: int) -> Callable[[np.ndarray], np.ndarray]:
    """Stored integers as float64, NaN where one is not within these."""
    return lambda stored: np.where((stored >= least) & (stored <= most), stored.astype(np.float64), np.nan)


def _e4m3(stored: np.ndarray) -> np.ndarray:
    return stored.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _of_odd(numbers: np.ndarray) -> np.ndarray:
    return ((numbers - 1) / 2).astype(np.uint8)


def _odd(stored: np.ndarray) -> np.ndarray:
    return 2 * stored.astype(np.float64) + 1


#: "ue8m0": one byte b that means 2**(b - 127); 255 is NaN (OCP MX v1.0, 5.4.1). "e4m3": one byte, OCP E4M3, 0x7F and 0xFF are
#: NaN. "int8", "int6", "uint4": an integer. "odd": one byte s, below 16, that means 2 * s + 1. The others are the numbers
#: themselves. A plugin may add a kind of its own: packing follows from the row; a kernel has to load it.
SCALE_KINDS = {
    kind.name: kind
    for kind in (
        ScaleKind("ue8m0", np.dtype(np.uint8), 0xFF, False, 0, _ue8m0, _of_ue8m0),
        ScaleKind("e4m3", np.dtype(np.uint8), 0x7F, True, 4, _e4m3, _of_e4m3),
        ScaleKind("int8", np.dtype(np.int8), 0, bits=7),
        ScaleKind("int6", np.dtype(np.int8), 0, bits=6, packed_bits=6, least=-32, numbers=_within(-32, 31)),
        ScaleKind("uint4", np.dtype(np.uint8), 0, False, bits=4, packed_bits=4, numbers=_within(0, 15)),
        ScaleKind("odd", np.dtype(np.uint8), 0, False, 5, numbers=_odd, stored=_of_odd),
        ScaleKind("bf16", _BF16, 0x7F80, bits=8),
        ScaleKind("fp16", np.dtype(np.float16), 0x7C00, bits=11),
        ScaleKind("fp32", np.dtype(np.float32), 0x7F800000, bits=24),
    )
}


@dataclass(frozen=True)
class Scale:
    """How a matrix [n, k] is scaled.

    kind: how one stored scale reads, a key of SCALE_KINDS.
    extent: (rows, columns) of the matrix that share one scale.

    Examples:
        >>> ktmoe.WeightFormat(ktmoe.MXFP4.element, ktmoe.Scale("fp32", (1, 64))).description
        'E2M1 with fp32 scales per 1x64'
    """

    kind: str
    extent: tuple[int, int]

    def __post_init__(self) -> None:
        if self.kind not in SCALE_KINDS:
            raise FormatError(f"scale kind {self.kind!r} is unknown; known are {', '.join(SCALE_KINDS)}")
        if min(self.extent) < 1:
            raise FormatError(f"a scale's extent must be at least 1 x 1, found {self.extent}")

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array that holds the stored scales."""
        return SCALE_KINDS[self.kind].dtype

    @property
    def description(self) -> str:
        """The scales as text: 'ue8m0 scales per 1x32'."""
        return f"{self.kind} scales per {self.extent[0]}x{self.extent[1]}"

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """How many scales a matrix [n, k] has, along n and along k.

        Examples:
            >>> ktmoe.Scale("fp32", (128, 128)).shape(256, 200)
            (2, 2)
        """
        rows, columns = self.extent
        return -(-n // rows), -(-k // columns)

    def numbers(self, stored: np.ndarray) -> np.ndarray:
        """Stored scales as float64; NaN or infinite where one is no real number.

        Examples:
            >>> ktmoe.MXFP4.scale.numbers(np.array([127, 130], np.uint8))
            array([1., 8.])
        """
        with np.errstate(invalid="ignore"):  # a signalling NaN is one of these
            return SCALE_KINDS[self.kind].numbers(stored)

    def stored(self, numbers: np.ndarray) -> np.ndarray:
        """The inverse of numbers(), for numbers that came from it.

        Examples:
            >>> ktmoe.MXFP4.scale.stored(np.array([1.0, 8.0]))
            array([127, 130], dtype=uint8)
        """
        return SCALE_KINDS[self.kind].of_numbers(numbers)

    def spread(self, stored: np.ndarray, n: int, k: int) -> np.ndarray:
        """Stored scales of a matrix [n, k] as float64 [n, k]: each weight's own.

        Examples:
            >>> ktmoe.Scale("fp32", (1, 2)).spread(np.array([[1, 3]], np.float32), 1, 4)
            array([[1., 1., 3., 3.]])
        """
        return np.repeat(np.repeat(self.numbers(stored), self.extent[0], axis=0)[:n], self.extent[1], axis=1)[:, :k]


@dataclass(frozen=True)
class Factor:
    """One float32 number for a whole matrix, or for each output row: it multiplies, or divides, what the matrix's product has
    summed up, before the bias.

    Examples:
        >>> ktmoe.Factor(per_row=True).description
        'an fp32 factor per row'
    """

    per_row: bool
    divides: bool = False

    @property
    def description(self) -> str:
        return f"an fp32 {'divisor' if self.divides else 'factor'} per {'row' if self.per_row else 'matrix'}"

    def shape(self, n: int) -> tuple[int]:
        """Of the array that holds the numbers of a matrix with n rows.

        Examples:
            >>> ktmoe.Factor(per_row=True).shape(4096), ktmoe.Factor(per_row=False).shape(4096)
            ((4096,), (1,))
        """
        return (n if self.per_row else 1,)
