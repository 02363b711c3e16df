"""Packing a model's dense matrices: one, and all that are torch's parameters."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ktmoe.backends.base import Arenas, Progress
from ktmoe.linear import Linear
from ktmoe.linear_group import LinearGroup
from ktmoe.linear_weights import LinearWeights
from ktmoe.machine import memory
from ktmoe.matrix import Matrix
from ktmoe.transformers.dense_modules import (
    DenseModule,
    dense_module,
    find_dense,
    output_of_embedding,
    put_embedding,
    put_packed,
    share_inputs,
)
from ktmoe.transformers.modules import bfloat16
from ktmoe.transformers.options import Options, Reporting
from ktmoe.weights.formats import BF16


def packable_nbytes(model: torch.nn.Module, options: Options) -> int:
    """Bytes of the matrices that pack_parameters() packs."""
    return sum(_packable(model, options).values())


def pack_parameters(model: PreTrainedModel, options: Options, report: Reporting) -> None:
    """Pack the dense matrices that are bfloat16 parameters in this memory, one after the other, and free each.

    An output layer that is the input embedding, too, is held once: the embedding then reads the packed rows.
    report: of Options.reporting(). Raises what Linear does; all matrices before are packed then.
    """
    tied = output_of_embedding(model)
    for name, nbytes in _packable(model, options).items():
        progress = report(nbytes)
        packed = _pack_module(dense_module(name, model.get_submodule(name)), options, progress)
        put_packed(model, name, packed)
        if tied and name == tied[0]:
            put_embedding(model, tied[1], packed)
    share_inputs(model)
    memory.give_back()


def _packable(model: torch.nn.Module, options: Options) -> dict[str, int]:
    """Bytes of each matrix, by its module's name."""
    if options.dense == "torch":
        return {}
    weights = {each.name: each.module.weight for each in find_dense(model)}
    return {name: w.nbytes for name, w in weights.items() if w.dtype == torch.bfloat16 and w.device.type == "cpu"}


def _pack_module(dense: DenseModule, options: Options, progress: Progress | None) -> Linear | LinearGroup:
    weight, bias = dense.module.weight.detach(), dense.module.bias
    bias = None if bias is None else bias.detach().float().numpy()
    matrix = Matrix(dense.name, BF16, dense.shape, bfloat16(weight.contiguous()), bias=bias)
    return pack_matrix(dense.groups, LinearWeights(matrix), options, progress, None)


def pack_matrix(
    groups: int, weights: LinearWeights, options: Options, progress: Progress | None, arenas: Arenas | None
) -> Linear | LinearGroup:
    """One matrix, packed as it is or rounded, as the options say. groups: DenseModule's. Raises what Linear does."""
    weights = options.rounded(weights)
    common = {"tuned_for": options.tuned_for, "numa_nodes": options.numa_nodes}
    backend = options.dense_backend
    if groups:
        return LinearGroup.of_rows(weights.matrix(0, "weight"), groups, backend, progress=progress, **common)
    return Linear(weights, backend, progress=progress, arenas=arenas, **common)
