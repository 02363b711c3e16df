"""Weights as GGUF files have them: WeightFormats by the name of the ggml type, and the record sizes of all types.

The layouts are those of llama.cpp, ggml/src/ggml-common.h and dequantize_row_* in ggml/src/ggml-quants.c.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktmoe.weights.elements import E2M1, INT4, INT8, UINT4, Element
from ktmoe.weights.formats import BF16, F16, F32, Factor, Minimum, WeightFormat
from ktmoe.weights.records import Field, Piece, Plane, Records, plain
from ktmoe.weights.scales import Scale


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


def _records(name: str, code_bits: int, *planes: Plane, plus: int = 0, **fields: Field) -> Records:
    of = _BY_NAME[name]
    return Records(name, of.weights, of.nbytes, code_bits, planes, plus, **fields)


def _half(byte: int) -> Field:
    """One fp16 number."""
    return plain(byte, 1, 2)


def _of_six_bits(byte: int, high: int, low: int) -> Field:
    """Eight scales, or minima, of Q4_K and Q5_K, whose 12 bytes begin at `byte`.

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
    """16 numbers of four bits, from bit `first` of a byte up."""
    return Field(tuple((Piece(byte + i, first, 4),) for i in range(16)))


_HALF = Scale("fp16", (1, 32))
_SUPER = Scale("fp16", (1, 256))
_INT32, _INT16 = Scale("int8", (1, 32)), Scale("int8", (1, 16))

#: The formats of the types that can be computed, by the type's name.
GGML = {
    "Q4_0": WeightFormat(INT4, _HALF, order=_records("Q4_0", 4, Plane(2, 4, 16), scales=_half(0))),
    "Q4_1": WeightFormat(
        UINT4,
        _HALF,
        offset=Minimum(_HALF, added=True),
        order=_records("Q4_1", 4, Plane(4, 4, 16), scales=_half(0), offsets=_half(2)),
    ),
    "Q5_0": WeightFormat(INT8, _HALF, order=_records("Q5_0", 8, Plane(6, 4, 16), Plane(2, 1, 1, 4), plus=-16, scales=_half(0))),
    "Q5_1": WeightFormat(
        INT8,
        _HALF,
        offset=Minimum(_HALF, added=True),
        order=_records("Q5_1", 8, Plane(8, 4, 16), Plane(4, 1, 1, 4), scales=_half(0), offsets=_half(2)),
    ),
    "Q8_0": WeightFormat(INT8, _HALF, order=_records("Q8_0", 8, Plane(2, 8, 32), scales=_half(0))),
    "Q2_K": WeightFormat(
        UINT4,
        _INT16,
        _SUPER,
        Minimum(_INT16, _SUPER),
        order=_records(
            "Q2_K",
            4,
            Plane(16, 2, 32),
            scales=_nibbles(0, 0),
            super_scales=_half(80),
            offsets=_nibbles(4, 0),
            super_offsets=_half(82),
        ),
    ),
    "Q3_K": WeightFormat(  # c - 4 is INT4's c + 4
        INT4,
        _INT16,
        _SUPER,
        order=_records("Q3_K", 4, Plane(32, 2, 32), Plane(0, 1, 32, 2), plus=4, scales=_Q3_K_SCALES, super_scales=_half(108)),
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
        INT8,
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
        INT8,
        _INT16,
        _SUPER,
        order=_records(
            "Q6_K", 8, Plane(0, 4, 64), Plane(128, 2, 32, 4), plus=-32, scales=plain(192, 16, 1), super_scales=_half(208)
        ),
    ),
    "IQ4_NL": WeightFormat(IQ4, _HALF, order=_records("IQ4_NL", 4, Plane(2, 4, 16), scales=_half(0))),
    "IQ4_XS": WeightFormat(
        IQ4, _INT32, _SUPER, order=_records("IQ4_XS", 4, Plane(8, 4, 16), scales=_IQ4_XS_SCALES, super_scales=_half(0))
    ),
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
