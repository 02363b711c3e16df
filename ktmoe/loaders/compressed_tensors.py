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

import weakref
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.loaders import checks, quantization, registry
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.loaders.scheme import Endings, Headers, Scheme, group
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weights.elements import INT4, INT8_PLUS_128
from ktmoe.weights.formats import Factor, WeightFormat, int4, int8, uint4

_SYMMETRIC = {"codes": ".weight_packed", "scales": ".weight_scale", "factor": ".weight_scale"}
_ASYMMETRIC = {**_SYMMETRIC, "offsets": ".weight_zero_point"}
_STATED = ".weight_shape"
_REST = {
    "optional": (_STATED,),
    "foreign": {
        "weight_g_idx": "activation reordering (actorder group) is not supported",
        "weight_global_scale": "FP4 (NVFP4) is not supported",
    },
}
_SHAPE_DTYPES = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_ELEMENTS = {4: INT4, 8: INT8_PLUS_128}
#: What config_groups.*.weights may say, besides nothing and group_size. actorder "weight" reorders nothing that is stored.
_SUPPORTED = {
    "num_bits": (4, 8),
    "type": ("int",),
    "symmetric": (True, False),
    "strategy": ("group", "channel", None),
    "actorder": (None, False, "weight", "static"),
}

#: The group_size that a checkpoint's config_groups say, by checkpoint.
_groups: weakref.WeakKeyDictionary[Checkpoint, int | None] = weakref.WeakKeyDictionary()


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
        size = _stated_group(headers.checkpoint)
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
    checkpoint, items = headers.checkpoint, headers.info("codes").shape[1]
    name = headers.name + _STATED
    size, stated = _stated_group(checkpoint), _stated_bits(checkpoint)
    if name in checkpoint:
        _check_stated(headers)
        _, k = _read_stated(headers)
        found = [bits for bits in _ELEMENTS if items == -(-k * bits // 32)]
    elif len(stated) == 1:
        found = list(stated)
    elif size is not None:
        found = [bits for bits in _ELEMENTS if headers.info("scales").shape[1] == -(-items * 32 // bits // size)]
    else:
        found = []
    if len(found) != 1:
        raise FormatError(
            f"{headers.tensor('codes')}: expected {_STATED.lstrip('.')}, or num_bits in quantization_config of config.json, to "
            f"say whether its codes have 4 or 8 bits, found {items} items a row"
        )
    return found[0]


def _stated_bits(checkpoint: Checkpoint) -> set[int]:
    """The bits that config.json's config_groups give, of those that are read here."""
    groups = quantization.read(checkpoint).get("config_groups")
    weights = [one.get("weights") for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
    found = [of.get("num_bits") for of in weights if isinstance(of, dict)]
    return {bits for bits in found if type(bits) is int and bits in _ELEMENTS}


def _stated_group(checkpoint: Checkpoint) -> int | None:
    """read_group(), once for all layers of a checkpoint: a hostile config has many groups."""
    if checkpoint not in _groups:
        _groups[checkpoint] = read_group(checkpoint)
    return _groups[checkpoint]


def read_group(checkpoint: Checkpoint) -> int | None:
    """config.json's group_size, None if it gives none. Raises FormatError, which names the key, for what is not supported.

    Where there are several config groups, one of them must be supported: which layers they are for is not looked at.
    """
    where, stated = f"{checkpoint.path}: quantization_config", quantization.read(checkpoint)
    groups = stated.get("config_groups")
    if not isinstance(groups, dict | None):
        raise CheckpointError(f"{where}.config_groups: expected an object, found {show(groups)}")
    refused, sizes = None, []
    for name, one in (groups or {}).items():
        weights = one.get("weights") if isinstance(one, dict) else None
        if not isinstance(weights, dict):  # a group that leaves weights as they are
            continue
        try:
            sizes.append(_group_size(f"{where}.config_groups.{name}.weights", weights))
        except FormatError as error:
            refused = refused or error
    if refused is not None and not sizes:
        raise refused
    sizes = set(sizes)
    return sizes.pop() if len(sizes) == 1 else None


def _group_size(where: str, weights: dict) -> int | None:
    for key, supported in _SUPPORTED.items():
        found = weights.get(key, supported[0])
        if not any(type(found) is type(value) and found == value for value in supported):
            expected = " or ".join(repr(value) for value in supported)
            raise FormatError(f"{where}.{key}: expected {expected}, found {show(found)}")
    size = weights.get("group_size")
    if type(size) is int and size == -1:  # all of a row
        return None
    if size is not None and (type(size) is not int or not 1 <= size < 2**31):
        raise FormatError(f"{where}.group_size: expected a count of columns, found {show(size)}")
    return size


registry.register("compressed_tensors", PerExpert(CompressedTensors(), "compressed-tensors' pack-quantized"))
