"""merge_adapter(): a checkpoint whose experts have an adapter added to their weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ktmoe.adapters.reading import import_adapter
from ktmoe.arrays import BF16
from ktmoe.conversion.convert import SHARD_BYTES
from ktmoe.conversion.parts import Made, Part, Tensor, Unit, copied
from ktmoe.conversion.plan import shards
from ktmoe.conversion.source import Source
from ktmoe.conversion.writing import Progress, Task, version, write
from ktmoe.errors import FormatError, InputError, UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders import naming
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.quantization import Error
from ktmoe.training.lora import Lora
from ktmoe.weights.formats import BF16 as BF16_FORMAT

#: Numbers that are computed at a time: their float32 sums stay in a core's cache.
BLOCK = 1 << 17


@dataclass(frozen=True)
class Merged:
    """What a merge did.

    path: of the result. layers: of each layer that was merged, what bfloat16 lost of the adapter: Error.relative is the root
    mean square of what rounding changed beside that of s B A. nbytes: of all tensors. kept: files that were finished before
    this run.
    """

    path: str
    layers: dict[int | str, Error]
    nbytes: int
    kept: list[str] = field(default_factory=list)


def merge_adapter(
    path: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | Mapping[int, Lora],
    out: str | os.PathLike[str],
    *,
    experts_only: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Merged:
    """Write a checkpoint whose experts are W + s B A, and whose other tensors and files are the same bytes.

    path: a folder, or a .safetensors file, with bfloat16 experts. adapter: a folder in PEFT's format (import_adapter()), or
    {layer: Lora}. out: a new or empty folder, or one in which this merge was interrupted: files that were finished stay then.
    experts_only: leave out what the adapter has of other modules. shard_bytes: most bytes of tensors in one file.
    progress: called with (done, total) bytes of the source.
    Computed in float32: B A is added up in ascending rank, multiplied by s and added to W; then it is rounded to bfloat16 once.
    Memory: the adapter; for each thread and one more, one matrix, gate and up being one where the checkpoint has them in one.

    The index is written last. Until then ktmoe refuses to load the folder.
    Raises FormatError for experts that are not bfloat16, and for sums that are not finite; MissingTensorError for a layer that
    the checkpoint has not; InputError for an adapter of other shapes; OutputError and OutOfSpaceError; what import_adapter()
    raises.
    """
    if shard_bytes < 1:
        raise InputError(f"shard_bytes: expected at least 1, found {shard_bytes}")
    with Source(path) as source:
        loras = adapter
        if not isinstance(adapter, Mapping):
            loras = import_adapter(adapter, source.checkpoint.config, experts_only=experts_only)
        elif not loras or not all(isinstance(lora, Lora) for lora in loras.values()):
            raise InputError("adapter: expected a folder or {layer: Lora}")
        loras = {naming.layer_key(layer): lora for layer, lora in loras.items()}
        units = _units(source, loras)
        task = Task(
            "merge",
            "merge",
            shards(units, shard_bytes),
            source.checkpoint.config,
            source.others + source.quantized,
            {"adapter": _digest(loras), "options": [shard_bytes]},
            loras,
            lambda errors: _data(loras, errors),
        )
        written = write(source, task, Path(out), progress)
    return Merged(str(Path(out)), written.errors, written.nbytes, written.kept)


@dataclass(frozen=True)
class _Slice:
    """One expert's part of a tensor: of gate, up or down, or of gate and up together.

    expert: its number. index, count: which of so many equal parts of the tensor's bytes. shape: of the part. transposed:
    whether it is [inputs, outputs]. rows: which outputs each projection has.
    """

    tensor: str
    expert: int
    index: int
    count: int
    shape: tuple[int, int]
    transposed: bool
    rows: Mapping[str, slice]


def _units(source: Source, loras: Mapping[int | str, Lora]) -> list[Unit]:
    """Of all tensors, in the source's order."""
    slices: dict[str, tuple[int | str, Lora, list[_Slice]]] = {}
    for layer, lora in loras.items():
        for each in _slices(source.checkpoint, layer, lora):
            slices.setdefault(each.tensor, (layer, lora, []))[2].append(each)
    units = []
    for info in source.infos:
        if info.name not in slices:
            units.append(copied(source.checkpoint, info))
            continue
        layer, lora, own = slices[info.name]
        parts = [_part(source.checkpoint, info.nbytes // each.count, layer, lora, each) for each in own]
        units.append(Unit([Tensor(info.name, info.dtype, info.shape)], parts))
    return units


def _slices(checkpoint: Checkpoint, layer: int | str, lora: Lora) -> Iterator[_Slice]:
    """Those that the adapter changes, expert by expert. Raises FormatError, InputError, UnavailableError."""
    reader = find_loader(checkpoint, layer=layer)
    experts = reader.load(checkpoint, layer)
    for projection, found in experts.formats.items():
        if (found.element, found.scale, found.factor) != (BF16_FORMAT.element, None, None):
            raise FormatError(
                f"{experts.name}: {projection}: expected bfloat16, found {found.description}; an adapter is merged into the "
                "bfloat16 model that these weights were made of, or stays beside them"
            )
    if not isinstance(reader, PerExpert):
        raise UnavailableError(f"{experts.name}: its loader does not say which tensors these are")
    lora.check(experts)
    place = reader.names.locate(checkpoint, layer)
    ending = place.spelling.arrays["codes"]
    for expert in range(experts.num_experts):
        of_tensors: dict[str, list[str]] = {}
        for projection in experts.formats:
            of_tensors.setdefault(place.name(projection, expert) + ending, []).append(projection)
        for tensor, projections in of_tensors.items():
            rows = _rows(experts, projections, place.spelling.interleaved)
            wanted = {projection: rows[projection] for projection in projections if projection in lora.projections}
            if wanted:
                n, k = experts.shape(projections[0])
                n *= len(projections)
                transposed = experts.formats[projections[0]].order.transposed
                which = (expert, experts.num_experts) if place.spelling.stacked else (0, 1)
                yield _Slice(tensor, expert, *which, (k, n) if transposed else (n, k), transposed, wanted)


def _rows(experts: ExpertWeights, projections: list[str], interleaved: bool) -> dict[str, slice]:
    """Which outputs of a tensor each projection has."""
    if len(projections) == 1:
        return {projections[0]: slice(None)}
    half = experts.intermediate
    if interleaved:
        return {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    return {"gate": slice(half), "up": slice(half, None)}


def _part(checkpoint: Checkpoint, nbytes: int, layer: int | str, lora: Lora, of: _Slice) -> Part:
    def make() -> Made:
        stored = naming.read_slice(checkpoint, of.tensor, of.index, of.count).view(BF16).reshape(of.shape).copy()
        weights = stored.T if of.transposed else stored
        error = Error()
        for projection, rows in of.rows.items():
            a, b = (_float32(array[of.expert]) for array in lora.pairs[projection])
            error += _add(weights[rows], a, b, np.float32(lora.scale), of.tensor)
        return Made({of.tensor: stored}, error)

    return Part(nbytes, make, layer)


def _add(weights: np.ndarray, a: np.ndarray, b: np.ndarray, scale: np.float32, name: str) -> Error:
    """weights [n, k], bfloat16, become weights + scale * b a, in place: a [rank, k], b [n, rank], float32.

    Sums are float32, in ascending rank, so that no number depends on threads or on a library. Raises FormatError for a result
    that is not finite.
    """
    total = Error()
    step = max(1, BLOCK // weights.shape[1])
    for first in range(0, len(weights), step):
        rows = slice(first, first + step)
        with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at
            change = b[rows, :1] * a[:1]
            for rank in range(1, len(a)):
                change += b[rows, rank : rank + 1] * a[rank]
            change *= scale
            exact = weights[rows].astype(np.float32) + change
            rounded = exact.astype(BF16)
            lost = rounded.astype(np.float32) - exact
        if not np.isfinite(lost).all():
            raise FormatError(f"{name}: expected finite weights with the adapter, found NaN or infinity")
        weights[rows] = rounded
        total += Error(float(np.square(change, dtype=np.float64).sum()), float(np.square(lost, dtype=np.float64).sum()))
    return total


def _float32(array: np.ndarray) -> np.ndarray:
    return (array.view(BF16) if array.dtype == np.uint16 else array).astype(np.float32)


def _digest(loras: Mapping[int | str, Lora]) -> str:
    """Of all numbers of an adapter: what a merge that goes on must find again."""
    found = hashlib.sha256()
    for layer, lora in loras.items():
        found.update(repr((layer, lora.alpha, lora.rank)).encode())
        for projection, pair in lora.pairs.items():
            for array in pair:
                found.update(repr((projection, str(array.dtype), array.shape)).encode())
                found.update(array.view(np.uint8).data)
    return found.hexdigest()


def _data(loras: Mapping[int | str, Lora], errors: Mapping[int | str, Error]) -> dict:
    """What is kept beside the weights: the same whether the merge was interrupted or not."""
    return {
        "ktmoe": version(),
        "adapter": {
            str(layer): {"rank": lora.rank, "alpha": lora.alpha, "projections": list(lora.projections)}
            for layer, lora in loras.items()
        },
        "relative_rms_lost": {str(layer): error.relative for layer, error in errors.items()},
    }
