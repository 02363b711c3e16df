"""What a conversion is made of: target tensors, and jobs that give some of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ktmoe.conversion.storage import Storage
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.files.safetensors_writer import item_bytes, nbytes_of
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.quantization import Error, Quantizer

#: Bytes of a tensor that are copied at a time.
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class ResultTensor:
    """A tensor of the result: name, dtype and shape as its header has them."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    @property
    def item_bytes(self) -> int:
        return item_bytes(self.dtype)


@dataclass
class Made:
    """arrays: by tensor, the bytes that come next of each. error: what rounding changed."""

    arrays: Mapping[str, np.ndarray]
    error: Error = field(default_factory=Error)


@dataclass(frozen=True)
class Job:
    """nbytes: of the source that it reads. make: reads, rounds. layer: whose error it is; None where nothing is rounded."""

    nbytes: int
    make: Callable[[], Made]
    layer: int | str | None = None


@dataclass(frozen=True)
class Unit:
    """Tensors that stay in one file, and the jobs that give their bytes, in order."""

    tensors: list[ResultTensor]
    jobs: list[Job]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def copied(checkpoint: Checkpoint, info: TensorInfo) -> Unit:
    """A tensor as it is."""

    def job(start: int, stop: int) -> Job:
        return Job(stop - start, lambda: Made({info.name: checkpoint.read(info.name, byte_range=(start, stop), release=True)}))

    starts = range(0, info.nbytes, CHUNK_BYTES)
    jobs = [job(start, min(start + CHUNK_BYTES, info.nbytes)) for start in starts]
    return Unit([ResultTensor(info.name, info.dtype, info.shape)], jobs)


def expert(
    layer: int | str, experts: ExpertWeights, number: int, names: Mapping[str, str], stored: Storage, quantizer: Quantizer
) -> Unit:
    """One expert, with tensors of its own. names: of its matrices in the result, by projection."""
    tensors = [
        ResultTensor(names[projection] + array.ending, array.dtype, array.shape(*experts.shape(projection)))
        for projection in PROJECTIONS
        for array in stored.arrays
    ]

    def make(projections: tuple[str, ...]) -> Made:
        rounded, error = _rounded(experts, number, projections, quantizer)
        return Made(
            {
                names[projection] + array.ending: np.ascontiguousarray(array.data(matrix))
                for projection, matrix in rounded.items()
                for array in stored.arrays
            },
            error,
        )

    return Unit(tensors, [_job(layer, experts, projections, make) for projections in (("gate", "up"), ("down",))])


def gpt_oss(layer: int | str, experts: ExpertWeights, quantizer: Quantizer) -> Unit:
    """All experts of a layer in MXFP4 as gpt-oss has them: rows of gate and up alternate."""
    tensors = []
    for stem, (n, k) in (("gate_up_proj", (2 * experts.intermediate, experts.hidden)), ("down_proj", experts.shape("down"))):
        rows = experts.num_experts, n, k // 32
        tensors += [
            ResultTensor(f"{experts.name}.{stem}_blocks", "U8", (*rows, 16)),
            ResultTensor(f"{experts.name}.{stem}_scales", "U8", rows),
        ]

    def job(number: int, stem: str, projections: tuple[str, ...]) -> Job:
        def make(projections: tuple[str, ...]) -> Made:
            rounded, error = _rounded(experts, number, projections, quantizer)
            arrays = {
                f"{experts.name}.{stem}{ending}": np.stack([getattr(rounded[p], label) for p in projections], axis=1)
                for ending, label in (("_blocks", "codes"), ("_scales", "scales"))
            }
            return Made(arrays, error)

        return _job(layer, experts, projections, make)

    steps = (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
    return Unit(tensors, [job(number, *step) for number in range(experts.num_experts) for step in steps])


def _job(
    layer: int | str, experts: ExpertWeights, projections: tuple[str, ...], make: Callable[[tuple[str, ...]], Made]
) -> Job:
    nbytes = sum(experts.formats[projection].nbytes(*experts.shape(projection)) for projection in projections)
    return Job(nbytes, lambda: make(projections), layer)


def _rounded(
    experts: ExpertWeights, number: int, projections: tuple[str, ...], quantizer: Quantizer
) -> tuple[dict[str, Any], Error]:
    """Matrices by projection. Where a matrix has a factor, gate and up have the same one, since engines compute them as one."""
    matrices = {projection: experts.matrix(number, projection) for projection in projections}
    factor, largest = quantizer.format.factor, None
    if factor and not factor.per_row:
        largest = max(map(quantizer.largest, matrices.values()))
    rounded, total = {}, Error()
    for projection in projections:
        matrix = matrices.pop(projection)
        rounded[projection], error = quantizer.matrix(matrix, largest=largest)
        total = total + error
    return rounded, total
