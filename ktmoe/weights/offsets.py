"""ZeroPoint and Minimum: the numbers of groups that are subtracted from weights, or added to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.weights.scales import Scale


@dataclass(frozen=True)
class ZeroPoint:
    """An integer z for each group of weights: weight = (value - z) * scale, z = (stored + plus) mod 16.

    extent: (rows, columns) of the matrix that share one; the rows must be 1.

    Examples:
        >>> element, scale = ktmoe.uint4(64).element, ktmoe.Scale("fp16", (1, 64))
        >>> ktmoe.WeightFormat(element, scale, offset=ktmoe.ZeroPoint((1, 64))).description
        'UINT4 with fp16 scales per 1x64, zero points per 1x64'
    """

    extent: tuple[int, int]
    plus: int = 0

    def __post_init__(self) -> None:
        if self.extent[0] != 1 or self.extent[1] < 1:
            raise FormatError(f"a zero point's extent must be 1 x at least 1, found {self.extent}")

    @property
    def description(self) -> str:
        return f"zero points per {self.extent[0]}x{self.extent[1]}"

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """How many zero points a matrix [n, k] has, along n and along k.

        Examples:
            >>> ktmoe.ZeroPoint((1, 64)).shape(8, 256)
            (8, 4)
        """
        return n, -(-k // self.extent[1])

    def numbers(self, points: np.ndarray) -> np.ndarray:
        """z of zero points as they are stored, one an item.

        Examples:
            >>> ktmoe.ZeroPoint((1, 64), plus=1).numbers(np.array([7, 15], np.uint8))
            array([8, 0], dtype=uint8)
        """
        return (points + np.uint8(self.plus)) & np.uint8(15)

    def stored(self, numbers: np.ndarray) -> np.ndarray:
        """The inverse of numbers().

        Examples:
            >>> ktmoe.ZeroPoint((1, 64), plus=1).stored(np.array([8, 0], np.uint8))
            array([ 7, 15], dtype=uint8)
        """
        return (numbers - np.uint8(self.plus)) & np.uint8(15)


@dataclass(frozen=True)
class Minimum:
    """A real number m for each group of weights: weight = value * scale - m, or value * scale + m.

    scale: how m is stored, and which weights share it. super_scale: of groups of minima, which it multiplies.
    added: whether m is added.

    Examples:
        >>> ktmoe.Minimum(ktmoe.Scale("uint4", (1, 32)), ktmoe.Scale("fp16", (1, 256))).description
        'minima, uint4 per 1x32 times fp16 per 1x256'
    """

    scale: Scale
    super_scale: Scale | None = None
    added: bool = False

    @property
    def description(self) -> str:
        described = [each.description.replace(" scales", "") for each in (self.scale, self.super_scale) if each]
        return f"{'added ' if self.added else ''}minima, {' times '.join(described)}"
