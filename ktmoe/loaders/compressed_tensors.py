"""compressed-tensors, pack-quantized: INT4 and INT8 experts (Kimi-K2-Thinking, and llm-compressor's W4A16 and W8A16).

An expert's tensors are {base}.{E}.{gate,up,down}_proj.weight_{packed,scale,shape}, or with w1, w3, w2, where base is
layers.{L}.mlp.experts, or another module's experts, behind model. and language_model. prefixes:

    weight_packed      I32 [N, K/8], eight codes an integer, lowest bits first along k, a code stores q + 8;
                       or of 8 bits, [N, K/4], four codes, q + 128
    weight_scale       BF16 or F16 [N, K/group]; or F32, too, [N, 1], one per row ("channel")
    weight_zero_point  I32 [N/8, K/group], eight an integer along n, lowest bits first; of 4 bits in groups, if asymmetric
    weight_shape       I32 or I64 [2], holds N and K; may be absent

A weight is (code - 8) * scale, (code - 128) * scale or (code - zero point) * scale. The little-endian bytes of an I32 are its
codes in order, low nibble = even k, so only zero points are unpacked. Whether codes have 4 or 8 bits is said by the shapes of
an expert's gate and down; of another matrix, by its weight_shape or by config.json. Of config.json's quantization_config, what
is not supported is refused, and group_size counts where it is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.loaders import checks, config_groups, registry
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.loaders.scheme import Endings, Headers, Scheme, group
from ktmoe.matrix import Matrix
from ktmoe.weights.elements import INT4, INT8_PLUS_128
from ktmoe.weights.formats import WeightFormat, int4, int8, uint4
from ktmoe.weights.scales import Factor

_SYMMETRIC = {"codes": ".weight_packed", "scales": ".weight_scale", "factor": ".weight_scale"}
_ASYMMETRIC = {**_SYMMETRIC, "offsets": ".weight_zero_point"}
_STATED = ".weight_shape"
_REST: dict[str, Any] = {
    "optional": (_STATED,),
    "foreign": {
        "weight_g_idx": "activation reordering (actorder group) is not supported",
        "weight_global_scale": "FP4 (NVFP4) is not supported",
    },
}
_SHAPE_DTYPES: dict[str, np.dtype] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_ELEMENTS = {4: INT4, 8: INT8_PLUS_128}


class CompressedTensors(Scheme):
    """Integers of 4 and 8 bits with a scale per group along k, of any group size, or per row.

    A weight_shape is compared when its matrix is read. Refused are other quantizations, by tensors or config.
    """

    stored = (Endings(_SYMMETRIC, **_REST), Endings(_ASYMMETRIC, **_REST))
    dtypes: ClassVar = {"codes": ("I32",), "offsets": ("I32",)}

    def format(self, headers: Headers) -> WeightFormat:
        packed, scales = headers.info("codes"), headers.info("scales")
        checks.dtype(packed, "I32")
        checks.dimensions(packed, 2)
        checks.dimensions(scales, 2)
        bits, asymmetric = _bits(headers), headers.arrays is _ASYMMETRIC
        size = config_groups.stated(headers.checkpoint).group_size
        per_row = size is None and scales.shape[1] == 1
        if asymmetric and (bits == 8 or per_row):
            found = "8 bits" if bits == 8 else "one per row (channel)"
            raise FormatError(f"{headers.tensor('offsets')}: expected zero points of 4 bits in groups, found {found}")
        if per_row:
            return WeightFormat(_ELEMENTS[bits], factor=Factor(per_row=True))
        size, kind = size or group(headers, packed.shape[1] * 32 // bits, axis=1), headers.kind("BF16", "F16")
        if asymmetric:
            return uint4(size, kind)
        return int4(size, kind) if bits == 4 else int8(size, kind, INT8_PLUS_128)

    def tensor_shape(self, label: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (-(-shape[0] // 8), shape[1]) if label == "offsets" else shape

    def array(self, headers: Headers, label: str, stored: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        if label == "offsets":
            eights = stored.view("<u4").reshape(-1, 1, shape[1]) >> 4 * np.arange(8, dtype=np.uint32)[:, None] & 15
            stored = np.ascontiguousarray(eights.astype(np.uint8).reshape(-1, shape[1])[: shape[0]])
        return super().array(headers, label, stored, dtype, shape)

    def check_more(self, headers: Headers, endings: Iterable[str], shape: tuple[int, int]) -> None:
        if _STATED in endings:
            _check_stated(headers)

    def check_read(self, matrix: Matrix, headers: Headers, endings: Iterable[str]) -> None:
        if _STATED in endings:
            found = _read_stated(headers)
            if found != list(matrix.shape):
                expected = f"expected {list(matrix.shape)} by weight_packed"
                raise CheckpointError(f"{headers.name}{_STATED}: {expected}, found {found}")


def _check_stated(headers: Headers) -> None:
    """Raise FormatError for the header of a weight_shape."""
    info = headers.checkpoint.info(headers.name + _STATED)
    checks.dtype(info, *_SHAPE_DTYPES)
    checks.shape(info, (2,), "n and k")


def _read_stated(headers: Headers) -> list[int]:
    """What a weight_shape holds."""
    name, checkpoint = headers.name + _STATED, headers.checkpoint
    return checkpoint.read(name).view(_SHAPE_DTYPES[checkpoint.info(name).dtype]).tolist()


def _bits(headers: Headers) -> int:
    """The bits of a code. Of experts, gate has as many rows as down has columns, of which an item of down holds eight or four.
    Any other matrix has its k in weight_shape, or config.json says the bits, or how many columns share one of its scales.
    Raises FormatError.
    """
    if not headers.down:
        return _bits_alone(headers)
    down = headers.checkpoint.info(headers.down + headers.arrays["codes"])
    checks.dimensions(down, 2)
    return 8 if headers.info("codes").shape[0] == 4 * down.shape[1] else 4


def _bits_alone(headers: Headers) -> int:
    stated, items = config_groups.stated(headers.checkpoint), headers.info("codes").shape[1]
    found = []
    if headers.name + _STATED in headers.checkpoint:
        _check_stated(headers)
        _, k = _read_stated(headers)
        found = [bits for bits in _ELEMENTS if items == -(-k * bits // 32)]
    elif len(stated.bits) == 1:
        found = list(stated.bits)
    elif stated.group_size is not None:
        groups = headers.info("scales").shape[1]
        found = [bits for bits in _ELEMENTS if groups == -(-items * 32 // bits // stated.group_size)]
    if len(found) != 1:
        raise FormatError(
            f"{headers.tensor('codes')}: expected {_STATED.lstrip('.')}, or num_bits in quantization_config of config.json, to "
            f"say whether its codes have 4 or 8 bits, found {items} items a row"
        )
    return found[0]


registry.register("compressed_tensors", PerExpert(CompressedTensors(), "compressed-tensors' pack-quantized"))
