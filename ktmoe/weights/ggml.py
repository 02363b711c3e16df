"""Weights as GGUF files have them: WeightFormats by the name of the ggml type, and the record sizes of all types.

The layouts are those of llama.cpp, ggml/src/ggml-common.h and dequantize_row_* in ggml/src/ggml-quants.c.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktmoe.weights.elements import E2M1, INT4, INT8, UINT4, Element, integers
from ktmoe.weights.formats import BF16, F16, F32, WeightFormat
from ktmoe.weights.grid_records import GridRecords, TernaryRecords
from ktmoe.weights.grids import IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, Grid
from ktmoe.weights.offsets import Minimum
from ktmoe.weights.records import Field, Piece, Plane, Records, plain, span
from ktmoe.weights.scales import Factor, Scale


@dataclass(frozen=True)
class GgmlType:
    """A type of GGUF tensors: its name, and how many weights stand in a record of how many bytes."""

    name: str
    weights: int
    nbytes: int


#: The types by their number in files. Types that were given up (4, 5, 31 to 33, 36 to 38) are in no file that can be read.
TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
    42: GgmlType("Q2_0", 64, 18),
}

_BY_NAME = {of.name: of for of in TYPES.values()}

#: The 16 numbers of IQ4_NL and IQ4_XS.
IQ4 = Element("IQ4", "q4", tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))))


_INT3, _INT5, _INT6 = integers("INT3", 3, 4), integers("INT5", 5, 16), integers("INT6", 6, 32)
_UINT2, _UINT5, _TERNARY = integers("UINT2", 2, 0), integers("UINT5", 5, 0), integers("INT2 + 1", 2, 1)


def _records(name: str, code_bits: int, *planes: Plane, **fields: Field) -> Records:
    of = _BY_NAME[name]
    return Records(name, of.weights, of.nbytes, code_bits, planes, **fields)


def _half(byte: int) -> Field:
    """A field of one fp16 number."""
    return plain(byte, 1, 2)


def _of_six_bits(byte: int, high: int, low: int) -> Field:
    """A field of eight scales, or minima, of Q4_K and Q5_K, whose 12 bytes begin at `byte`.

    Four have six bits of a byte each, from byte `low` on. The others have four bits of bytes 8 to 11, from bit `high` up, and
    the two highest bits of the first four's bytes.
    """
    first = tuple((Piece(byte + low + i, 0, 6),) for i in range(4))
    return Field(first + tuple((Piece(byte + 8 + i, high, 4), Piece(byte + low + i, 6, 2, 4)) for i in range(4)))


_Q3_K_SCALES = Field(
    tuple((Piece(96 + i % 8, 4 * (i // 8), 4), Piece(104 + i % 4, 2 * (i // 4), 2, 4)) for i in range(16)), plus=-32
)
_IQ4_XS_SCALES = Field(
    tuple((Piece(4 + i // 2, 4 * (i % 2), 4), Piece(2 + i // 4, 2 * (i % 4), 2, 4)) for i in range(8)), plus=-32
)


def _nibbles(first: int, byte: int) -> Field:
    """A field of 16 numbers of four bits, from bit `first` of a byte up."""
    return Field(tuple((Piece(byte + i, first, 4),) for i in range(16)))


_HALF = Scale("fp16", (1, 32))
_SUPER = Scale("fp16", (1, 256))
_INT32, _INT16, _UINT4_PER_16 = Scale("int8", (1, 32)), Scale("int8", (1, 16)), Scale("uint4", (1, 16))

#: The formats of the types that can be computed, by the type's name.
GGML = {
    "Q4_0": WeightFormat(INT4, _HALF, order=_records("Q4_0", 4, Plane(2, 4, 16), scales=_half(0))),
    "Q4_1": WeightFormat(
        UINT4,
        _HALF,
        offset=Minimum(_HALF, added=True),
        order=_records("Q4_1", 4, Plane(4, 4, 16), scales=_half(0), offsets=_half(2)),
    ),
    "Q5_0": WeightFormat(_INT5, _HALF, order=_records("Q5_0", 8, Plane(6, 4, 16), Plane(2, 1, 1, 4), scales=_half(0))),
    "Q5_1": WeightFormat(
        _UINT5,
        _HALF,
        offset=Minimum(_HALF, added=True),
        order=_records("Q5_1", 8, Plane(8, 4, 16), Plane(4, 1, 1, 4), scales=_half(0), offsets=_half(2)),
    ),
    "Q8_0": WeightFormat(INT8, _HALF, order=_records("Q8_0", 8, Plane(2, 8, 32), scales=_half(0))),
    "Q2_K": WeightFormat(
        _UINT2,
        _UINT4_PER_16,
        _SUPER,
        Minimum(_UINT4_PER_16, _SUPER),
        order=_records(
            "Q2_K",
            8,
            Plane(16, 2, 32),
            scales=_nibbles(0, 0),
            super_scales=_half(80),
            offsets=_nibbles(4, 0),
            super_offsets=_half(82),
        ),
    ),
    "Q3_K": WeightFormat(
        _INT3,
        Scale("int6", (1, 16)),
        _SUPER,
        order=_records("Q3_K", 8, Plane(32, 2, 32), Plane(0, 1, 32, 2), scales=_Q3_K_SCALES, super_scales=_half(108)),
    ),
    "Q4_K": WeightFormat(
        UINT4,
        _INT32,
        _SUPER,
        Minimum(_INT32, _SUPER),
        order=_records(
            "Q4_K",
            4,
            Plane(16, 4, 32),
            scales=_of_six_bits(4, 0, 0),
            super_scales=_half(0),
            offsets=_of_six_bits(4, 4, 4),
            super_offsets=_half(2),
        ),
    ),
    "Q5_K": WeightFormat(
        _UINT5,
        _INT32,
        _SUPER,
        Minimum(_INT32, _SUPER),
        order=_records(
            "Q5_K",
            8,
            Plane(48, 4, 32),
            Plane(16, 1, 32, 4),
            scales=_of_six_bits(4, 0, 0),
            super_scales=_half(0),
            offsets=_of_six_bits(4, 4, 4),
            super_offsets=_half(2),
        ),
    ),
    "Q6_K": WeightFormat(
        _INT6,
        _INT16,
        _SUPER,
        order=_records("Q6_K", 8, Plane(0, 4, 64), Plane(128, 2, 32, 4), scales=plain(192, 16, 1), super_scales=_half(208)),
    ),
    "IQ4_NL": WeightFormat(IQ4, _HALF, order=_records("IQ4_NL", 4, Plane(2, 4, 16), scales=_half(0))),
    "IQ4_XS": WeightFormat(
        IQ4, _INT32, _SUPER, order=_records("IQ4_XS", 4, Plane(8, 4, 16), scales=_IQ4_XS_SCALES, super_scales=_half(0))
    ),
    "TQ2_0": WeightFormat(_TERNARY, _SUPER, order=_records("TQ2_0", 8, Plane(0, 2, 32), scales=_half(64))),
    "MXFP4": WeightFormat(E2M1, Scale("ue8m0", (1, 32)), order=_records("MXFP4", 4, Plane(1, 4, 16), scales=plain(0, 1, 1))),
    # UE4M3: ggml does not look at the sign bit, which is 0 where a writer was right. The factor is the tensor's `.scale`.
    "NVFP4": WeightFormat(
        E2M1,
        Scale("e4m3", (1, 16)),
        factor=Factor(per_row=False),
        order=_records("NVFP4", 4, Plane(4, 4, 8), scales=plain(0, 4, 1, bits=7)),
    ),
    "BF16": BF16,
    "F16": F16,
    "F32": F32,
}


def _signed(*magnitudes: float) -> tuple[float, ...]:
    """The values of codes with a sign in bit 3; 0 for those that do not occur."""
    values = magnitudes + (0.0,) * (8 - len(magnitudes))
    return values + tuple(-value if value else 0.0 for value in values)


#: What the codes of grids stand for. ggml has 8, 25, 43 and 4, 12, ... 62, multiplied by a scale of s + 1/2, and by 1/4 or 1/2.
#: Here the scale is 2 s + 1.
IQ2 = Element("IQ2", "q4", _signed(8 / 8, 25 / 8, 43 / 8))
IQ3_XXS_VALUES = Element("IQ3_XXS", "q4", _signed(1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5))
IQ3_S_VALUES = Element("IQ3_S", "q4", _signed(1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0))
#: -1, 0 and 1, plus 1/8, or with bit 3 minus 1/8.
IQ1 = Element("IQ1", "q4", (-7 / 8, 1 / 8, 9 / 8, *(0.0,) * 5, -9 / 8, -1 / 8, 7 / 8, *(0.0,) * 5))
TERNARY = Element("TERNARY", "q4", (-1.0, 0.0, 1.0, *(0.0,) * 13))


def _words(byte: int, nbytes: int, count: int, items: int, bits: int, first: int = 0, step: int = 0, shift: int = 0) -> Field:
    """A field of numbers in so many words of so many bytes, from `byte` on, each with so many items of so many bits.

    first: a word's bit where they begin. step: how many bits apart they are; 0: these bits are all of them.
    shift: the bit of the item where these bits begin.
    """
    places = [(byte + nbytes * word, first + step * item) for word in range(count) for item in range(items)]
    return Field(tuple(span(*place, bits, shift) for place in places))


def _both(low: Field, high: Field) -> Field:
    """The field whose items have the pieces of both."""
    return Field(tuple(of_low + of_high for of_low, of_high in zip(low.items, high.items, strict=True)))


def _in_grid(name: str, element: Element, grid: Grid, sign_bits: int, **fields: Field) -> WeightFormat:
    order = GridRecords(name, _BY_NAME[name].nbytes, grid, sign_bits=sign_bits, **fields)
    return WeightFormat(element, Scale("odd", (1, 256 // len(fields["scales"].items))), _SUPER, order=order)


#: The formats of the types whose codes are a grid's entries, or digits to base 3.
GRIDS = {
    "IQ2_XXS": _in_grid(
        "IQ2_XXS",
        IQ2,
        IQ2_XXS,
        7,
        index=_words(2, 8, 8, 4, 8, step=8),
        signs=_words(6, 8, 8, 4, 7, step=7),
        scales=_words(6, 8, 8, 1, 4, first=28),
        super_scales=_half(0),
    ),
    "IQ2_XS": _in_grid(
        "IQ2_XS",
        IQ2,
        IQ2_XS,
        7,
        index=_words(2, 2, 32, 1, 9),
        signs=_words(2, 2, 32, 1, 7, first=9),
        scales=_words(66, 1, 8, 2, 4, step=4),
        super_scales=_half(0),
    ),
    "IQ2_S": _in_grid(
        "IQ2_S",
        IQ2,
        IQ2_S,
        8,
        index=_both(plain(2, 32, 1), _words(66, 1, 8, 4, 2, step=2, shift=8)),
        signs=plain(34, 32, 1),
        scales=_words(74, 1, 8, 2, 4, step=4),
        super_scales=_half(0),
    ),
    "IQ3_XXS": _in_grid(
        "IQ3_XXS",
        IQ3_XXS_VALUES,
        IQ3_XXS,
        7,
        index=plain(2, 64, 1),
        signs=_words(66, 4, 8, 4, 7, step=7),
        scales=_words(66, 4, 8, 1, 4, first=28),
        super_scales=_half(0),
    ),
    "IQ3_S": _in_grid(
        "IQ3_S",
        IQ3_S_VALUES,
        IQ3_S,
        8,
        index=_both(plain(2, 64, 1), _words(66, 1, 8, 8, 1, step=1, shift=8)),
        signs=plain(74, 32, 1),
        scales=_words(106, 1, 4, 2, 4, step=4),
        super_scales=_half(0),
    ),
    "IQ1_S": _in_grid(
        "IQ1_S",
        IQ1,
        IQ1_S,
        1,
        index=_both(plain(2, 32, 1), _words(34, 2, 8, 4, 3, step=3, shift=8)),
        signs=_words(34, 2, 8, 4, 1, first=15),
        scales=_words(34, 2, 8, 1, 3, first=12),
        super_scales=_half(0),
    ),
    "IQ1_M": _in_grid(
        "IQ1_M",
        IQ1,
        IQ1_S,
        1,
        index=_both(plain(0, 32, 1), _words(32, 1, 16, 2, 3, step=4, shift=8)),
        signs=_words(32, 1, 16, 2, 1, first=3, step=4),
        scales=_words(48, 2, 4, 4, 3, step=3),
        super_scales=Field((tuple(Piece(49 + 2 * i, 4, 4, 4 * i) for i in range(4)),)),
    ),
    "TQ1_0": WeightFormat(
        TERNARY,
        _SUPER,
        order=TernaryRecords("TQ1_0", _BY_NAME["TQ1_0"].nbytes, ((0, 32, 5), (32, 16, 5), (48, 4, 4)), scales=_half(52)),
    ),
}
GGML |= GRIDS
