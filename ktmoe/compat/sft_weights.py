"""Weights that kt-kernel's callers hand over for fine-tuning, in the tensors of their formats, as ExpertWeights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ktmoe import arrays
from ktmoe.compat.arguments import count
from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weights.formats import MXFP4, WeightFormat, fp8, int4

#: What kt-kernel's scales of MXFP4 are: bfloat16 powers of two, whose exponents are UE8M0's bytes.
_MANTISSA_BITS = 7
#: 2**-127, which is a denormal number of bfloat16, and UE8M0's byte 0.
_SMALLEST = 0x0040
#: The exponent of infinity and NaN; above it is the sign.
_NAN = 255


@dataclass(frozen=True)
class OfFiles:
    """A layer's weights in a checkpoint's folder, which are read when they are packed."""

    folder: str
    layer: int


#: A matrix's codes and its scales, of each expert.
Given = Mapping[str, tuple[Sequence, Sequence]]


def rawint4(weights, name: str) -> ExpertWeights:
    """Experts of {projection}_proj, uint8 [E, n, k / 2], {projection}_scale, bfloat16 [E, n, k / group], and group_size."""
    return _experts(_attributes(weights), int4(count("group_size", weights.group_size)), name, _as_bfloat16)


def block_fp8(weights, name: str) -> ExpertWeights:
    """Experts of {projection}_proj, E4M3 [n, k] each, {projection}_scale, float32 [n / 128, k / 128] each, and block_size."""
    rows, columns = (count("block_size", size) for size in weights.block_size)
    return _experts(_attributes(weights), fp8(block=(rows, columns)), name, _as_float32)


def mxfp4(experts_data: Mapping[str, Sequence], name: str) -> ExpertWeights:
    """Experts of "gate", "up", "down", uint8 [n, k / 2] each, and "gate_scale" and so on, bfloat16 [n, k / 32] each."""
    wanted = [key for projection in PROJECTIONS for key in (projection, f"{projection}_scale")]
    if not isinstance(experts_data, Mapping) or not set(wanted) <= set(experts_data):
        raise InputError(f"experts_data must have {', '.join(wanted)}, found {show(experts_data)}")
    return _experts({p: (experts_data[p], experts_data[f"{p}_scale"]) for p in PROJECTIONS}, MXFP4, name, _as_ue8m0)


def _attributes(weights) -> Given:
    return {p: (getattr(weights, f"{p}_proj"), getattr(weights, f"{p}_scale")) for p in PROJECTIONS}


def _experts(given: Given, form: WeightFormat, name: str, as_scales: Callable) -> ExpertWeights:
    """as_scales: makes of a tensor, whose name follows it, what a Matrix takes. Matrices are read when they are packed."""
    lengths = {len(array) for pair in given.values() for array in pair}
    if len(lengths) != 1 or not all(lengths):
        raise InputError(f"{name}: weights and scales must be of as many experts each, found {sorted(lengths)}")

    def read(expert: int, projection: str) -> Matrix:
        label = f"{name}.{expert}.{projection}"
        codes, scales = (array[expert] for array in given[projection])
        codes = _bytes(codes, f"{label} codes")
        shape = len(codes), codes.shape[1] * 8 // form.element.bits
        return Matrix(label, form, shape, codes, as_scales(scales, f"{label} scales"))

    intermediate, hidden = read(0, "gate").shape
    return ExpertWeights(*lengths, hidden, intermediate, read, form, name=name)


def _bytes(value, name: str) -> np.ndarray:
    """uint8 [n, bytes of a row]."""
    of_torch = arrays.is_torch(value) and value.element_size() == 1  # numpy has none of its types of eight bits
    array = arrays.as_numpy(value, name, sys.modules["torch"].uint8 if of_torch else None)
    if array.dtype.itemsize != 1 or array.ndim != 2:
        raise InputError(f"{name} must be bytes of two dimensions, found {array.dtype} {list(array.shape)}")
    return np.ascontiguousarray(array).view(np.uint8)


def _as_float32(value, name: str) -> np.ndarray:
    array = arrays.view(value, name).array
    if array.dtype != np.float32:
        raise InputError(f"{name} must be float32, found bfloat16")
    return np.ascontiguousarray(array)


def _as_bfloat16(value, name: str) -> np.ndarray:
    array = arrays.view(value, name).array
    if array.dtype != np.uint16:
        raise InputError(f"{name} must be bfloat16, found float32")
    return np.ascontiguousarray(array).view(arrays.BF16)


def _as_ue8m0(value, name: str) -> np.ndarray:
    """UE8M0's bytes of bfloat16 powers of two, exactly."""
    bits = _as_bfloat16(value, name).view(np.uint16)
    mantissa, exponent = bits & ((1 << _MANTISSA_BITS) - 1), bits >> _MANTISSA_BITS
    wrong = (bits != _SMALLEST) & ((mantissa != 0) | (exponent == 0) | (exponent >= _NAN))
    if wrong.any():
        at = np.argwhere(wrong)[0].tolist()
        raise InputError(f"{name} {at} must be a power of two, found {float(bits.view(arrays.BF16)[tuple(at)])}")
    return exponent.astype(np.uint8)
