"""One expert's weights into a GPU rank's host buffers: codes in the checkpoint's own packing, scales as kt-kernel has them.

A scale buffer has an item for each scale, of the dtype that methods.Method.scales says: bfloat16 (MXFP4, RAWINT4, NVFP4),
float32 (FP8, FP8_PERCHANNEL) or the UE8M0 byte (MXFP8). They are exact but for NVFP4's, scale * weight_scale_2, which is
rounded to float32 and then to bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from ktmoe.compat import methods
from ktmoe.compat.arguments import whole
from ktmoe.errors import InputError, UnavailableError
from ktmoe.experts import ExpertSpec
from ktmoe.weights.formats import WeightFormat


class RankBuffers:
    """The host buffers of all GPU ranks, as the arrays that MoELayer.export_expert writes.

    Rank i has gate's rows [i*I/ranks, (i+1)*I/ranks), then up's, in w13, and those columns of down in w2; scales likewise.
    down's scales per row are in every rank.
    Raises UnavailableError for weights that kt-kernel has no such buffers for, InputError for addresses that are not one to a
    rank or not aligned, and what ExpertSpec.part raises.
    """

    def __init__(self, method: str, experts: ExpertSpec, ranks: int, w13, w13_scales, w2, w2_scales):
        ranks = whole("gpu_tp_count", ranks)
        self._one = experts.part(ranks, "gpu_tp_count")
        _check(method, experts)
        self._dtype = methods.SERVED[method].scales
        self._convert: list[tuple[WeightFormat, Mapping[str, np.ndarray], np.ndarray]] = []
        self.parts = [{} for _ in range(ranks)]
        for name, codes, scales, projections in (("w13", w13, w13_scales, ("gate", "up")), ("w2", w2, w2_scales, ("down",))):
            codes = _addresses(f"{name}_weight_ptrs", codes, ranks)
            scales = [0] * ranks if self._dtype is None else _addresses(f"{name}_scale_ptrs", scales, ranks)
            for part, of_codes, of_scales in zip(self.parts, codes, scales, strict=True):
                memory = _Memory(f"{name}_weight_ptrs", of_codes), _Memory(f"{name}_scale_ptrs", of_scales)
                for projection in projections:
                    part[projection] = self._place(projection, *memory)

    def finish(self) -> None:
        """Turn the scales into what the buffers take, once the parts are written."""
        for weight_format, stored, out in self._convert:
            _convert(weight_format, stored, out)

    def _place(self, projection: str, codes: _Memory, scales: _Memory) -> dict[str, np.ndarray]:
        """The arrays of a rank's part of a matrix, by name: in the buffers, or to be converted into them by finish()."""
        weight_format = self._one.formats[projection]
        arrays = weight_format.arrays(*self._one.shape(projection))
        dtype, shape = arrays.pop("codes")
        placed = {"codes": codes.next(dtype, shape)}
        if not arrays:
            return placed
        label, (dtype, shape) = next(iter(arrays.items()))  # scales, if there are any, else the factor
        out = scales.next(self._dtype, shape)
        if len(arrays) == 1 and dtype == self._dtype:
            return placed | {label: out}
        stored = {label: np.empty(shape, dtype) for label, (dtype, shape) in arrays.items()}
        self._convert.append((weight_format, stored, out))
        return placed | stored


class _Memory:
    """Host memory from an address on, as one array after another. name: of the argument that has the address.

    Raises InputError for an address that is not aligned to an array's items.
    """

    def __init__(self, name: str, address: int):
        self._name, self._address = name, address

    def next(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        if self._address % dtype.alignment:
            wanted = f"addresses that are aligned to {dtype}, multiples of {dtype.alignment}"
            raise InputError(f"{self._name} must have {wanted}, found {self._address}")
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = (ctypes.c_uint8 * nbytes).from_address(self._address)
        self._address += nbytes
        return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def _convert(weight_format: WeightFormat, stored: Mapping[str, np.ndarray], out: np.ndarray) -> None:
    """Scales, times the factor if there is one, as the numbers of out's dtype."""
    scale, scales, factor = weight_format.scale, stored["scales"], stored.get("factor", np.float32(1))
    if scale.dtype.itemsize > 1:
        out[...] = scale.numbers(scales).astype(np.float32) * factor
        return
    table = (scale.numbers(np.arange(256, dtype=np.uint8)).astype(np.float32) * factor).astype(out.dtype)
    bits = np.dtype(f"u{out.dtype.itemsize}")
    np.take(table.view(bits), scales, out=out.view(bits), mode="clip")  # "raise" would write into a copy first


def _check(method: str, experts: ExpertSpec) -> None:
    for projection, weight_format in experts.formats.items():
        divides = weight_format.factor is not None and weight_format.factor.divides
        if divides or not methods.SERVED[method].exports:
            raise UnavailableError(
                f"{experts.name}: kt-kernel has no buffers for GPUs that take these weights of method {method!r}: "
                f"found {weight_format.description} ({projection})"
            )


def _addresses(name: str, given: Sequence[int], ranks: int) -> list[int]:
    """The addresses, checked: one a rank. Raises InputError."""
    addresses = [whole(name, address) for address in given] if np.iterable(given) else []
    if len(addresses) != ranks or not all(address > 0 for address in addresses):
        raise InputError(f"{name} must have {ranks} host addresses, one for each of gpu_tp_count, found {addresses or given}")
    return addresses
