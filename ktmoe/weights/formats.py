"""WeightFormat: all that can be known of what a weight matrix's bytes mean. It names no model and no instruction set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.forks import cached_property
from ktmoe.weights.elements import BFLOAT16, E2M1, E4M3, FP16, FP32, INT4, INT8, INT8_PLUS_128, NUMBERS, UINT4, Element
from ktmoe.weights.offsets import Minimum, ZeroPoint
from ktmoe.weights.order import AWQ, GPTQ, ROWS, Components, Shapes, SourceOrder
from ktmoe.weights.scales import Factor, Scale


@dataclass(frozen=True)
class WeightFormat:
    """What the arrays of a weight matrix [n, k] mean.

    A weight is (value - zero point) * scale * super-scale - minimum, times (or divided by) the factor, for those of these that
    the format has. Only kernels have limits; ktmoe.reference knows every combination.

    element: what codes stand for. scale: of groups of weights. super_scale: of groups of scales, which it multiplies.
    offset: ZeroPoint or Minimum. factor: Factor. order: how codes and numbers of groups stand.
    Raises FormatError for components that do not go together.

    Examples:
        >>> mxfp4 = ktmoe.WeightFormat(ktmoe.MXFP4.element, ktmoe.Scale("ue8m0", (1, 32)))
        >>> mxfp4 == ktmoe.MXFP4, mxfp4.description
        (True, 'E2M1 with ue8m0 scales per 1x32')
    """

    element: Element
    scale: Scale | None = None
    super_scale: Scale | None = None
    offset: ZeroPoint | Minimum | None = None
    factor: Factor | None = None
    order: SourceOrder = field(default=ROWS)

    def __post_init__(self) -> None:
        if self.element.family in NUMBERS and (self.scale or self.offset):
            raise FormatError(f"{self.element.name} weights have neither scales nor offsets")
        if self.super_scale and not self.scale:
            raise FormatError("a super-scale needs a scale that it multiplies")
        if isinstance(self.offset, ZeroPoint) and not _small_integers(self.element):
            raise FormatError(f"zero points need 4-bit integers of at most 16, found {self.element.name}")
        self.order.check(self._components)

    @cached_property
    def _components(self) -> Components:
        """What the order has to know."""
        return Components(self.element, self.scales, self.offset.extent[1] if isinstance(self.offset, ZeroPoint) else 0)

    @property
    def scales(self) -> dict[str, Scale]:
        """The scale, the super-scale, and those that a Minimum has, by the names of their arrays."""
        minimum = self.offset if isinstance(self.offset, Minimum) else None
        given = {"scales": self.scale, "super_scales": self.super_scale}
        if minimum:
            given |= {"offsets": minimum.scale, "super_offsets": minimum.super_scale}
        return {label: scale for label, scale in given.items() if scale}

    @property
    def family(self) -> str:
        """What packs such a matrix, and the kernels that decode it: by default its element's family."""
        return self.order.packed or self.element.family

    @property
    def description(self) -> str:
        """The format in words, for messages and tables: 'E2M1 with ue8m0 scales per 1x32'."""
        described = [each.description for each in (self.scale, self.super_scale, self.offset, self.factor) if each]
        text = f"{self.element.name} with {', '.join(described)}" if described else self.element.name
        return text if self.order.rows else f"{text}, {self.order.description}"

    @property
    def unit(self) -> tuple[int, int]:
        """(rows, columns) that may not be cut: what shares a scale or an offset, or an item of the arrays."""
        extents = [scale.extent for scale in self.scales.values()]
        if isinstance(self.offset, ZeroPoint):
            extents.append(self.offset.extent)
        extents.append(self.code_unit)
        return math.lcm(*(rows for rows, _ in extents)), math.lcm(*(columns for _, columns in extents))

    @property
    def code_unit(self) -> tuple[int, int]:
        """(rows, columns) of which n and k must be multiples."""
        own, of_rows = self.order.unit(self._components), ROWS.unit(self._components)  # packing turns every order into rows
        return math.lcm(own[0], of_rows[0]), math.lcm(own[1], of_rows[1])

    def arrays(self, n: int, k: int) -> Shapes:
        """dtype and shape of each array of a matrix [n, k], by its name in Matrix.

        Examples:
            >>> ktmoe.MXFP4.arrays(8, 64)
            {'codes': (dtype('uint8'), (8, 32)), 'scales': (dtype('uint8'), (8, 2))}
        """
        arrays = self.order.arrays(self._components, n, k)
        if self.factor:
            arrays["factor"] = np.dtype(np.float32), self.factor.shape(n)
        return arrays

    def shape(self, codes_shape: tuple[int, int]) -> tuple[int, int]:
        """(n, k) of the matrix whose codes have that shape.

        Examples:
            >>> ktmoe.MXFP4.shape((8, 32))
            (8, 64)
        """
        return self.order.shape(self._components, codes_shape)

    def empty(self, n: int, k: int) -> dict[str, np.ndarray]:
        """New arrays for a matrix [n, k], by name.

        Examples:
            >>> {name: array.shape for name, array in ktmoe.MXFP4.empty(8, 64).items()}
            {'codes': (8, 32), 'scales': (8, 2)}
        """
        return {label: np.empty(shape, dtype) for label, (dtype, shape) in self.arrays(n, k).items()}

    def nbytes(self, n: int, k: int) -> int:
        """Bytes that a checkpoint spends on a matrix [n, k].

        Examples:
            >>> ktmoe.MXFP4.nbytes(8, 64)
            272
        """
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.arrays(n, k).values())

    def rows(self, stored: Mapping[str, np.ndarray], n: int, k: int) -> dict[str, np.ndarray]:
        """The arrays of a matrix in the order of rows: scales are [n/rows, k/columns], zero points uint8 [n, groups].

        Examples:
            >>> stored = ktmoe.uint4(32, order=ktmoe.weights.order.AWQ).empty(8, 32)
            >>> ktmoe.uint4(32, order=ktmoe.weights.order.AWQ).rows(stored, 8, 32)["codes"].shape
            (8, 16)
        """
        return dict(stored) | self.order.to_rows(self._components, stored, n, k)

    def from_rows(self, arrays: Mapping[str, np.ndarray], n: int, k: int) -> dict[str, np.ndarray]:
        """The inverse of rows(). Raises FormatError for a number that has no bits in this order.

        Examples:
            >>> awq, rows = ktmoe.uint4(32, order=ktmoe.weights.order.AWQ), ktmoe.uint4(32)
            >>> zeros = {name: np.zeros_like(array) for name, array in rows.empty(8, 32).items()}
            >>> awq.from_rows(zeros, 8, 32)["codes"].shape
            (32, 1)
        """
        factor = {"factor": arrays["factor"]} if self.factor else {}
        return self.order.from_rows(self._components, arrays, n, k) | factor

    def group_rows(self, stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of rows() that are not codes and not the factor.

        Examples:
            >>> sorted(ktmoe.uint4(32).group_rows(ktmoe.uint4(32).empty(8, 32)))
            ['offsets', 'scales']
        """
        return self.order.group_rows(self._components, stored)

    def stored_groups(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Those of from_rows() that are not codes and not the factor.

        Examples:
            >>> sorted(ktmoe.MXFP4.stored_groups({"scales": np.zeros((8, 1), np.uint8)}))
            ['scales']
        """
        return self.order.stored_groups(self._components, arrays)

    def shown_groups(self, stored: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Numbers of groups, at least, at the places that messages name.

        Examples:
            >>> list(ktmoe.MXFP4.shown_groups({"scales": np.zeros((8, 1), np.uint8)}))
            ['scales']
        """
        return self.order.shown_groups(self._components, stored)


def _small_integers(element: Element) -> bool:
    """Whether a value less a zero point is exact in every kernel's arithmetic."""
    values = [value for value in element.values if value is not None]
    return element.family == "q4" and all(value == int(value) and abs(value) <= 16 for value in values)


#: MXFP4 and MXFP8 of the OCP MX specification: one UE8M0 scale per 32 along k.
MXFP4 = WeightFormat(E2M1, Scale("ue8m0", (1, 32)))
MXFP8 = WeightFormat(E4M3, Scale("ue8m0", (1, 32)))
#: bfloat16 weights.
BF16 = WeightFormat(BFLOAT16)
#: IEEE weights of 16 and of 32 bits.
F16 = WeightFormat(FP16)
F32 = WeightFormat(FP32)
#: E4M3 with one scale per output row ("channel"), or per matrix ("tensor").
FP8_PER_ROW = WeightFormat(E4M3, factor=Factor(per_row=True))
FP8_PER_MATRIX = WeightFormat(E4M3, factor=Factor(per_row=False))


def fp8(kind: str = "fp32", block: tuple[int, int] = (128, 128)) -> WeightFormat:
    """E4M3 with one scale per block of (rows, columns), as DeepSeek-V3 has it.

    Examples:
        >>> ktmoe.fp8("bf16").description
        'E4M3 with bf16 scales per 128x128'
    """
    return WeightFormat(E4M3, Scale(kind, block))


def nvfp4(divides: bool = False) -> WeightFormat:
    """E2M1 with one E4M3 scale per 16 along k, and one float32 number per matrix that multiplies, or divides.

    Examples:
        >>> ktmoe.nvfp4().description
        'E2M1 with e4m3 scales per 1x16, an fp32 factor per matrix'
    """
    return WeightFormat(E2M1, Scale("e4m3", (1, 16)), factor=Factor(per_row=False, divides=divides))


def int4(group: int | None = None, kind: str = "bf16", order: SourceOrder = ROWS) -> WeightFormat:
    """Symmetric INT4: codes that store q + 8, one scale per `group` along k, or a float32 one per output row.

    Examples:
        >>> ktmoe.int4(32).description, ktmoe.int4().description
        ('INT4 with bf16 scales per 1x32', 'INT4 with an fp32 factor per row')
    """
    if group is None:
        return WeightFormat(INT4, factor=Factor(per_row=True), order=order)
    return WeightFormat(INT4, Scale(kind, (1, group)), order=order)


def uint4(group: int, kind: str = "fp16", order: SourceOrder = ROWS, plus: int = 0) -> WeightFormat:
    """Asymmetric INT4: one scale and one zero point per `group` along k; GPTQ's and AWQ's in their orders.

    Examples:
        >>> ktmoe.uint4(128).description
        'UINT4 with fp16 scales per 1x128, zero points per 1x128'
    """
    return WeightFormat(UINT4, Scale(kind, (1, group)), offset=ZeroPoint((1, group), plus), order=order)


def int8(group: int | None = None, kind: str = "bf16", element: Element = INT8, rows: int = 1) -> WeightFormat:
    """Symmetric INT8: one scale per (rows, group along k), or a float32 one per output row.

    Examples:
        >>> ktmoe.int8().description
        'INT8 with an fp32 factor per row'
    """
    if group is None:
        return WeightFormat(element, factor=Factor(per_row=True))
    return WeightFormat(element, Scale(kind, (rows, group)))


#: What loaders of safetensors read, by name; {group} stands for 32, 64 or 128. docs/formats.md has a row for each. F16 and F32
#: are with GGUF's, in ktmoe.weights.ggml.
FORMATS = {
    "MXFP4": MXFP4,
    "MXFP8": MXFP8,
    "NVFP4": nvfp4(),
    "NVFP4, divided": nvfp4(divides=True),
    "FP8 per 128x128": fp8(),
    "FP8 per 128x128, bf16 scales": fp8("bf16"),
    "FP8 per row": FP8_PER_ROW,
    "FP8 per matrix": FP8_PER_MATRIX,
    "INT8 per row": int8(),
    "INT8 per group": int8(128),
    "INT8 + 128": int8(128, element=INT8_PLUS_128),
    "INT8 per 128x128": int8(128, "fp32", rows=128),
    "INT4": int4(32),
    "GPTQ": uint4(128, order=GPTQ, plus=1),
    "GPTQ, symmetric": int4(128, "fp16", GPTQ),
    "AWQ": uint4(128, order=AWQ),
    "BF16": BF16,
}
