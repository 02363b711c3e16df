"""Scales of groups of weights, from the numbers of each group: the first half of a rule.

A group is what shares a scale. Its numbers are its least and its largest weight; M is the largest magnitude. What a weight is
divided by (its step) and what its code is multiplied by need not be the same: some rules round the scale after they used it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ktmoe.errors import FormatError
from ktmoe.forks import cached_property
from ktmoe.weights.scales import Scale

ONE = np.float32(1)
#: The largest E4M3 number, and the least one above zero.
E4M3_LARGEST, E4M3_LEAST = np.float32(448), np.float32(2**-9)
#: The number of each E4M3 byte.
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_FINITE = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


@dataclass(frozen=True)
class Groups:
    """The groups of a matrix.

    low, high: float32 [groups along n, groups along k], the least and the largest weight of each.
    whole: M of the whole matrix, or of those that are to share its factor. kind: of the scales that are stored, "fp32" for a
    factor. name: the matrix's, for messages.
    """

    low: np.ndarray
    high: np.ndarray
    whole: np.float32
    kind: str
    name: str

    @cached_property
    def largest(self) -> np.ndarray:
        """M of each group."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def rounded(self, numbers: np.ndarray) -> np.ndarray:
        """float32 numbers as the nearest of this kind, ties to even, in float32. Raises FormatError if one is too large."""
        with np.errstate(over="ignore"):
            rounded = numbers.astype(_FINITE[self.kind]).astype(np.float32)
        if not np.isfinite(rounded).all():
            raise FormatError(f"{self.name}: a scale of {numbers.max()} is too large for {self.kind}")
        return rounded


@dataclass(frozen=True)
class Steps:
    """What becomes of groups; arrays [groups along n, groups along k].

    divisors: float32, what weights are divided by; never 0. scales: float32, those that are stored; stored: as they are, for
    kinds that are bytes. points: float32 integers that are added to quotients before they are rounded, or None.
    factor: of the matrix, or None; divides: whether it divides. inverses: float32, what weights are multiplied by instead of
    1 / divisors, or None.
    """

    divisors: np.ndarray
    scales: np.ndarray
    stored: np.ndarray | None = None
    points: np.ndarray | None = None
    factor: np.float32 | None = None
    divides: bool = False
    inverses: np.ndarray | None = None

    @classmethod
    def of(cls, scales: np.ndarray, stored: np.ndarray | None = None, points: np.ndarray | None = None) -> Steps:
        """Weights are divided by the scale itself."""
        return cls(_not_zero(scales), scales, stored, points)

    @property
    def values(self) -> np.ndarray:
        """float64: what a code, less its zero point, is multiplied by."""
        values = self.scales.astype(np.float64)
        if self.factor is None:
            return values
        return values / np.float64(self.factor) if self.divides else values * np.float64(self.factor)


def _not_zero(divisors: np.ndarray) -> np.ndarray:
    return np.where(divisors == 0, ONE, divisors)


@dataclass(frozen=True)
class PowerOfTwo:
    """2^e, e from -127 to 127. M = m 2^x and element's largest number = l 2^y, m and l in [1/2, 1): e = x - y, plus 1 where
    m reaches `up`, less 1 where it is below `down`.

    exclusive: whether m has to be above `up`. zeros: e + 127 of a group of zeros.
    """

    largest: float
    up: float = 1.0
    down: float = 0.5
    exclusive: bool = False
    zeros: int = 0

    def __call__(self, groups: Groups) -> Steps:
        bits, (up, down) = groups.largest.view(np.int32), self.fractions(23)
        fraction = bits & 0x7FFFFF  # a denormal M, whose fraction is another, is far below 2^-127 times the largest number
        e = (bits >> 23) + (1 - math.frexp(self.largest)[1])  # plus 127, as UE8M0 stores it
        e += fraction >= up
        e -= fraction < down
        stored = np.where(bits == 0, self.zeros, np.clip(e, 0, 254))
        return Steps.of((stored << 23 | (stored == 0) << 22).astype(np.int32).view(np.float32), stored.astype(np.uint8))

    def fractions(self, bits: int) -> tuple[int, int]:
        """Two bounds of M's fraction, as integers of so many bits.

        They are the least fraction for which e is one more, and the least for which it is not one less.
        """
        up, down = ((2 * m - 1) * 2**bits for m in (self.up, self.down))
        return math.floor(up) + 1 if self.exclusive else math.ceil(up), math.ceil(down)


def ceil(largest: float) -> PowerOfTwo:
    """e = ceil(log2(M / largest)): nothing saturates."""
    return PowerOfTwo(largest, up=math.frexp(largest)[0], exclusive=True)


def nearest(largest: float) -> PowerOfTwo:
    """e = log2(M / largest) to the nearest integer. There is no tie, since no square is 2."""
    return PowerOfTwo(largest, down=math.frexp(largest)[0] * 2**-0.5)


def even(largest: float, bits: int, zeros: int = 0) -> PowerOfTwo:
    """e = floor(log2(M')) - floor(log2(largest)), M' being M rounded to so many bits behind the first, ties up."""
    return PowerOfTwo(largest, up=1 - 2.0 ** -(bits + 2), zeros=zeros)


def floor(largest: float) -> PowerOfTwo:
    """e = floor(log2(M)) - floor(log2(largest))."""
    return PowerOfTwo(largest)


@dataclass(frozen=True)
class Share:
    """M / divisor in float32, then the nearest of the scales' kind.

    divisor: of M. up: whether the next scale is taken where divisor * scale would be below M. late: whether weights are divided
    by what M / divisor is before it is a scale. zeros: the scale of a group of zeros. inverse: whether it is M * (1 / divisor).
    """

    divisor: float
    up: bool = False
    late: bool = False
    zeros: float = 1.0
    inverse: bool = False

    def __call__(self, groups: Groups) -> Steps:
        m = groups.largest
        exact = m * np.float32(1 / self.divisor) if self.inverse else m / np.float32(self.divisor)
        scales = groups.rounded(exact)
        if self.up:
            scales = _reaching(groups, scales, self.divisor)
        scales = np.where(m == 0, np.float32(self.zeros), scales)
        return Steps(_not_zero(exact), scales) if self.late else Steps.of(scales)


def _reaching(groups: Groups, scales: np.ndarray, divisor: float) -> np.ndarray:
    """The next scale where divisor * scale is below M."""
    short = scales.astype(np.float64) * divisor < groups.largest
    kind = np.dtype(_FINITE[groups.kind])
    stored = scales.astype(kind)
    bits = stored.view(f"u{kind.itemsize}") + short.astype(f"u{kind.itemsize}")  # all are positive
    return groups.rounded(bits.view(kind).astype(np.float32))


def inverted(groups: Groups) -> Steps:
    """1 / (448 * (1 / M)) in float32, and weights are multiplied by 448 * (1 / M): torch divides a Python number so. Both are 1
    for zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        inverses = np.where(groups.largest == 0, ONE, E4M3_LARGEST * (ONE / groups.largest))
    if not np.isfinite(inverses).all():
        raise FormatError(
            f"{groups.name}: a largest weight of {groups.largest[~np.isfinite(inverses)][0]} has no inverse in float32"
        )
    scales = ONE / inverses
    return Steps(scales, groups.rounded(scales), inverses=inverses)


def in_matrix(groups: Groups) -> Steps:
    """E4M3 scales and a factor f of the matrix. f = M of the matrix / 2688 (448 times 6); s = M / (6 f), the nearest E4M3 from
    2^-9 to 448; divisors are s f. All in float32. Of zeros: s = 1; f = 1 if all are."""
    factor = np.float32(groups.whole / np.float32(2688)) or ONE
    scales = np.clip(groups.largest / (np.float32(6) * factor), E4M3_LEAST, E4M3_LARGEST)
    stored = _e4m3(np.where(groups.largest == 0, ONE, scales))
    scales = _E4M3[stored]
    return Steps(_not_zero(scales * factor), scales, stored, factor=factor)


def in_matrix_divided(groups: Groups) -> Steps:
    """E4M3 scales and a divisor g of the matrix. g = 2688 (1 / M of the matrix), as torch divides a Python number;
    s = g (M / 6), the nearest E4M3 up to 448; divisors are s / g. All in float32. Where s is 0: s = 1/8; g = 1 if it is not
    finite."""
    with np.errstate(over="ignore"):
        factor = np.float32(2688) * (ONE / np.maximum(groups.whole, np.finfo(np.float32).tiny))
    factor = factor if np.isfinite(factor) else ONE
    stored = _e4m3(np.minimum(factor * (groups.largest / np.float32(6)), E4M3_LARGEST))
    stored = np.where(stored == 0, _e4m3(np.array(0.125, np.float32)), stored)
    scales = _E4M3[stored]
    return Steps(_not_zero(scales / factor), scales, stored, factor=factor, divides=True)


def _e4m3(numbers: np.ndarray) -> np.ndarray:
    """The bytes of the nearest E4M3 numbers, ties to even."""
    return numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def between(groups: Groups) -> Steps:
    """s = (high - low) / 15 with low of at most and high of at least 0; zero point z = -8 - low / s, to the nearest integer,
    ties to even, from -8 to 7. Each operation is rounded to the scales' kind. Of zeros: s = 2^-7 for bfloat16, the kind's
    epsilon, and z = 0."""
    low, high = np.minimum(groups.low, np.float32(0)), np.maximum(groups.high, np.float32(0))
    scales = groups.rounded(groups.rounded(high - low) / np.float32(15))
    with np.errstate(divide="ignore", invalid="ignore"):
        points = groups.rounded(np.float32(-8) - groups.rounded(np.where(scales == 0, np.float32(-8), low / scales)))
    epsilon = np.float32(ml_dtypes.finfo(_FINITE[groups.kind]).eps)
    scales = np.where(scales == 0, epsilon, scales)
    return Steps.of(scales, points=np.rint(np.clip(points, -8, 7)))


def extent(scale: Scale | None, per_row: bool, shape: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) of a group in a matrix of that shape."""
    if scale:
        return scale.extent
    return (1, shape[1]) if per_row else shape
