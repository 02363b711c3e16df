"""Tensors of random values: their bytes depend on a seed, the tensor's name and its shape alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import ml_dtypes
import numpy as np

from ktmoe.weights.elements import Element
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.offsets import ZeroPoint

#: The dtypes by their names in a safetensors header: the writer's names, and bytes per element.
DTYPES = {
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
}
_BF16 = np.dtype(ml_dtypes.bfloat16)
#: Scales are uniform over this, times what gives weights the right size. Hardly any is a power of two.
_LOW, _HIGH = 0.5, 2.0
_SCALE_RMS = math.sqrt((_LOW * _LOW + _LOW * _HIGH + _HIGH * _HIGH) / 3)
_GAUSS = math.sqrt(3)  # a uniform number in [-sqrt(3), sqrt(3)] has variance 1

#: Turns random bytes, uint8, into a tensor's, in place.
Shaper = Callable[[np.ndarray], None]


@dataclass(frozen=True)
class Tensor:
    """name, dtype, shape: as in a safetensors header. slabs: how many, along the first axis, are made one by one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shaper: Shaper
    slabs: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    def fill(self, out: np.ndarray, seed: int) -> None:
        """Write the tensor's bytes into uint8 [nbytes]."""
        for index, slab in enumerate(np.split(out, self.slabs)):
            self._fill_slab(slab, index, seed)

    def read(self, start: int, stop: int, seed: int) -> np.ndarray:
        """The bytes [start, stop); only the slabs that they lie in are made."""
        size = self.nbytes // self.slabs
        first, last = start // size, -(-stop // size)
        out = np.empty((last - first, size), np.uint8)
        for row, index in zip(out, range(first, last), strict=True):
            self._fill_slab(row, index, seed)
        return out.reshape(-1)[start - first * size : stop - first * size]

    def _fill_slab(self, out: np.ndarray, index: int, seed: int) -> None:
        name = self.name if self.slabs == 1 else f"{self.name}[{index}]"
        random = np.random.default_rng([seed, *name.encode()])
        words = random.integers(0, 2**64, -(-len(out) // 8), np.uint64)  # four times faster than as many bytes
        out[:] = words.view(np.uint8)[: len(out)]
        self.shaper(out)


def uniform(_out: np.ndarray) -> None:
    """Leave the random bytes as they are: codes of which each value is as likely."""


def constant(array: np.ndarray) -> Shaper:
    """A shaper that makes a tensor this array, whatever the random bytes are."""

    def shape(out: np.ndarray) -> None:
        out[:] = array.view(np.uint8)

    return shape


def codes(element: Element) -> Shaper:
    """A shaper that makes codes as drawn() has them."""
    table = drawn(element)
    if len(table) <= 256:
        return uniform  # bytes or pairs of nibbles

    def shape(out: np.ndarray) -> None:
        words = out.astype(np.uint16)
        words |= np.roll(out, -1).astype(np.uint16) << 8  # a byte's neighbour decides on the size
        np.take(table, words, out=out, mode="clip")  # "raise" makes a copy

    return shape


@cache
def drawn(element: Element) -> np.ndarray:
    """Codes of which each is as likely. All of them; of floats of 8 bits 2**16, rounded from a normal distribution whose
    largest number is the element's, as quantized weights are. Denormal numbers are rare then; on some CPUs they are slow.
    """
    if element.family != "f8":
        return np.arange(1 << element.bits, dtype=np.uint8)
    known = np.array([-np.inf if value is None else value for value in element.values])
    order = np.argsort(known, kind="stable")[np.isinf(known).sum() :]
    normal = NormalDist()
    upper = np.array([normal.inv_cdf((i + 0.5) / 2**16) for i in range(2**15, 2**16)])
    wanted = np.concatenate([-upper[::-1], upper]) * (known.max() / upper[-1])
    middles = (known[order][1:] + known[order][:-1]) / 2
    return order[np.searchsorted(middles, wanted)].astype(np.uint8)


def zero_points(out: np.ndarray) -> None:
    """Make zero points: two a byte, 4 to 11 each."""
    out &= 0x77
    out += 0x44


def scales(weight_format: WeightFormat, k: int) -> Shaper:
    """Scales with which the codes of codes(), less zero_points(), have a standard deviation of about 1/sqrt(k).

    ue8m0: four powers of two. e4m3: 16 numbers from 0.5 to 1.875; the factor does the rest. Others: uniform.
    """
    kind, wanted = weight_format.scale.kind, 1 / math.sqrt(k) / _rms(weight_format)
    if kind == "ue8m0":
        middle = round(math.log2(wanted / math.sqrt(np.mean(np.exp2([-4, -2, 0, 2])))))
        return _bits(3, 127 + middle - 2)
    if kind == "e4m3":
        return _bits(15, 0x30)
    return numbers(weight_format.scale.dtype, _LOW * wanted / _SCALE_RMS, _HIGH * wanted / _SCALE_RMS)


def factors(weight_format: WeightFormat, k: int, dtype: str) -> Shaper:
    """Factors with which weights have the standard deviation that scales() says. dtype: a safetensors header's."""
    wanted = 1 / math.sqrt(k) / _rms(weight_format)
    if weight_format.scale:  # e4m3
        wanted /= math.sqrt(
            np.mean(np.square(np.arange(0x30, 0x40, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)))
        )
    low, high = (_LOW / _SCALE_RMS, _HIGH / _SCALE_RMS) if weight_format.factor.per_row else (0.8, 1.25)
    low, high = (1 / (high * wanted), 1 / (low * wanted)) if weight_format.factor.divides else (low * wanted, high * wanted)
    return numbers({"F32": np.float32, "BF16": _BF16}[dtype], low, high)


def bf16_numbers(deviation: float) -> Shaper:
    """A shaper that makes uniform numbers with mean 0 and that standard deviation."""
    return numbers(_BF16, -_GAUSS * deviation, _GAUSS * deviation)


def numbers(dtype: np.dtype | type, low: float, high: float) -> Shaper:
    """A shaper that makes uniform floats in [low, high]."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")

    def shape(out: np.ndarray) -> None:
        values = out.view(bits).astype(np.float32)
        values *= np.float32((high - low) / np.iinfo(bits).max)
        values += np.float32(low)
        out[:] = values.astype(dtype).view(np.uint8)

    return shape


def _bits(mask: int, first: int) -> Shaper:
    def shape(out: np.ndarray) -> None:
        out &= mask
        out += np.uint8(first)

    return shape


def _rms(weight_format: WeightFormat) -> float:
    """The root mean square of what codes() and zero_points() stand for, before any scale."""
    values = weight_format.element.numbers(drawn(weight_format.element))
    if isinstance(weight_format.offset, ZeroPoint):
        values = np.subtract.outer(values, np.arange(4, 12) + weight_format.offset.plus)
    return math.sqrt(np.mean(np.square(values)))
