"""W + s B A: what makes the tensors of a merged checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ktmoe.arrays import BF16
from ktmoe.conversion.jobs import Job, Made, ResultTensor, Unit
from ktmoe.dequantization import dequantize
from ktmoe.errors import FormatError, UnavailableError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.loaders import naming
from ktmoe.loaders.base import Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.quantization import Error
from ktmoe.training.lora import Lora

#: Numbers that are computed at a time: their float32 sums stay in a core's cache.
BLOCK = 1 << 17


@dataclass(frozen=True)
class _Slice:
    """One expert's slice of a bfloat16 tensor: of gate, up or down, or of gate and up together.

    expert: its number. index, count: which of so many equal slices of the tensor's bytes. shape: of the slice. transposed:
    whether it is [inputs, outputs]. rows: which outputs each projection has.
    """

    tensor: str
    expert: int
    index: int
    count: int
    shape: tuple[int, int]
    transposed: bool
    rows: Mapping[str, slice]


def in_place(checkpoint: Checkpoint, reader: Loader, layer: int | str, experts: ExpertWeights, lora: Lora) -> dict[str, Unit]:
    """The tensors of a layer with bfloat16 experts that the adapter changes, as they are stored, by name.

    Raises UnavailableError for a loader that does not say which tensors these are.
    """
    if not isinstance(reader, PerExpert):
        raise UnavailableError(f"{experts.name}: its loader does not say which tensors the experts are")
    jobs: dict[str, list[Job]] = {}
    for each in _slices(reader.names.locate(checkpoint, layer), experts, lora):
        jobs.setdefault(each.tensor, []).append(_job(checkpoint, layer, lora, each))
    infos = map(checkpoint.info, jobs)
    return {info.name: Unit([ResultTensor(info.name, info.dtype, info.shape)], jobs[info.name]) for info in infos}


def dequantized(layer: int | str, experts: ExpertWeights, names: list[dict[str, str]], lora: Lora | None) -> list[Unit]:
    """bfloat16 tensors for each expert of a layer, whose experts may have any format.

    names: of each expert's matrices, by projection. lora: what is added; None: the weights are only rounded.
    """

    def job(expert: int, projection: str, name: str) -> Job:
        def make() -> Made:
            with np.errstate(over="ignore"):  # _add() refuses what is infinite then
                weights = dequantize(experts.matrix(expert, projection)).astype(np.float32)
            made = np.empty(weights.shape, BF16)
            error = _add(weights, made, lora, projection, expert, name)
            return Made({name: made}, error)

        nbytes = experts.formats[projection].nbytes(*experts.shape(projection))
        return Job(nbytes, make, None if lora is None else layer)

    units = []
    for expert, of_expert in enumerate(names):
        for projection in PROJECTIONS:
            name = f"{of_expert[projection]}.weight"
            units.append(Unit([ResultTensor(name, "BF16", experts.shape(projection))], [job(expert, projection, name)]))
    return units


def _slices(place: naming.Place, experts: ExpertWeights, lora: Lora) -> Iterator[_Slice]:
    """The slices of tensors that the adapter changes, expert by expert."""
    ending = place.spelling.arrays["codes"]
    for expert in range(experts.num_experts):
        of_tensors: dict[str, list[str]] = {}
        for projection in PROJECTIONS:
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
    """The outputs of a tensor that each of its projections has."""
    if len(projections) == 1:
        return {projections[0]: slice(None)}
    half = experts.intermediate
    if interleaved:
        return {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    return {"gate": slice(half), "up": slice(half, None)}


def _job(checkpoint: Checkpoint, layer: int | str, lora: Lora, of: _Slice) -> Job:
    def make() -> Made:
        stored = naming.read_slice(checkpoint, of.tensor, of.index, of.count).view(BF16).reshape(of.shape).copy()
        weights = stored.T if of.transposed else stored
        error = Error()
        for projection, rows in of.rows.items():
            error += _add(weights[rows], weights[rows], lora, projection, of.expert, of.tensor)
        return Made({of.tensor: stored}, error)

    return Job(checkpoint.info(of.tensor).nbytes // of.count, make, layer)


def _add(weights: np.ndarray, out: np.ndarray, lora: Lora | None, projection: str, expert: int, name: str) -> Error:
    """out [n, k], bfloat16, becomes weights + scale * b a, of an expert's adapter if it has one; out may be weights.

    Sums are float32, in ascending rank, so that no number depends on threads or on a library. Raises FormatError for a result
    that is not finite.
    """
    pair, scale = None, np.float32(1)
    if lora is not None and projection in lora.pairs:
        pair, scale = [_float32(array[expert]) for array in lora.pairs[projection]], np.float32(lora.scale)
    total, step = Error(), max(1, BLOCK // weights.shape[1])
    for first in range(0, len(weights), step):
        rows = slice(first, first + step)
        with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at
            exact, change = weights[rows].astype(np.float32), None
            if pair is not None:
                change = _product(pair[0], pair[1][rows], scale)
                exact += change
            rounded = exact.astype(BF16)
            lost = rounded.astype(np.float32) - exact
        if not np.isfinite(lost).all():
            raise FormatError(f"{name}: expected finite weights with the adapter, found NaN or infinity")
        out[rows] = rounded
        if change is not None:
            total += Error(_squares(change), _squares(lost))
    return total


def _product(a: np.ndarray, b: np.ndarray, scale: np.float32) -> np.ndarray:
    """scale * b a, float32 [rows, k]; a [rank, k], b [rows, rank]."""
    change = b[:, :1] * a[:1]
    for rank in range(1, len(a)):
        change += b[:, rank : rank + 1] * a[rank]
    change *= scale
    return change


def _squares(array: np.ndarray) -> float:
    return float(np.square(array, dtype=np.float64).sum())


def _float32(array: np.ndarray) -> np.ndarray:
    return (array.view(BF16) if array.dtype == np.uint16 else array).astype(np.float32)
