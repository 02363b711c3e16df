"""A checkpoint's weights in the forms that peers take. Needs numpy alone. Arrays are as protocol.Model has them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np


def blocks_of_32(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """ggml's block_mxfp4 and block_q4_0, uint8 [n, k / 32, bytes of a scale + 16]: the scale, then 16 bytes of codes.

    The first 16 codes are low nibbles, the others high. scales: [n, k / 32], of the type that the block has.
    """
    nbytes = scales.view(np.uint8).reshape(*scales.shape, -1)
    packed = codes.reshape(*scales.shape, 16)
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scales.shape, 32)
    return np.concatenate([nbytes, values[..., :16] | values[..., 16:] << 4], axis=-1)


def mxfp4_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The same values: ggml's table is twice E2M1's, and it halves the scale."""
    return blocks_of_32(codes, scales)


def q4_0_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """INT4 as ggml's Q4_0, whose scales are float16. Raises ValueError where a bfloat16 scale is no float16."""
    wide = float32(scales)
    half = wide.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), wide):
        raise ValueError("Q4_0 has float16 scales, and a scale of these weights is none")
    return blocks_of_32(codes, half)


def bfloat16_weights(weights: str, *arrays: np.ndarray) -> np.ndarray:
    """A matrix in bfloat16, whose bits these are, uint16 [n, k]. The same real numbers for MXFP4 and BF16.

    A weight of FP8, INT4 or Q4_K is rounded, to nearest even, since it has more bits.
    """
    return _IN_BFLOAT16[weights](*arrays)


def _from_mxfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Exact for scales from 2**-125 to 2**125."""
    byte = scales.astype(np.uint16)[..., None] << 8 | codes.reshape(*scales.shape, 16)
    return _mxfp4_pairs()[byte].view(np.uint16).reshape(len(scales), -1)


@functools.cache
def _mxfp4_pairs() -> np.ndarray:
    """Two bfloat16 weights, the low nibble's first, by scale and byte of codes."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    with np.errstate(over="ignore"):
        values = np.ldexp(np.concatenate([e2m1, -e2m1]), np.arange(256)[:, None] - 127)
    return _pairs(bfloat16(values)).reshape(-1)


def _from_int4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes are unsigned, with 8 for 0."""
    used, at = np.unique(scales, return_inverse=True)
    pairs = _pairs(bfloat16(float32(used)[:, None] * np.arange(-8, 8, dtype=np.float32))).reshape(-1)
    byte = at.reshape(scales.shape).astype(np.uint32)[..., None] << 8 | codes.reshape(*scales.shape, -1)
    return pairs[byte].view(np.uint16).reshape(len(scales), -1)


def _from_q4_k(records: np.ndarray) -> np.ndarray:
    """The weights of Q4_K's records.

    A record of 256 has fp16 d and m, 12 bytes of six-bit scales and minima, and the codes of 32 weights in the low nibbles of
    32 bytes, those of the next 32 in the high ones. A weight is d * scale * code - m * minimum.
    """
    each = records.reshape(-1, 144)
    halves = np.ascontiguousarray(each[:, :4]).view(np.float16).astype(np.float64)
    low, high, rest = (each[:, first : first + 4] for first in (4, 8, 12))
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=1)
    codes = each[:, 16:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None] & 15
    scaled = (halves[:, :1] * scales)[..., None] * codes.reshape(-1, 8, 32)
    return bfloat16((scaled - (halves[:, 1:] * minima)[..., None]).reshape(len(records), -1))


def _from_fp8(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks of 128 x 128; the last may be cut."""
    made = np.empty(codes.shape, np.uint16)
    for i, row in enumerate(scales):
        for j, scale in enumerate(row):
            block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            made[block] = bfloat16(_e4m3() * scale)[codes[block]]
    return made


@functools.cache
def _e4m3() -> np.ndarray:
    """The values of E4M3's codes; 0x7F and 0xFF are NaN."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, (code & 7) / 8
    values = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


def _pairs(bits: np.ndarray) -> np.ndarray:
    """uint32 [..., 256] of the bits of 16 codes' numbers, [..., 16]: by byte, the low nibble's first."""
    byte, bits = np.arange(256), bits.astype(np.uint32)
    return bits[..., byte & 15] | bits[..., byte >> 4] << 16


_IN_BFLOAT16: dict[str, Callable[..., np.ndarray]] = {
    "MXFP4": _from_mxfp4,
    "BF16": lambda bits: bits,
    "FP8": _from_fp8,
    "INT4": _from_int4,
    "GGUF Q4_K": _from_q4_k,
}


def bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 numbers, ties to even; NaN stays NaN."""
    bits = numbers.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def float32(bits: np.ndarray) -> np.ndarray:
    """The numbers whose bfloat16 bits these are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
