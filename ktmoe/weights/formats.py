"""WeightFormat: what the bytes of a weight matrix mean. It names no model and no instruction set."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ktmoe.errors import FormatError

_BF16 = np.dtype(ml_dtypes.bfloat16)

#: OCP Microscaling Formats (MX) v1.0, table 5: FP4 E2M1, sign in bit 3.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

#: Signed 4-bit integers stored as q + 8.
OFFSET_INT4 = tuple(float(q) for q in range(-8, 8))

#: How a stored scale reads, by kind: the dtype of the array that holds the checkpoint's bytes.
#: "ue8m0": one byte b that means 2**(b - 127); 255 is NaN (OCP MX v1.0, 5.4.1). "bf16": a bfloat16 number.
SCALE_DTYPES = {"ue8m0": np.dtype(np.uint8), "bf16": _BF16}


@dataclass(frozen=True)
class Scale:
    """How a matrix [n, k] is scaled.

    kind: how one stored scale reads, a key of SCALE_DTYPES.
    extent: (rows, columns) of the matrix that share one scale.
    """

    kind: str
    extent: tuple[int, int]

    def __post_init__(self):
        if self.kind not in SCALE_DTYPES:
            raise FormatError(f"scale kind {self.kind!r} is unknown; known are {', '.join(SCALE_DTYPES)}")
        if min(self.extent) < 1:
            raise FormatError(f"a scale's extent must be at least 1 x 1, found {self.extent}")

    @property
    def dtype(self) -> np.dtype:
        """Of the array that holds the stored scales."""
        return SCALE_DTYPES[self.kind]

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the scales of a matrix [n, k]."""
        rows, columns = self.extent
        return -(-n // rows), -(-k // columns)

    def invalid(self, scales: np.ndarray) -> np.ndarray:
        """Where stored scales stand for no real number, bool."""
        return scales == 255 if self.kind == "ue8m0" else ~np.isfinite(scales.astype(np.float32))


@dataclass(frozen=True)
class WeightFormat:
    """What the codes of a weight matrix [n, k] mean.

    family: the kernel family, by element.
        "q4": a weight is exactly codebook[code] * scale; 4-bit codes, two a byte along k, low nibble = even k, uint8 [n, k/2].
        "b16": a weight is the bfloat16 number itself, [n, k]; no codebook, no scale.
    codebook: the 16 real numbers that q4 codes stand for; each must be a bfloat16 number, and one of them 0, which pads.
    scale: Scale, or None for b16.
    """

    family: str
    codebook: tuple[float, ...] = ()
    scale: Scale | None = None

    def __post_init__(self):
        if self.family == "b16":
            if self.codebook or self.scale:
                raise FormatError("b16 weights have neither a codebook nor a scale")
            return
        if self.family != "q4":
            raise FormatError(f"weight family {self.family!r} is unknown; known are q4, b16")
        if len(self.codebook) != 16:
            raise FormatError(f"a q4 codebook has 16 entries, found {len(self.codebook)}")
        values = np.array(self.codebook, np.float64)
        wrong = ~np.isfinite(values) | (values.astype(ml_dtypes.bfloat16) != values)
        if wrong.any():
            raise FormatError(f"a q4 codebook's entries must be finite bfloat16 numbers, found {values[wrong][0]}")
        if 0.0 not in self.codebook:
            raise FormatError("a q4 codebook must contain 0, which pads")
        if self.scale is None:
            raise FormatError("q4 weights need a scale")

    @property
    def description(self) -> str:
        """For messages and tables: 'q4 with ue8m0 scales per 1x32'."""
        if self.scale is None:
            return self.family
        rows, columns = self.scale.extent
        return f"{self.family} with {self.scale.kind} scales per {rows}x{columns}"

    @property
    def codes_dtype(self) -> np.dtype:
        """Of the array that holds the stored codes."""
        return np.dtype(np.uint8) if self.family == "q4" else _BF16

    @property
    def codes_per_item(self) -> int:
        """How many codes one item of that array holds, along k; k must be a multiple of it."""
        return 2 if self.family == "q4" else 1

    def codes_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the stored codes of a matrix [n, k]."""
        return n, k // self.codes_per_item

    def empty(self, n: int, k: int) -> tuple[np.ndarray, np.ndarray | None]:
        """New arrays for the stored codes and scales of a matrix [n, k]; None where there are no scales."""
        scales = None if self.scale is None else np.empty(self.scale.shape(n, k), self.scale.dtype)
        return np.empty(self.codes_shape(n, k), self.codes_dtype), scales

    def nbytes(self, n: int, k: int) -> int:
        """Bytes that a checkpoint spends on a matrix [n, k]: codes and scales."""
        codes = n * (k // self.codes_per_item) * self.codes_dtype.itemsize
        if self.scale is None:
            return codes
        rows, columns = self.scale.shape(n, k)
        return codes + rows * columns * self.scale.dtype.itemsize


#: MXFP4 of the OCP MX specification: E2M1 codes, one UE8M0 scale per 32 along k.
MXFP4 = WeightFormat("q4", E2M1, Scale("ue8m0", (1, 32)))
#: bfloat16 weights.
BF16 = WeightFormat("b16")


def int4(group: int) -> WeightFormat:
    """Symmetric INT4: codes that store q + 8, one bfloat16 scale per `group` along k."""
    return WeightFormat("q4", OFFSET_INT4, Scale("bf16", (1, group)))
