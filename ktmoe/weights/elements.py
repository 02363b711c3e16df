"""Element: what a code stands for. A family is what packs such codes, and the kernels that decode them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ktmoe.errors import FormatError

#: The sizes of a code in bits, by family. q4: any 16 bfloat16 numbers. f8: floats. int: integers, a code less the code of 0; of
#: 8 bits also in two's complement. b16, f16, f32: the code is the number itself, of one of NUMBERS.
FAMILIES = {"q4": (4,), "f8": (8,), "int": (2, 3, 5, 6, 8), "b16": (16,), "f16": (16,), "f32": (32,)}

#: The dtype of codes that are numbers themselves, by family.
NUMBERS = {"b16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Element:
    """What codes stand for: the real number of each.

    name: for messages. family: a key of FAMILIES.
    values: by code, 2**bits of them; None for a code that is no real number. Empty for NUMBERS.
    Raises FormatError.

    Examples:
        >>> sixteenths = ktmoe.Element("sixteenths", "q4", tuple(code / 16 for code in range(16)))
        >>> sixteenths.bits
        4
    """

    name: str
    family: str
    values: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise FormatError(f"{self.name}: weight family {self.family!r} is unknown; known are {', '.join(FAMILIES)}")
        counts = [0 if self.family in NUMBERS else 1 << bits for bits in FAMILIES[self.family]]
        if len(self.values) not in counts:
            expected = ", ".join(map(str, counts))
            raise FormatError(f"{self.name}: a {self.family} element has {expected} values, found {len(self.values)}")
        known = np.array([value for value in self.values if value is not None], np.float64)
        wrong = ~np.isfinite(known) | (known.astype(ml_dtypes.bfloat16) != known)
        if wrong.any():
            raise FormatError(f"{self.name}: an element's values must be finite bfloat16 numbers, found {known[wrong][0]}")
        if self.family == "int" and not self._integers:
            raise FormatError(
                f"{self.name}: an int element's values are neighbouring integers with 0 among them; of 8 bits, -128 to 127, in "
                "two's complement or plus 128"
            )
        if self.family == "q4" and None in self.values:
            raise FormatError(f"{self.name}: every code of a q4 element must have a value")

    @property
    def _integers(self) -> bool:
        """Whether the values are such as int's are."""
        if len(self.values) == 256:
            return self.values in _INTEGERS
        least = self.values[0]
        if least is None or 0.0 not in self.values:
            return False
        return self.values == tuple(least + code for code in range(len(self.values)))

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return FAMILIES[self.family][0] if self.family in NUMBERS else len(self.values).bit_length() - 1

    @property
    def row_bits(self) -> int:
        """Bits of a code in arrays that have codes alone: those of integers are bytes."""
        return max(8, self.bits) if self.family == "int" else self.bits

    @property
    def codes_dtype(self) -> np.dtype:
        """The dtype of an array of codes, one an item."""
        return NUMBERS.get(self.family, np.dtype(np.uint8))

    @property
    def padding(self) -> int:
        """The code that pads: that of 0, else of the value nearest to 0. x is 0 there."""
        sizes = [np.inf if value is None else abs(value) for value in self.values] or [0]
        return sizes.index(min(sizes))

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        """Codes, one an item, as float64; NaN for those that are no real number.

        Examples:
            >>> ktmoe.MXFP4.element.numbers(np.array([1, 7, 15]))
            array([ 0.5,  6. , -6. ])
        """
        with np.errstate(invalid="ignore"):  # a signalling NaN is one of these
            if self.family in NUMBERS:
                return codes.astype(np.float64)
            values = np.full(1 << self.row_bits, np.nan)  # an array of bytes may hold more than a code has bits
            values[: len(self.values)] = self.values
            return values[codes]


#: What codes of 8 bits of int may stand for: q in two's complement, and stored as q + 128.
_INTEGERS = (
    tuple(float(q - 256 * (q > 127)) for q in range(256)),
    tuple(float(q - 128) for q in range(256)),
)


def _of_dtype(dtype: Any) -> tuple[float | None, ...]:
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    return tuple(float(value) if np.isfinite(value) else None for value in values)


def integers(name: str, bits: int, zero: int) -> Element:
    """Integers of so many bits, stored plus `zero`."""
    return Element(name, "int", tuple(float(code - zero) for code in range(1 << bits)))


#: OCP Microscaling Formats (MX) v1.0, table 5: FP4 E2M1, sign in bit 3.
E2M1 = Element("E2M1", "q4", (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
#: Signed 4-bit integers stored as q + 8.
INT4 = Element("INT4", "q4", tuple(float(q) for q in range(-8, 8)))
#: Unsigned 4-bit integers, for formats that have zero points.
UINT4 = Element("UINT4", "q4", tuple(float(q) for q in range(16)))
#: OCP 8-bit Floating Point Specification v1.0, E4M3: no infinities, 0x7F and 0xFF are NaN.
E4M3 = Element("E4M3", "f8", _of_dtype(ml_dtypes.float8_e4m3fn))
#: OCP 8-bit Floating Point Specification v1.0, E5M2: 0x7C to 0x7F and their negatives are infinities and NaN.
E5M2 = Element("E5M2", "f8", _of_dtype(ml_dtypes.float8_e5m2))
#: Signed 8-bit integers, in two's complement.
INT8 = Element("INT8", "int", _INTEGERS[0])
#: Signed 8-bit integers, stored as q + 128.
INT8_PLUS_128 = Element("INT8 + 128", "int", _INTEGERS[1])
BFLOAT16 = Element("BF16", "b16")
#: IEEE 754 binary16 and binary32.
FP16 = Element("FP16", "f16")
FP32 = Element("FP32", "f32")

#: The elements that kernels know by their names, by name.
ELEMENTS = {element.name: element for element in (E2M1, INT4, UINT4, E4M3, E5M2, INT8, INT8_PLUS_128, BFLOAT16, FP16, FP32)}
