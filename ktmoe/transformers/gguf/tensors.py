"""The tensors of a GGUF file that transformers reads, under its own names, as a .safetensors file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

import ml_dtypes
import numpy as np

from ktmoe.dequantization import dequantize
from ktmoe.files.safetensors_writer import SafetensorsWriter
from ktmoe.matrix import Matrix
from ktmoe.messages import printable
from ktmoe.transformers.dense_modules import is_small
from ktmoe.transformers.dense_names import StoredParameter
from ktmoe.transformers.gguf.names import EMBEDDING, OUTPUT, GgufParameters

logger = logging.getLogger(__name__)


def write_tensors(found: GgufParameters, file: Path, name: str, everything: bool, kept: Collection[str]) -> None:
    """Write the small tensors, in float32: norms, routers, sinks. The model takes them in its own dtype.

    everything: also the matrices and their biases, in bfloat16, for a model whose dense part torch computes. name: the GGUF
    file's, for the log, which says if bfloat16 rounds a small tensor. kept: parts of names that the model keeps in float32.
    """
    small = {parameter: read() for parameter, read in found.values.items()}
    small |= {name: _rows(of, _numbers) for name, of in found.matrices.items() if _is_small(name, of)}
    rounded = [name for name, values in small.items() if _rounds(values) and not set(name.split(".")) & set(kept)]
    if rounded:
        logger.warning(
            "%s: bfloat16 rounds numbers of %d small tensors, such as %s; dtype=torch.float32 keeps them",
            printable(name),
            len(rounded),
            rounded[0],
        )
    matrices = {name: each for name, each in _matrices(found).items() if name not in small} if everything else {}
    entries = [(parameter, "F32", values.shape) for parameter, values in small.items()]
    entries += [(parameter, "BF16", shape) for parameter, (shape, _) in matrices.items()]
    with SafetensorsWriter(file, entries, {"format": "pt"}) as writer:
        for parameter, values in small.items():
            writer.write(np.ascontiguousarray(values, np.float32), parameter)
        for parameter, (_, read) in matrices.items():
            writer.write(read().astype(ml_dtypes.bfloat16), parameter)


def _is_small(parameter: str, of: StoredParameter) -> bool:
    """Whether torch multiplies by it in any model."""
    module = parameter.removesuffix(".weight")
    return module != EMBEDDING and is_small(module, sum(part.shape[0] for part in of.find()))


def _rounds(values: np.ndarray) -> bool:
    return bool((values.astype(ml_dtypes.bfloat16).astype(np.float32) != values).any())


def _matrices(found: GgufParameters) -> dict[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]]:
    """Shapes and readers of matrices and biases. An output layer that is the embedding, too, is not there twice."""
    made: dict[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]] = {}
    seen = set()
    for parameter, of in found.matrices.items():
        if parameter == f"{OUTPUT}.weight" and of.bases in seen:
            continue
        seen.add(of.bases)
        parts = of.find()
        shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        made[parameter] = shape, lambda of=of: _rows(of, _numbers)
        if parts[0].has_bias:
            bias = f"{parameter.removesuffix('weight')}bias"
            made[bias] = shape[:1], lambda of=of: _rows(of, lambda matrix: matrix.bias)
    return made


def _numbers(matrix: Matrix) -> np.ndarray:
    return dequantize(matrix).astype(np.float32)


def _rows(of: StoredParameter, values: Callable[[Matrix], np.ndarray]) -> np.ndarray:
    rows = np.concatenate([values(part.read()) for part in of.find()])
    return rows if of.order is None else np.ascontiguousarray(rows[of.order])
