"""Tensors of an expert with integers of 4 and 8 bits, and what they mean, by the definitions."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)

#: Where the code of n = 8i + j stands in AWQ's dword i.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def along_n(dwords: np.ndarray, places=range(8)) -> np.ndarray:
    """int32 [rows, n/8] -> codes [rows, n]: that of n = 8i + j is at 4 * places[j] of dword i."""
    codes = [dwords.astype(np.int64) >> 4 * place & 15 for place in places]
    return np.stack(codes, -1).reshape(len(dwords), -1)


def along_k(dwords: np.ndarray) -> np.ndarray:
    """int32 [k/8, n] -> codes [k, n]."""
    return along_n(np.ascontiguousarray(dwords.T)).T


def factors(random, dtype, *shape) -> list:
    """A tensor of scales."""
    return [
        dtype,
        np.asarray(random.uniform(0.5, 2, shape)).astype({"F32": np.float32, "BF16": BF16, "F16": np.float16}[dtype]),
    ]


def int8(ending, dtype, scales):
    """Tensors of INT8. scales: the shape of a matrix's, by (n, k)."""

    def make(random, n, k):
        return {".weight": ["I8", random.integers(-128, 128, (n, k), np.int8)], ending: factors(random, dtype, *scales(n, k))}

    def meaning(arrays):
        codes, stored = arrays[".weight"].astype(np.float64), arrays[ending].astype(np.float64)
        if stored.ndim < 2 or stored.shape == (len(codes), 1):
            return codes * stored.reshape(-1, 1)
        size = 32 if len(stored) == len(codes) else 128
        return codes * stored.repeat(1 if size == 32 else size, 0)[: len(codes)].repeat(size, 1)[:, : codes.shape[1]]

    return make, meaning


def packed_int8(group):
    """Tensors of compressed-tensors' pack-quantized, 8 bits. group: columns that share a scale, or None for all of a row."""

    def make(random, n, k):
        packed = random.integers(-(2**31), 2**31, (n, k // 4), np.int32)
        scales = factors(random, "BF16", n, -(-k // (group or k)))
        return {".weight_packed": ["I32", packed], ".weight_scale": scales, ".weight_shape": ["I64", np.array([n, k])]}

    def meaning(arrays):
        codes = arrays[".weight_packed"].astype(np.int64)[..., None] >> 8 * np.arange(4) & 255
        q = codes.reshape(len(codes), -1) - 128
        return q * np.repeat(arrays[".weight_scale"].astype(np.float64), group or q.shape[1], 1)[:, : q.shape[1]]

    return make, meaning


def asymmetric_int4(random, n, k):
    """Tensors of compressed-tensors' pack-quantized with zero points, in groups of 32."""
    return {
        ".weight_packed": ["I32", random.integers(-(2**31), 2**31, (n, k // 8), np.int32)],
        ".weight_scale": factors(random, "BF16", n, k // 32),
        ".weight_zero_point": ["I32", random.integers(-(2**31), 2**31, (-(-n // 8), k // 32), np.int32)],
        ".weight_shape": ["I64", np.array([n, k])],
    }


def asymmetric_int4_meaning(arrays):
    codes, n = along_n(arrays[".weight_packed"]), len(arrays[".weight_packed"])
    zeros, scales = along_k(arrays[".weight_zero_point"])[:n], arrays[".weight_scale"].astype(np.float64)
    return (codes - zeros.repeat(32, 1)) * scales.repeat(32, 1)


def int4_per_row(dtype):
    """Tensors of compressed-tensors' pack-quantized, a scale per row."""

    def make(random, n, k):
        packed = random.integers(-(2**31), 2**31, (n, k // 8), np.int32)
        return {".weight_packed": ["I32", packed], ".weight_scale": factors(random, dtype, n, 1)}

    return make, lambda arrays: (along_n(arrays[".weight_packed"]) - 8) * arrays[".weight_scale"].astype(np.float64)


def gptq(random, n, k):
    """Tensors of symmetric GPTQ, in groups of 32."""
    return {
        ".qweight": ["I32", random.integers(-(2**31), 2**31, (k // 8, n), np.int32)],
        ".scales": ["F16", random.uniform(0.01, 0.1, (k // 32, n)).astype(np.float16)],
        ".qzeros": ["I32", np.full((k // 32, n // 8), 0x77777777, np.int32)],
        ".g_idx": ["I32", np.arange(k, dtype=np.int32) // 32],
    }


def gptq_meaning(arrays):
    return ((along_k(arrays[".qweight"]) - 8) * arrays[".scales"].astype(np.float64).repeat(32, 0)).T


def awq(random, n, k):
    """Tensors of AWQ, in groups of 32."""
    return {
        ".qweight": ["I32", random.integers(-(2**31), 2**31, (k, n // 8), np.int32)],
        ".qzeros": ["I32", random.integers(-(2**31), 2**31, (k // 32, n // 8), np.int32)],
        ".scales": ["F16", random.uniform(0.01, 0.1, (k // 32, n)).astype(np.float16)],
    }


def awq_meaning(arrays):
    codes, zeros = along_n(arrays[".qweight"], AWQ_PLACES), along_n(arrays[".qzeros"], AWQ_PLACES)
    return ((codes - zeros.repeat(32, 0)) * arrays[".scales"].astype(np.float64).repeat(32, 0)).T
