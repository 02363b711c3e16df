"""What the emulated instructions compute, in numpy: float64, where the product of two bf16 is exact and the rest is rounded to
odd, hence to float32 once. And inputs that tell one order, rounding or choice of NaN from another.
"""

from __future__ import annotations

import numpy as np

SPECIAL = np.array(
    [0, 0x0001, 0x007F, 0x0080, 0x0081, 0x00FF, 0x3F80, 0x3F81, 0x4049, 0x7F7F, 0x7F00, 0x7F80, 0x7F81, 0x7FC0, 0x7FC5, 0x7FFF],
    np.uint16,
)


def bf16_values(rng, count):
    """bf16 bits: a third of ordinary size, a third of any, a third special (zeros, denormals, infinities, NaN), either sign."""
    ordinary = (rng.normal(0, 1, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    special = rng.choice(SPECIAL, count) | (rng.integers(0, 2, count, dtype=np.uint16) << 15)
    return np.choose(rng.integers(0, 3, count), [ordinary, rng.integers(0, 1 << 16, count, dtype=np.uint16), special])


def random_state(rng):
    """All vector and mask registers: uint8 [32, 64], uint64 [8]."""
    zmm = bf16_values(rng, 32 * 32).view(np.uint8).reshape(32, 64)
    return zmm, rng.integers(0, 1 << 64, 8, dtype=np.uint64)


def bits(x):
    return np.ascontiguousarray(x).view(np.uint32)


def quiet(x):
    return (x.view(np.uint32) | np.uint32(0x00400000)).view(np.float32)


def flush(x):
    """Denormals to zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def round_once(x, error):
    """The exact x + error, |error| at most half an ulp of float64 x, as float32: RNE, tininess after rounding, FTZ."""
    bits = x.view(np.int64)
    inexact_even = (error != 0) & (bits & 1 == 0)
    bits = bits + np.where(inexact_even, np.where((error > 0) == (x > 0), 1, -1), 0)  # to odd: no tie arises by chance
    bits = (bits + 0x0FFFFFFF + (bits >> 29 & 1)) & ~0x1FFFFFFF  # 24 bits of precision, exponent as wide as it takes
    rounded = bits.view(np.float64)
    rounded = np.where(np.abs(rounded) < 2.0**-126, np.copysign(0.0, rounded), rounded)
    return rounded.astype(np.float32)  # exact, or infinite


def fma(a, b, c):
    """float32 a * b + c with one rounding, DAZ, FTZ; NaN priority a, b, c."""
    a, b, c = flush(a), flush(b), flush(c)
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)
        total = product + c
        shadow = total - product
        error = (product - (total - shadow)) + (c.astype(np.float64) - shadow)
        finite = np.isfinite(product) & np.isfinite(c)
        result = np.where(finite, round_once(total, np.where(finite, error, 0)), total.astype(np.float32))
    result = np.where(np.isnan(result), np.uint32(0xFFC00000).view(np.float32), result)  # invalid: the default NaN, negative
    for operand in (c, b, a):
        result = np.where(np.isnan(operand), quiet(operand), result)
    return result


def dot_pairs(acc, a, b, order=(1, 0)):
    """VDPBF16PS: uint32 pairs of bf16 a, b into float32 acc; order of the pair's elements: the odd one first."""
    for element in order:
        high = [x & np.uint32(0xFFFF0000) if element else x << np.uint32(16) for x in (a, b)]
        acc = fma(high[0].view(np.float32), high[1].view(np.float32), acc)
    return acc


def to_bf16(x):
    """float32 -> bf16 bits by arithmetic on the value: RNE, denormals to zero, NaN cut and made quiet."""
    x = flush(x)
    with np.errstate(all="ignore"):
        fraction, exponent = np.frexp(x.astype(np.float64))
        rounded = np.ldexp(np.rint(fraction * 256), exponent - 8).astype(np.float32)
    rounded = np.where(np.isnan(x), quiet(x), np.where(np.isinf(x), x, rounded))
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def multiply(a, b):
    """VMULPS under the default MXCSR: float32 a * b; NaN priority a, b."""
    with np.errstate(all="ignore"):
        result = a * b
    result = np.where(np.isnan(result), np.uint32(0xFFC00000).view(np.float32), result)
    for operand in (b, a):
        result = np.where(np.isnan(operand), quiet(operand), result)
    return result


def multishift(control, source):
    """VPMULTISHIFTQB of whole qwords: uint8 [8 n], of which source's are taken apart into bits."""
    bits = np.unpackbits(source.reshape(-1, 8), axis=1, bitorder="little")
    first = control.reshape(-1, 8, 1) % 64
    return np.packbits(
        bits[np.arange(len(bits))[:, None, None], (first + np.arange(8)) % 64], axis=2, bitorder="little"
    ).ravel()


def affine(source, matrix, immediate):
    """VGF2P8AFFINEQB of whole qwords: uint8 [8 n], each byte times the matrix of its qword, whose last byte gives bit 0."""
    rows = matrix.reshape(-1, 1, 8)[:, :, ::-1]
    parities = np.bitwise_xor.reduce(np.unpackbits((source.reshape(-1, 8, 1) & rows)[..., None], axis=3), axis=3)
    return (np.packbits(parities, axis=2, bitorder="little").ravel() ^ np.uint8(immediate)).astype(np.uint8)


def dot_bytes(acc, a, b):
    """VPDPBUSD: int32 acc [n] + unsigned bytes a [4 n] times signed bytes b [4 n], four at a time; wraps around."""
    products = (a.astype(np.int64) * b.astype(np.int64)).reshape(-1, 4).sum(axis=1)
    return (acc.astype(np.int64) + products).astype(np.uint64).astype(np.uint32).view(np.int32)


def dot_words(acc, a, b):
    """VPDPWSSD: int32 acc [n] + signed words a [2 n] times signed words b [2 n], two at a time; wraps around."""
    products = (a.astype(np.int64) * b.astype(np.int64)).reshape(-1, 2).sum(axis=1)
    return (acc.astype(np.int64) + products).astype(np.uint64).astype(np.uint32).view(np.int32)


def add(a, b):
    """float32 a + b with one rounding, DAZ, FTZ; NaN priority a, b."""
    a, b = flush(a), flush(b)
    with np.errstate(all="ignore"):
        wide = a.astype(np.float64), b.astype(np.float64)
        total = wide[0] + wide[1]
        shadow = total - wide[0]
        error = (wide[0] - (total - shadow)) + (wide[1] - shadow)
        finite = np.isfinite(a) & np.isfinite(b)
        result = np.where(finite, round_once(total, np.where(finite, error, 0)), total.astype(np.float32))
    result = np.where(np.isnan(result), np.uint32(0xFFC00000).view(np.float32), result)
    for operand in (b, a):
        result = np.where(np.isnan(operand), quiet(operand), result)
    return result


def tdpbf16ps(c, a, b):
    """float32 c [..., m, n] + bf16 bits a [..., m, 2k] times b [..., k, 2n], whose rows hold the pairs of a column each."""
    even, odd = np.zeros_like(c), np.zeros_like(c)
    a, b = ((x.astype(np.uint32) << 16).view(np.float32) for x in (a, b))
    for k in range(b.shape[-2]):
        even = fma(a[..., 2 * k, None], b[..., k, None, 0::2], even)
        odd = fma(a[..., 2 * k + 1, None], b[..., k, None, 1::2], odd)
    return add(c, add(even, odd))


def tdpb(c, a, b):
    """int32 c [m, n] + bytes a [m, 4k] times b [k, 4n], signed or not as their types say; wraps around."""
    m, k, n = *c.shape[:1], b.shape[0], c.shape[1]
    columns = b.astype(np.int64).reshape(k, n, 4).transpose(0, 2, 1).reshape(4 * k, n)
    return (c.astype(np.int64) + a.astype(np.int64) @ columns).astype(np.uint64).astype(np.uint32).view(np.int32).reshape(m, n)
