"""What rounding a checkpoint's experts costs each layer, beside the original: without torch, on random inputs.

An input of a real text needs the whole model: ktmoe.transformers.accuracy has that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from os import PathLike

import numpy as np

from ktmoe.dequantization import dequantize
from ktmoe.errors import CheckpointError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.loaders import gguf_model, model_config, model_shape
from ktmoe.loaders.base import find_layers, find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.naming import listed
from ktmoe.measuring.batches import MeasuredBatch, random_batches
from ktmoe.measuring.inspection import top_k_of
from ktmoe.messages import printable
from ktmoe.reference.difference import Difference

#: Tokens whose outputs are compared, and experts whose weights are, at most.
TOKENS, EXPERTS = 64, 4
#: The activation mode that rounds nothing.
_EXACT = "bf16"


@dataclass(frozen=True)
class RoundedLayer:
    """formats, original_formats: of the weights, in words. weights: the root mean square of the error of the weights of some
    experts, as a part of the weights' own. outputs: the difference of the layer's outputs."""

    layer: int | str
    formats: str
    original_formats: str
    weights: float
    outputs: Difference


def rounding_cost(
    path: str | PathLike[str],
    original: str | PathLike[str],
    backend: str = "auto",
    *,
    progress: Callable[[float, float], object],
) -> list[RoundedLayer]:
    """Compare each layer of a checkpoint with that of the original.

    TOKENS tokens of random numbers, the same for both, go to random experts. Two layers are in memory, one after the other.
    progress: called with (layers done, layers).
    Raises CheckpointError, which names what differs, unless both have the same layers and shapes.
    """
    with Checkpoint(path) as rounded, Checkpoint(original) as exact:
        layers = _same_layers(rounded, exact)
        _same_shape(rounded, exact)
        found = []
        for layer in layers:
            found.append(_compare(rounded, exact, layer, backend))
            progress(len(found), len(layers))
        return found


def _same_layers(rounded: Checkpoint, exact: Checkpoint) -> list[int | str]:
    ours, theirs = (list(find_layers(checkpoint)) for checkpoint in (rounded, exact))
    for has, other, lacks in ((rounded, exact, set(ours) - set(theirs)), (exact, rounded, set(theirs) - set(ours))):
        if lacks:
            only = listed([layer for layer in (*ours, *theirs) if layer in lacks])
            raise CheckpointError(f"{other.path}: expected the layers of {has.path}, found no experts of {only}")
    if not ours:
        raise CheckpointError(f"{rounded.path}: expected layers with routed experts, found none")
    return ours


def _same_shape(rounded: Checkpoint, exact: Checkpoint) -> None:
    different = model_shape.difference(partial(_stated, rounded), partial(_stated, exact))
    if different:
        raise CheckpointError(f"{rounded.path}: {different}, as in {exact.path}: both must be the same model")


def _stated(checkpoint: Checkpoint, key: str) -> object:
    """What a configuration says; not a GGUF file's model_type, which is llama.cpp's name of it."""
    if key == "model_type" and gguf_model.ARCHITECTURE in checkpoint.config:
        return None
    return model_config.value(checkpoint, key)


def _compare(rounded: Checkpoint, exact: Checkpoint, layer: int | str, backend: str) -> RoundedLayer:
    ours, theirs = (find_loader(checkpoint, layer=layer).load(checkpoint, layer) for checkpoint in (rounded, exact))
    for name in ("num_experts", "hidden", "intermediate", "activation", "router_weight"):
        one, other = getattr(ours, name), getattr(theirs, name)
        if one != other:
            raise CheckpointError(f"{rounded.path}: layer {layer}: {name} is {one}, expected {other}, as in {exact.path}")
    top_k = top_k_of(exact, theirs.num_experts)
    batch = next(random_batches(TOKENS, top_k, theirs.num_experts, theirs.hidden))
    difference = Difference.of(*(_outputs(experts, backend, batch) for experts in (ours, theirs)))
    return RoundedLayer(layer, _formats(ours), _formats(theirs), _weights(ours, theirs), difference)


def _outputs(experts: ExpertWeights, backend: str, batch: MeasuredBatch) -> np.ndarray:
    """Not rounded to bfloat16."""
    with MoELayer(experts, backend, _EXACT) as layer:
        return layer.forward(batch.x.astype(np.float32), batch.ids, batch.weights)


def _weights(ours: ExpertWeights, theirs: ExpertWeights) -> float:
    error = size = 0.0
    for one, other in _matrices(ours, theirs):
        error += float(np.square(one - other).sum())
        size += float(np.square(other).sum())
    return math.sqrt(error / size) if size else math.nan


def _matrices(ours: ExpertWeights, theirs: ExpertWeights) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The matrices of EXPERTS experts, float64, evenly taken from all."""
    for expert in np.unique(np.linspace(0, ours.num_experts - 1, EXPERTS).astype(int)):
        for projection in PROJECTIONS:
            yield dequantize(ours.matrix(int(expert), projection)), dequantize(theirs.matrix(int(expert), projection))


def _formats(experts: ExpertWeights) -> str:
    return printable(", ".join(dict.fromkeys(experts.formats[projection].description for projection in PROJECTIONS)))
