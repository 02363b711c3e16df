"""One expert's weights into a GPU rank's host buffers: the checkpoint's own packing, scales as bfloat16."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence

import numpy as np

from ktmoe.arrays import BF16
from ktmoe.errors import InputError, UnavailableError
from ktmoe.experts import ExpertSpec
from ktmoe.messages import show
from ktmoe.weights.formats import WeightFormat

#: bfloat16 bits of each UE8M0 byte, 2**(byte - 127), exactly: byte 0 is a subnormal number, and 255, a NaN, is never loaded.
_UE8M0_BITS = (np.arange(256, dtype=np.uint16) << 7) | (np.arange(256) == 0).astype(np.uint16) << 6


class Target:
    """The host buffers of all GPU ranks, as the arrays that MoELayer.export_expert writes.

    Rank i has gate's rows [i*I/ranks, (i+1)*I/ranks), then up's, in w13, and those columns of down in w2; scales likewise.
    Raises UnavailableError for a format that these buffers have no place for, InputError for addresses that are not one to a
    rank, and what ExpertSpec.part raises.
    """

    def __init__(self, experts: ExpertSpec, ranks: int, w13, w13_scales, w2, w2_scales):
        ranks = _whole("gpu_tp_count", ranks)
        one = experts.part(ranks, "gpu_tp_count")
        for projection, weight_format in one.formats.items():
            _check(experts.name, projection, weight_format)
        scaled = {projection: weight_format.scale for projection, weight_format in one.formats.items()}
        codes = {"w13": _addresses("w13_weight_ptrs", w13, ranks), "w2": _addresses("w2_weight_ptrs", w2, ranks)}
        scales = {
            "w13": _addresses("w13_scale_ptrs", w13_scales, ranks, needed=bool(scaled["gate"] or scaled["up"])),
            "w2": _addresses("w2_scale_ptrs", w2_scales, ranks, needed=bool(scaled["down"])),
        }
        self._convert: list[tuple[np.ndarray, np.ndarray]] = []
        self.parts = [{} for _ in range(ranks)]
        for rank, part in enumerate(self.parts):
            offsets = {"codes": 0, "scales": 0}
            for projection, buffer in (("gate", "w13"), ("up", "w13"), ("down", "w2")):
                if buffer == "w2":
                    offsets = {"codes": 0, "scales": 0}
                weight_format = one.formats[projection]
                part[projection] = {}
                for label, (dtype, shape) in weight_format.arrays(*one.shape(projection)).items():
                    addresses = codes if label == "codes" else scales
                    at = addresses[buffer][rank] + offsets[label]
                    array = _at(at, shape, dtype if label == "codes" else np.dtype(np.uint16))
                    offsets[label] += array.nbytes
                    part[projection][label] = array if label == "codes" else self._scales(weight_format.scale.kind, array)

    def _scales(self, kind: str, bits: np.ndarray) -> np.ndarray:
        if kind == "bf16":
            return bits.view(BF16)
        self._convert.append((np.empty(bits.shape, np.uint8), bits))
        return self._convert[-1][0]

    def finish(self) -> None:
        """Once the parts are written: turn the scales into what the buffers take."""
        for stored, bits in self._convert:
            np.take(_UE8M0_BITS, stored, out=bits)


def _check(name: str, projection: str, weight_format: WeightFormat) -> None:
    scale = weight_format.scale
    plain = (
        weight_format.order.rows and weight_format.element.bits != 8 and set(weight_format.arrays(8, 8)) <= {"codes", "scales"}
    )
    if not plain or (scale and scale.kind not in ("ue8m0", "bf16")):
        raise UnavailableError(
            f"{name}: the buffers for GPUs take 4-bit codes along k with ue8m0 or bf16 scales, and bfloat16; "
            f"found {weight_format.description} ({projection})"
        )


def _addresses(name: str, given: Sequence[int], ranks: int, needed: bool = True) -> list[int]:
    """One a rank. Formats without scales come with null addresses, or none."""
    if not needed:
        return []
    addresses = [_whole(name, address) for address in given] if np.iterable(given) else []
    if len(addresses) != ranks or not all(address > 0 for address in addresses):
        raise InputError(f"{name} must have {ranks} host addresses, one for each of gpu_tp_count, found {addresses or given}")
    return addresses


def _whole(name: str, value) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, found {show(value)}") from None


def _at(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The memory at an address as an array."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8).view(dtype).reshape(shape)
