"""GGUF files of experts, of random codes and scales that make weights of the right size."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.loaders.gguf_model import ARCHITECTURE
from ktmoe.synthetic.files import Model, check, load
from ktmoe.synthetic.tensors import Shaper, Tensor, numbers
from ktmoe.weights.elements import NUMBERS
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.ggml import GGML, TYPES
from ktmoe.weights.offsets import Minimum
from ktmoe.weights.records import Field, RecordOrder, Records
from ktmoe.weights.scales import SCALE_KINDS

#: llama.cpp's names of mixed types, that of most tensors, and that of the down projections of some layers.
MIXED = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K"), "Q3_K_M": ("Q3_K", "Q5_K")}
ALIGNMENT = 32
_ARCHITECTURE = "qwen3moe"
_TYPES = {of.name: (number, of) for number, of in TYPES.items()}
#: A key's type by its value's; bool is an int, too, so it comes first.
_VALUES = ((bool, 7, "<?"), (int, 4, "<I"), (float, 6, "<f"))
_SAMPLE = 256


@dataclass(frozen=True)
class GgufTensor(Tensor):
    """Tensor.dtype is the name of a ggml type."""

    @property
    def nbytes(self) -> int:
        _, of = _TYPES[self.dtype]
        return math.prod(self.shape) // of.weights * of.nbytes


def write_gguf(
    path: str | os.PathLike[str],
    *,
    types: str = "Q4_K_M",
    num_experts: int = 32,
    hidden: int = 2048,
    intermediate: int = 768,
    layers: int = 1,
    top_k: int = 8,
    splits: int = 1,
    seed: int = 0,
) -> None:
    """Write experts into a new or empty folder, in one file or split into so many.

    path: the folder; made if need be. types: a key of MIXED, or of ktmoe.weights.ggml.GGML for all tensors. hidden,
    intermediate: multiples of a record's weights. A tensor's bytes depend on `seed`, its name and its shape alone.
    Raises InputError for a size that is not possible, and for a folder that already holds a model. If it fails or is
    interrupted, what it wrote is removed.

    Examples:
        >>> synthetic.write_gguf("experts.gguf", types="Q4_K", num_experts=2, hidden=256, intermediate=256)
        >>> ktmoe.load_experts("experts.gguf", 0).num_experts
        2
    """
    check(splits=(splits, 1), layers=(layers, 1))
    model = _model(types, num_experts, hidden, intermediate, layers, top_k)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if found := next((file.name for file in sorted(folder.iterdir()) if file.suffix in (".gguf", ".safetensors")), None):
        raise InputError(f"{folder}: expected a folder without a model, found {found}")
    written: list[Path] = []
    try:
        for number in range(splits):
            written.append(folder / ("model.gguf" if splits == 1 else f"model-{number + 1:05}-of-{splits:05}.gguf"))
            metadata = model.config if number == 0 else {}
            if splits > 1:
                metadata = metadata | {"split.no": number, "split.count": splits, "split.tensors.count": len(model.tensors)}
            first, last = (len(model.tensors) * n // splits for n in (number, number + 1))
            _write(written[-1], metadata, model.tensors[first:last], seed)
    except BaseException:  # an interrupt, too: half a model must not look like one
        for file in written:
            file.unlink(missing_ok=True)
        raise


def _write(path: Path, metadata: Mapping[str, object], tensors: Sequence[Tensor], seed: int) -> None:
    with path.open("wb") as file:
        file.write(header(metadata, tensors))
        for tensor in tensors:
            file.write(tensor.read(0, tensor.nbytes, seed).data)
            file.write(bytes(-tensor.nbytes % ALIGNMENT))


def gguf_experts(
    *, types: str = "Q4_K_M", num_experts: int = 32, hidden: int = 2048, intermediate: int = 768, seed: int = 0
) -> ExpertWeights:
    """Layer 0 of write_gguf(), without a file.

    Examples:
        >>> synthetic.gguf_experts(types="Q4_K", num_experts=2, hidden=256, intermediate=256).num_experts
        2
    """
    return load(_model(types, num_experts, hidden, intermediate, 1, 8), seed)


def header(metadata: Mapping[str, object], tensors: Sequence[Tensor]) -> bytes:
    """The header of a file of version 3. metadata: str, bool, int, float and lists of str."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    start = 0
    for tensor in tensors:
        out += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape[::-1], _TYPES[tensor.dtype][0], start)
        start += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return bytes(out + bytes(-len(out) % ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    number, form = next((number, form) for kind, number, form in _VALUES if isinstance(value, kind))
    return struct.pack("<I", number) + struct.pack(form, value)


def _model(types: str, num_experts: int, hidden: int, intermediate: int, layers: int, top_k: int) -> Model:
    usual, better = MIXED.get(types, (types, types))
    if usual not in GGML:
        raise InputError(f"types: expected one of {', '.join([*MIXED, *GGML])}, found {types!r}")
    step = math.lcm(*(GGML[name].code_unit[1] for name in (usual, better)))
    check(hidden=(hidden, step), intermediate=(intermediate, step), num_experts=(num_experts, 1))
    tensors: list[Tensor] = []
    for layer in range(layers):
        for projection in PROJECTIONS:
            n, k = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
            name = better if projection == "down" and gets_more(layer, layers) else usual
            stem = f"blk.{layer}.ffn_{projection}_exps"
            tensors.append(GgufTensor(f"{stem}.weight", name, (num_experts, n, k), weights(GGML[name], k), num_experts))
            if GGML[name].factor:
                tensors.append(GgufTensor(f"{stem}.scale", "F32", (num_experts,), _factors(k)))
    metadata = {ARCHITECTURE: _ARCHITECTURE, "general.type": "model", "general.alignment": ALIGNMENT}
    numbers_of = {"block_count": layers, "embedding_length": hidden, "expert_feed_forward_length": intermediate}
    numbers_of |= {"expert_count": num_experts, "expert_used_count": min(top_k, num_experts)}
    return Model("gguf", metadata | {f"{_ARCHITECTURE}.{key}": value for key, value in numbers_of.items()}, tensors)


def gets_more(layer: int, layers: int) -> bool:
    """Whether llama.cpp gives a layer's down projections more bits: the first and last eighths, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def weights(weight_format: WeightFormat, k: int) -> Shaper:
    """Random weights with a standard deviation of about 1/sqrt(k)."""
    if weight_format.element.family in NUMBERS:
        size = math.sqrt(3 / k)
        return numbers(weight_format.element.codes_dtype, -size, size)
    order, fields = _records(weight_format), _fields(weight_format, k)

    def shape(out: np.ndarray) -> None:
        records = out.reshape(-1, order.nbytes)
        records &= ~order.spare
        _balance(weight_format, records)
        for field, dtype, shaper in fields:
            stored = field.read(records, dtype)
            shaper(stored.view(np.uint8).reshape(-1))
            field.write(records, stored)

    return shape


def _balance(weight_format: WeightFormat, records: np.ndarray) -> None:
    """Give TQ2_0's random records no code 3, which its writers do not have, so that weights are -1, 0 and 1."""
    order = weight_format.order
    if weight_format == GGML["TQ2_0"] and isinstance(order, Records):
        (plane,) = order.planes
        codes = records[:, plane.offset : plane.offset + order.weights // plane.pieces]
        codes &= ~((codes & codes >> 1 & np.uint8(0x55)) << 1)


def _records(weight_format: WeightFormat) -> RecordOrder:
    """The order of a format whose element is no number."""
    return cast("RecordOrder", weight_format.order)  # as all such types of GGML have


def _fields(weight_format: WeightFormat, k: int) -> list[tuple[Field, np.dtype, Shaper]]:
    """The scales that are not random bits: their field of a record, their dtype, and what they become."""
    spread, ratio = _sizes(weight_format)
    unit = 1 / math.sqrt(k) / spread / math.sqrt(1.75)  # the mean square from 0.5 to 2 is 1.75
    fields = []
    for label, field in _records(weight_format).fields.items():
        scale = weight_format.scales[label]
        if scale.kind == "fp16":
            size = unit * (ratio if "offsets" in label else 1)
            fields.append((field, scale.dtype, numbers(np.float16, *sorted((0.5 * size, 2 * size)))))
        elif scale.kind == "ue8m0":
            fields.append((field, scale.dtype, _bytes(3, 127 + round(math.log2(unit)) - 2)))
        elif scale.kind == "e4m3":
            fields.append((field, scale.dtype, _bytes(15, 0x30)))
    return fields


@cache
def _sizes(weight_format: WeightFormat) -> tuple[float, float]:
    """(standard deviation, ratio) of weights of random records, whose minima are multiplied by `ratio` so that their mean is 0,
    where the records' scales that are no integers are 1.
    """
    order = _records(weight_format)
    records: np.ndarray = np.random.default_rng(0).integers(0, 256, (_SAMPLE, order.nbytes), np.uint8)
    records &= ~order.spare
    _balance(weight_format, records)
    stored = weight_format.rows({"codes": records}, _SAMPLE, order.weights)
    codes_of = stored["codes"]
    if weight_format.element.bits == 4:
        codes_of = np.stack([codes_of & 15, codes_of >> 4], axis=-1).reshape(_SAMPLE, -1)
    terms, minima = weight_format.element.numbers(codes_of), np.zeros(codes_of.shape)
    for label, scale in weight_format.scales.items():
        whole = not SCALE_KINDS[scale.kind].field
        spread = scale.spread(stored[label], *codes_of.shape) if whole else np.ones(codes_of.shape)
        if label in ("scales", "super_scales"):
            terms = terms * spread
        else:
            minima = spread if label == "offsets" else minima * spread
    if not minima.any():
        return float(terms.std()), 0.0
    ratio = float(terms.mean() / minima.mean())
    deviation = float((terms - ratio * minima).std())
    added = isinstance(weight_format.offset, Minimum) and weight_format.offset.added
    return deviation, -ratio if added else ratio


def _factors(k: int) -> Shaper:
    """The factors of NVFP4, whose scales are uniform from 0.5 to 1.875."""
    unit = 1 / math.sqrt(k) / (_sizes(GGML["NVFP4"])[0] * 1.2)
    return numbers(np.float32, 0.8 * unit, 1.25 * unit)


def _bytes(mask: int, first: int) -> Shaper:
    def shape(out: np.ndarray) -> None:
        out &= np.uint8(mask)
        out += np.uint8(first)

    return shape


@dataclass(frozen=True)
class PublishedGguf:
    """Weights of one GGUF type, with write() and experts() as synthetic.quantized's have."""

    types: str
    loader: str = "gguf"

    def write(self, path: str | os.PathLike[str], **sizes: Any) -> None:
        """A file, or a folder of them: write_gguf() of these types.

        Examples:
            >>> synthetic.GGUF["GGUF Q8_0"].write("Q8_0.gguf", num_experts=2, hidden=256, intermediate=256)
        """
        write_gguf(path, types=self.types, **sizes)

    def experts(self, **sizes: Any) -> ExpertWeights:
        """Layer 0 of write(), without a file.

        Examples:
            >>> synthetic.GGUF["GGUF Q6_K"].experts(num_experts=2, hidden=256, intermediate=256).num_experts
            2
        """
        return gguf_experts(types=self.types, **sizes)


#: The kinds of GGUF weights, by the name that tables give them.
GGUF = {f"GGUF {name}": PublishedGguf(name) for name in ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "IQ4_XS")}
