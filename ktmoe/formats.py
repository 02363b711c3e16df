"""WeightFormat: what the bytes of a weight matrix mean. It names no model and no instruction set."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ktmoe.errors import FormatError

#: OCP Microscaling Formats (MX) v1.0, table 5: FP4 E2M1, sign in bit 3.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

#: Bytes of one stored scale, by kind.
SCALE_BYTES = {"ue8m0": 1}


@dataclass(frozen=True)
class Scale:
    """How a matrix [n, k] is scaled.

    kind: how one stored scale reads. "ue8m0" is one byte b that means 2**(b - 127); 255 is NaN (OCP MX v1.0, 5.4.1).
    extent: (rows, columns) of the matrix that share one scale.
    """

    kind: str
    extent: tuple[int, int]

    def __post_init__(self):
        if self.kind not in SCALE_BYTES:
            raise FormatError(f"scale kind {self.kind!r} is unknown; known are {sorted(SCALE_BYTES)}")

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the scales of a matrix [n, k]."""
        rows, columns = self.extent
        return -(-n // rows), -(-k // columns)


@dataclass(frozen=True)
class WeightFormat:
    """A weight is exactly codebook[code] * scale.

    family: the kernel family, by element. "q4": 4-bit codes, two a byte along k, low nibble = even k, uint8 [n, k/2].
    codebook: the 16 real numbers that the codes stand for; each must be a bfloat16 number.
    scale: Scale.
    """

    family: str
    codebook: tuple[float, ...]
    scale: Scale

    def __post_init__(self):
        if self.family != "q4":
            raise FormatError(f"weight family {self.family!r} is unknown; known is 'q4'")
        if len(self.codebook) != 16:
            raise FormatError(f"a q4 codebook has 16 entries, found {len(self.codebook)}")
        values = np.array(self.codebook, np.float64)
        wrong = ~np.isfinite(values) | (values.astype(ml_dtypes.bfloat16) != values)
        if wrong.any():
            raise FormatError(f"a q4 codebook's entries must be finite bfloat16 numbers, found {values[wrong][0]}")
        if 0.0 not in self.codebook:
            raise FormatError("a q4 codebook must contain 0, which pads")

    @property
    def description(self) -> str:
        """For messages and tables: 'q4 with ue8m0 scales per 1x32'."""
        rows, columns = self.scale.extent
        return f"{self.family} with {self.scale.kind} scales per {rows}x{columns}"

    def codes_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the stored codes, uint8, of a matrix [n, k]; k must be even."""
        return n, k // 2

    def nbytes(self, n: int, k: int) -> int:
        """Bytes that a checkpoint spends on a matrix [n, k]: codes and scales."""
        rows, columns = self.scale.shape(n, k)
        return n * (k // 2) + rows * columns * SCALE_BYTES[self.scale.kind]


#: MXFP4 of the OCP MX specification: E2M1 codes, one UE8M0 scale per 32 along k.
MXFP4 = WeightFormat("q4", E2M1, Scale("ue8m0", (1, 32)))
