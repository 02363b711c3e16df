"""Tensors of random values: their bytes depend on a seed, the tensor's name and its shape alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ktmoe.weights.formats import WeightFormat

#: By the dtype names of a safetensors header: those of its writer, and bytes per element.
DTYPES = {"I8": ("int8", 1), "U8": ("uint8", 1), "F8_E8M0": ("float8_e8m0fnu", 1), "BF16": ("bfloat16", 2), "I32": ("int32", 4)}
_BF16 = np.dtype(ml_dtypes.bfloat16)
_GAUSS = math.sqrt(3)  # a uniform number in [-sqrt(3), sqrt(3)] has variance 1

#: Turns random bytes, uint8, into a tensor's, in place.
Shaper = Callable[[np.ndarray], None]


@dataclass(frozen=True)
class Tensor:
    """name, dtype, shape: as in a safetensors header. slabs: how many parts along the first axis are made one by one."""

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

    def part(self, start: int, stop: int, seed: int) -> np.ndarray:
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
    """All byte values alike: codes."""


def constant(array: np.ndarray) -> Shaper:
    """Not random at all."""

    def shape(out: np.ndarray) -> None:
        out[:] = array.view(np.uint8)

    return shape


def ue8m0_scales(weight_format: WeightFormat, k: int) -> Shaper:
    """Four powers of two, such that uniform codes times scales have a standard deviation of about 1/sqrt(k)."""
    # rms of a uniform code times rms of 2**(-2..1), and 2**middle brings that to about 1/sqrt(k)
    rms = math.sqrt(np.mean(np.square(weight_format.codebook)) * np.mean(np.exp2([-4, -2, 0, 2])))
    middle = round(-math.log2(rms * math.sqrt(k)))

    def shape(out: np.ndarray) -> None:
        out &= 3
        out += np.uint8(127 + middle - 2)

    return shape


def bf16_scales(weight_format: WeightFormat, k: int) -> Shaper:
    """Uniform over a factor of 4, hardly ever powers of two, such that weights have a standard deviation of about 1/sqrt(k)."""
    low, high = 0.5, 2.0
    rms = math.sqrt(np.mean(np.square(weight_format.codebook)) * (low * low + low * high + high * high) / 3)
    return _uniform_bf16(low / rms / math.sqrt(k), high / rms / math.sqrt(k))


def bf16_numbers(deviation: float) -> Shaper:
    """Uniform, with mean 0 and that standard deviation."""
    return _uniform_bf16(-_GAUSS * deviation, _GAUSS * deviation)


def _uniform_bf16(low: float, high: float) -> Shaper:
    def shape(out: np.ndarray) -> None:
        values = out.view(np.uint16).astype(np.float32)
        values *= np.float32((high - low) / 65535)
        values += np.float32(low)
        out[:] = values.astype(_BF16).view(np.uint8)

    return shape
