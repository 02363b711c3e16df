"""The checkpoint's MXFP4 in the forms that peers take. Needs numpy alone."""

from __future__ import annotations

import functools

import numpy as np


def mxfp4_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """ggml's block_mxfp4, uint8 [n, k / 32, 17]: the scale, then 16 bytes; the first 16 codes are low nibbles, the others high.

    The same values: its table is twice E2M1's, and it halves the scale.
    """
    packed = codes.reshape(*scales.shape, 16)
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scales.shape, 32)
    return np.concatenate([scales[..., None], values[..., :16] | values[..., 16:] << 4], axis=-1)


def bfloat16_weights(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The same real numbers in bfloat16, whose bits these are, uint16 [n, k]: exact for scales from 2**-125 to 2**125."""
    byte = scales.astype(np.uint16)[..., None] << 8 | codes.reshape(*scales.shape, 16)
    return _pairs()[byte].view(np.uint16).reshape(len(scales), -1)


@functools.cache
def _pairs() -> np.ndarray:
    """By scale and byte of codes: two bfloat16 weights, the low nibble's first."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    with np.errstate(over="ignore"):
        values = np.ldexp(np.concatenate([e2m1, -e2m1]), np.arange(256)[:, None] - 127)
    bits, byte = values.view(np.uint32) >> 16, np.arange(256)
    return (bits[:, byte & 15] | bits[:, byte >> 4] << 16).reshape(-1)


def float32(bits: np.ndarray) -> np.ndarray:
    """The numbers whose bfloat16 bits these are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
