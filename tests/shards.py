"""A layer's shards as layers of their own, whose outputs are added up: what a layer on NUMA nodes has to compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from helpers import group_extents

from ktmoe import ExpertWeights, Matrix, MoELayer
from ktmoe.machine import numa
from ktmoe.weights.order import ROWS


def shard_of(experts: ExpertWeights, first: int, last: int) -> ExpertWeights:
    """The experts with the intermediate dimension from first to last only, in rows; the bias of down goes with 0, and a factor
    that is not of the rows that are cut with every shard."""
    formats = {projection: replace(weight_format, order=ROWS) for projection, weight_format in experts.formats.items()}
    size = last - first

    def read(expert: int, projection: str) -> Matrix:
        matrix = experts.matrix(expert, projection)
        weight_format = matrix.format
        extents = {"codes": (1, 2 if weight_format.family == "q4" else 1), **group_extents(weight_format)}

        def cut(label, array):
            if label == "factor":
                return array[first:last] if weight_format.factor.per_row and projection != "down" else array
            rows, columns = extents[label]
            if projection == "down":
                return np.ascontiguousarray(array[:, first // columns : -(-last // columns)])
            return array[first // rows : -(-last // rows)]

        bias = matrix.bias
        if bias is not None:
            bias = bias[first:last] if projection != "down" else None if first else bias
        shape = (experts.hidden, size) if projection == "down" else (size, experts.hidden)
        arrays = weight_format.rows(matrix.stored, *matrix.shape)
        arrays = {label: cut(label, array) for label, array in arrays.items()}
        return Matrix(matrix.name, formats[projection], shape, bias=bias, **arrays)

    return ExpertWeights(experts.num_experts, experts.hidden, size, read, formats, experts.activation, experts.name)


def partial_outputs(experts: ExpertWeights, shards: list[tuple[int, int]], batch, backend: str, **settings) -> np.ndarray:
    """float32 [shards, tokens, hidden], each from a layer of its own."""
    x, ids, weights = batch
    of_shards = []
    for first, last in shards:
        with MoELayer(shard_of(experts, first, last), backend, **settings) as layer:
            of_shards.append(layer.forward(x.astype(np.float32), ids, weights))
    return np.array(of_shards)


def added_up(experts, nodes, batch, backend, **settings):
    """The sum of what a layer of its own gives for each shard."""
    settings["numa_nodes"] = [0]
    of_shards = partial_outputs(
        experts, numa.split(experts.intermediate, experts.shard_unit, nodes), batch, backend, **settings
    )
    y = of_shards[0]
    for of_shard in of_shards[1:]:
        y = y + of_shard
    return y
