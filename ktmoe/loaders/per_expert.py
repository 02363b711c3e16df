"""PerExpert: a loader for checkpoints that have tensors of their own for every expert. A table says what they are called.

What the tensors must be, dtypes and shapes, follows from the WeightFormat.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import ml_dtypes
import numpy as np

from ktmoe.errors import FormatError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders import model_config, naming, quantization
from ktmoe.loaders.base import Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.safetensors_file import DTYPE_BITS
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weights.activation import GatedActivation
from ktmoe.weights.formats import Minimum, WeightFormat, ZeroPoint
from ktmoe.weights.scales import Scale

#: Scale kinds by the dtype names of a safetensors header, where no other kind is stored so.
KINDS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E8M0": "ue8m0"}
#: How a float32 factor may be stored: all of these are float32 numbers.
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
#: Endings of scales for quantizing an expert's input. They are not used: activations stay as they are, which is more precise.
_INPUT = (".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale", ".qscale_act")
#: Endings of what no loader with tensors of an expert's own reads, and why.
_FOREIGN = {
    "bias": "biases are not supported",
    "pre_quant_scale": "inputs that are scaled column by column are not supported",
    "input_rotation": "inputs that are rotated are not supported",
}


def spellings(
    arrays: Mapping[str, str], *more: str, foreign: Mapping[str, str] | None = None, **other
) -> tuple[naming.Spelling, ...]:
    """Names with transformers' stems, and with Mixtral's. arrays: the ending of each array's tensor, by the array's name.

    Arrays of which a format has only one may share an ending. more: endings of other tensors that every matrix has.
    foreign, other: Spelling's. Scales of an expert's input may be there and are not used.
    """
    endings = tuple(dict.fromkeys((*arrays.values(), *more)))
    rest = {"unused": _INPUT, "foreign": {**_FOREIGN, **(foreign or {})}, "arrays": arrays, **other}
    return tuple(naming.Spelling(stems, endings, **rest) for stems in (naming.PROJ_STEMS, naming.NUMBERED_STEMS))


@dataclass(frozen=True)
class Headers:
    """The headers of one matrix's tensors.

    name: what the tensors' names begin with. arrays: the spelling's. down: the name of the same expert's down.
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
        naming.check_dtype(info, *dtypes)
        return KINDS[info.dtype]


class PerExpert(Loader):
    """Reads what format() says, from tensors of names' spellings, each of which has `arrays`.

    names: Names. dtypes: what an array's tensor may be stored in, by the array's name, where it is not the usual. The
    codes' tell this scheme from others with its names.
    num_experts is what the tensor names say; config.json must agree with it where it gives it, see naming.
    """

    names: ClassVar[naming.Names]
    dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @abstractmethod
    def format(self, headers: Headers) -> WeightFormat:
        """What a layer's matrices are, by the headers of its first one and by config.json. Raises FormatError."""

    def activation(self, checkpoint: Checkpoint) -> GatedActivation:
        """The activation, by config.json. Raises FormatError, CheckpointError."""
        return model_config.activation(checkpoint)

    def check_config(self, checkpoint: Checkpoint) -> None:
        """Raise FormatError for what config.json says and this loader does not read."""

    def check_more(self, headers: Headers, endings: Iterable[str], shape: tuple[int, int]) -> None:
        """Raise FormatError for headers of tensors that are no arrays. endings: of all tensors that are there."""

    def tensor_shape(self, label: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor that holds an array of that name and shape."""
        return shape

    def array(self, headers: Headers, label: str, stored: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """An array of a matrix, of that dtype and shape. stored: its tensor's bytes, uint8."""
        if label == "factor":  # exact: float32 has every number of the others
            stored = stored.view(FACTORS[headers.info(label).dtype]).astype(np.float32)
        return stored.view(dtype).reshape(shape)

    def check_read(self, matrix: Matrix, headers: Headers, endings: Iterable[str]) -> None:
        """Raise FormatError for a matrix whose bytes are not what its headers promise; it may read other tensors."""

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.9 if the first layer that can be read has tensors of these names, dtypes and shapes, else 0.

        Raises FormatError if it has these names and these dtypes of codes, but is not what format() wants.
        """

        def score(spelling: naming.Spelling, prefix: str) -> float:
            gate = checkpoint.info(f"{prefix}{spelling.stems['gate']}{spelling.arrays['codes']}")
            if gate.dtype not in self.dtypes.get("codes", (gate.dtype,)):
                return 0.0
            try:
                self.check_headers(checkpoint, spelling, prefix)
            except FormatError:
                self.check_config(checkpoint)  # 8 bits where 4 are read say more than the shapes that follow from them
                raise
            return 0.9

        return self.names.detect(checkpoint, score, refused=None)

    def check_headers(self, checkpoint: Checkpoint, spelling: naming.Spelling, prefix: str) -> None:
        """Raise FormatError for an expert whose headers are not what format() says. prefix: what comes before its stems."""
        down = prefix + spelling.stems["down"]
        matrices = [Headers(checkpoint, prefix + stem, spelling.arrays, down) for stem in spelling.stems.values()]
        weight_format = self.format(matrices[0])
        for headers in matrices:
            self.check_dtypes(headers, weight_format)
            self._shape(headers, weight_format)

    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        return self.names.layers(checkpoint)

    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """One layer's experts, which keep the checkpoint open and read a matrix when it is asked for.

        layer: int, or its digits, or a name such as "mtp.0". All headers are checked here, before any weight is read.
        A matrix that was read is released from the page cache: its next owner is the packed copy.
        Raises MissingTensorError for a layer, an expert or a tensor that does not exist; FormatError for tensors of another
        format; CheckpointError for experts of different shapes, and for a config.json that contradicts the tensors.
        """
        return self.load_place(self.names.locate(checkpoint, layer))

    def load_place(self, place: naming.Place) -> ExpertWeights:
        """What load() gives, for a layer that has been found."""
        checkpoint, arrays = place.checkpoint, place.spelling.arrays
        quantization.check_transforms(checkpoint)
        self.check_config(checkpoint)
        down = place.name("down", 0)
        weight_format = self.format(Headers(checkpoint, place.name("gate", 0), arrays, down))

        def check(name: str) -> tuple[int, int]:
            headers = Headers(checkpoint, name, arrays, down)
            self.check_dtypes(headers, weight_format)
            shape = self._shape(headers, weight_format)
            self.check_more(headers, place.endings, shape)
            return shape

        shapes = place.shapes(check)

        def read(expert: int, projection: str) -> Matrix:
            headers, shape = Headers(checkpoint, place.name(projection, expert), arrays), shapes[projection]
            stored = {}
            for label, (dtype, wanted) in weight_format.arrays(*shape).items():
                stored[label] = self.array(headers, label, checkpoint.read(headers.tensor(label), release=True), dtype, wanted)
            matrix = Matrix(headers.name, weight_format, shape, **stored)
            self.check_read(matrix, headers, place.endings)
            return matrix

        activation, router_weight = self.activation(checkpoint), model_config.router_weight(checkpoint, place.base)
        return ExpertWeights(place.num_experts, *shapes["down"], read, weight_format, activation, place.base, router_weight)

    def check_dtypes(self, headers: Headers, weight_format: WeightFormat) -> None:
        """Raise FormatError for an array's tensor of another dtype."""
        for label in weight_format.arrays(8, 8):
            naming.check_dtype(headers.info(label), *self.dtypes.get(label) or _dtypes(weight_format, label))

    def _shape(self, headers: Headers, weight_format: WeightFormat) -> tuple[int, int]:
        """(n, k) by the codes' header. Raises FormatError if that or another header's shape does not fit; dtypes do."""
        info = headers.info("codes")
        naming.check_dimensions(info, 2)
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
                naming.check_shape(info, self.tensor_shape(label, wanted), why(weight_format, label, k))
        return n, k


def group(headers: Headers, k: int, axis: int) -> int:
    """Columns that share a scale, by the shapes, where scales have that axis along k. Raises FormatError."""
    scales = headers.info("scales")
    naming.check_dimensions(scales, 2)
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
    if scale := _scale(weight_format, label):
        return _SCALES[scale.kind]
    if label == "codes" and not weight_format.order.transposed:
        return "I8", "U8", "F4"
    return ("I32",) if weight_format.order.transposed else ("U8",)


def _scale(weight_format: WeightFormat, label: str) -> Scale | None:
    """How the numbers of an array are stored, if they are scales or minima."""
    offset = weight_format.offset
    scales = {"scales": weight_format.scale, "super_scales": weight_format.super_scale}
    return scales.get(label) or (offset.scale if label == "offsets" and isinstance(offset, Minimum) else None)


def why(weight_format: WeightFormat, label: str, k: int) -> str:
    """A reason for check_shape(), of scales and zero points."""
    scale, offset = _scale(weight_format, label), weight_format.offset
    rows, columns = scale.extent if scale else offset.extent
    what = "zero point" if isinstance(offset, ZeroPoint) and label == "offsets" else "scale"
    return f"one {what} per {columns} along k = {k}" if rows == 1 else f"one {what} per {rows}x{columns}"


def _check_factor(info: TensorInfo, wanted: tuple[int], transposed: bool) -> None:
    (count,) = wanted
    shapes = ((), (1,)) if count == 1 else ((count,), (1, count) if transposed else (count, 1))
    if info.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise FormatError(f"{info.name}: shape: expected {expected}, found {list(info.shape)}")
