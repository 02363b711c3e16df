"""How rounded experts are stored: the tensors of a matrix by its format, and what quantization_config says of them.

Names and numbers are compressed-tensors' where it has the format, otherwise those of DeepSeek-V3's FP8 and of ModelOpt's NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ktmoe.errors import InputError
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import MXFP4, WeightFormat
from ktmoe.weights.offsets import ZeroPoint

_OF_MODELOPT = (
    "transformers does not know the quant_method modelopt: by itself it does not load the result; ktmoe chat, ktmoe serve and "
    "ktmoe.transformers.load() do, but for dense='torch'"
)
#: Scale kinds by how compressed-tensors' loaders want them stored.
_DTYPES = {"ue8m0": "U8", "e4m3": "F8_E4M3", "fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_Shape = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class Array:
    """One tensor of a matrix [n, k]: its name's ending, the header's dtype, its shape, and the bytes of a rounded matrix."""

    ending: str
    dtype: str
    shape: _Shape
    data: Callable[[Matrix], np.ndarray]


@dataclass(frozen=True)
class Storage:
    """How checkpoints store a format.

    arrays: of each matrix. method: quant_method. weights: what compressed-tensors' config says of weights, and format, its name
    of the storage; activations: of an expert's input. stated: what other methods say. ignored: their key for the modules that
    are not quantized.
    unit: k must be a multiple of it. note: what is to be known of the result, or "".
    """

    arrays: tuple[Array, ...]
    method: str = "compressed-tensors"
    format: str = ""
    weights: Mapping[str, object] = field(default_factory=dict)
    activations: Mapping[str, object] | None = None
    stated: Mapping[str, object] = field(default_factory=dict)
    ignored: str = "ignore"
    unit: int = 1
    note: str = ""


def storage(weight_format: WeightFormat) -> Storage:
    """How matrices of a format are stored, each with tensors of its own. Raises InputError where nobody has names for it."""
    element, scale, factor = weight_format.element.name, weight_format.scale, weight_format.factor
    if weight_format == MXFP4:
        return _mx(4, "mxfp4-pack-quantized", ".weight_packed", "U8")
    if element == "E2M1":
        return _nvfp4(divides=factor is not None and factor.divides)
    if element == "E4M3" and scale and scale.kind == "ue8m0":
        return _mx(8, "mxfp8-quantized", ".weight", "F8_E4M3")
    if element == "E4M3":
        return _fp8(weight_format)
    of_rows = factor or (scale and scale.extent[0] == 1 and scale.kind in ("bf16", "fp16"))
    if element in ("INT8", "INT4", "UINT4") and of_rows:
        return _integers(weight_format)
    raise InputError(f"{weight_format.description}: no checkpoint has names for these; choose another group or kind of scales")


def _scales(matrix: Matrix) -> np.ndarray:
    return matrix.stored["scales"]


def _factor(matrix: Matrix) -> np.ndarray:
    return matrix.stored["factor"]


#: DeepSeek-V4's own names of MXFP4; quantization_config is that of its other weights.
DEEPSEEK_V4 = Storage(
    (
        Array(".weight", "I8", lambda n, k: (n, k // 2), lambda matrix: matrix.codes),
        Array(".scale", "F8_E8M0", lambda n, k: (n, k // 32), _scales),
    ),
    method="",
    unit=32,
)


def _mx(bits: int, name: str, ending: str, dtype: str) -> Storage:
    codes = Array(ending, dtype, lambda n, k: (n, k * bits // 8), lambda matrix: matrix.codes)
    scales = Array(".weight_scale", "U8", lambda n, k: (n, k // 32), _scales)
    weights = _weights(bits, "float", strategy="group", group_size=32)
    weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    return Storage((codes, scales), format=name, weights=weights, unit=32)


def _nvfp4(divides: bool) -> Storage:
    codes = Array(".weight_packed" if divides else ".weight", "U8", lambda n, k: (n, k // 2), lambda matrix: matrix.codes)
    scales = Array(".weight_scale", "F8_E4M3", lambda n, k: (n, k // 16), _scales)
    if divides:
        whole = Array(".weight_global_scale", "F32", lambda n, k: (1,), _factor)
        weights = _weights(4, "float", strategy="tensor_group", group_size=16)
        weights |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        return Storage((codes, scales, whole), format="nvfp4-pack-quantized", weights=weights, unit=16)
    whole = Array(".weight_scale_2", "F32", lambda n, k: (), _factor)
    stated = {"quant_algo": "NVFP4", "group_size": 16}
    return Storage((codes, scales, whole), method="modelopt", stated=stated, unit=16, note=_OF_MODELOPT)


def _fp8(weight_format: WeightFormat) -> Storage:
    codes = Array(".weight", "F8_E4M3", lambda n, k: (n, k), lambda matrix: matrix.codes)
    if scale := weight_format.scale:
        if scale.kind == "fp16":
            raise InputError(f"{weight_format.description}: expected fp32 or bf16 scales, which FP8 checkpoints have")
        scales = Array(".weight_scale_inv", _DTYPES[scale.kind], scale.shape, _scales)
        stated = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(scale.extent)}
        return Storage((codes, scales), method="fp8", stated=stated, ignored="modules_to_not_convert")
    per_row = weight_format.factor is not None and weight_format.factor.per_row
    shape = (lambda n, k: (n, 1)) if per_row else (lambda n, k: (1,))
    factor = Array(".weight_scale", "F32", shape, _factor)
    return Storage(
        (codes, factor),
        format="float-quantized",
        weights=_weights(8, "float", strategy="channel" if per_row else "tensor"),
        # as compressed-tensors' own FP8 checkpoints have it
        activations={"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    )


def _integers(weight_format: WeightFormat) -> Storage:
    """compressed-tensors' pack-quantized: unsigned codes along k in int32, lowest bits first, which is their order in bytes."""
    bits, scale, offset = weight_format.element.bits, weight_format.scale, weight_format.offset

    def packed(matrix: Matrix) -> np.ndarray:
        return matrix.codes ^ np.uint8(128) if bits == 8 else matrix.codes  # a sign bit that is turned is 128 added

    arrays = [Array(".weight_packed", "I32", lambda n, k: (n, k * bits // 32), packed)]
    weights = _weights(bits, "int", symmetric=weight_format.offset is None)
    if scale:
        arrays.append(Array(".weight_scale", _DTYPES[scale.kind], scale.shape, _scales))
        weights |= {"strategy": "group", "group_size": scale.extent[1]}
    else:
        arrays.append(Array(".weight_scale", "F32", lambda n, k: (n, 1), _factor))
        weights |= {"strategy": "channel"}
    if isinstance(offset, ZeroPoint):
        groups = offset.shape
        arrays.append(
            Array(
                ".weight_zero_point",
                "I32",
                lambda n, k: (-(-n // 8), groups(n, k)[1]),
                lambda matrix: _eights(matrix.stored["offsets"]),
            )
        )
    arrays.append(Array(".weight_shape", "I64", lambda n, k: (2,), lambda matrix: np.array(matrix.shape, "<i8")))
    return Storage(tuple(arrays), format="pack-quantized", weights=weights, unit=32 // bits)


def _eights(points: np.ndarray) -> np.ndarray:
    """Zero points uint8 [n, groups] as int32 [ceil(n / 8), groups], eight an item along n, lowest bits first."""
    n, groups = points.shape
    padded = np.zeros((-(-n // 8), 8, groups), np.uint32)
    padded.reshape(-1, groups)[:n] = points
    return np.bitwise_or.reduce(padded << 4 * np.arange(8, dtype=np.uint32)[:, None], axis=1).view(np.int32)


def _weights(bits: int, kind: str, symmetric: bool = True, **other: object) -> dict[str, object]:
    return {"num_bits": bits, "type": kind, "symmetric": symmetric, "dynamic": False, **other}
