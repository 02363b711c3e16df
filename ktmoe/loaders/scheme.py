"""Scheme: how one matrix is stored, whoever's it is: the tensors that `{base}` has, their dtypes, and what they mean together.

What the tensors must be, dtypes and shapes, follows from the WeightFormat. Where experts' matrices stand is a loader's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import ml_dtypes
import numpy as np

from ktmoe.errors import FormatError
from ktmoe.loaders import checks
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.safetensors_file import DTYPE_BITS
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.offsets import ZeroPoint

#: Scale kinds by the dtype names of a safetensors header, where no other kind is stored so.
KINDS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E8M0": "ue8m0"}
#: How a float32 factor or bias may be stored: all of these are float32 numbers.
FACTORS = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_SCALES = {"fp32": ("F32",), "bf16": ("BF16",), "fp16": ("F16",), "ue8m0": ("F8_E8M0", "U8"), "e4m3": ("F8_E4M3", "U8")}
_CODES = {
    "E4M3": ("F8_E4M3",),
    "E5M2": ("F8_E5M2",),
    "BF16": ("BF16",),
    "FP16": ("F16",),
    "FP32": ("F32",),
    "INT8": ("I8",),
    "INT8 + 128": ("U8", "I32"),
}
#: Endings of scales for quantizing a matrix's input. They are not used: activations stay as they are, which is more precise.
_INPUT = (".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale", ".qscale_act")
#: Endings of what no scheme reads, and why.
_FOREIGN = {
    "pre_quant_scale": "inputs that are scaled column by column are not supported",
    "input_rotation": "inputs that are rotated are not supported",
}


@dataclass(frozen=True)
class Endings:
    """What the tensors of a matrix are called, {base}{ending}.

    arrays: the ending of each array's tensor, by the array's name. Arrays of which a format has only one may share an ending.
    optional: of tensors that may be there, too. foreign: of those that change what the others mean, without the dot, and what
    to say about them. unused: of those that may be there and nothing depends on.
    """

    arrays: Mapping[str, str]
    optional: tuple[str, ...] = ()
    foreign: Mapping[str, str] = field(default_factory=dict)
    unused: ClassVar[tuple[str, ...]] = _INPUT

    @property
    def required(self) -> tuple[str, ...]:
        """Those of the arrays, each once."""
        return tuple(dict.fromkeys(self.arrays.values()))

    @property
    def refused(self) -> dict[str, str]:
        """All foreign endings, with those that no scheme reads."""
        return {**_FOREIGN, **self.foreign}


@dataclass(frozen=True)
class Headers:
    """The headers of one matrix's tensors.

    name: what the tensors' names begin with. arrays: of its Endings. down: for an expert's matrix, the name of the same
    expert's down, which has as many columns as gate has rows; else empty.
    """

    checkpoint: Checkpoint
    name: str
    arrays: Mapping[str, str]
    down: str = ""

    def tensor(self, label: str) -> str:
        return self.name + self.arrays[label]

    def info(self, label: str) -> TensorInfo:
        return self.checkpoint.info(self.tensor(label))

    def kind(self, *dtypes: str) -> str:
        """The kind of scales that are stored in one of these dtypes, keys of KINDS. Raises FormatError."""
        info = self.info("scales")
        checks.dtype(info, *dtypes)
        return KINDS[info.dtype]


class Scheme:
    """Reads what format() says, from tensors of one of `stored`, each of which has its arrays.

    stored: what the tensors may be called. Of two that fit, the first counts. dtypes: what an array's tensor may be stored in,
    by the array's name, where it is not the usual. The codes' tell this scheme from others with its names.
    """

    stored: ClassVar[tuple[Endings, ...]] = ()
    dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def format(self, headers: Headers) -> WeightFormat:
        """What a matrix is, by its headers and by config.json; of experts, by those of a layer's first gate. Raises
        FormatError."""
        raise NotImplementedError(f"{type(self).__name__} has no format()")

    def check_config(self, checkpoint: Checkpoint) -> None:
        """Raise FormatError for what config.json says and this scheme does not read."""

    def check_more(self, headers: Headers, endings: Iterable[str], shape: tuple[int, int]) -> None:
        """Raise FormatError for headers of tensors that are no arrays. endings: of all tensors that are there."""

    def tensor_shape(self, label: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor that holds an array of that name and shape."""
        return shape

    def array(self, headers: Headers, label: str, stored: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """An array of a matrix, of that dtype and shape. stored: its tensor's bytes, uint8."""
        if label == "factor":
            stored = float32(stored, headers.info(label))
        return stored.view(dtype).reshape(shape)

    def check_read(self, matrix: Matrix, headers: Headers, endings: Iterable[str]) -> None:
        """Raise FormatError for a matrix whose bytes are not what its headers promise; it may read other tensors."""

    def reads(self, headers: Headers) -> bool:
        """Whether the codes have one of the dtypes that tell this scheme from others."""
        found = headers.info("codes").dtype
        return found in self.dtypes.get("codes", (found,))

    def check_dtypes(self, headers: Headers, weight_format: WeightFormat) -> None:
        """Raise FormatError for an array's tensor of another dtype."""
        for label in weight_format.arrays(8, 8):
            checks.dtype(headers.info(label), *self.dtypes.get(label) or _dtypes(weight_format, label))

    def shape(self, headers: Headers, weight_format: WeightFormat) -> tuple[int, int]:
        """(n, k) by the codes' header. Raises FormatError if that or another header's shape does not fit; dtypes do."""
        info = headers.info("codes")
        checks.dimensions(info, 2)
        rows, columns = info.shape
        item = 8 * weight_format.arrays(8, 8)["codes"][0].itemsize
        items, rest = divmod(columns * DTYPE_BITS[info.dtype], item)
        if rest:
            raise FormatError(f"{info.name}: shape: expected an even number of {info.dtype} columns, found {list(info.shape)}")
        n, k = weight_format.shape((rows, items))
        whole, _ = weight_format.code_unit
        if n % whole:
            raise FormatError(f"{info.name}: shape: expected an n that is a multiple of {whole}, found [n, k] = {[n, k]}")
        for label, (_, wanted) in weight_format.arrays(n, k).items():
            if label == "factor":
                _check_factor(headers.info(label), wanted, weight_format.order.transposed)
            elif label != "codes":
                info = headers.info(label)
                if len(info.shape) == 4 and info.shape[1] == info.shape[3] == 1:  # as ModelOpt has scales of blocks
                    info = replace(info, shape=info.shape[::2])
                checks.shape(info, self.tensor_shape(label, wanted), why(weight_format, label, k))
        return n, k

    def read(
        self,
        headers: Headers,
        weight_format: WeightFormat,
        shape: tuple[int, int],
        endings: Iterable[str],
        bias: np.ndarray | None = None,
    ) -> Matrix:
        """Read a matrix whose headers have been checked. endings: of all its tensors. bias: float32 [n], which is passed on.

        What was read is released from the page cache: its next owner is the packed copy. Raises FormatError, CheckpointError.
        """
        matrix = Matrix(headers.name, weight_format, shape, bias=bias, **self.tensors(headers, weight_format, shape))
        self.check_read(matrix, headers, endings)
        return matrix

    def tensors(self, headers: Headers, weight_format: WeightFormat, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """Read the arrays of a matrix that tensors hold, by name."""
        arrays = {}
        for label, (dtype, wanted) in weight_format.arrays(*shape).items():
            if label in headers.arrays:
                data = headers.checkpoint.read(headers.tensor(label), release=True)
                arrays[label] = self.array(headers, label, data, dtype, wanted)
        return arrays


def float32(stored: np.ndarray, info: TensorInfo) -> np.ndarray:
    """A tensor's bytes as float32, exactly: it has every number of the FACTORS."""
    return stored.view(FACTORS[info.dtype]).astype(np.float32)


def group(headers: Headers, k: int, axis: int) -> int:
    """Columns that share a scale, by the shapes, where scales have that axis along k. Raises FormatError."""
    scales = headers.info("scales")
    checks.dimensions(scales, 2)
    groups = scales.shape[axis]
    if k % groups:
        what = "rows" if axis == 0 else "columns"
        raise FormatError(
            f"{scales.name}: shape: expected a number of {what} that divides k = {k}, or group_size in quantization_config of "
            f"config.json, found {show(list(scales.shape))}"
        )
    return k // groups


def _dtypes(weight_format: WeightFormat, label: str) -> tuple[str, ...]:
    if label == "factor":
        return tuple(FACTORS)
    if label == "codes" and weight_format.element.name in _CODES:
        return _CODES[weight_format.element.name]
    if label in weight_format.scales:
        return _SCALES[weight_format.scales[label].kind]
    if label == "codes" and not weight_format.order.transposed:
        return "I8", "U8", "F4"
    return ("I32",) if weight_format.order.transposed else ("U8",)


def why(weight_format: WeightFormat, label: str, k: int) -> str:
    """A reason for check_shape(), of scales and zero points."""
    offset = weight_format.offset
    points = offset if label == "offsets" and isinstance(offset, ZeroPoint) else None
    what, (rows, columns) = ("zero point", points.extent) if points else ("scale", weight_format.scales[label].extent)
    return f"one {what} per {columns} along k = {k}" if rows == 1 else f"one {what} per {rows}x{columns}"


def _check_factor(info: TensorInfo, wanted: tuple[int, ...], transposed: bool) -> None:
    (count,) = wanted
    shapes = ((), (1,)) if count == 1 else ((count,), (1, count) if transposed else (count, 1))
    if info.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise FormatError(f"{info.name}: shape: expected {expected}, found {list(info.shape)}")
